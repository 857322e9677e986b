"""Who may connect: a challenge answered with a shared secret, in both directions.

    acceptor  -> CHALLENGE {version, nonce}
    connector -> HELLO     {version, role, nonce, mac}      mac  = HMAC-SHA256(secret, "hello", acceptor's nonce, role)
    acceptor  -> WELCOME   {version, mac} or REFUSED {why}  mac  = HMAC-SHA256(secret, "welcome", connector's nonce)

Pure functions over documents; sockets are the caller's. The secret itself never crosses.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Any

from bimetal.engine.wire.frame import WIRE_VERSION
from bimetal.errors import LinkError

SECRET_VARIABLE = "BIMETAL_SECRET"


def new_secret() -> str:
    return secrets.token_hex(32)


def new_nonce() -> str:
    return secrets.token_hex(16)


def _mac(secret: str, *parts: str) -> str:
    message = "\0".join(parts).encode(errors="surrogatepass")
    # An environment variable may hold any bytes.
    return hmac.new(secret.encode(errors="surrogateescape"), message, hashlib.sha256).hexdigest()


def _is_same(mac: str, expected: str) -> bool:
    """In a time that does not tell where they differ; a peer may send any characters."""
    return hmac.compare_digest(mac.encode(errors="surrogatepass"), expected.encode())


@dataclass(frozen=True, slots=True)
class Hello:
    """Who connects: `driver`, `gateway`, or `edge:<kind>:<source>:<target>`."""

    role: str


def challenge(nonce: str) -> dict[str, Any]:
    return {"version": WIRE_VERSION, "nonce": nonce}


def answer(document: Any, secret: str, role: str, nonce: str) -> dict[str, Any]:
    """The connector's HELLO to a CHALLENGE."""
    check_version(document)
    theirs = document.get("nonce")
    if not isinstance(theirs, str) or len(theirs) < 16:
        raise LinkError("peer sent a challenge without a nonce")
    return {"version": WIRE_VERSION, "role": role, "nonce": nonce, "mac": _mac(secret, "hello", theirs, role)}


def accept(document: Any, secret: str, nonce: str) -> tuple[Hello, dict[str, Any]]:
    """Check a HELLO against the nonce that was sent; return who it is and the WELCOME to send."""
    check_version(document)
    role, theirs, mac = document.get("role"), document.get("nonce"), document.get("mac")
    if not (isinstance(role, str) and isinstance(theirs, str) and isinstance(mac, str)):
        raise LinkError("peer sent a hello without role, nonce and mac")
    if not _is_same(mac, _mac(secret, "hello", nonce, role)):
        raise LinkError(f"peer's secret differs: set the same {SECRET_VARIABLE} on every node")
    return Hello(role), {"version": WIRE_VERSION, "mac": _mac(secret, "welcome", theirs)}


def confirm(document: Any, secret: str, nonce: str) -> None:
    """The connector's check of a WELCOME."""
    check_version(document)
    mac = document.get("mac")
    if not isinstance(mac, str) or not _is_same(mac, _mac(secret, "welcome", nonce)):
        raise LinkError(f"peer's secret differs: set the same {SECRET_VARIABLE} on every node")


def check_version(document: Any) -> None:
    version = document.get("version") if isinstance(document, dict) else None
    if version != WIRE_VERSION:
        raise LinkError(
            f"peer speaks wire version {version}, this process version {WIRE_VERSION}: install the same bimetal on both"
        )
