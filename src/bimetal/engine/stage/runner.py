"""Runs steps through a stage's model: inputs onto the device, decode batches padded to buckets and replayed as graphs
where the device captures them, everything else as it comes.

A bucket is a number of rows; a decode step is padded up to the next one, with rows whose slot is -1.
"""

from __future__ import annotations

import bisect
import statistics
import time
from collections.abc import Sequence

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
        block_table_width: int,
        is_last: bool,
    ) -> None:
        self._model = model
        self._cache = cache
        self._device = device
        self._dtype = dtype
        self._buckets = tuple(buckets)
        self._width = block_table_width
        self._is_last = is_last

    @torch.inference_mode()
    def run(
        self, step: Step, token_ids: NDArray[np.int32] | None, hidden: Tensor | None, pool: Tensor | None
    ) -> Tensor:
        """Hidden states [T, H] for the next stage, or logits [R, V] on the last.

        First stage: `token_ids` [T], where negative ones refer to `pool`. Other stages: `hidden` [T, H].
        """
        num_tokens, num_padded = step.num_tokens, self._bucket(step)
        meta, ids, logit_rows = self._upload(step, token_ids, num_padded)
        if ids is None:
            assert hidden is not None
            inputs = hidden if num_padded == num_tokens else _pad_rows(hidden, num_padded)
        else:
            inputs = ids if pool is None else torch.where(ids < 0, pool[(-1 - ids).clamp(min=0).long()], ids)
        x, residual = self._model.forward(inputs, meta, self._cache)
        if not self._is_last:
            return (x + residual)[:num_tokens]
        return self._model.logits(x[logit_rows], residual[logit_rows])

    def _bucket(self, step: Step) -> int:
        n = step.num_tokens
        if step.num_decodes != n or not self._buckets or n > self._buckets[-1]:
            return n
        return self._buckets[bisect.bisect_left(self._buckets, n)]

    def _upload(
        self, step: Step, token_ids: NDArray[np.int32] | None, num_rows: int
    ) -> tuple[AttentionMetadata, Tensor | None, Tensor]:
        """The step's arrays in one copy, padded to `num_rows` single-row sequences."""
        pad = num_rows - step.num_tokens
        b, width = step.num_sequences + pad, step.block_tables.shape[1]
        parts = [
            _padded(step.positions, pad, 0),
            _padded(step.slots, pad, PADDING_SLOT),
            np.concatenate([step.query_starts, step.query_starts[-1] + 1 + np.arange(pad, dtype=np.int32)]),
            _padded(step.context_lens, pad, 1),
            np.concatenate([step.block_tables.ravel(), np.zeros(pad * width, np.int32)]),
            step.logit_rows,
        ]
        if token_ids is not None:
            parts.append(_padded(token_ids, pad, 0))
        packed = self._device.upload(np.concatenate(parts))
        positions, slots, starts, lens, tables, rows, *ids = torch.split(packed, [len(p) for p in parts])
        sizes = step.query_starts[1:] - step.query_starts[:-1]
        meta = AttentionMetadata(
            positions=positions,
            slots=slots,
            query_starts=starts,
            context_lens=lens,
            block_tables=tables.view(b, width),
            num_decodes=step.num_decodes + pad,
            max_query_len=int(sizes.max()),
            max_context_len=int(step.context_lens.max()),
        )
        return meta, (ids[0] if ids else None), rows

    def warm_up(self, sizes: Sequence[int], hidden_size: int) -> dict[int, float]:
        """Median seconds of a decode step of n rows, for each size until the time is up. Nothing is written."""
        times: dict[int, float] = {}
        began = time.monotonic()
        for n in sizes:
            if times and time.monotonic() - began > _WARM_UP_BUDGET_S:
                break
            step = idle_step(n)
            ids = step.token_ids if self._model.is_first else None
            hidden = (
                None
                if self._model.is_first
                else torch.zeros(n, hidden_size, dtype=self._dtype, device=self._device.torch_device)
            )
            runs = []
            for _ in range(_WARM_UP_RUNS + 1):
                self._device.synchronize()
                start = time.perf_counter()
                self.run(step, ids, hidden, None)
                self._device.synchronize()
                runs.append(time.perf_counter() - start)
            times[n] = statistics.median(runs[1:])
        return times


def _padded(values: NDArray[np.int32], count: int, value: int) -> NDArray[np.int32]:
    return np.concatenate([values, np.full(count, value, np.int32)]) if count else values


def _pad_rows(hidden: Tensor, num_rows: int) -> Tensor:
    padded = hidden.new_zeros(num_rows, hidden.shape[1])
    padded[: len(hidden)] = hidden
    return padded
