"""The link over NIXL (UCX: shared memory on one host, RDMA or TCP between hosts), for edges that carry much.

An edge keeps its authenticated connection: over it go the setup, the header of every message, small payloads, credits,
and the news that the peer is gone. The receiver offers a ring of slots in host memory and says so in a MEMORY frame,
which only a peer that proved the secret ever sees; a larger payload is written into the slots, piece by piece, each with a
notification that says how much came. Nothing is pickled: NIXL's own metadata is bytes that only NIXL reads.

NIXL itself authenticates nobody and encrypts nothing: whoever can reach UCX's ports is trusted, so they belong on a
private network (UCX_NET_DEVICES names its interfaces). Torch-free, as all of the link; needs the package `nixl`, and
imports it when an edge is made.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import secrets
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from bimetal.engine.link.tcp import Allocate, Buffer, Connection
from bimetal.engine.wire.frame import MAX_CONTROL_BYTES, Header, Kind
from bimetal.errors import ConfigError, LinkError

INLINE_BYTES = 128 << 10
"""Payloads up to this go over the connection itself: below, one system call beats a write and its notification."""
SLOT_BYTES = 1 << 20
_MIN_SLOTS, _MAX_SLOTS = 8, 64
_PAGE_BYTES = 4096
_SETUP_TIMEOUT_S = 60.0
_SPIN_S = 0.0005
_PAUSE_S = 0.00005
"""Whoever waits for NIXL drives it: it polls for `_SPIN_S`, then looks again every `_PAUSE_S`."""
_BACKGROUND_PAUSE_S = 0.0002

_MEMORY = struct.Struct("<16sQII")
"""token, address of slot 0, slot_bytes, num_slots; NIXL's metadata follows."""
_PIECE = struct.Struct("<16sQI")
"""token, number of the piece since the edge began (its slot is that modulo num_slots), bytes."""

# `nixl` chooses the build that fits torch's CUDA; a build alone, without that small package, does as well.
_PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm")

T = TypeVar("T")


def load_nixl() -> Any:
    """The installed NIXL package; ConfigError says how to get one."""
    for name in _PACKAGES:
        try:
            package = importlib.import_module(name)
        except ImportError as error:
            why = error
            continue
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(
                logging.WARNING
            )  # else it reports every agent on standard output
        return package
    raise ConfigError(
        f"link 'nixl' needs the package nixl ({why}): pip install 'bimetal[nixl]' on every node of the plan "
        "(beside a CPU build of torch: pip install --no-deps nixl nixl-cu12), or choose link 'tcp'"
    )


@dataclass(frozen=True, slots=True)
class RingShape:
    """Slots that the receiver offers."""

    slot_bytes: int
    num_slots: int

    @classmethod
    def for_messages(cls, largest_bytes: int) -> RingShape:
        """Room for two of the largest messages, as far as that is between 8 and 64 slots of at most 1 MiB.

        Larger messages flow through as the receiver takes their pieces.
        """
        pages = -(-max(largest_bytes, 1) // _PAGE_BYTES)
        slot_bytes = min(SLOT_BYTES, pages * _PAGE_BYTES)
        wanted = -(-2 * largest_bytes // slot_bytes)
        return cls(slot_bytes, min(max(wanted, _MIN_SLOTS), _MAX_SLOTS))


class _Agent:
    """A NIXL agent and host memory of its own, registered with it.

    It has no progress thread: NIXL's spins, a whole core of every end of every edge. Whoever waits calls it instead.
    """

    def __init__(self, peer: str, num_bytes: int) -> None:
        nixl = load_nixl()
        self._peer = peer
        with self.failures("starting"):
            self._agent = nixl.nixl_agent(
                f"bimetal-{uuid.uuid4().hex}",
                nixl.nixl_agent_config(
                    enable_prog_thread=False, sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
                ),
            )
            self._array = np.zeros(num_bytes, np.uint8)
            self.memory = self._array.data
            self.address = int(self._array.ctypes.data)
            self._registered = self._agent.register_memory([(self.address, num_bytes, 0, "")], "DRAM")

    def failures(self, doing: str) -> _AsLinkError:
        return _AsLinkError(f"NIXL, {doing} the edge with {self._peer}")

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> bytes:
        """The peer's name, which `write` takes."""
        name: bytes = self._agent.add_remote_agent(metadata)
        return name

    def notifications(self) -> list[bytes]:
        """Those that came since the last call; drives what is under way."""
        return [note for notes in self._agent.get_new_notifs().values() for note in notes]

    def write(self, num_bytes: int, peer: bytes, address: int, note: bytes) -> Callable[[], bool]:
        """Start writing the first `num_bytes` of own memory to the peer's `address`; asks whether it is done."""
        agent = self._agent
        source = agent.get_xfer_descs([(self.address, num_bytes, 0)], "DRAM")
        target = agent.get_xfer_descs([(address, num_bytes, 0)], "DRAM")
        transfer = agent.initialize_xfer("WRITE", source, target, peer, note)
        state = agent.transfer(transfer)

        def done() -> bool:
            nonlocal state
            if state == "PROC":
                state = agent.check_xfer_state(transfer)
            if state == "ERR":
                raise LinkError(f"NIXL failed to write to {self._peer}")
            if state == "DONE":
                transfer.release()
            return bool(state == "DONE")

        return done

    def close(self) -> None:
        """Once or more often."""
        registered, self._registered = self._registered, None
        if registered is not None:
            with self.failures("closing"):
                self._agent.deregister_memory(registered)


class _AsLinkError:
    """NIXL's exceptions share no base of their own, and differ between its builds: any is a failure of the link."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, LinkError):
            raise LinkError(f"{self._what}: {type(error).__name__}: {error}") from error


def _wait(attempt: Callable[[], T | None], connection: Connection) -> T:
    """What `attempt` gives once it gives something; LinkError if the peer goes first."""
    spin_until = time.perf_counter() + _SPIN_S
    while (result := attempt()) is None:
        if time.perf_counter() > spin_until:
            connection.check_open()
            time.sleep(_PAUSE_S)
    return result


class NixlOutgoing:
    """`Outgoing`: waits, when made, for the receiver's memory; `send` waits for free slots when the receiver is behind."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        load_nixl()  # before waiting for a peer
        connection.set_timeout(_SETUP_TIMEOUT_S)
        header, payload = connection.receive()
        connection.set_timeout(None)
        if header.kind is not Kind.MEMORY or header.num_bytes <= _MEMORY.size:
            raise LinkError(
                f"{connection.peer} sent {header.kind.name} where MEMORY was due: choose the same link on both"
            )
        self._token, self._ring_address, slot_bytes, num_slots = _MEMORY.unpack(payload[: _MEMORY.size])
        self._ring = RingShape(slot_bytes, num_slots)
        self._agent = _Agent(connection.peer, slot_bytes)
        with self._agent.failures("joining"):
            self._receiver = self._agent.add_peer(bytes(payload[_MEMORY.size :]))
        self._num_sent = 0
        self._num_taken = 0

    def send(self, header: Header, payload: Iterable[Buffer]) -> None:
        if header.num_bytes <= INLINE_BYTES:
            self._connection.send(header, payload)
            return
        parts = iter(payload)
        first = next(parts, b"")
        self._connection.send(header, ())
        try:
            with self._agent.failures("writing to"):
                for part in itertools.chain((first,), parts):
                    view = memoryview(part).cast("B")
                    for start in range(0, len(view), self._ring.slot_bytes):
                        self._write(view[start : start + self._ring.slot_bytes])
        except LinkError:
            self._connection.close()  # the receiver waits for the rest
            raise

    def _write(self, piece: memoryview) -> None:
        if self._num_sent - self._num_taken == self._ring.num_slots:
            _wait(self._take_credit, self._connection)
        self._agent.memory[: len(piece)] = piece
        slot = self._num_sent % self._ring.num_slots
        note = _PIECE.pack(self._token, self._num_sent, len(piece))
        address = self._ring_address + slot * self._ring.slot_bytes
        done = self._agent.write(len(piece), self._receiver, address, note)
        # One piece at a time: the staging memory stays in the cache, and what is written is there when the note is.
        _wait(lambda: done() or None, self._connection)
        self._num_sent += 1

    def _take_credit(self) -> bool | None:
        self._agent.notifications()
        if not self._connection.has_frame():
            return None
        header = self._connection.receive_header()
        if header.kind is not Kind.CREDIT or not self._num_taken < header.step <= self._num_sent:
            raise LinkError(
                f"{self._connection.peer} sent {header.kind.name} {header.step} where a CREDIT was due"
            )
        self._num_taken = header.step
        return True

    def close(self) -> None:
        self._connection.close()
        self._agent.close()


class NixlIncoming:
    """`Incoming`: offers its memory when made. Messages are read by the thread that waits for them.

    While that thread computes, another drives NIXL for as long as a message lies unread, so that its data comes meanwhile.
    """

    def __init__(self, connection: Connection, largest_bytes: int, spin_s: float) -> None:
        """`largest_bytes`: of a message, which sizes the ring. `spin_s`: as in `TcpIncoming`."""
        self._connection = connection
        self._spin_s = spin_s
        self._largest_bytes = largest_bytes
        self._ring = RingShape.for_messages(largest_bytes)
        self._agent = _Agent(connection.peer, self._ring.slot_bytes * self._ring.num_slots)
        self._token = secrets.token_bytes(16)
        self._pieces: deque[int] = deque()
        self._num_arrived = 0
        self._num_taken = 0
        self._num_credited = 0
        self._driving = threading.Lock()
        self._is_away = threading.Event()
        """The reading thread is not in `next`."""
        self._is_away.set()
        with self._agent.failures("opening"):
            metadata = self._agent.metadata()
        offer = _MEMORY.pack(self._token, self._agent.address, self._ring.slot_bytes, self._ring.num_slots)
        connection.send(Header(Kind.MEMORY, len(offer) + len(metadata)), (offer, metadata))
        threading.Thread(target=self._drive_forever, name="nixl-receiver", daemon=True).start()

    def next(self, allocate: Allocate) -> tuple[Header, memoryview]:
        self._is_away.clear()
        try:
            deadline = time.perf_counter() + self._spin_s
            while time.perf_counter() < deadline and not self._connection.has_frame():
                pass
            header = self._connection.receive_header(max(self._largest_bytes, MAX_CONTROL_BYTES))
            payload = allocate(header)
            if header.num_bytes <= INLINE_BYTES:
                self._connection.receive_into(payload)
            else:
                done = 0
                while done < len(payload):
                    done += self._take(payload[done:])
            return header, payload
        finally:
            self._is_away.set()

    def poll(self, allocate: Allocate) -> tuple[Header, memoryview] | None:
        return self.next(allocate) if self._connection.has_frame() else None

    def _take(self, target: memoryview) -> int:
        """Copy the next piece to the front of `target`, free its slot; returns its bytes."""
        size = _wait(self._arrived, self._connection)
        if size > len(target):
            raise LinkError(
                f"{self._connection.peer} sent {size} bytes where {len(target)} were left of a message"
            )
        start = self._num_taken % self._ring.num_slots * self._ring.slot_bytes
        target[:size] = self._agent.memory[start : start + size]
        self._num_taken += 1
        # In halves of the ring: a sender that waits has filled it, so half of it is always there to be credited.
        if self._num_taken - self._num_credited >= self._ring.num_slots // 2:
            self._connection.send(Header(Kind.CREDIT, 0, step=self._num_taken), ())
            self._num_credited = self._num_taken
        return size

    def _arrived(self) -> int | None:
        """Bytes of the next piece, if it is there."""
        if not self._pieces:
            self._drive()
        return self._pieces.popleft() if self._pieces else None

    def _drive(self) -> None:
        with self._driving, self._agent.failures("reading from"):
            for note in self._agent.notifications():
                if len(note) != _PIECE.size:
                    continue
                token, number, size = _PIECE.unpack(note)
                if token != self._token:
                    continue  # not from the peer of this connection
                if number != self._num_arrived or not 0 < size <= self._ring.slot_bytes:
                    raise LinkError(
                        f"{self._connection.peer} sent piece {number} of {size} bytes, {self._num_arrived} was due"
                    )
                self._num_arrived += 1
                self._pieces.append(size)

    def _drive_forever(self) -> None:
        try:
            while True:
                self._is_away.wait()
                time.sleep(_BACKGROUND_PAUSE_S)  # first, too: a reader that is back by then is not disturbed
                self._connection.wait_for_bytes()
                if self._is_away.is_set():
                    self._drive()
        except LinkError:
            return  # the reading thread meets it too

    def close(self) -> None:
        self._connection.close()
        with self._driving:
            self._agent.close()
