"""The gateway's end of the engine: one driver on a socket, many requests at once, all on one event loop.

Knows the wire's messages and who waits for which request; knows no text and no HTTP. A `Ticket` is one HTTP request's
view of the engine: it may cover several sequences, and wakes its waiter once for all that a message brings.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

from bimetal.engine.wire.api import (
    Abort,
    EngineStats,
    Fatal,
    Generate,
    Loading,
    Message,
    Output,
    Outputs,
    Ready,
    decode,
    encode,
)
from bimetal.engine.wire.frame import (
    HEADER_BYTES,
    MAX_CONTROL_BYTES,
    MAX_HELLO_BYTES,
    Kind,
    pack_json,
    unpack_header,
    unpack_json,
)
from bimetal.engine.wire.handshake import accept, challenge, new_nonce
from bimetal.errors import EngineError, LinkError

_HANDSHAKE_TIMEOUT_S = 10.0
_RATE_WINDOW_S = 30.0
_LONGEST_RETRY_S = 60


async def _connection_closed() -> str:
    return "the engine's driver closed its connection"


class Ticket:
    """Outputs of the sequences of one HTTP request, as they come. Close it when done or when nobody listens."""

    def __init__(self, client: EngineClient, request_ids: Iterable[str]) -> None:
        self._client = client
        self._open = set(request_ids)
        self._outputs: list[Output] = []
        self._failure: str | None = None
        self._wake = asyncio.Event()

    def put(self, output: Output) -> None:
        self._outputs.append(output)
        self._wake.set()

    def fail(self, message: str) -> None:
        self._failure = message
        self._wake.set()

    async def outputs(self) -> list[Output]:
        """All that came since the last call, at least one; EngineError once the engine is gone."""
        await self._wake.wait()
        self._wake.clear()
        outputs, self._outputs = self._outputs, []
        if not outputs and self._failure is not None:
            raise EngineError(self._failure)
        if self._failure is not None:
            self._wake.set()
        return outputs

    def finished(self, request_id: str) -> None:
        self._open.discard(request_id)

    def abort(self, request_id: str) -> None:
        """Nobody needs the rest of this sequence."""
        if request_id in self._open:
            self._open.discard(request_id)
            self._client.abort([request_id])

    def close(self) -> None:
        if self._open:
            self._client.abort(sorted(self._open))
            self._open.clear()


class EngineClient:
    """Accepts one driver; `ready`, `loading`, `stats` and `failure` say how it is."""

    def __init__(
        self,
        secret: str,
        *,
        on_loading: Callable[[Loading], None] = lambda _: None,
        on_ready: Callable[[Ready], None] = lambda _: None,
        on_failure: Callable[[str], None] = lambda _: None,
        why_lost: Callable[[], Awaitable[str]] = _connection_closed,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._secret = secret
        self._on_loading = on_loading
        self._on_ready = on_ready
        self._on_failure = on_failure
        self._why_lost = why_lost
        self._clock = clock
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tickets: dict[str, Ticket] = {}
        self._unstarted: set[str] = set()
        """Sequences of which nothing has come yet: waiting, or in prefill."""
        self._ends_s: deque[float] = deque()
        """When sequences finished, over the last `_RATE_WINDOW_S`."""
        self.ready: Ready | None = None
        self.stats: EngineStats | None = None
        self.failure: str | None = None

    # -- the connection ---------------------------------------------------------------------------------------------

    async def listen(self, path: str) -> None:
        """Wait for the driver on a unix-domain socket."""
        self._server = await asyncio.start_unix_server(self._connected, path, limit=1 << 20)

    async def close(self) -> None:
        """The driver takes the end of the connection as the order to stop."""
        if self._server is not None:
            self._server.close()
        if self._writer is not None:
            self._writer.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
                await self._shake_hands(reader, writer)
        except (LinkError, TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            return
        self._writer = writer
        try:
            while True:
                header = unpack_header(await reader.readexactly(HEADER_BYTES), MAX_CONTROL_BYTES)
                payload = await reader.readexactly(header.num_bytes)
                self._receive(decode(header.kind, payload))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.fail(await self._why_lost())
        except LinkError as error:
            self.fail(f"the engine's driver sent what cannot be read: {error}")
        finally:
            self.fail("the gateway could not go on reading from the engine's driver")
            writer.close()

    async def _shake_hands(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonce = new_nonce()
        writer.write(pack_json(Kind.CHALLENGE, challenge(nonce)))
        header = unpack_header(await reader.readexactly(HEADER_BYTES), MAX_HELLO_BYTES)
        document = unpack_json(await reader.readexactly(header.num_bytes))
        try:
            hello, welcome = accept(document, self._secret, nonce)
            if hello.role != "driver":
                raise LinkError(f"this socket is for a driver, not for {hello.role!r}")
            if self._writer is not None:
                raise LinkError("this gateway already has its driver")
        except LinkError as error:
            writer.write(pack_json(Kind.REFUSED, {"why": str(error)}))
            raise
        writer.write(pack_json(Kind.WELCOME, welcome))

    def _receive(self, message: Message) -> None:
        if isinstance(message, Outputs):
            for output in message.outputs:
                self._deliver(output)
        elif isinstance(message, EngineStats):
            self.stats = message
        elif isinstance(message, Loading):
            self._on_loading(message)
        elif isinstance(message, Ready):
            self.ready = message
            self._on_ready(message)
        elif isinstance(message, Fatal):
            self.fail(message.message)
        else:
            raise LinkError(f"a {type(message).__name__} message goes to the driver, not from it")

    def _deliver(self, output: Output) -> None:
        self._unstarted.discard(output.request_id)
        ticket = self._tickets.get(output.request_id)
        if output.finish_reason is not None:
            self._forget(output.request_id)
        if ticket is not None:
            if output.finish_reason is not None:
                ticket.finished(output.request_id)
            ticket.put(output)

    def fail(self, message: str) -> None:
        """The engine is gone, for this reason; the first one given stays."""
        if self.failure is not None:
            return
        self.failure = message
        tickets = set(self._tickets.values())
        self._tickets.clear()
        self._unstarted.clear()
        for ticket in tickets:
            ticket.fail(message)
        self._on_failure(message)

    # -- requests ---------------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        return len(self._tickets)

    @property
    def num_running(self) -> int:
        return len(self._tickets) - self.num_waiting

    @property
    def num_waiting(self) -> int:
        """Sequences in the driver's queue: what it last reported, corrected by what was sent and answered since.

        Of those that have not answered, at least what exceeds the running limit waits; the driver's report adds
        those that wait for KV blocks.
        """
        excess = len(self._tickets) - self.ready.max_num_seqs if self.ready else 0
        reported = self.stats.num_waiting if self.stats else 0
        return min(len(self._unstarted), max(excess, reported, 0))

    def retry_after_s(self, num_waiting: int) -> int:
        """Seconds until `num_waiting` sequences should have left the queue, from those that finished lately."""
        self._drop_old_ends()
        rate = len(self._ends_s) / _RATE_WINDOW_S
        wait_s = num_waiting / rate if rate else math.inf
        return int(max(1, min(math.ceil(wait_s), _LONGEST_RETRY_S))) if rate else 5

    def submit(self, requests: Sequence[Generate]) -> Ticket:
        """EngineError if the engine is not there to take them."""
        if self.failure is not None or self._writer is None:
            raise EngineError(self.failure or "the engine is still loading")
        ticket = Ticket(self, [request.request_id for request in requests])
        for request in requests:
            self._tickets[request.request_id] = ticket
            self._unstarted.add(request.request_id)
        self._writer.write(b"".join(encode(request) for request in requests))
        return ticket

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._forget(request_id)
        if self._writer is not None and self.failure is None:
            self._writer.write(encode(Abort(tuple(request_ids))))

    def _forget(self, request_id: str) -> None:
        self._unstarted.discard(request_id)
        if self._tickets.pop(request_id, None) is not None:
            self._ends_s.append(self._clock())
            self._drop_old_ends()

    def _drop_old_ends(self) -> None:
        oldest_s = self._clock() - _RATE_WINDOW_S
        while self._ends_s and self._ends_s[0] < oldest_s:
            self._ends_s.popleft()
