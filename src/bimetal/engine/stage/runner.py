"""Runs steps through a stage's model: decode batches padded to buckets and replayed as graphs where the device captures
them, everything else as it comes.

A bucket is a number of rows; a decode step is padded up to the next one, with rows whose slot is -1. `prepare` puts a
step's metadata on the device while its input is still on the way; `run` needs only the input.
"""

from __future__ import annotations

import bisect
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bimetal.engine.device import Device
from bimetal.engine.kernels.interface import AttentionMetadata
from bimetal.engine.stage.model import KvCache, StageModel
from bimetal.engine.stage.step_inputs import decode_sizes, metadata, step_arrays, write_arrays
from bimetal.engine.wire.step import Step, idle_step

Tensor = torch.Tensor
_WARM_UP_BUDGET_S = 3.0
_WARM_UP_RUNS = 3
_PLACES = 2


def decode_buckets(max_num_seqs: int, is_gpu: bool) -> tuple[int, ...]:
    """Row counts that decode steps are padded to. A CPU pays for every row and captures nothing: it pads nothing."""
    if not is_gpu:
        return ()
    sizes = [1, 2, 4, *range(8, min(max_num_seqs, 256) + 1, 8), *range(272, max_num_seqs + 1, 16)]
    return tuple(sorted({s for s in sizes if s < max_num_seqs} | {max_num_seqs}))


@dataclass(slots=True)
class _Place:
    """Pinned memory that graphs read their step's metadata and input from: their first kernels fetch it over the bus, so
    that a launch is all that is left to do when the input arrives. Two take turns."""

    ints: NDArray[np.int32]
    inputs: Tensor
    mapped_ints: Tensor
    mapped_inputs: Tensor
    read: torch.cuda.Event | None = None


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    out: Tensor
    place: _Place


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step that needs nothing but its input."""

    step: Step
    num_rows: int
    captured: _Captured | None
    meta: AttentionMetadata | None
    """Of a step that no graph runs."""
    logit_rows: Tensor | None
    """None: the rows in order."""

    @property
    def input_memory(self) -> memoryview | None:
        """Where a graph reads its hidden states, to be received right there; None: anywhere."""
        if self.captured is None:
            return None
        view: memoryview = self.captured.place.inputs.numpy().data
        return view


class Runner:
    """Of one stage."""

    def __init__(
        self,
        model: StageModel,
        cache: KvCache,
        device: Device,
        dtype: torch.dtype,
        buckets: Sequence[int],
        max_model_len: int,
        block_tokens: int,
        pool: Tensor | None,
    ) -> None:
        """`pool`: on a stage that is first and last at once, where the ids that it sampled for each slot are."""
        self._model = model
        self._cache = cache
        self._device = device
        self._dtype = dtype
        self._buckets = tuple(buckets)
        self._max_model_len = max_model_len
        self._width = -(-max_model_len // block_tokens)
        self._pool = pool
        self._captured: dict[int, tuple[_Captured, ...]] = {}
        self._turn = 0

    # -- a step -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prepare(self, step: Step) -> Prepared:
        """Bring everything but the input to the device. Steps run in the order in which they are prepared."""
        n, num_rows = step.num_tokens, self._bucket(step)
        graphs = self._captured.get(num_rows) if step.num_decodes == n else None
        if graphs is not None:
            captured = graphs[self._turn]
            self._turn = (self._turn + 1) % _PLACES
            place = captured.place
            if place.read is not None:
                place.read.synchronize()
            write_arrays(place.ints, step_arrays(step, num_rows, self._width))
            rows = None if step.num_logit_rows == n else self._device.upload(step.logit_rows)
            return Prepared(step, num_rows, captured, None, rows)
        arrays = step_arrays(step, num_rows, step.block_tables.shape[1])
        packed = self._device.upload(np.concatenate([*arrays, step.logit_rows]))
        sizes = [len(a) for a in arrays]
        longest = int((step.query_starts[1:] - step.query_starts[:-1]).max())
        meta = metadata(packed, sizes, step.num_decodes + num_rows - n, longest, int(step.context_lens.max()))
        return Prepared(step, num_rows, None, meta, packed[sum(sizes) :])

    @torch.inference_mode()
    def run(self, prepared: Prepared, token_ids: NDArray[np.int32] | None, hidden: Tensor | None) -> Tensor:
        """Hidden states [T, H] for the next stage, or logits [R, V] on the last.

        First stage: `token_ids` [T], where negative ones refer to the pool. Other stages: `hidden` [T, H], in host memory
        (at `prepared.input_memory` already, if it was received there). A result that a graph wrote is valid until the next
        step.
        """
        n = prepared.step.num_tokens
        if prepared.captured is not None:
            self._replay(prepared.captured, token_ids, hidden)
            out = prepared.captured.out
            return (
                out[:n]
                if prepared.logit_rows is None or not self._model.is_last
                else out[prepared.logit_rows]
            )
        if token_ids is not None:
            inputs = self._device.upload(token_ids)
        else:
            assert hidden is not None
            inputs = hidden.to(self._device.torch_device, non_blocking=True)
        if prepared.num_rows != n:
            inputs = torch.nn.functional.pad(inputs, (0, 0) * (inputs.dim() - 1) + (0, prepared.num_rows - n))
        assert prepared.meta is not None
        x, residual = self._forward(inputs, prepared.meta)
        if not self._model.is_last:
            return (x + residual)[:n]
        return self._model.logits(x[prepared.logit_rows], residual[prepared.logit_rows])

    def _replay(
        self, captured: _Captured, token_ids: NDArray[np.int32] | None, hidden: Tensor | None
    ) -> None:
        place = captured.place
        if token_ids is not None:
            place.inputs.numpy()[: token_ids.nbytes] = token_ids.view(np.uint8)
        elif hidden is not None and hidden.data_ptr() != place.inputs.data_ptr():
            place.inputs[: hidden.nbytes] = hidden.contiguous().view(torch.uint8).flatten()
        captured.graph.replay()
        place.read = self._device.mark()

    def _forward(self, inputs: Tensor, meta: AttentionMetadata) -> tuple[Tensor, Tensor]:
        if self._pool is not None:
            inputs = torch.where(inputs < 0, self._pool[(-1 - inputs).clamp(min=0).long()], inputs)
        return self._model.forward(inputs, meta, self._cache)

    def _bucket(self, step: Step) -> int:
        n = step.num_tokens
        if step.num_decodes != n or not self._buckets or n > self._buckets[-1]:
            return n
        return self._buckets[bisect.bisect_left(self._buckets, n)]

    # -- before the first step --------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self) -> None:
        """For each bucket one graph a place, the largest first, all in one memory pool."""
        largest = self._buckets[-1]
        num_ints = sum(decode_sizes(largest, self._width))
        row_bytes = 4 if self._model.is_first else self._model.spec.hidden_size * self._dtype.itemsize
        places = [self._make_place(num_ints, largest * row_bytes) for _ in range(_PLACES)]
        ints = torch.zeros(num_ints, dtype=torch.int32, device=self._device.torch_device)
        memory = None
        for num_rows in reversed(self._buckets):
            graphs = []
            for place in places:
                graphs.append(self._capture(num_rows, num_rows * row_bytes, place, ints, memory))
                memory = graphs[-1].graph.pool()
            self._captured[num_rows] = tuple(graphs)

    def _make_place(self, num_ints: int, input_bytes: int) -> _Place:
        ints, inputs = self._device.pinned(4 * num_ints), self._device.pinned(input_bytes)
        return _Place(
            ints.view(torch.int32).numpy(),
            inputs,
            self._device.mapped(ints).view(torch.int32),
            self._device.mapped(inputs),
        )

    def _capture(
        self, num_rows: int, input_bytes: int, place: _Place, ints: Tensor, memory: Any
    ) -> _Captured:
        sizes = decode_sizes(num_rows, self._width)
        # An idle step: its rows are padding, so neither warm-up nor capture writes any KV.
        write_arrays(place.ints, step_arrays(idle_step(num_rows), num_rows, self._width))
        meta = metadata(ints, sizes, num_rows, 1, self._max_model_len)
        arguments = (place.mapped_ints[: sum(sizes)], place.mapped_inputs[:input_bytes], ints, meta)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._decode(*arguments)  # compiles kernels, sizes workspaces
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            out = self._decode(*arguments)
        return _Captured(graph, out, place)

    def _decode(
        self, host_ints: Tensor, host_inputs: Tensor, ints: Tensor, meta: AttentionMetadata
    ) -> Tensor:
        """What a graph captures: logits of every row on the last stage, hidden states elsewhere."""
        # Sums, because a copy would be a transfer of its own; on integers, because those keep every bit.
        torch.add(host_ints, 0, out=ints[: len(host_ints)])
        inputs = torch.add(host_inputs.view(torch.int32), 0)
        if not self._model.is_first:
            inputs = inputs.view(self._dtype).view(-1, self._model.spec.hidden_size)
        x, residual = self._forward(inputs, meta)
        return self._model.logits(x, residual) if self._model.is_last else x + residual

    def warm_up(self, sizes: Sequence[int]) -> dict[int, float]:
        """Median seconds of a decode step of n rows, for each size until the time is up. Nothing is written."""
        times: dict[int, float] = {}
        began = time.monotonic()
        for n in sizes:
            if times and time.monotonic() - began > _WARM_UP_BUDGET_S:
                break
            step = idle_step(n)
            ids = step.token_ids if self._model.is_first else None
            hidden = None
            if not self._model.is_first:
                shape = (n, self._model.spec.hidden_size)
                hidden = torch.zeros(shape, dtype=self._dtype)
            runs = []
            for _ in range(_WARM_UP_RUNS + 1):
                self._device.synchronize()
                start = time.perf_counter()
                self.run(self.prepare(step), ids, hidden)
                self._device.synchronize()
                runs.append(time.perf_counter() - start)
            times[n] = statistics.median(runs[1:])
        return times
