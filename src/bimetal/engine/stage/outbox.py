"""What a stage sends, once its copy to host memory is there: by a thread of its own, or by the compute thread in passing.

On a GPU the compute thread only queues work and then waits for input; it sends what is ready while it polls, so that no
second thread has to be woken for a hop of a tenth of a millisecond. What is large still goes through the thread, piece by
piece as the pieces arrive in host memory. On a CPU the compute thread computes, and the thread does all the sending.
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
from bimetal.engine.stage.boundary import rows_as_bytes
from bimetal.engine.stage.sampler import SampledCopies
from bimetal.engine.wire.frame import Header, Kind
from bimetal.engine.wire.step import encode_sampled
from bimetal.errors import LinkError

LARGE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Message:
    """The result of a step: rows for the next stage in pieces, or ids, or (neither) word that it has none."""

    header: Header
    stopwatch: Stopwatch
    hidden: tuple[HostCopy, ...] = ()
    sampled: SampledCopies | None = None

    @property
    def is_ready(self) -> bool:
        copies = self.hidden if self.sampled is None else self.sampled.copies
        return all(copy.is_done for copy in copies)


@dataclass(slots=True)
class Busy:
    """Seconds of compute of the messages sent so far."""

    seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> float:
        with self.lock:
            seconds, self.seconds = self.seconds, 0.0
        return seconds


class Outbox:
    """`is_polled`: the compute thread calls `flush` while it waits, and small messages go out there."""

    def __init__(
        self,
        hidden_out: Outgoing | None,
        ids_out: Outgoing | None,
        driver: Connection | None,
        is_polled: bool,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.busy = Busy()
        self._hidden_out = hidden_out
        self._ids_out = ids_out
        self._driver = driver
        self._is_polled = is_polled
        self._on_failure = on_failure
        self._polled: deque[Message] = deque()
        self._threaded: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._num_threaded = 0
        self._num_sent = 0
        threading.Thread(target=self._send_forever, name="sender", daemon=True).start()

    def put(self, message: Message) -> None:
        # Order matters more than speed: nothing overtakes a large message that the thread still has.
        threaded_first = self._num_threaded > self._num_sent
        if self._is_polled and not threaded_first and message.header.num_bytes < LARGE_BYTES:
            self._polled.append(message)
            return
        while self._polled:
            self._send(self._polled.popleft())
        self._num_threaded += 1
        self._threaded.put(message)

    def flush(self) -> bool:
        """Send what is ready; whether something still waits for its copy."""
        while self._polled and self._polled[0].is_ready:
            self._send(self._polled.popleft())
        return bool(self._polled)

    def _send_forever(self) -> None:
        try:
            while True:
                message = self._threaded.get()
                self._send(message)
                self._num_sent += 1
        except (LinkError, RuntimeError) as error:
            self._on_failure(error)

    def _send(self, message: Message) -> None:
        header = message.header
        if message.hidden:
            assert self._hidden_out is not None
            self._hidden_out.send(header, _as_they_come(message.hidden))
        else:
            self._send_ids(header, message.sampled)
        seconds = message.stopwatch.elapsed_s()
        with self.busy.lock:
            self.busy.seconds += seconds

    def _send_ids(self, header: Header, copies: SampledCopies | None) -> None:
        """To the first stage, which waits for them, then to the driver."""
        assert self._driver is not None
        where = (header.epoch, header.step, header.micro_batch)
        if copies is None:
            self._driver.send(Header(Kind.SAMPLED, 0, *where), ())
            return
        sampled = copies.wait()
        if self._ids_out is not None:
            ids = np.ascontiguousarray(sampled.ids).data.cast("B")
            self._ids_out.send(Header(Kind.IDS, len(ids), *where), (ids,))
        payload = encode_sampled(sampled).data.cast("B")
        self._driver.send(Header(Kind.SAMPLED, len(payload), *where), (payload,))


def _as_they_come(copies: tuple[HostCopy, ...]) -> Iterator[Buffer]:
    for copy in copies:
        yield rows_as_bytes(copy.wait())
