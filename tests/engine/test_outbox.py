"""What a stage sends: everything once and in order on each edge, whichever thread sends it and whenever the device is done.

The device is made up: a copy or a stopwatch is done once its gate is open.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bimetal.engine.device import HostCopy, Stopwatch
from bimetal.engine.link.tcp import Buffer, Connection, TcpIncoming
from bimetal.engine.stage.boundary import rows_as_bytes
from bimetal.engine.stage.loop import next_frame
from bimetal.engine.stage.outbox import PIECE_BYTES, HiddenPiece, Message, Outbox
from bimetal.engine.stage.sampler import SampledCopies
from bimetal.engine.wire.frame import Header, Kind
from bimetal.engine.wire.step import decode_sampled
from bimetal.errors import LinkError

SMALL, LARGE = 8, 2 * PIECE_BYTES


@dataclass
class Gate:
    """Stands for a device's event."""

    opened: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.opened.is_set()

    def synchronize(self) -> None:
        assert self.opened.wait(5), "nothing of this message became ready"


class DeviceStopwatch(Stopwatch):
    """One second of compute that is over once the gate is open."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(is_gpu=False)
        self._gate = gate

    @property
    def is_host_clock(self) -> bool:
        return False

    @property
    def is_done(self) -> bool:
        return self._gate.query()

    def elapsed_s(self) -> float:
        self._gate.synchronize()
        return 1.0


@dataclass
class Edge:
    """`Outgoing` that remembers: (step, payload, name of the thread that sent it)."""

    log: list[tuple[str, int]] = field(default_factory=list)
    name: str = "edge"
    error: LinkError | None = None
    sent: list[tuple[Header, bytes, str]] = field(default_factory=list)

    def send(self, header: Header, payload: Iterable[Buffer]) -> None:
        if self.error is not None:
            raise self.error
        data = b"".join(bytes(part) for part in payload)
        self.sent.append((header, data, threading.current_thread().name))
        self.log.append((self.name, header.step))

    def close(self) -> None: ...

    @property
    def steps(self) -> list[int]:
        return [header.step for header, _data, _thread in self.sent]


def rows_message(step: int, gate: Gate, num_bytes: int = SMALL, num_pieces: int = 1) -> Message:
    """Rows whose values are the step's number. The header says how large they count as."""
    pieces = []
    for _ in range(num_pieces):
        rows = torch.full((2, 2), float(step))
        pieces.append(HiddenPiece(HostCopy(rows, gate), rows_as_bytes(rows)))  # type: ignore[arg-type]
    return Message(Header(Kind.HIDDEN, num_bytes, 1, step), DeviceStopwatch(gate), tuple(pieces))


def ids_message(step: int, gate: Gate, num_bytes: int = SMALL) -> Message:
    ids = HostCopy(torch.tensor([step, -step], dtype=torch.int32), gate)  # type: ignore[arg-type]
    copies = SampledCopies(ids, None, None, None, None)
    return Message(Header(Kind.STEP, num_bytes, 1, step), DeviceStopwatch(gate), sampled=copies)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.001)


class Stage:
    """An outbox of a stage that has a next one (`rows`) or samples (`ids`)."""

    def __init__(self, *, is_last: bool) -> None:
        self.log: list[tuple[str, int]] = []
        self.hidden, self.ids, self.driver = (Edge(self.log, name) for name in ("hidden", "ids", "driver"))
        self.failures: list[BaseException] = []
        outgoing = (None, self.ids) if is_last else (self.hidden, None)
        self.outbox = Outbox(*outgoing, self.driver, self.failures.append)  # type: ignore[arg-type]

    def end(self) -> None:
        """The sending thread ends when a send fails."""
        self.hidden.error = self.ids.error = self.driver.error = LinkError("the test is over")
        gate = Gate()
        gate.opened.set()
        self.outbox.put(
            rows_message(10**6, gate, LARGE) if self.outbox._hidden_out else ids_message(10**6, gate, LARGE)
        )
        wait_until(lambda: bool(self.failures))


def test_what_is_ready_is_sent_by_the_thread_that_computed_it() -> None:
    stage, gate = Stage(is_last=False), Gate()
    gate.opened.set()
    stage.outbox.put(rows_message(1, gate))
    (header, data, thread) = stage.hidden.sent[0]
    assert (header.kind, header.step, thread) == (Kind.HIDDEN, 1, threading.current_thread().name)
    assert np.frombuffer(data, np.float32).tolist() == [1.0] * 4
    assert stage.outbox.busy.take() == 1.0
    stage.end()


def test_what_is_not_ready_waits_for_the_next_look() -> None:
    stage, gates = Stage(is_last=False), [Gate(), Gate()]
    for step, gate in enumerate(gates, 1):
        stage.outbox.put(rows_message(step, gate))
    gates[1].opened.set()
    assert stage.outbox.send_ready()
    assert stage.hidden.steps == []  # the second may not overtake
    gates[0].opened.set()
    assert not stage.outbox.send_ready()
    assert stage.hidden.steps == [1, 2]
    stage.end()


def test_handed_over_it_leaves_without_another_look() -> None:
    stage, gate = Stage(is_last=True), Gate()
    stage.outbox.put(ids_message(1, gate))
    assert stage.outbox.send_ready()
    stage.outbox.hand_over()
    assert not stage.outbox.send_ready()
    time.sleep(0.02)
    assert stage.driver.sent == []
    gate.opened.set()
    wait_until(lambda: stage.driver.steps == [1])
    assert stage.driver.sent[0][2] == "sender"
    stage.end()


def test_ids_go_to_the_first_stage_before_the_driver() -> None:
    stage, gate = Stage(is_last=True), Gate()
    gate.opened.set()
    stage.outbox.put(ids_message(7, gate))
    assert stage.log == [("ids", 7), ("driver", 7)]
    assert np.frombuffer(stage.ids.sent[0][1], np.int32).tolist() == [7, -7]
    assert decode_sampled(stage.driver.sent[0][1]).ids.tolist() == [7, -7]
    stage.end()


def test_a_step_without_a_result_is_told_to_the_driver_alone() -> None:
    stage, gate = Stage(is_last=True), Gate()
    gate.opened.set()
    stage.outbox.put(Message(Header(Kind.STEP, SMALL, 1, 3), DeviceStopwatch(gate)))
    assert stage.log == [("driver", 3)]
    assert stage.driver.sent[0][0].num_bytes == 0
    stage.end()


def test_small_ones_do_not_overtake_a_large_one() -> None:
    stage, large, small = Stage(is_last=False), Gate(), Gate()
    small.opened.set()
    stage.outbox.put(rows_message(1, large, LARGE, num_pieces=3))
    stage.outbox.put(rows_message(2, small))
    assert not stage.outbox.send_ready()
    assert stage.hidden.steps == []
    large.opened.set()
    wait_until(lambda: stage.hidden.steps == [1, 2])
    assert len(stage.hidden.sent[0][1]) == 3 * 16
    stage.end()


def test_a_send_that_fails_is_told_to_whoever_sends() -> None:
    stage, gate = Stage(is_last=False), Gate()
    stage.hidden.error = LinkError("the next stage is gone")
    stage.outbox.put(rows_message(1, gate))
    gate.opened.set()
    with pytest.raises(LinkError, match="the next stage is gone"):
        stage.outbox.send_ready()
    assert not stage.outbox.send_ready()  # it is not tried again
    assert stage.failures == []
    stage.outbox.put(rows_message(2, gate, LARGE))
    wait_until(lambda: [str(e) for e in stage.failures] == ["the next stage is gone"])


def test_a_device_that_fails_fails_once_a_message() -> None:
    """Whoever polls would otherwise say so for ever."""
    stage, gates = Stage(is_last=True), [Gate(), Gate()]
    for step, gate in enumerate(gates, 1):
        stage.outbox.put(ids_message(step, gate))
    for gate in gates:
        gate.error = RuntimeError("an illegal memory access was encountered")
    for _ in gates:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            stage.outbox.send_ready()
    assert not stage.outbox.send_ready()
    stage.end()


_OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from([SMALL, LARGE]), st.booleans(), st.integers(1, 3)),
        st.tuples(st.just("open"), st.integers(0, 20)),
        st.tuples(st.just("look")),
        st.tuples(st.just("hand over")),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(operations=_OPERATIONS, is_last=st.booleans())
def test_everything_is_sent_once_and_in_order(operations: list[tuple], is_last: bool) -> None:
    stage = Stage(is_last=is_last)
    gates: list[Gate] = []
    for operation in operations:
        if operation[0] == "put":
            _put, num_bytes, is_ready, num_pieces = operation
            gates.append(gate := Gate())
            if is_ready:
                gate.opened.set()
            step = len(gates)
            message = (
                ids_message(step, gate, num_bytes)
                if is_last
                else rows_message(step, gate, num_bytes, num_pieces)
            )
            stage.outbox.put(message)
        elif operation[0] == "open" and gates:
            gates[operation[1] % len(gates)].opened.set()
        elif operation[0] == "look":
            stage.outbox.send_ready()
        elif operation[0] == "hand over":
            stage.outbox.hand_over()
    for gate in gates:
        gate.opened.set()
    assert not stage.outbox.send_ready()
    edges = (stage.ids, stage.driver) if is_last else (stage.hidden,)
    expected = list(range(1, len(gates) + 1))
    wait_until(lambda: all(len(edge.sent) >= len(gates) for edge in edges))
    for edge in edges:
        assert edge.steps == expected
    for step, (_header, data, _thread) in enumerate(edges[0].sent, 1):
        values = np.frombuffer(data, np.int32 if is_last else np.float32)
        assert abs(values).tolist() == [step] * len(values)
    wait_until(lambda: stage.outbox.busy.seconds == len(gates))
    stage.end()
    assert len(stage.failures) == 1


def test_a_result_does_not_wait_for_a_large_input_to_come_in() -> None:
    """Rows of a long prompt come piece by piece; ids that another stage waits for become ready meanwhile."""
    ours, theirs = socket.socketpair()
    stage, gate = Stage(is_last=True), Gate()
    stage.outbox.put(ids_message(1, gate))
    memory = bytearray(LARGE)
    received = []
    incoming = TcpIncoming(Connection(ours, "peer"), 0.0)
    reader = threading.Thread(
        target=lambda: received.append(next_frame(incoming, lambda _: memoryview(memory), stage.outbox))
    )
    theirs.sendall(Header(Kind.HIDDEN, LARGE, 1, 2).pack() + b"x" * 100)
    reader.start()
    time.sleep(0.05)
    gate.opened.set()
    try:
        wait_until(lambda: stage.driver.steps == [1])
    finally:
        theirs.sendall(b"x" * (LARGE - 100))
        reader.join(5)
    assert received[0][0].step == 2
    assert bytes(memory) == b"x" * LARGE
    stage.end()
    ours.close()
    theirs.close()
