"""A step: one flat batch of tokens, described once and sent to every stage; and what comes back from the last one.

Little-endian int32 and float32 arrays, one after the other behind a header of counts, so that a stage reads them in
place and copies them to its device in one piece. A step is self-contained: whoever holds the KV blocks can run it.
Numpy only; torch is the stages' business.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bimetal.engine.wire.frame import MAX_CONTROL_BYTES
from bimetal.errors import LinkError

Int = NDArray[np.int32]
Float = NDArray[np.float32]

_HEADER_INTS = 16
_SAMPLING, _PENALTIES, _BIAS, _LOGPROBS, _MASKS = 1, 2, 4, 8, 16

NO_TARGET = -1
MAX_SCORED_TOKENS = 256
"""Prompt tokens that one step may ask log-probabilities of: each takes a row of logits, and stages reserve memory for them."""
PADDING_SLOT = -1
_BIAS_BYTES = 12


def max_biases(max_num_seqs: int) -> int:
    """Biases that a request may have, so that a step in which every sequence has as many takes half of a frame's limit."""
    return MAX_CONTROL_BYTES // 2 // _BIAS_BYTES // max_num_seqs


def pool_reference(sequence_slot: Int) -> Int:
    """The token ids that stand for "the id last sampled for this sequence slot", known to the stages only."""
    references: Int = -1 - sequence_slot
    return references


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """One entry a logit row. Absent from a step that is greedy throughout."""

    temperatures: Float
    uniforms: Float
    top_ks: Int
    top_ps: Float
    min_ps: Float


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """Row r's history is history[starts[r]:starts[r + 1]], its prompt the first prompt_lens[r] of them.

    Where `pending[r]`, the id last sampled for the row's slot follows, which the driver had not seen when it wrote this.
    """

    repetition: Float
    presence: Float
    frequency: Float
    prompt_lens: Int
    pending: Int
    starts: Int
    history: Int


@dataclass(frozen=True, slots=True)
class BiasEntries:
    """`values[i]` is added to the logit of token `ids[i]` in row `rows[i]`."""

    rows: Int
    ids: Int
    values: Float


@dataclass(frozen=True, slots=True)
class Step:
    """T token rows of B sequences, sequences with exactly one row first; R rows of the T get logits."""

    token_ids: Int
    """[T]; negative: `pool_reference` of a sequence slot."""
    positions: Int
    """[T]"""
    slots: Int
    """[T] KV slot, block * block_tokens + offset."""
    query_starts: Int
    """[B + 1]"""
    context_lens: Int
    """[B]"""
    block_tables: Int
    """[B, W]"""
    sequence_slots: Int
    """[B] place of each sequence in the stages' pool of sampled ids."""
    logit_rows: Int
    """[R] row of the T."""
    logit_sequences: Int
    """[R] index into the B."""
    targets: Int
    """[R] NO_TARGET: sample; else score this given token (prompt log-probabilities)."""
    num_decodes: int
    ids_lag: int = 0
    """Pool references need the ids of all steps up to this one's number minus `ids_lag`; 0: none needed."""
    sampling: SamplingRows | None = None
    penalties: PenaltyRows | None = None
    bias: BiasEntries | None = None
    num_logprobs: Int | None = None
    """[R] alternatives wanted beside the chosen one; -1: no log-probability wanted."""
    masked: Int | None = None
    """[R] 1: a token mask for this row follows in a MASK frame."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)

    @property
    def num_logit_rows(self) -> int:
        return len(self.logit_rows)


def idle_step(num_rows: int) -> Step:
    """A decode step of `num_rows` sequences that writes no KV and whose ids mean nothing."""
    zeros = np.zeros(num_rows, np.int32)
    rows = np.arange(num_rows, dtype=np.int32)
    return Step(
        token_ids=zeros,
        positions=zeros,
        slots=np.full(num_rows, PADDING_SLOT, np.int32),
        query_starts=np.arange(num_rows + 1, dtype=np.int32),
        context_lens=np.ones(num_rows, np.int32),
        block_tables=np.zeros((num_rows, 1), np.int32),
        sequence_slots=rows,
        logit_rows=rows,
        logit_sequences=rows,
        targets=np.full(num_rows, NO_TARGET, np.int32),
        num_decodes=num_rows,
    )


def encode_step(step: Step) -> NDArray[np.int32]:
    flags = 0
    num_history = num_bias = 0
    arrays: list[NDArray[np.int32] | NDArray[np.float32]] = [
        step.token_ids,
        step.positions,
        step.slots,
        step.query_starts,
        step.context_lens,
        step.sequence_slots,
        step.logit_rows,
        step.logit_sequences,
        step.targets,
        step.block_tables.ravel(),
    ]
    if step.sampling is not None:
        flags |= _SAMPLING
        s = step.sampling
        arrays += [s.temperatures, s.uniforms, s.top_ks, s.top_ps, s.min_ps]
    if step.penalties is not None:
        flags |= _PENALTIES
        p = step.penalties
        num_history = len(p.history)
        arrays += [p.repetition, p.presence, p.frequency, p.prompt_lens, p.pending, p.starts, p.history]
    if step.bias is not None:
        flags |= _BIAS
        num_bias = len(step.bias.rows)
        arrays += [step.bias.rows, step.bias.ids, step.bias.values]
    if step.num_logprobs is not None:
        flags |= _LOGPROBS
        arrays.append(step.num_logprobs)
    if step.masked is not None:
        flags |= _MASKS
        arrays.append(step.masked)
    header = np.zeros(_HEADER_INTS, np.int32)
    header[:10] = (
        step.num_tokens,
        step.num_sequences,
        step.num_logit_rows,
        step.block_tables.shape[1],
        step.num_decodes,
        step.ids_lag,
        flags,
        num_history,
        num_bias,
        sum(len(a) for a in arrays),
    )
    return np.concatenate([header, *(a.view(np.int32) for a in arrays)])


class _Reader:
    def __init__(self, data: NDArray[np.int32]) -> None:
        self._data = data
        self._at = _HEADER_INTS

    def ints(self, n: int) -> Int:
        self._at += n
        return self._data[self._at - n : self._at]

    def floats(self, n: int) -> Float:
        return self.ints(n).view(np.float32)


def decode_step(payload: bytes | bytearray | memoryview) -> Step:
    """Views into `payload`; LinkError if the counts do not add up to its size."""
    if len(payload) % 4 or len(payload) < 4 * _HEADER_INTS:
        raise LinkError(f"a STEP frame of {len(payload)} bytes is truncated")
    data = np.frombuffer(payload, np.int32)
    t, b, r, w, num_decodes, ids_lag, flags, num_history, num_bias, total = (int(v) for v in data[:10])
    expected = 3 * t + (b + 1) + 2 * b + 3 * r + b * w
    expected += 5 * r * bool(flags & _SAMPLING) + (6 * r + 1 + num_history) * bool(flags & _PENALTIES)
    expected += 3 * num_bias * bool(flags & _BIAS) + r * bool(flags & _LOGPROBS) + r * bool(flags & _MASKS)
    if min(t, b, r, w, num_history, num_bias) < 0 or total != expected or len(data) != _HEADER_INTS + total:
        raise LinkError(
            f"a STEP frame announces {total} values, its counts need {expected}, it holds {len(data)}"
        )
    read = _Reader(data)
    token_ids, positions, slots = read.ints(t), read.ints(t), read.ints(t)
    query_starts, context_lens, sequence_slots = read.ints(b + 1), read.ints(b), read.ints(b)
    logit_rows, logit_sequences, targets = read.ints(r), read.ints(r), read.ints(r)
    block_tables = read.ints(b * w).reshape(b, w)
    sampling = penalties = bias = num_logprobs = masked = None
    if flags & _SAMPLING:
        sampling = SamplingRows(read.floats(r), read.floats(r), read.ints(r), read.floats(r), read.floats(r))
    if flags & _PENALTIES:
        penalties = PenaltyRows(
            read.floats(r),
            read.floats(r),
            read.floats(r),
            read.ints(r),
            read.ints(r),
            read.ints(r + 1),
            read.ints(num_history),
        )
    if flags & _BIAS:
        bias = BiasEntries(read.ints(num_bias), read.ints(num_bias), read.floats(num_bias))
    if flags & _LOGPROBS:
        num_logprobs = read.ints(r)
    if flags & _MASKS:
        masked = read.ints(r)
    return Step(
        token_ids,
        positions,
        slots,
        query_starts,
        context_lens,
        block_tables,
        sequence_slots,
        logit_rows,
        logit_sequences,
        targets,
        num_decodes,
        ids_lag,
        sampling,
        penalties,
        bias,
        num_logprobs,
        masked,
    )


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the last stage returns for a step's R logit rows: ids, and log-probabilities where the step wanted them."""

    ids: Int
    """[R] the sampled id, or the target that was scored."""
    logprobs: Float | None = None
    """[R]"""
    ranks: Int | None = None
    """[R] from 1."""
    top_ids: Int | None = None
    """[R, k], k the largest number wanted in the step."""
    top_logprobs: Float | None = None


def encode_sampled(sampled: Sampled) -> NDArray[np.int32]:
    r = len(sampled.ids)
    if (
        sampled.logprobs is None
        or sampled.ranks is None
        or sampled.top_ids is None
        or sampled.top_logprobs is None
    ):
        return np.concatenate([np.array([r, -1], np.int32), sampled.ids])
    k = sampled.top_ids.shape[1]
    return np.concatenate(
        [
            np.array([r, k], np.int32),
            sampled.ids,
            sampled.logprobs.view(np.int32),
            sampled.ranks,
            sampled.top_ids.ravel(),
            sampled.top_logprobs.ravel().view(np.int32),
        ]
    )


def decode_sampled(payload: bytes | bytearray | memoryview) -> Sampled:
    if len(payload) % 4 or len(payload) < 8:
        raise LinkError(f"a SAMPLED frame of {len(payload)} bytes is truncated")
    data = np.frombuffer(payload, np.int32)
    r, k = int(data[0]), int(data[1])
    expected = 2 + r + (0 if k < 0 else 2 * r + 2 * r * k)
    if r < 0 or k < -1 or len(data) != expected:
        raise LinkError(f"a SAMPLED frame of {r} rows needs {expected} values, it holds {len(data)}")
    ids = data[2 : 2 + r]
    if k < 0:
        return Sampled(ids)
    at = 2 + r
    logprobs, ranks = data[at : at + r].view(np.float32), data[at + r : at + 2 * r]
    at += 2 * r
    top_ids = data[at : at + r * k].reshape(r, k)
    return Sampled(ids, logprobs, ranks, top_ids, data[at + r * k :].view(np.float32).reshape(r, k))
