"""Where processes listen: `host:port`, or `unix:/path` on one machine."""

from __future__ import annotations

import contextlib
import errno
import re
import socket
from pathlib import Path

from bimetal.errors import LinkError

_MAX_PORT = 65535
_PROBE_TIMEOUT_S = 1.0


def parse_address(address: str) -> tuple[int, str | tuple[str, int]]:
    """(socket family, what `connect` and `bind` take)."""
    if address.startswith("unix:") and (path := address.removeprefix("unix:")):
        return socket.AF_UNIX, path
    host, colon, port = address.rpartition(":")
    if not colon or not re.fullmatch("[0-9]{1,5}", port) or int(port) > _MAX_PORT:
        raise LinkError(f"address {address!r} is neither host:port nor unix:/path")
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host.strip("[]") or "127.0.0.1", int(port))


def bound_socket(address: str) -> tuple[socket.socket, str]:
    """Bound, not yet listening, and its address with the port that it got. LinkError if it cannot be had."""
    family, target = parse_address(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if isinstance(target, str):
            _bind_unix(sock, target)
            return sock, address
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(target)
    except OSError as error:
        sock.close()
        raise LinkError(f"cannot listen at {address}: {error}: choose another address") from error
    host, port = sock.getsockname()[:2]
    return sock, f"{host}:{port}"


def _bind_unix(sock: socket.socket, path: str) -> None:
    """For this user only; in place of what a listener that has ended left behind."""
    try:
        sock.bind(path)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or not _is_left_behind(path):
            raise
        with contextlib.suppress(FileNotFoundError):
            Path(path).unlink()
        sock.bind(path)
    Path(path).chmod(0o600)


def _is_left_behind(path: str) -> bool:
    """A socket at which nobody listens. Nothing else is ever removed."""
    if not Path(path).is_socket():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
