"""Authenticated connections over blocking sockets: the built-in link, with no dependency.

Frames go out under a lock, from whichever thread has one. They come in through a thread of the connection's own
(`receive_forever`: control), or are read by the thread that waits for them (`Incoming`: activations and ids), which saves
a hop between threads; the kernel's buffers hold what comes early. Torch-free.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from bimetal.engine.link.address import bound_socket, parse_address
from bimetal.engine.wire.frame import (
    HEADER_BYTES,
    MAX_CONTROL_BYTES,
    MAX_HELLO_BYTES,
    Header,
    Kind,
    pack_json,
    unpack_header,
    unpack_json,
)
from bimetal.engine.wire.handshake import Hello, accept, answer, challenge, confirm, new_nonce
from bimetal.errors import LinkError

_SOCKET_BUFFER_BYTES = 8 << 20
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_HANDSHAKE_TIMEOUT_S = 5.0
_ACCEPT_AGAIN_S = 0.05
_PROBE_AFTER_S, _PROBE_INTERVAL_S, _PROBES = 10, 5, 3
_UNACKNOWLEDGED_MS = 25_000
"""A host that is gone without a word (power, cable) is missed within half a minute, whether anything is being sent or not."""

Buffer = bytes | bytearray | memoryview
Allocate = Callable[[Header], memoryview]
Handle = Callable[[Header, memoryview], None]


class _DroppedError(LinkError):
    """The peer ended the connection or is gone."""


def _failed(what: str, error: OSError) -> LinkError:
    return (_DroppedError if isinstance(error, ConnectionError) else LinkError)(f"{what}: {error}")


class Connection:
    """A byte stream to a peer that has proved that it knows the secret."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.peer = peer
        self._socket = sock
        self._send_lock = threading.Lock()

    def send(self, header: Header, payload: Iterable[Buffer]) -> None:
        """A data frame; the parts of `payload` add up to header.num_bytes and are asked for one by one."""
        parts = iter(payload)
        first = next(parts, b"")
        try:
            with self._send_lock:
                # One call for header and first part: the peer wakes once, and with both.
                sent = self._socket.sendmsg((header.pack(), first)) - HEADER_BYTES
                if sent < len(first):
                    self._socket.sendall(memoryview(first)[sent:])
                for part in parts:
                    self._socket.sendall(part)
        except OSError as error:
            raise _failed(f"lost {self.peer} while sending", error) from error

    def send_frame(self, frame: bytes) -> None:
        """A control frame that `pack_json` or `api.encode` made."""
        try:
            with self._send_lock:
                self._socket.sendall(frame)
        except OSError as error:
            raise _failed(f"lost {self.peer} while sending", error) from error

    def receive_header(self, max_bytes: int = MAX_CONTROL_BYTES) -> Header:
        buffer = bytearray(HEADER_BYTES)
        self.receive_into(memoryview(buffer))
        return unpack_header(buffer, max_bytes)

    def receive_into(self, view: memoryview) -> None:
        """Fill `view`; LinkError if the peer closes first."""
        got = 0
        while got < len(view):
            try:
                n = self._socket.recv_into(view[got:])
            except OSError as error:
                raise _failed(f"lost {self.peer} while receiving", error) from error
            if n == 0:
                raise _DroppedError(
                    f"{self.peer} closed the connection" + (" inside a message" if got else "")
                )
            got += n

    def try_header(self, buffer: bytearray, max_bytes: int = MAX_CONTROL_BYTES) -> Header | None:
        """The next frame's header, if it has come; `buffer` of HEADER_BYTES is overwritten."""
        try:
            n = self._socket.recv_into(buffer, HEADER_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            raise _failed(f"lost {self.peer} while receiving", error) from error
        if n == 0:
            raise LinkError(f"{self.peer} closed the connection")
        if n < HEADER_BYTES:
            self.receive_into(memoryview(buffer)[n:])
        return unpack_header(buffer, max_bytes)

    def receive(self, max_bytes: int = MAX_CONTROL_BYTES) -> tuple[Header, memoryview]:
        """One whole frame in memory of its own."""
        header = self.receive_header(max_bytes)
        payload = memoryview(bytearray(header.num_bytes))
        self.receive_into(payload)
        return header, payload

    def has_frame(self) -> bool:
        """Whether a header can be read without waiting."""
        try:
            return len(self._socket.recv(HEADER_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)) == HEADER_BYTES
        except BlockingIOError:
            return False
        except OSError as error:
            raise _failed(f"lost {self.peer} while receiving", error) from error

    def wait_for_bytes(self) -> None:
        """Wait until something can be read; LinkError once the connection ended."""
        self._poll(None)

    def check_open(self) -> None:
        """LinkError if the peer has closed, even while frames of it lie unread."""
        self._poll(0)

    def _poll(self, timeout_ms: int | None) -> None:
        poller = select.poll()
        try:
            poller.register(self._socket, select.POLLIN | select.POLLRDHUP)
            events = poller.poll(timeout_ms)
        except (OSError, ValueError) as error:
            raise LinkError(f"lost {self.peer}: {error}") from error
        if events and events[0][1] & ~select.POLLIN:
            raise LinkError(f"{self.peer} closed the connection")

    def receive_forever(self, handle: Handle) -> LinkError:
        """Pass every frame to `handle` until the connection ends; returns why it ended."""
        try:
            while True:
                header = self.receive_header()
                payload = fresh_memory(header)
                self.receive_into(payload)
                handle(header, payload)
        except LinkError as error:
            return error

    def set_timeout(self, timeout_s: float | None) -> None:
        self._socket.settimeout(timeout_s)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Outgoing(Protocol):
    """The sending end of an edge: ordered frames to one peer."""

    def send(self, header: Header, payload: Iterable[Buffer]) -> None: ...

    def close(self) -> None: ...


class Incoming(Protocol):
    """The receiving end of an edge, for the one thread that needs its messages."""

    def next(self, allocate: Allocate) -> tuple[Header, memoryview]:
        """Wait for the next frame; its payload goes to the memory that `allocate` gives."""

    def poll(self, allocate: Allocate) -> tuple[Header, memoryview] | None:
        """The next frame, if it is there."""


class TcpIncoming:
    """`Incoming` over a connection. A wait polls for `spin_s` before it sleeps: waking a thread up takes longer than a hop."""

    def __init__(self, connection: Connection, spin_s: float, max_bytes: int = MAX_CONTROL_BYTES) -> None:
        """`max_bytes`: of a message."""
        self._connection = connection
        self._spin_s = spin_s
        self._max_bytes = max_bytes
        self._header = bytearray(HEADER_BYTES)

    def next(self, allocate: Allocate) -> tuple[Header, memoryview]:
        deadline = time.perf_counter() + self._spin_s
        while time.perf_counter() < deadline:
            if (frame := self.poll(allocate)) is not None:
                return frame
        return self._payload(self._connection.receive_header(self._max_bytes), allocate)

    def poll(self, allocate: Allocate) -> tuple[Header, memoryview] | None:
        header = self._connection.try_header(self._header, self._max_bytes)
        return None if header is None else self._payload(header, allocate)

    def _payload(self, header: Header, allocate: Allocate) -> tuple[Header, memoryview]:
        payload = allocate(header)
        self._connection.receive_into(payload)
        return header, payload


def fresh_memory(header: Header) -> memoryview:
    """The simplest `Allocate`."""
    return memoryview(bytearray(header.num_bytes))


def _tune(sock: socket.socket) -> None:
    # Only with the privilege to exceed the system's limit: a plain SO_RCVBUF is cut to it, and ends the kernel's own tuning.
    for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)


def _receive_hello(connection: Connection, *expected: Kind) -> object:
    header, payload = connection.receive(MAX_HELLO_BYTES)
    document = unpack_json(payload)
    if header.kind is Kind.REFUSED and isinstance(document, dict):
        raise LinkError(f"{connection.peer} refused the connection: {document.get('why')}")
    if header.kind not in expected:
        raise LinkError(f"{connection.peer} sent {header.kind.name} where {expected[0].name} was due")
    return document


def connect(address: str, secret: str, role: str, timeout_s: float = 10.0) -> Connection:
    """Dial and prove the secret to each other, retrying until `timeout_s` while nobody listens."""
    family, target = parse_address(address)
    deadline = time.monotonic() + timeout_s
    while True:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(deadline - time.monotonic(), 0.1))
            sock.connect(target)
            _tune(sock)
            return _introduce(Connection(sock, address), secret, role)
        except (OSError, _DroppedError) as error:
            sock.close()
            if time.monotonic() >= deadline:
                if isinstance(error, LinkError):
                    raise
                raise LinkError(
                    f"nothing answers at {address} ({error}): start `bimetal stage --listen` there, or correct the address"
                ) from error
            # Dropped: a stage whose last driver has just gone starts afresh, with what it had accepted meanwhile.
            time.sleep(0.05)
        except LinkError:
            sock.close()
            raise


def _introduce(connection: Connection, secret: str, role: str) -> Connection:
    connection.set_timeout(_HANDSHAKE_TIMEOUT_S)
    nonce = new_nonce()
    document = _receive_hello(connection, Kind.CHALLENGE)
    connection.send_frame(pack_json(Kind.HELLO, answer(document, secret, role, nonce)))
    confirm(_receive_hello(connection, Kind.WELCOME), secret, nonce)
    connection.set_timeout(None)
    return connection


class Listener:
    """Accepts connections in a thread; each that passes the handshake goes to `on_connect` in a thread of its own.

    One that does not is told why, reported to `on_refused`, and closed; nothing else notices.
    """

    def __init__(
        self,
        address: str,
        secret: str,
        on_connect: Callable[[Hello, Connection], None],
        on_refused: Callable[[str, LinkError], None],
    ) -> None:
        self._secret = secret
        self._on_connect = on_connect
        self._on_refused = on_refused
        self._closed = False
        self._socket, self.address = bound_socket(address)
        self._socket.listen(64)
        threading.Thread(target=self._accept_forever, name="listener", daemon=True).start()

    def _accept_forever(self) -> None:
        while True:
            try:
                sock, peer = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                # One connection broke before it was taken, or too many files are open: others may fare better.
                time.sleep(_ACCEPT_AGAIN_S)
                continue
            name = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "local peer"
            thread = threading.Thread(
                target=self._welcome, args=(sock, name), name=f"from-{name}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # no more threads
                sock.close()
                self._on_refused(name, LinkError(f"{name}: {error}"))

    def _welcome(self, sock: socket.socket, name: str) -> None:
        connection = Connection(sock, name)
        try:
            _tune(sock)
            connection.set_timeout(_HANDSHAKE_TIMEOUT_S)
            nonce = new_nonce()
            connection.send_frame(pack_json(Kind.CHALLENGE, challenge(nonce)))
            document = _receive_hello(connection, Kind.HELLO)
            hello, welcome = accept(document, self._secret, nonce)
            connection.send_frame(pack_json(Kind.WELCOME, welcome))
            connection.set_timeout(None)
        except (LinkError, OSError) as error:
            refusal = error if isinstance(error, LinkError) else LinkError(f"{name}: {error}")
            with contextlib.suppress(LinkError):
                connection.send_frame(pack_json(Kind.REFUSED, {"why": str(refusal)}))
            connection.close()
            self._on_refused(name, refusal)
            return
        connection.peer = f"{hello.role} at {name}"
        self._on_connect(hello, connection)

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
