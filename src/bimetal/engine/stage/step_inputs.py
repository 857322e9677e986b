"""A step's arrays as the device gets them: padded to a bucket, packed into one buffer, seen through views."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from bimetal.engine.kernels.interface import AttentionMetadata
from bimetal.engine.wire.step import PADDING_SLOT, Step

Tensor = torch.Tensor


def decode_sizes(num_rows: int, width: int) -> list[int]:
    """Lengths of `step_arrays` for a decode step padded to `num_rows`."""
    return [num_rows, num_rows, num_rows + 1, num_rows, num_rows * width]


def step_arrays(step: Step, num_rows: int, width: int) -> list[NDArray[np.int32]]:
    """What the device needs of a step beside its inputs, padded to `num_rows` with single-row sequences: positions, slots,
    query starts, context lengths, block tables of `width` columns."""
    pad = num_rows - step.num_tokens
    tables = step.block_tables
    if pad or tables.shape[1] != width:
        tables = np.zeros((step.num_sequences + pad, width), np.int32)
        tables[: step.num_sequences, : step.block_tables.shape[1]] = step.block_tables
    starts = step.query_starts
    if pad:
        starts = np.concatenate([starts, starts[-1] + 1 + np.arange(pad, dtype=np.int32)])
    return [
        padded(step.positions, pad, 0),
        padded(step.slots, pad, PADDING_SLOT),
        starts,
        padded(step.context_lens, pad, 1),
        tables.reshape(-1),
    ]


def padded(values: NDArray[np.int32], count: int, value: int) -> NDArray[np.int32]:
    return np.concatenate([values, np.full(count, value, np.int32)]) if count else values


def metadata(
    packed: Tensor, sizes: Sequence[int], num_decodes: int, max_query_len: int, max_context_len: int
) -> AttentionMetadata:
    """Views of a packed buffer that begins with `step_arrays` of these sizes."""
    views = []
    at = 0
    for size in sizes:
        views.append(packed[at : at + size])
        at += size
    positions, slots, starts, lens, tables = views
    return AttentionMetadata(
        positions=positions,
        slots=slots,
        query_starts=starts,
        context_lens=lens,
        block_tables=tables.view(len(lens), -1),
        num_decodes=num_decodes,
        max_query_len=max_query_len,
        max_context_len=max_context_len,
    )
