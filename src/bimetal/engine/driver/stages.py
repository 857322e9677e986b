"""The driver's side of a replica's stages: start or reach them, load, agree on KV blocks, join the edges, start.

After `start`, steps go out with `send_step` and everything that comes back is put on one queue.
"""

from __future__ import annotations

import os
import queue
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Thread
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from bimetal.engine.driver.children import StageChild
from bimetal.engine.link.tcp import Connection, connect
from bimetal.engine.wire.control import (
    AskStats,
    LoadStage,
    StageEdge,
    StageFailed,
    StageLoaded,
    StageStarted,
    StageStats,
    StartStage,
    decode_control,
    encode_control,
)
from bimetal.engine.wire.frame import Header, Kind, unpack_json
from bimetal.engine.wire.handshake import SECRET_VARIABLE, new_secret
from bimetal.engine.wire.options import LinkKind
from bimetal.engine.wire.step import Step, encode_step, idle_step
from bimetal.errors import ConfigError, LinkError, StageError
from bimetal.plan import Replica, Stage

_STOP_TIMEOUT_S = 1.0
_HOP_ROUNDS = 5
_PATIENCE_S = 0.5
_JUST_STATS = AskStats()


@dataclass(frozen=True, slots=True)
class FromStage:
    """A frame of stage `index`, or the news that it is gone."""

    index: int
    header: Header | None
    payload: memoryview
    why_lost: str = ""

    @property
    def is_end(self) -> bool:
        return self.header is None

    @property
    def is_failure(self) -> bool:
        """It says itself what is wrong."""
        return self.header is not None and self.header.kind is Kind.FAILED


def device_of(stage: Stage) -> str:
    return "cpu" if stage.gpu == "cpu" else f"cuda:{stage.device_indices[0]}"


def check_one_device_a_stage(stages: Sequence[Stage]) -> None:
    """ConfigError for a stage that this engine cannot run."""
    for index, stage in enumerate(stages):
        if stage.tensor_parallel != 1:
            raise ConfigError(
                f"stage {index} has tensor_parallel {stage.tensor_parallel}: this engine runs one device a stage; "
                "give each device a stage of its own"
            )


class Stages:
    """All stages of one replica, in order."""

    def __init__(self, replica: Replica, events: queue.SimpleQueue[Any], link: LinkKind = "tcp") -> None:
        self._replica = replica
        self._link = link
        self._events = events
        self._children: list[StageChild] = []
        self._connections: list[Connection] = []
        self._addresses: list[str] = []
        self._own: queue.SimpleQueue[FromStage] = queue.SimpleQueue()
        self._started = False
        self._cancelled = False
        self.loaded: list[StageLoaded] = []
        self.decode_step_s: list[dict[int, float]] = []
        self.hop_s = 0.0
        self.epoch = 1

    def __len__(self) -> int:
        return len(self._replica.stages)

    # -- start ------------------------------------------------------------------------------------------------------

    def start(
        self, load: Callable[[int, Stage], LoadStage], progress: Callable[[int, int, int], None]
    ) -> int:
        """Bring all stages up; returns the number of KV blocks that every one of them holds."""
        check_one_device_a_stage(self._replica.stages)
        self._reach()
        for index, stage in enumerate(self._replica.stages):
            self._send_control(index, encode_control(load(index, stage)))
        self.loaded = self._collect(Kind.LOADED, StageLoaded, progress)
        self._check_same_checkpoint()
        num_blocks = min(loaded.max_kv_blocks for loaded in self.loaded)
        for index in range(len(self)):
            self._send_control(index, encode_control(self._start_message(index, num_blocks)))
        self.decode_step_s = [started.decode_step_s for started in self._collect(Kind.STARTED, StageStarted)]
        if len(self) > 1:
            self._measure_hop()
        self._started = True
        return num_blocks

    def _reach(self) -> None:
        """Children for stages without an address, connections to all."""
        secret = os.environ.get(SECRET_VARIABLE)
        if secret is None:
            if any(stage.address for stage in self._replica.stages):
                raise ConfigError(
                    f"stages on other hosts need a shared secret: set {SECRET_VARIABLE} here and there"
                )
            secret = new_secret()
        waiting = {}
        for index, stage in enumerate(self._replica.stages):
            if stage.address is None:
                child = StageChild(index, stage, secret)
                self._children.append(child)
                waiting[index] = child
                self._check_cancelled()
        with ThreadPoolExecutor(max(len(self), 1)) as threads:
            addresses = list(
                threads.map(
                    lambda i: (
                        waiting[i].wait_for_address()
                        if i in waiting
                        else str(self._replica.stages[i].address)
                    ),
                    range(len(self)),
                )
            )
        self._addresses = addresses
        for index, address in enumerate(addresses):
            connection = connect(address, secret, "driver")
            self._connections.append(connection)
            self._check_cancelled()
            Thread(target=self._receive, args=(index, connection), name=f"stage-{index}", daemon=True).start()

    def cancel_start(self) -> None:
        """From any thread: make `start` raise StageError soon, whatever it waits for."""
        self._cancelled = True
        for child in list(self._children):
            child.ask_to_stop()
        for connection in list(self._connections):
            connection.close()

    def _check_cancelled(self) -> None:
        if self._cancelled:
            raise StageError("the start was called off")

    def _receive(self, index: int, connection: Connection) -> None:
        def handle(header: Header, payload: memoryview) -> None:
            (self._events if self._started else self._own).put(FromStage(index, header, payload))

        error = connection.receive_forever(handle)
        (self._events if self._started else self._own).put(
            FromStage(index, None, memoryview(b""), str(error))
        )

    def _collect(
        self, kind: Kind, cls: type[Any], progress: Callable[[int, int, int], None] | None = None
    ) -> list[Any]:
        """One message of `kind` from every stage, in order of stages."""
        found: dict[int, Any] = {}
        while len(found) < len(self):
            event = self._own.get()
            self.check(event)
            assert event.header is not None
            if event.header.kind is Kind.LOADING:
                document = unpack_json(event.payload)
                if progress is not None:
                    progress(
                        int(document["stage"]), int(document["done_bytes"]), int(document["total_bytes"])
                    )
            elif event.header.kind is kind:
                found[event.index] = decode_control(cls, event.payload)
        return [found[i] for i in range(len(self))]

    def check(self, event: FromStage) -> None:
        """StageError if the event says that a stage failed or is gone."""
        if event.is_end:
            self._fail(event)
        if event.is_failure:
            self._fail(self._cause(event))

    def _fail(self, event: FromStage) -> NoReturn:
        name = self._replica.stages[event.index].node
        if event.is_failure:
            failed = decode_control(StageFailed, event.payload)
            raise StageError(f"stage {event.index} on node {name!r}: {failed.message}")
        status = [c.status for c in self._children if c.index == event.index]
        ended = f", its process ended with status {status[0]}" if status and status[0] is not None else ""
        raise StageError(f"stage {event.index} on node {name!r} is gone: {event.why_lost}{ended}")

    def _cause(self, news: FromStage) -> FromStage:
        """Of `news` that something is wrong. What comes soon may say more: a stage that has lost its neighbour may say so
        before the neighbour's own end is known here, and one that ends its connection may have said why before.

        Whatever else comes is lost: the engine ends.
        """
        events = self._events if self._started else self._own
        deadline = time.monotonic() + _PATIENCE_S
        said: dict[int, FromStage] = {}
        event: Any = news
        while True:
            if isinstance(event, FromStage):
                if event.is_failure:
                    said.setdefault(event.index, event)
                elif event.is_end and event is not news and event.index not in said:
                    return event
            try:
                event = events.get(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                return next(iter(said.values()), news)

    def _send(self, index: int, header: Header, payload: memoryview) -> None:
        try:
            self._connections[index].send(header, (payload,))
        except LinkError as error:
            self._lost(index, error)

    def _send_control(self, index: int, frame: bytes) -> None:
        try:
            self._connections[index].send_frame(frame)
        except LinkError as error:
            self._lost(index, error)

    def _lost(self, index: int, error: LinkError) -> NoReturn:
        self._fail(self._cause(FromStage(index, None, memoryview(b""), str(error))))

    def _check_same_checkpoint(self) -> None:
        for i, loaded in enumerate(self.loaded):
            for key, value in loaded.fingerprint.items():
                if value != self.loaded[0].fingerprint.get(key):
                    raise StageError(
                        f"stages 0 and {i} hold different checkpoints: their {key} hashes are "
                        f"{self.loaded[0].fingerprint.get(key)} and {value}: copy the same revision to both nodes"
                    )

    def _start_message(self, index: int, num_blocks: int) -> StartStage:
        edges = self._replica.edges
        return StartStage(
            epoch=self.epoch,
            num_kv_blocks=num_blocks,
            outgoing=tuple(
                StageEdge(e.kind, e.target, self._addresses[e.target]) for e in edges if e.source == index
            ),
            incoming=tuple(e.kind for e in edges if e.target == index),
            link=self._link,
        )

    def _measure_hop(self) -> None:
        """Seconds a boundary adds to a one-row step: its way through all stages, less the time that they computed.

        The idle steps take numbers 1 to N; the scheduler's begin at `first_step`.
        """
        rounds = []
        own_s = []
        for number in range(1, _HOP_ROUNDS + 1):
            began = time.perf_counter()
            self.send_step(number, idle_step(1))
            while True:
                event = self._own.get()
                self.check(event)
                if event.header is not None and event.header.kind is Kind.SAMPLED:
                    break
            rounds.append(time.perf_counter() - began)
            self.ask_stats()
            own_s.append(sum(stats.busy_s for stats in self._collect(Kind.STATS, StageStats)))
        self.hop_s = max(statistics.median(np.subtract(rounds, own_s)), 0.0) / len(self)

    @property
    def first_step(self) -> int:
        """Number of the first step that is free to use."""
        return _HOP_ROUNDS + 1

    # -- steps ------------------------------------------------------------------------------------------------------

    def send_step(self, number: int, step: Step) -> None:
        payload = encode_step(step).data.cast("B")
        header = Header(Kind.STEP, len(payload), self.epoch, number)
        for index in range(len(self)):
            self._send(index, header, payload)

    def send_mask(self, number: int, row: int, words: NDArray[np.uint32]) -> None:
        """The token mask of one logit row, to the last stage."""
        payload = np.concatenate([np.array([row], np.uint32), words]).data.cast("B")
        self._send(len(self) - 1, Header(Kind.MASK, len(payload), self.epoch, number), payload)

    def ask_stats(self, ask: AskStats = _JUST_STATS) -> None:
        for index in range(len(self)):
            self._send_control(index, encode_control(ask))

    @staticmethod
    def read_stats(event: FromStage) -> StageStats:
        return decode_control(StageStats, event.payload)

    def stop(self) -> None:
        """End all children; leave stages that were started by hand waiting for another driver."""
        for connection in self._connections:
            connection.close()
        for child in self._children:
            child.ask_to_stop()
        deadline = time.monotonic() + _STOP_TIMEOUT_S  # for all of them: several may hang
        for child in self._children:
            child.stop(max(deadline - time.monotonic(), 0.0))
