"""Which requests share the next step, and how many micro-batches are in flight: pure decisions of explicit state.

The engine's scheduler and the simulator both call these. Knows nothing of KV blocks, processes or clocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

_ENOUGH_CHUNK_TOKENS = 1024
"""Keeps any device busy."""
_FIXED_RATIO = 4
"""A chunk's tokens take at least so many times what its step takes anyway."""

StepTime = Callable[[int], float]
"""Seconds that one stage takes for a decode step of n sequences."""


def round_s(
    num_requests: int, num_micro_batches: int, stage_times: Sequence[StepTime], hop_s: float
) -> float:
    """Time in which every one of `num_requests` gets one token, over P stages and K micro-batches of N / K.

    A round ends when the slowest stage has run all K, but no sooner than one micro-batch has been through every stage
    and hop: max(K * max_i t_i(N/K), sum_i t_i(N/K) + P * hop). One stage alone has no hop.

    >>> round_s(8, 2, [lambda n: 0.5, lambda n: 0.25], 0.125)
    1.0
    """
    size = -(-num_requests // num_micro_batches)
    times = [time(size) for time in stage_times]
    hops = hop_s * len(times) if len(times) > 1 else 0.0
    return max(num_micro_batches * max(times), sum(times) + hops)


def choose_num_micro_batches(num_requests: int, stage_times: Sequence[StepTime], hop_s: float) -> int:
    """The K that minimises `round_s`; the fewest among equals, since each micro-batch reads the weights again.

    More than `max_num_micro_batches` cannot help.
    """
    largest = min(num_requests, max_num_micro_batches(len(stage_times)))
    candidates = range(1, max(largest, 1) + 1)
    return min(candidates, key=lambda k: (round_s(max(num_requests, 1), k, stage_times, hop_s), k))


def max_num_micro_batches(num_stages: int) -> int:
    """That can help: P keep every stage busy, one more hides the hops.

    >>> max_num_micro_batches(1), max_num_micro_batches(2)
    (1, 3)
    """
    return num_stages + 1 if num_stages > 1 else 1


def pick_decodes(
    ready: NDArray[np.bool_],
    in_flight: NDArray[np.int32],
    last_step: NDArray[np.int64],
    oldest_outstanding_step: int | None,
    num_micro_batches: int,
) -> NDArray[np.intp]:
    """Slots of the sequences that take one token each in the next step.

    There are no fixed groups. Of the N sequences ready to decode, a step takes at most ceil(N / K): first those with no
    step in flight, then, running ahead of the ids, those whose only step in flight is the oldest outstanding one, since
    its ids will be there first. Longest unscheduled first. Groups of equal size form by themselves, and as requests come
    and go the cap moves sequences from large groups to small ones without a stage ever waiting for ids out of turn.
    """
    num_ready = int(np.count_nonzero(ready))
    if num_ready == 0:
        return np.empty(0, np.intp)
    may_run_ahead = (in_flight == 1) & (
        last_step == (-1 if oldest_outstanding_step is None else oldest_outstanding_step)
    )
    eligible = np.flatnonzero(ready & ((in_flight == 0) | may_run_ahead))
    quota = -(-num_ready // num_micro_batches)
    if len(eligible) > quota:
        order = np.lexsort((eligible, last_step[eligible]))
        eligible = np.sort(eligible[order[:quota]])
    return eligible


def num_micro_batches_with_prefill(num_stages: int) -> int:
    """While steps carry prompts, products are bound by arithmetic and smaller micro-batches cost nothing: one more than the
    stages, so that neither hops nor large activations are waited for.

    >>> num_micro_batches_with_prefill(1), num_micro_batches_with_prefill(2)
    (1, 3)
    """
    return num_stages + 1 if num_stages > 1 else 1


def smallest_chunk_tokens(stage_times: Sequence[StepTime]) -> int:
    """Of a prompt that is cut to fill a pipeline. A step takes a + b n: what it takes for no token at all, the weights, is
    paid by every chunk, so a chunk has 4 a / b tokens or more; 1024 always do, since b is then a GPU's and the tokens of a
    prompt take more than those of decodes.

    >>> smallest_chunk_tokens([lambda n: 0.032 + 0.004 * n]), smallest_chunk_tokens([lambda n: 0.002])
    (32, 1024)
    """
    largest = 1
    for time_s in stage_times:
        fixed_s, token_s = time_s(0), time_s(1) - time_s(0)
        if token_s * _ENOUGH_CHUNK_TOKENS <= _FIXED_RATIO * fixed_s:
            return _ENOUGH_CHUNK_TOKENS
        largest = max(largest, math.ceil(_FIXED_RATIO * fixed_s / token_s))
    return largest


def prefill_budget(
    limit_tokens: int, prompt_tokens: int, num_stages: int, smallest_tokens: int = _ENOUGH_CHUNK_TOKENS
) -> int:
    """Token budget of a step while `prompt_tokens` of prompts are still to be computed.

    One stage takes all it may. Over P stages c equal chunks take (c + P - 1) / c of the time of one busy stage, so what is
    left is cut into 4 P, the last ones ever smaller; but not below `smallest_tokens`, which keep a device busy.

    >>> prefill_budget(8192, 8192, 1), prefill_budget(8192, 262144, 2), prefill_budget(8192, 8192, 2)
    (8192, 8192, 1024)
    """
    if num_stages == 1:
        return limit_tokens
    return min(limit_tokens, max(-(-prompt_tokens // (4 * num_stages)), smallest_tokens))


def prefill_chunk(remaining_tokens: int, budget_tokens: int) -> int:
    """Tokens of a prompt that go into a step which has room for `budget_tokens` more."""
    return min(remaining_tokens, max(budget_tokens, 0))


def prompt_chunks(
    prompt_tokens: int, limit_tokens: int, num_stages: int, smallest_tokens: int = _ENOUGH_CHUNK_TOKENS
) -> tuple[int, ...]:
    """How a prompt that has the engine to itself is cut.

    >>> prompt_chunks(700, 512, 1), prompt_chunks(100, 512, 2, 30)
    ((512, 188), (30, 30, 30, 10))
    """
    chunks: list[int] = []
    while (left := prompt_tokens - sum(chunks)) > 0:
        chunks.append(prefill_chunk(left, prefill_budget(limit_tokens, left, num_stages, smallest_tokens)))
    return tuple(chunks)


def max_outstanding_steps(num_stages: int, num_micro_batches: int) -> int:
    """Steps issued and not returned: enough to fill the pipeline and run one ahead, no more, so that a new request waits
    behind as little as possible."""
    return max(num_stages, num_micro_batches) + 1
