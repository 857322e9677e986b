"""What a stage sends, in order.

Small results that another stage waits for are sent by the compute thread, on a GPU while it waits for its next input: two
threads that take turns at the interpreter cost more than the sending (docs/performance.md). The rest goes through a thread
of its own: large results piece by piece, as they reach host memory, and whatever is due while the compute thread is busy
queueing a step without a graph.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from bimetal.engine.device import HostCopy, Stopwatch
from bimetal.engine.link.tcp import Buffer, Connection, Outgoing
from bimetal.engine.stage.sampler import SampledCopies
from bimetal.engine.wire.frame import Header, Kind
from bimetal.engine.wire.step import encode_sampled

PIECE_BYTES = 1 << 20
_CPU_SMALL_BYTES = 128 << 10


@dataclass(frozen=True, slots=True)
class HiddenPiece:
    """Rows on their way to host memory, and that memory."""

    copy: HostCopy
    memory: memoryview


@dataclass(frozen=True, slots=True)
class Message:
    """The result of a step: rows for the next stage in pieces, or ids, or (neither) word that it has none."""

    header: Header
    stopwatch: Stopwatch
    hidden: tuple[HiddenPiece, ...] = ()
    sampled: SampledCopies | None = None

    @property
    def is_small(self) -> bool:
        """Fits a socket's buffer, so that sending it waits for nobody (over NIXL it may wait for a place in the peer's ring)."""
        return self.header.num_bytes <= (_CPU_SMALL_BYTES if self.stopwatch.is_host_clock else PIECE_BYTES)

    @property
    def is_ready(self) -> bool:
        """All of it is in host memory."""
        copies = [piece.copy for piece in self.hidden] if self.sampled is None else self.sampled.copies
        return self.stopwatch.is_done and all(copy.is_done for copy in copies)


@dataclass(slots=True)
class Busy:
    """Seconds of compute of the messages sent so far."""

    seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, seconds: float) -> None:
        with self.lock:
            self.seconds += seconds

    def take(self) -> float:
        with self.lock:
            seconds, self.seconds = self.seconds, 0.0
        return seconds


class Outbox:
    """Its edges out are those that the stage has; None: it has not."""

    def __init__(
        self,
        hidden_out: Outgoing | None,
        ids_out: Outgoing | None,
        driver: Connection | None,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.busy = Busy()
        self._hidden_out = hidden_out
        self._ids_out = ids_out
        self._driver = driver
        self._on_failure = on_failure
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._pending: deque[Message] = deque()
        self._unsent = 0
        self._unsent_lock = threading.Lock()
        threading.Thread(target=self._send_forever, name="sender", daemon=True).start()

    def put(self, message: Message) -> None:
        """On the one compute thread, like all here. LinkError if the peer is gone and the message goes at once."""
        self._pending.append(message)
        is_urgent = message.stopwatch.is_host_clock or self._hidden_out or self._ids_out
        if is_urgent and message.is_small and not self._unsent:
            self.send_ready()
        else:
            self.hand_over()

    def send_ready(self) -> bool:
        """Send what has reached host memory; whether something is still on its way there."""
        while self._pending:
            message = self._pending.popleft()  # first: one that fails is not tried again
            if not message.is_ready:
                self._pending.appendleft(message)
                return True
            self._send(message)
        return False

    def hand_over(self) -> None:
        """Leave what is pending to the other thread: this one will be busy."""
        while self._pending:
            with self._unsent_lock:
                self._unsent += 1
            self._messages.put(self._pending.popleft())

    def _send_forever(self) -> None:
        try:
            while True:
                self._send(self._messages.get())
                with self._unsent_lock:
                    self._unsent -= 1
        except Exception as error:
            self._on_failure(error)

    def _send(self, message: Message) -> None:
        header = message.header
        if message.hidden:
            assert self._hidden_out is not None
            self._hidden_out.send(header, _as_they_come(message.hidden))
            self.busy.add(message.stopwatch.elapsed_s())
            return
        assert self._driver is not None
        where = (header.epoch, header.step, header.micro_batch)
        payload: Buffer = b""
        if message.sampled is not None:
            sampled = message.sampled.wait()
            if self._ids_out is not None:  # to the first stage before the driver: it waits for them
                ids = np.ascontiguousarray(sampled.ids).data.cast("B")
                self._ids_out.send(Header(Kind.IDS, len(ids), *where), (ids,))
            payload = encode_sampled(sampled).data.cast("B")
        # Before the driver hears of the step, so that what it then asks includes it.
        self.busy.add(message.stopwatch.elapsed_s())
        self._driver.send(Header(Kind.SAMPLED, len(payload), *where), (payload,))


def _as_they_come(pieces: tuple[HiddenPiece, ...]) -> Iterator[Buffer]:
    for piece in pieces:
        piece.copy.wait()
        yield piece.memory
