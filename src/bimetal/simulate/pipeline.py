"""`SimulatedPipeline`: a replica of several stages, step by step on modelled time.

Issues steps as the engine's scheduler does, through the same `policy` functions: decodes first, running ahead of ids that
are on their way, prompts in chunks beside them, as many steps in flight as the policy allows. Each stage runs its steps in
order; a step waits for its stage, for its rows and for the ids that it refers to. One stage alone is `replica`'s, whose
rounds are as exact and quicker. Does not know where requests come from.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from bimetal.perf.stage_clock import StageClock
from bimetal.policy.batching import (
    StepTime,
    choose_num_micro_batches,
    max_outstanding_steps,
    num_micro_batches_with_prefill,
    pick_decodes,
    prefill_budget,
    prefill_chunk,
    smallest_chunk_tokens,
)
from bimetal.policy.step_times import TIMED_SIZES, fit_step_time
from bimetal.simulate.replica import Prompt
from bimetal.simulate.shapes import ReplicaShape

_CONTEXT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class _Step:
    """In flight."""

    number: int
    done_s: float
    decodes: NDArray[np.intp]
    """Slots."""
    finished: tuple[int, ...]
    """Slots whose prompts end in it, and which get their first token from it."""
    tickets: NDArray[np.int64]
    """Of all these slots when it was issued: another ticket, another sequence."""


class SimulatedPipeline:
    def __init__(
        self, shape: ReplicaShape, first_token_s: NDArray[np.float64], done_s: NDArray[np.float64]
    ) -> None:
        n = shape.max_num_seqs
        self.shape = shape
        self.busy_s = [0.0] * len(shape.clocks)
        self.num_unfinished = 0
        self.num_preemptions = 0
        self._first_token_s, self._done_s = first_token_s, done_s
        self._waiting: deque[Prompt] = deque()
        self._reading: dict[int, Prompt] = {}
        """By slot, first come first."""
        self._outstanding: deque[_Step] = deque()
        self._free_s = [0.0] * len(shape.clocks)
        self._free_slots = list(range(n - 1, -1, -1))
        self._request = np.full(n, -1, np.int64)
        self._ticket = np.zeros(n, np.int64)
        self._context = np.zeros(n, np.int64)
        self._to_issue = np.zeros(n, np.int64)
        """Decode steps that a sequence needs and that are not issued."""
        self._to_come = np.zeros(n, np.int64)
        """Tokens that it waits for, those in flight included."""
        self._ready = np.zeros(n, np.bool_)
        self._in_flight = np.zeros(n, np.int32)
        self._last_step = np.full(n, -1, np.int64)
        self._kv_used = 0
        self._num_steps = 0
        self._tickets = 0
        self._times = [fit_step_time(timed) for timed in shape.decode_step_s] or [
            measured_step_time(clock, n) for clock in shape.clocks
        ]
        self._quickest_s = max(clock.step_s(1, 0) for clock in shape.clocks)
        self._hop_s = shape.hop_latency_s / len(shape.clocks)
        self._carry_token_s = shape.hop_token_s / (len(shape.clocks) - 1)
        self._smallest_chunk_tokens = smallest_chunk_tokens(self._times)
        self._chosen: dict[int, int] = {}

    @property
    def next_change_s(self) -> float:
        """No request can finish before this. Steps in flight bring at most two tokens of a sequence, later ones another
        each, and none of them is quicker than a stage alone."""
        if not self._outstanding:
            return np.inf
        soon_s = self._outstanding[0].done_s
        if self._reading or self._waiting:
            return soon_s
        steps = int(self._to_come[self._ready].min()) - len(self._outstanding)
        return soon_s + max(steps, 0) * self._quickest_s

    def submit(self, request: int, input_tokens: int, output_tokens: int, at_s: float) -> None:
        """Queue a request that arrives at `at_s`; `advance` to that time first."""
        self.num_unfinished += 1
        self._waiting.append(Prompt(request, input_tokens, output_tokens, at_s))
        self._issue(at_s)

    def advance(self, until_s: float) -> None:
        """Take in every step that ends by `until_s`, and issue what follows."""
        while self._outstanding and self._outstanding[0].done_s <= until_s:
            self._repeat_rounds(until_s)
            step = self._outstanding.popleft()
            self._take_in(step)
            self._issue(step.done_s)

    # -- rounds that repeat --------------------------------------------------------------------------------------

    def _repeat_rounds(self, until_s: float) -> None:
        """Where the same groups take turns and nobody comes or goes, many rounds at once.

        The step issued last then has the rows of the oldest, and those between have all others: every step in flight moves
        on by whole rounds.
        """
        steps = self._outstanding
        first, last = steps[0], steps[-1]
        if self._reading or self._waiting or len(steps) < 2 or len(first.decodes) != len(last.decodes):
            return
        if until_s - first.done_s < 3 * (len(steps) - 1) * self._quickest_s:
            return
        groups = [step.decodes for step in islice(steps, len(steps) - 1)]
        running = np.flatnonzero(self._ready)
        if (
            sum(map(len, groups)) != len(running)
            or any(step.finished for step in steps)
            or not np.array_equal(first.decodes, last.decodes)
        ):
            return
        most = int(self._to_issue[running].min()) - 1
        most = min(most, (self.shape.kv_tokens - self._kv_used) // len(running) - 1)
        rounds = 0
        for _ in range(2):  # the second time at the context of half way
            times = [self._group_s(group, rounds / 2) for group in groups]
            busy = [sum(stage) for stage in zip(*times, strict=True)]
            carry_s = len(first.decodes) * self._carry_token_s * (len(busy) - 1)
            round_s = max(max(busy), max(map(sum, times)) + self.shape.hop_latency_s + carry_s)
            rounds = most
            if np.isfinite(until_s):
                rounds = min(rounds, int((until_s - first.done_s) / round_s) - 1)
            if rounds < 2:
                return
        later_s, later = rounds * round_s, rounds * len(groups)
        self._outstanding = deque(
            replace(step, number=step.number + later, done_s=step.done_s + later_s) for step in steps
        )
        self._num_steps += later
        self._last_step[running] += later
        self._free_s = [free + later_s for free in self._free_s]
        self.busy_s = [total + rounds * one for total, one in zip(self.busy_s, busy, strict=True)]
        self._to_issue[running] -= rounds
        self._to_come[running] -= rounds
        self._context[running] += rounds
        self._kv_used += rounds * len(running)

    def _group_s(self, slots: NDArray[np.intp], rounds_on: float) -> list[float]:
        """What a step of these sequences takes each stage, some rounds on."""
        context = float(self._context[slots].sum()) + rounds_on * len(slots)
        return [clock.step_s(len(slots), context) for clock in self.shape.clocks]

    # -- steps ---------------------------------------------------------------------------------------------------

    def _issue(self, now_s: float) -> None:
        """As many steps as may be in flight."""
        num_stages = len(self.shape.clocks)
        while True:
            ready = self._ready & (self._to_issue > 0)
            k = self._micro_batches(int(np.count_nonzero(ready)))
            if len(self._outstanding) >= max_outstanding_steps(num_stages, k):
                return
            oldest = self._outstanding[0] if self._outstanding else None
            number = None if oldest is None else oldest.number
            slots = pick_decodes(ready, self._in_flight, self._last_step, number, k)
            slots = self._make_room(slots)
            chunks = self._chunks(len(slots))
            if not len(slots) and not chunks:
                return
            self._send(now_s, oldest, slots, chunks)

    def _micro_batches(self, num_ready: int) -> int:
        if self._reading or (self._waiting and self._free_slots):
            return num_micro_batches_with_prefill(len(self.shape.clocks))
        chosen = self._chosen.get(num_ready)
        if chosen is None:
            chosen = self._chosen[num_ready] = choose_num_micro_batches(num_ready, self._times, self._hop_s)
        return chosen

    def _chunks(self, num_decodes: int) -> list[tuple[int, int]]:
        """(slot, tokens) of the prompts in the next step."""
        shape = self.shape
        if not self._reading and not self._waiting:
            return []
        unread = sum(prompt.tokens - prompt.done for prompt in self._reading.values())
        unread += sum(prompt.tokens for prompt in islice(self._waiting, len(self._free_slots)))
        budget = prefill_budget(
            shape.max_num_batched_tokens, unread, len(shape.clocks), self._smallest_chunk_tokens
        )
        budget -= num_decodes
        chunks: list[tuple[int, int]] = []
        for slot, prompt in self._reading.items():
            if budget <= 0:
                return chunks
            size = prefill_chunk(prompt.tokens - prompt.done, budget)
            chunks.append((slot, size))
            budget -= size
        while self._waiting and self._free_slots and budget > 0:
            prompt = self._waiting[0]
            if self._kv_used + prompt.tokens + 1 > shape.kv_tokens:
                if self._kv_used:
                    break
                prompt.tokens = shape.kv_tokens - 1  # alone it still runs, as far as the cache reaches
                prompt.outputs_left = 1
            size = prefill_chunk(prompt.tokens, budget)
            chunks.append((self._admit(self._waiting.popleft()), size))
            budget -= size
        return chunks

    def _admit(self, prompt: Prompt) -> int:
        slot = self._free_slots.pop()
        self._tickets += 1
        self._reading[slot] = prompt
        self._request[slot], self._ticket[slot] = prompt.request, self._tickets
        self._in_flight[slot], self._last_step[slot], self._context[slot] = 0, -1, prompt.tokens
        self._kv_used += prompt.tokens
        return slot

    def _send(
        self, now_s: float, oldest: _Step | None, slots: NDArray[np.intp], chunks: list[tuple[int, int]]
    ) -> None:
        """Through the stages, each of which runs its steps in order."""
        tokens, pairs = 0, 0.0
        finished = []
        for slot, size in chunks:
            prompt = self._reading[slot]
            pairs += size * (2 * prompt.done + size) / 2
            prompt.done += size
            tokens += size
            if prompt.done == prompt.tokens:
                finished.append(slot)
        at_s = now_s
        if oldest is not None and self._in_flight[slots].any():
            at_s = max(at_s, oldest.done_s + self._hop_s)
        context = float(self._context[slots].sum())
        carry_s = self._hop_s + (len(slots) + tokens) * self._carry_token_s
        for i, clock in enumerate(self.shape.clocks):
            step_s = clock.step_s(len(slots), context, tokens, pairs, len(finished))
            self.busy_s[i] += step_s
            at_s = self._free_s[i] = max(at_s + (carry_s if i else 0.0), self._free_s[i]) + step_s
        self._num_steps += 1
        self._context[slots] += 1
        self._kv_used += len(slots)
        self._to_issue[slots] -= 1
        for slot in finished:
            prompt = self._reading.pop(slot)
            self._ready[slot] = True
            self._to_issue[slot], self._to_come[slot] = prompt.outputs_left - 1, prompt.outputs_left
        rows = np.concatenate((slots, np.array(finished, np.intp)))
        self._in_flight[rows] += 1
        self._last_step[rows] = self._num_steps
        self._outstanding.append(
            _Step(self._num_steps, at_s, slots, tuple(finished), self._ticket[rows].copy())
        )

    def _take_in(self, step: _Step) -> None:
        """Every row's token."""
        rows = np.concatenate((step.decodes, np.array(step.finished, np.intp)))
        is_same = self._ticket[rows] == step.tickets
        read = self._request[rows[len(step.decodes) :][is_same[len(step.decodes) :]]]
        rows = rows[is_same]
        self._in_flight[rows] -= 1
        self._to_come[rows] -= 1
        # Who was pre-empted meanwhile has lost it, and whoever took the slot has got nothing yet.
        self._first_token_s[read] = np.fmin(self._first_token_s[read], step.done_s)
        ended = rows[self._to_come[rows] <= 0]
        self._done_s[self._request[ended]] = step.done_s
        self.num_unfinished -= len(ended)
        for slot in ended.tolist():
            self._leave(slot)

    # -- sequences -----------------------------------------------------------------------------------------------

    def _leave(self, slot: int) -> None:
        self._kv_used -= int(self._context[slot])
        self._ready[slot] = False
        self._ticket[slot] = 0
        self._reading.pop(slot, None)
        self._free_slots.append(slot)

    def _make_room(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """Pre-empt the newest while the cache has no room for a token of each; what is in flight for them is lost."""
        while len(slots) and self._kv_used + len(slots) > self.shape.kv_tokens:
            running = np.flatnonzero(self._ticket > 0)
            if len(running) == 1:
                break
            victim = int(running[np.argmax(self._request[running])])
            prompt = self._reading.get(victim)
            if prompt is None:
                left = int(self._to_come[victim])
                prompt = Prompt(int(self._request[victim]), int(self._context[victim]), left, 0.0)
            prompt.done = 0
            self._leave(victim)
            self._waiting.appendleft(prompt)
            self.num_preemptions += 1
            slots = slots[slots != victim]
        return slots


def measured_step_time(clock: StageClock, max_num_seqs: int) -> StepTime:
    """Of a stage as its engine would have measured it: at a few sizes and short context."""
    sizes = [n for n in TIMED_SIZES if n <= max_num_seqs]
    return fit_step_time({n: clock.step_s(n, n * _CONTEXT_TOKENS) for n in sizes})
