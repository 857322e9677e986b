"""Runs steps through a stage's model: decode batches padded to buckets and replayed as graphs where the device captures
them, everything else as it comes.

A bucket is a number of rows; a decode step is padded up to the next one, with rows whose slot is -1. `prepare` puts a
step's metadata on the device while its input is still on the way; `run` needs only the input.
"""

from __future__ import annotations

import bisect
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bimetal.engine.device import Device
from bimetal.engine.kernels.interface import AttentionMetadata
from bimetal.engine.stage.model import KvCache, StageModel
from bimetal.engine.stage.step_inputs import decode_sizes, metadata, step_arrays
from bimetal.engine.wire.step import Step, idle_step

Tensor = torch.Tensor
_WARM_UP_BUDGET_S = 3.0
_WARM_UP_RUNS = 3


def decode_buckets(max_num_seqs: int, is_gpu: bool) -> tuple[int, ...]:
    """Row counts that decode steps are padded to. A CPU pays for every row and captures nothing: it pads nothing."""
    if not is_gpu:
        return ()
    sizes = [1, 2, 4, *range(8, min(max_num_seqs, 256) + 1, 8), *range(272, max_num_seqs + 1, 16)]
    return tuple(sorted({s for s in sizes if s < max_num_seqs} | {max_num_seqs}))


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    meta: AttentionMetadata
    out: Tensor


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step whose metadata is on the device."""

    step: Step
    num_rows: int
    captured: _Captured | None
    meta: AttentionMetadata
    logit_rows: Tensor | None
    """None: the rows in order."""
    target: Tensor | None = None
    """Where a graph reads the inputs of so many rows."""

    @property
    def is_replay(self) -> bool:
        """Queueing it takes the host next to no time."""
        return self.captured is not None


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
        self._captured: dict[int, _Captured] = {}
        self._ints: Tensor | None = None
        self._inputs: Tensor | None = None
        self.before_eager_step: Callable[[Step], None] | None = None
        """Called before each step, which then runs without a graph."""

    # -- a step -----------------------------------------------------------------------------------------------------

    # Both in inference mode, which the caller enters: doing so takes longer than queueing a graph.

    def prepare(self, step: Step) -> Prepared:
        """Start the upload of everything but the input. Steps run in the order in which they are prepared."""
        n, num_rows = step.num_tokens, self._bucket(step)
        captured = self._captured.get(num_rows) if step.num_decodes == n else None
        if self.before_eager_step is not None:
            captured = None
            self.before_eager_step(step)
        if captured is not None:
            assert self._ints is not None and self._inputs is not None
            self._device.upload(np.concatenate(step_arrays(step, num_rows, self._width)), self._ints)
            rows = None if step.num_logit_rows == n else self._device.upload(step.logit_rows)
            return Prepared(step, num_rows, captured, captured.meta, rows, self._inputs[:n])
        arrays = step_arrays(step, num_rows, step.block_tables.shape[1])
        packed = self._device.upload(np.concatenate([*arrays, step.logit_rows]))
        sizes = [len(a) for a in arrays]
        longest = int((step.query_starts[1:] - step.query_starts[:-1]).max())
        meta = metadata(packed, sizes, step.num_decodes + num_rows - n, longest, int(step.context_lens.max()))
        return Prepared(step, num_rows, None, meta, packed[sum(sizes) :])

    def run(self, prepared: Prepared, source: Tensor) -> Tensor:
        """Hidden states [T, H] for the next stage, or logits [R, V] on the last.

        `source`, in host memory, pinned where the device is a GPU (or on the device): token ids [T] on the first stage, where
        negative ones refer to the pool; hidden states [T, H] elsewhere. A result that a graph wrote is valid until the next
        step.
        """
        n = prepared.step.num_tokens
        if prepared.captured is not None:
            assert prepared.target is not None
            prepared.target.copy_(source, non_blocking=True)
            prepared.captured.graph.replay()
            out = prepared.captured.out
            if prepared.logit_rows is None or not self._model.is_last:
                return out[:n]
            return out[prepared.logit_rows]
        inputs = source.to(self._device.torch_device, non_blocking=True)
        if prepared.num_rows != n:
            inputs = torch.nn.functional.pad(inputs, (0, 0) * (inputs.dim() - 1) + (0, prepared.num_rows - n))
        x, residual = self._forward(inputs, prepared.meta)
        if not self._model.is_last:
            return (x + residual)[:n]
        return self._model.logits(x[prepared.logit_rows], residual[prepared.logit_rows])

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
        """One graph a bucket, the largest first, all in one memory pool and on the same input buffers: a replay reads them
        in stream order, before the next step overwrites them."""
        device = self._device.torch_device
        largest = self._buckets[-1]
        self._ints = torch.zeros(sum(decode_sizes(largest, self._width)), dtype=torch.int32, device=device)
        if self._model.is_first:
            self._inputs = torch.zeros(largest, dtype=torch.int32, device=device)
        else:
            self._inputs = torch.zeros(
                largest, self._model.spec.hidden_size, dtype=self._dtype, device=device
            )
        memory = None
        for num_rows in reversed(self._buckets):
            self._captured[num_rows] = self._capture(num_rows, memory)
            memory = self._captured[num_rows].graph.pool()

    def _capture(self, num_rows: int, memory: Any) -> _Captured:
        assert self._ints is not None
        assert self._inputs is not None
        sizes = decode_sizes(num_rows, self._width)
        # An idle step: its rows are padding, so neither warm-up nor capture writes any KV.
        self._device.upload(
            np.concatenate(step_arrays(idle_step(num_rows), num_rows, self._width)), self._ints
        )
        meta = metadata(self._ints, sizes, num_rows, 1, self._max_model_len)
        inputs = self._inputs[:num_rows]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._decode(inputs, meta)  # compiles kernels, sizes workspaces
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            out = self._decode(inputs, meta)
        return _Captured(graph, meta, out)

    def _decode(self, inputs: Tensor, meta: AttentionMetadata) -> Tensor:
        """What a graph captures: logits of every row on the last stage, hidden states elsewhere."""
        x, residual = self._forward(inputs, meta)
        return self._model.logits(x, residual) if self._model.is_last else x + residual

    @torch.inference_mode()
    def warm_up(self, sizes: Sequence[int]) -> dict[int, float]:
        """Median seconds of a decode step of n rows, for each size until the time is up. Nothing is written."""
        times: dict[int, float] = {}
        began = time.monotonic()
        for n in sizes:
            if times and time.monotonic() - began > _WARM_UP_BUDGET_S:
                break
            step = idle_step(n)
            if self._model.is_first:
                source = torch.from_numpy(step.token_ids)
            else:
                shape = (n, self._model.spec.hidden_size)
                source = torch.zeros(shape, dtype=self._dtype, device=self._device.torch_device)
            runs = []
            for _ in range(_WARM_UP_RUNS + 1):
                self._device.synchronize()
                start = time.perf_counter()
                self.run(self.prepare(step), source)
                self._device.synchronize()
                runs.append(time.perf_counter() - start)
            times[n] = statistics.median(runs[1:])
        return times
