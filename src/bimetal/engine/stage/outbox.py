"""What a stage sends, in order, by a thread of its own: it waits for the copy to host memory so that the compute thread
need not. Large results leave piece by piece, as the pieces arrive in host memory.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from bimetal.engine.device import HostCopy, Stopwatch
from bimetal.engine.link.tcp import Buffer, Connection, Outgoing
from bimetal.engine.stage.boundary import rows_as_bytes
from bimetal.engine.stage.sampler import SampledCopies
from bimetal.engine.wire.frame import Header, Kind
from bimetal.engine.wire.step import encode_sampled

PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Message:
    """The result of a step: rows for the next stage in pieces, or ids, or (neither) word that it has none."""

    header: Header
    stopwatch: Stopwatch
    hidden: tuple[HostCopy, ...] = ()
    sampled: SampledCopies | None = None


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
        threading.Thread(target=self._send_forever, name="sender", daemon=True).start()

    def put(self, message: Message) -> None:
        self._messages.put(message)

    def _send_forever(self) -> None:
        try:
            while True:
                self._send(self._messages.get())
        except Exception as error:
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
