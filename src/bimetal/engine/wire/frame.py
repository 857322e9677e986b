"""A frame: the unit in which bimetal's processes talk, over any byte stream.

A fixed header of 32 bytes, then `num_bytes` of payload. The header of a data frame names the step that it belongs to
by (epoch, step, micro_batch), so that a stale or doubled one is recognised. Control payloads are JSON, data payloads
are raw little-endian arrays; nothing is ever pickled.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from bimetal.errors import LinkError

MAGIC = b"bmtl"
WIRE_VERSION = 1
HEADER = struct.Struct("<4sBBHIQIQ")
"""magic, version, kind, micro_batch, epoch, step, flags, num_bytes."""
HEADER_BYTES = HEADER.size
MAX_CONTROL_BYTES = 256 << 20
MAX_HELLO_BYTES = 4096


class Kind(IntEnum):
    # Both ways, before anything else.
    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    REFUSED = 4
    # Driver and stage: JSON.
    LOAD = 10
    LOADING = 11
    LOADED = 12
    START = 13
    STARTED = 14
    STATS = 15
    FAILED = 16
    STOP = 17
    PROBE = 18
    # Driver and stage, stage and stage: arrays.
    STEP = 30
    HIDDEN = 31
    IDS = 32
    SAMPLED = 33
    MASK = 34
    # Stage and stage, beside the data of link nixl.
    MEMORY = 40
    CREDIT = 41
    # Gateway and driver: JSON.
    READY = 50
    GENERATE = 51
    ABORT = 52
    OUTPUTS = 53
    ENGINE_STATS = 54
    FATAL = 55


@dataclass(frozen=True, slots=True)
class Header:
    kind: Kind
    num_bytes: int
    epoch: int = 0
    step: int = 0
    micro_batch: int = 0
    flags: int = 0

    def pack(self) -> bytes:
        return HEADER.pack(
            MAGIC,
            WIRE_VERSION,
            self.kind,
            self.micro_batch,
            self.epoch,
            self.step,
            self.flags,
            self.num_bytes,
        )


def unpack_header(data: bytes | bytearray | memoryview, max_bytes: int) -> Header:
    """Check and read a header; LinkError says whether magic, version, kind or size is off."""
    magic, version, kind, micro_batch, epoch, step, flags, num_bytes = HEADER.unpack(data)
    if magic != MAGIC:
        raise LinkError(
            f"peer does not speak bimetal's wire: its first bytes are {bytes(magic)!r}, not {MAGIC!r}"
        )
    if version != WIRE_VERSION:
        raise LinkError(
            f"peer speaks wire version {version}, this process version {WIRE_VERSION}: install the same bimetal on both"
        )
    try:
        known = Kind(kind)
    except ValueError:
        raise LinkError(
            f"peer sent a frame of unknown kind {kind}: install the same bimetal on both"
        ) from None
    if num_bytes > max_bytes:
        raise LinkError(
            f"peer announced a {known.name} frame of {num_bytes} bytes, the limit here is {max_bytes}"
        )
    return Header(known, num_bytes, epoch, step, micro_batch, flags)


def pack_json(kind: Kind, document: Any, *, epoch: int = 0) -> bytes:
    """A whole control frame."""
    payload = json.dumps(document, separators=(",", ":")).encode()
    return Header(kind, len(payload), epoch=epoch).pack() + payload


def unpack_json(payload: bytes | bytearray | memoryview) -> Any:
    try:
        return json.loads(bytes(payload))
    except (ValueError, RecursionError) as error:
        raise LinkError(f"peer sent a control frame that is not JSON: {error}") from error
