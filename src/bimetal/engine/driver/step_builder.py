"""Writes a `Step` from the sequence table: which token rows, where their KV goes, how each logit row is sampled.

Changes nothing: the scheduler decides and accounts, this only describes.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bimetal.engine.driver.sequences import Sequence, SequenceTable, uniforms
from bimetal.engine.wire.step import (
    NO_TARGET,
    BiasEntries,
    PenaltyRows,
    SamplingRows,
    Step,
    pool_reference,
)

Int = NDArray[np.int32]
_FORBIDDEN = np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + size) of a running sequence's known tokens."""

    sequence: Sequence
    start: int
    size: int

    @property
    def is_last(self) -> bool:
        return self.start + self.size == self.sequence.num_tokens


@dataclass(slots=True)
class _Logits:
    """Logit rows as they are collected."""

    rows: list[int]
    sequences: list[int]
    targets: list[int]
    owners: list[tuple[Sequence, int]]


def build_step(
    table: SequenceTable,
    slots: NDArray[np.intp],
    chunks: Listing[Chunk],
    number: int,
    block_tokens: int,
) -> tuple[Step, list[tuple[Sequence, int]]]:
    """The step that decodes one token for each of `slots` and prefills `chunks` (single-row ones first).

    Returns it with (sequence, target) for each logit row.
    """
    num_decodes = len(slots)
    chunk_slots = [_slot(c.sequence) for c in chunks]
    all_slots = np.concatenate([slots.astype(np.int32), np.array(chunk_slots, np.int32)])
    positions = table.num_scheduled[slots]
    pending = table.in_flight[slots] > 0
    ids = np.where(pending, pool_reference(slots.astype(np.int32)), table.last_token[slots])
    lag = int(number - table.last_step[slots][pending].max()) if pending.any() else 0

    sizes = np.array([1] * num_decodes + [c.size for c in chunks], np.int32)
    starts = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=starts[1:])
    if chunks:
        ids = np.concatenate([ids, *(c.sequence.tokens[c.start : c.start + c.size] for c in chunks)])
        positions = np.concatenate(
            [positions, *(np.arange(c.start, c.start + c.size, dtype=np.int32) for c in chunks)]
        )
    row_slots = np.repeat(all_slots, sizes)
    kv_slots = (
        table.block_table[row_slots, positions // block_tokens] * block_tokens + positions % block_tokens
    )
    context_lens = positions[starts[1:] - 1] + 1
    width = max(int(-(-context_lens.max() // block_tokens)), 1)

    logits = _logit_rows(table, slots, chunks, starts)
    logit_slots = all_slots[logits.sequences] if logits.sequences else np.empty(0, np.int32)
    logit_positions = positions[logits.rows] if logits.rows else np.empty(0, np.int32)
    special = any(table.special[logit_slots])
    step = Step(
        token_ids=ids.astype(np.int32, copy=False),
        positions=positions.astype(np.int32, copy=False),
        slots=kv_slots.astype(np.int32, copy=False),
        query_starts=starts,
        context_lens=context_lens.astype(np.int32, copy=False),
        block_tables=np.ascontiguousarray(table.block_table[all_slots, :width]),
        sequence_slots=all_slots,
        logit_rows=np.array(logits.rows, np.int32),
        logit_sequences=np.array(logits.sequences, np.int32),
        targets=np.array(logits.targets, np.int32),
        num_decodes=num_decodes + sum(1 for c in chunks if c.size == 1),
        ids_lag=lag,
        sampling=_sampling(table, logit_slots, logit_positions),
        penalties=_penalties(logits) if special else None,
        bias=_bias(logits) if special else None,
        num_logprobs=_num_logprobs(table, logit_slots, logits),
        masked=_masked(logits) if special else None,
    )
    return step, logits.owners


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None
    return sequence.slot


def _logit_rows(
    table: SequenceTable, slots: NDArray[np.intp], chunks: Listing[Chunk], starts: Int
) -> _Logits:
    n = len(slots)
    owners: list[tuple[Sequence, int]] = []
    for slot in slots:
        sequence = table.sequences[slot]
        assert sequence is not None
        owners.append((sequence, NO_TARGET))
    logits = _Logits(list(range(n)), list(range(n)), [NO_TARGET] * n, owners)
    for i, chunk in enumerate(chunks, start=n):
        sequence, first = chunk.sequence, int(starts[i])
        if sequence.scores_prompt:
            end = min(chunk.start + chunk.size, sequence.num_prompt - 1)
            for position in range(max(chunk.start, sequence.num_scored - 1), end):
                _add(logits, first + position - chunk.start, i, sequence, int(sequence.tokens[position + 1]))
                sequence.num_scored = position + 2
        if chunk.is_last:
            _add(logits, first + chunk.size - 1, i, sequence, NO_TARGET)
    return logits


def _add(logits: _Logits, row: int, index: int, sequence: Sequence, target: int) -> None:
    logits.rows.append(row)
    logits.sequences.append(index)
    logits.targets.append(target)
    logits.owners.append((sequence, target))


def _sampling(table: SequenceTable, slots: Int, positions: Int) -> SamplingRows | None:
    temperatures = table.temperature[slots]
    if not temperatures.any():
        return None
    return SamplingRows(
        temperatures,
        uniforms(table.seeds[slots], positions),
        table.top_k[slots],
        table.top_p[slots],
        table.min_p[slots],
    )


def _penalties(logits: _Logits) -> PenaltyRows | None:
    wanted = [s.request.sampling if target == NO_TARGET else None for s, target in logits.owners]
    active = [
        s is not None
        and (s.repetition_penalty != 1.0 or bool(s.presence_penalty) or bool(s.frequency_penalty))
        for s in wanted
    ]
    if not any(active):
        return None
    n = len(wanted)
    repetition, presence, frequency = np.ones(n, np.float32), np.zeros(n, np.float32), np.zeros(n, np.float32)
    prompt_lens, pending, starts = np.zeros(n, np.int32), np.zeros(n, np.int32), np.zeros(n + 1, np.int32)
    history = []
    for row, ((sequence, _target), sampling) in enumerate(zip(logits.owners, wanted, strict=True)):
        starts[row + 1] = starts[row]
        if sampling is None or not active[row]:
            continue
        repetition[row] = sampling.repetition_penalty
        presence[row] = sampling.presence_penalty
        frequency[row] = sampling.frequency_penalty
        prompt_lens[row] = sequence.num_prompt
        pending[row] = sequence.in_flight > 0
        history.append(sequence.tokens[: sequence.num_tokens])
        starts[row + 1] += sequence.num_tokens
    return PenaltyRows(repetition, presence, frequency, prompt_lens, pending, starts, np.concatenate(history))


def _bias(logits: _Logits) -> BiasEntries | None:
    rows: list[Int] = []
    ids: list[Int] = []
    values: list[NDArray[np.float32]] = []

    def add(row: int, tokens: Int, added: NDArray[np.float32]) -> None:
        rows.append(np.full(len(tokens), row, np.int32))
        ids.append(tokens)
        values.append(added)

    for row, (sequence, target) in enumerate(logits.owners):
        if target != NO_TARGET:
            continue
        if len(sequence.bias_ids):
            add(row, sequence.bias_ids, sequence.bias_values)
        sampling = sequence.request.sampling
        if sequence.num_output + sequence.in_flight < sampling.min_tokens:
            endings = np.array([*sequence.ending_ids, *sampling.stop_token_ids], np.int32)
            add(row, endings, np.full(len(endings), _FORBIDDEN))
    if not sum(map(len, rows)):
        return None
    return BiasEntries(np.concatenate(rows), np.concatenate(ids), np.concatenate(values))


def _num_logprobs(table: SequenceTable, slots: Int, logits: _Logits) -> Int | None:
    wanted = table.num_logprobs[slots]
    for row, (sequence, target) in enumerate(logits.owners):
        if target != NO_TARGET:
            wanted[row] = sequence.request.sampling.prompt_logprobs or 0
    return wanted if len(wanted) and wanted.max() >= 0 else None


def _masked(logits: _Logits) -> Int | None:
    masked = np.array([t == NO_TARGET and s.matcher is not None for s, t in logits.owners], np.int32)
    return masked if masked.any() else None
