"""Runs steps through a stage's model: inputs onto the device, decode batches padded to buckets and replayed as graphs
where the device captures them, everything else as it comes.

A bucket is a number of rows; a decode step is padded up to the next one, with rows whose slot is -1.
"""

from __future__ import annotations

import bisect
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bimetal.engine.device import Device
from bimetal.engine.kernels.interface import AttentionMetadata
from bimetal.engine.stage.model import KvCache, StageModel
from bimetal.engine.wire.step import PADDING_SLOT, Step, idle_step

Tensor = torch.Tensor
_WARM_UP_BUDGET_S = 3.0
_WARM_UP_RUNS = 3


def decode_buckets(max_num_seqs: int, is_gpu: bool) -> tuple[int, ...]:
    """Row counts that decode steps are padded to. A CPU pays for every row and captures nothing: it pads nothing."""
    if not is_gpu:
        return ()
    sizes = [1, 2, 4, *range(8, min(max_num_seqs, 256) + 1, 8), *range(272, max_num_seqs + 1, 16)]
    return tuple(sorted({s for s in sizes if s < max_num_seqs} | {max_num_seqs}))


class Runner:
    """Of one stage. `block_table_width`: blocks of the longest sequence."""

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
        self._graphs: dict[int, DecodeGraph] = {}

    @torch.inference_mode()
    def run(self, step: Step, token_ids: NDArray[np.int32] | None, hidden: Tensor | None) -> Tensor:
        """Hidden states [T, H] for the next stage, or logits [R, V] on the last.

        First stage: `token_ids` [T], where negative ones refer to the pool. Other stages: `hidden` [T, H]. A result that
        a graph wrote is valid until the next step.
        """
        num_tokens, num_rows = step.num_tokens, self._bucket(step)
        graph = self._graphs.get(num_rows) if step.num_decodes == num_tokens else None
        if graph is not None:
            out = graph.replay(step, token_ids, hidden)
            if not self._model.is_last:
                return out[:num_tokens]
            if step.num_logit_rows == num_tokens:
                return out[:num_tokens]
            return out[self._device.upload(step.logit_rows)]
        arrays = step_arrays(step, token_ids, num_rows, step.block_tables.shape[1])
        packed = self._device.upload(np.concatenate([*arrays, step.logit_rows]))
        sizes = [len(a) for a in arrays]
        meta, ids = metadata(packed, sizes, step.num_decodes + num_rows - num_tokens)
        meta = replace(
            meta,
            max_query_len=int((step.query_starts[1:] - step.query_starts[:-1]).max()),
            max_context_len=int(step.context_lens.max()),
        )
        inputs = self._inputs(ids, hidden, num_rows)
        x, residual = self._model.forward(inputs, meta, self._cache)
        if not self._model.is_last:
            return (x + residual)[:num_tokens]
        rows = packed[sum(sizes) :]
        return self._model.logits(x[rows], residual[rows])

    def _inputs(self, ids: Tensor | None, hidden: Tensor | None, num_rows: int) -> Tensor:
        if ids is None:
            assert hidden is not None
            return hidden if len(hidden) == num_rows else _pad_rows(hidden, num_rows)
        if self._pool is None:
            return ids
        return torch.where(ids < 0, self._pool[(-1 - ids).clamp(min=0).long()], ids)

    def _bucket(self, step: Step) -> int:
        n = step.num_tokens
        if step.num_decodes != n or not self._buckets or n > self._buckets[-1]:
            return n
        return self._buckets[bisect.bisect_left(self._buckets, n)]

    @torch.inference_mode()
    def capture(self) -> None:
        """One graph a bucket, the largest first, all in one memory pool."""
        memory: Any = None
        ints = torch.zeros(
            decode_ints(self._buckets[-1], self._width), dtype=torch.int32, device=self._device.torch_device
        )
        hidden = None
        if not self._model.is_first:
            shape = (self._buckets[-1], self._model.spec.hidden_size)
            hidden = torch.zeros(shape, dtype=self._dtype, device=self._device.torch_device)
        for num_rows in reversed(self._buckets):
            graph = DecodeGraph(self, num_rows, ints, hidden, memory)
            memory = graph.memory
            self._graphs[num_rows] = graph

    def decode_forward(
        self, meta: AttentionMetadata, ids: Tensor | None, hidden: Tensor | None, num_rows: int
    ) -> Tensor:
        """What a graph captures: logits of every row on the last stage, hidden states elsewhere."""
        x, residual = self._model.forward(self._inputs(ids, hidden, num_rows), meta, self._cache)
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
                hidden = torch.zeros(shape, dtype=self._dtype, device=self._device.torch_device)
            runs = []
            for _ in range(_WARM_UP_RUNS + 1):
                self._device.synchronize()
                start = time.perf_counter()
                self.run(step, ids, hidden)
                self._device.synchronize()
                runs.append(time.perf_counter() - start)
            times[n] = statistics.median(runs[1:])
        return times


class DecodeGraph:
    """A decode step of `num_rows` single-row sequences, captured once and replayed on new contents of its inputs.

    `ints` and `hidden` are shared by all graphs: a replay reads them in stream order, before the next one overwrites them.
    """

    def __init__(
        self, runner: Runner, num_rows: int, ints: Tensor, hidden: Tensor | None, memory: Any
    ) -> None:
        self._device = runner._device
        self._num_rows = num_rows
        self._width = runner._width
        self._ints = ints
        self._hidden = hidden
        with_ids = hidden is None
        sizes = decode_sizes(num_rows, self._width, with_ids)
        # An idle step: rows are padding, so neither warm-up nor capture writes any KV.
        step = idle_step(num_rows)
        self._device.upload(
            np.concatenate(step_arrays(step, step.token_ids if with_ids else None, num_rows, self._width)),
            ints,
        )
        meta, ids = metadata(ints, sizes, num_rows)
        meta = replace(meta, max_context_len=runner._max_model_len)
        rows = None if hidden is None else hidden[:num_rows]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            runner.decode_forward(meta, ids, rows, num_rows)  # compiles kernels, sizes workspaces
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=memory, capture_error_mode="thread_local"):
            self._out = runner.decode_forward(meta, ids, rows, num_rows)
        self.memory = self._graph.pool()

    def replay(self, step: Step, token_ids: NDArray[np.int32] | None, hidden: Tensor | None) -> Tensor:
        arrays = step_arrays(step, token_ids, self._num_rows, self._width)
        self._device.upload(np.concatenate(arrays), self._ints)
        if self._hidden is not None:
            assert hidden is not None
            self._hidden[: len(hidden)].copy_(hidden, non_blocking=True)
        self._graph.replay()
        return self._out


def decode_sizes(num_rows: int, width: int, with_ids: bool) -> list[int]:
    """Lengths of `step_arrays` for a decode step padded to `num_rows`."""
    n = num_rows
    return [n, n, n + 1, n, n * width, *([n] if with_ids else [])]


def decode_ints(num_rows: int, width: int) -> int:
    return sum(decode_sizes(num_rows, width, True))


def step_arrays(
    step: Step, token_ids: NDArray[np.int32] | None, num_rows: int, width: int
) -> list[NDArray[np.int32]]:
    """What the device needs of a step, padded to `num_rows` with single-row sequences: positions, slots, query starts,
    context lengths, block tables of `width` columns, token ids on the first stage."""
    pad = num_rows - step.num_tokens
    tables = step.block_tables
    if pad or tables.shape[1] != width:
        tables = np.zeros((step.num_sequences + pad, width), np.int32)
        tables[: step.num_sequences, : step.block_tables.shape[1]] = step.block_tables
    starts = step.query_starts
    if pad:
        starts = np.concatenate([starts, starts[-1] + 1 + np.arange(pad, dtype=np.int32)])
    arrays = [
        _padded(step.positions, pad, 0),
        _padded(step.slots, pad, PADDING_SLOT),
        starts,
        _padded(step.context_lens, pad, 1),
        tables.reshape(-1),
    ]
    if token_ids is not None:
        arrays.append(_padded(token_ids, pad, 0))
    return arrays


def metadata(
    packed: Tensor, sizes: Sequence[int], num_decodes: int
) -> tuple[AttentionMetadata, Tensor | None]:
    """Views of a packed buffer that begins with `step_arrays` of these sizes; ids too, where there are any."""
    views = []
    at = 0
    for size in sizes:
        views.append(packed[at : at + size])
        at += size
    positions, slots, starts, lens, tables, *ids = views
    meta = AttentionMetadata(
        positions=positions,
        slots=slots,
        query_starts=starts,
        context_lens=lens,
        block_tables=tables.view(len(lens), -1),
        num_decodes=num_decodes,
        max_query_len=1,
        max_context_len=1,
    )
    return meta, (ids[0] if ids else None)


def _padded(values: NDArray[np.int32], count: int, value: int) -> NDArray[np.int32]:
    return np.concatenate([values, np.full(count, value, np.int32)]) if count else values


def _pad_rows(hidden: Tensor, num_rows: int) -> Tensor:
    padded = hidden.new_zeros(num_rows, hidden.shape[1])
    padded[: len(hidden)] = hidden
    return padded
