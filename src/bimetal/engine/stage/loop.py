"""The stage's loop: for each step in order, wait for its input, run it, pass its output on.

The same loop serves the first, a middle, the last and the only stage; edges that a stage does not have are None.
The compute thread reads its input itself: on a GPU what it has queued runs meanwhile, and no other thread has to wake it.
What leaves goes through the outbox.
"""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bimetal.engine.device import Device, Stopwatch
from bimetal.engine.link.tcp import Allocate, Incoming, fresh_memory
from bimetal.engine.stage.boundary import ENCODINGS, InputRing, rows_as_bytes
from bimetal.engine.stage.outbox import PIECE_BYTES, HiddenPiece, Message, Outbox
from bimetal.engine.stage.runner import Runner
from bimetal.engine.stage.sampler import Sampler
from bimetal.engine.wire.control import StageStats
from bimetal.engine.wire.frame import Header, Kind
from bimetal.engine.wire.step import NO_TARGET, Int, Step
from bimetal.errors import StageError


def next_frame(incoming: Incoming, allocate: Allocate, outbox: Outbox) -> tuple[Header, memoryview]:
    """Wait for it; results that reach host memory meanwhile leave."""

    def begin(header: Header) -> memoryview:
        if header.num_bytes > PIECE_BYTES:
            outbox.hand_over()  # it comes piece by piece, and nothing that is ready waits for the last one
        return allocate(header)

    while outbox.send_ready():
        if (frame := incoming.poll(begin)) is not None:
            return frame
    return incoming.next(allocate)


def wait_for(
    incoming: Incoming, epoch: int, step: int, allocate: Allocate, name: str, outbox: Outbox
) -> tuple[Header, memoryview]:
    """The frame of `step`; those of another epoch and doubled ones are dropped."""
    while True:
        header, payload = next_frame(incoming, allocate, outbox)
        if header.epoch == epoch and header.step == step:
            return header, payload
        if header.epoch == epoch and header.step > step:
            raise StageError(f"{name}: step {step} is due, but {header.step} came: a message was lost")


class MaskInbox:
    """Token masks, which the driver sends beside the steps, each as soon as it is known: one that depends on ids in flight
    may come after those of later steps."""

    def __init__(self) -> None:
        self._frames: queue.SimpleQueue[tuple[Header, memoryview]] = queue.SimpleQueue()
        self._early: dict[int, dict[int, NDArray[np.uint32]]] = {}

    def put(self, header: Header, payload: memoryview) -> None:
        self._frames.put((header, payload))

    def take(self, epoch: int, step: int, num_masks: int) -> dict[int, NDArray[np.uint32]]:
        """Wait for all masks of a step: bit sets by logit row. Steps ask in order; masks of past ones are dropped."""
        found = self._early.pop(step, {})
        while len(found) < num_masks:
            header, payload = self._frames.get()
            if header.epoch != epoch or header.step < step:
                continue
            values = np.frombuffer(payload, np.uint32)
            masks = found if header.step == step else self._early.setdefault(header.step, {})
            masks[int(values[0])] = values[1:]
        return found


@dataclass(slots=True)
class StageClock:
    """Since the last reset."""

    input_wait_s: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Inputs:
    """Where this stage's messages come from."""

    hidden_in: Incoming | None = None
    ids_in: Incoming | None = None
    masks_in: MaskInbox | None = None


class TokenPool:
    """On the first of several stages: the id last sampled for each sequence slot, as the last stage sends them."""

    def __init__(self, incoming: Incoming, max_num_seqs: int, epoch: int) -> None:
        self._incoming = incoming
        self._epoch = epoch
        self._ids = np.zeros(max_num_seqs, np.int32)
        self._expected: dict[int, tuple[Int, NDArray[np.bool_]]] = {}
        self._applied_step = 0

    def expect(self, number: int, step: Step) -> None:
        """Ids of this step's logit rows will come."""
        if step.num_logit_rows:
            self._expected[number] = (
                step.sequence_slots[step.logit_sequences].copy(),
                step.targets == NO_TARGET,
            )

    def resolve(self, number: int, step: Step, outbox: Outbox) -> NDArray[np.int32]:
        """The step's token ids, once those that it refers to have come."""
        is_reference = step.token_ids < 0
        slots = np.maximum(-1 - step.token_ids, 0)  # now: once the ids are there, the device waits
        while (frame := self._incoming.poll(fresh_memory)) is not None:
            self._apply(*frame)
        if not step.ids_lag:
            return step.token_ids
        while self._applied_step < number - step.ids_lag:
            self._apply(*next_frame(self._incoming, fresh_memory, outbox))
        return np.where(is_reference, self._ids[slots], step.token_ids)

    def _apply(self, header: Header, payload: memoryview) -> None:
        if header.epoch != self._epoch or header.step <= self._applied_step:
            return
        slots, samples = self._expected.pop(header.step)
        ids = np.frombuffer(payload, np.int32)
        self._ids[slots[samples]] = ids[samples]
        self._applied_step = header.step


class StageLoop:
    def __init__(
        self,
        runner: Runner,
        sampler: Sampler | None,
        device: Device,
        inputs: Inputs,
        ring: InputRing,
        pool: TokenPool | None,
        epoch: int,
        outbox: Outbox,
    ) -> None:
        """`sampler`: on the last stage. `pool`: on the first of several. `ring`: of ids on the first, of hidden states on the
        others."""
        self._runner = runner
        self._sampler = sampler
        self._device = device
        self._inputs = inputs
        self._ring = ring
        self._pool = pool
        self._epoch = epoch
        self.outbox = outbox
        self._last_step = 0
        self.clock = StageClock()

    @torch.inference_mode()
    def run(self, header: Header, step: Step) -> None:
        """One step. A stale or doubled one is dropped."""
        if header.epoch != self._epoch or header.step <= self._last_step:
            return
        self._last_step = header.step
        began = time.perf_counter()
        stopwatch = Stopwatch(self._device.is_gpu)
        prepared = self._runner.prepare(step)  # while the input is on its way
        source = self._input(header, step)
        self.clock.input_wait_s += time.perf_counter() - began
        if not prepared.is_replay:
            self.outbox.hand_over()
        stopwatch.start()
        out = self._runner.run(prepared, source)
        sampled = None
        if self._sampler is not None and step.num_logit_rows:
            sampled = self._sampler(out, step, self._masks(header, step))
        stopwatch.stop()
        self.clock.num_steps += 1
        self.clock.num_tokens += step.num_tokens
        if self._sampler is None:
            self.outbox.put(self._hidden_message(header, out, stopwatch))
        else:
            copies = None if sampled is None else sampled.download(self._device)
            self.outbox.put(Message(header, stopwatch, sampled=copies))
        self._ring.mark_read()

    def _input(self, header: Header, step: Step) -> torch.Tensor:
        """In host memory: ids [T] on the first stage, hidden states [T, H] elsewhere."""
        self._ring.begin(step.num_tokens)
        if self._inputs.hidden_in is None:
            if self._pool is None:
                return self._ring.fill(step.token_ids)
            self._pool.expect(header.step, step)
            return self._ring.fill(self._pool.resolve(header.step, step, self.outbox))
        frame, _payload = wait_for(
            self._inputs.hidden_in, self._epoch, header.step, self._ring.allocate, "edge hidden", self.outbox
        )
        return self._ring.received(frame)

    def _masks(self, header: Header, step: Step) -> dict[int, NDArray[np.uint32]]:
        if step.masked is None or self._inputs.masks_in is None:
            return {}
        self.outbox.hand_over()  # the driver makes a mask from ids that may be among them
        return self._inputs.masks_in.take(self._epoch, header.step, int(step.masked.sum()))

    def _hidden_message(self, header: Header, rows: torch.Tensor, stopwatch: Stopwatch) -> Message:
        flags = ENCODINGS[rows.dtype]
        out = Header(Kind.HIDDEN, rows.nbytes, header.epoch, header.step, header.micro_batch, flags)
        is_small = rows.nbytes <= PIECE_BYTES
        rows = rows.contiguous()
        if self._device.is_gpu and not is_small:
            # A graph overwrites its output at the next replay, and the copies run beside that.
            rows = rows.clone()
        pieces = []
        for piece in rows.split(max(PIECE_BYTES // rows[0].nbytes, 1)):
            copy = self._device.download(piece, beside=not is_small)
            pieces.append(HiddenPiece(copy, rows_as_bytes(copy.tensor)))
        return Message(out, stopwatch, tuple(pieces))

    def take_stats(self) -> StageStats:
        """What was done since the last call."""
        clock, self.clock = self.clock, StageClock()
        return StageStats(self.outbox.busy.take(), clock.input_wait_s, clock.num_steps, clock.num_tokens)
