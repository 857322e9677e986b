"""`SimulatedReplica`: one chain of stages with continuous batching, on modelled time.

Decides as the engine's scheduler does, through the same `policy` functions: decodes first, prompts in chunks beside them
under a token budget, first come first served, the newest pre-empted when the cache is full. Time goes by rounds: every
running sequence gets one token, in as many micro-batches as the policy chooses. Rounds without a prompt are taken many
at a time, since nothing is decided between them. Does not know where requests come from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bimetal.perf.stage_clock import StageClock
from bimetal.policy.batching import StepTime, choose_num_micro_batches, prefill_chunk


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """What does not change while a replica runs."""

    clocks: tuple[StageClock, ...]
    hop_latency_s: float
    """Of all hops of a round together, the way back included."""
    hop_token_s: float
    """The same per token carried."""
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tokens: int
    """Tokens that the smallest stage's cache holds."""


@dataclass(slots=True)
class Prompt:
    """A request that is being read."""

    request: int
    tokens: int
    """To read in all: the prompt, and after a pre-emption what was generated too."""
    outputs_left: int
    done: int = 0


class SimulatedReplica:
    def __init__(
        self, shape: ReplicaShape, first_token_s: NDArray[np.float64], done_s: NDArray[np.float64]
    ) -> None:
        self.shape = shape
        self.now_s = 0.0
        self.busy_s = [0.0] * len(shape.clocks)
        self.num_unfinished = 0
        self.num_preemptions = 0
        self._first_token_s = first_token_s
        self._done_s = done_s
        self._waiting: deque[Prompt] = deque()
        self._reading: list[Prompt] = []
        self._request = np.zeros(shape.max_num_seqs, dtype=np.int64)
        self._left = np.zeros(shape.max_num_seqs, dtype=np.int64)
        self._context = np.zeros(shape.max_num_seqs, dtype=np.int64)
        self._n = 0
        self._context_tokens = 0
        self._reading_tokens = 0
        self._chosen: dict[int, int] = {}
        self.next_change_s = np.inf
        """No request can finish before this."""

    def submit(self, request: int, input_tokens: int, output_tokens: int, at_s: float) -> None:
        """Queue a request that arrives at `at_s`; `advance` to that time first."""
        if not self.num_unfinished:
            self.now_s = max(self.now_s, at_s)
        self.num_unfinished += 1
        self._waiting.append(Prompt(request, input_tokens, output_tokens))
        self.next_change_s = min(self.next_change_s, self.now_s)

    def advance(self, until_s: float) -> None:
        """Run whole rounds until the clock has reached `until_s` or nothing is left to do."""
        while self.now_s < until_s and self.num_unfinished:
            self._admit()
            if self._reading:
                self._mixed_round()
            else:
                self._decode_rounds(until_s)
        if not self.num_unfinished:
            self.next_change_s = np.inf
        elif self._reading or not self._n:
            self.next_change_s = self.now_s
        else:
            steps = int(self._left[: self._n].min())
            self.next_change_s = self.now_s + (steps - 1) * self._round_s(self._context_tokens)[0]

    # -- admission -----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        shape = self.shape
        while self._waiting and self._n + len(self._reading) < shape.max_num_seqs:
            prompt = self._waiting[0]
            if self._context_tokens + self._reading_tokens + prompt.tokens + 1 > shape.kv_tokens:
                if self._n or self._reading:
                    return
                prompt.tokens = shape.kv_tokens - 1  # alone it still runs, as far as the cache reaches
                prompt.outputs_left = 1
            self._waiting.popleft()
            self._reading.append(prompt)
            self._reading_tokens += prompt.tokens

    # -- rounds --------------------------------------------------------------------------------------------------

    def _micro_batches(self, num_decodes: int) -> int:
        if len(self.shape.clocks) == 1:
            return 1
        chosen = self._chosen.get(num_decodes)
        if chosen is None:
            context = self._context_tokens / max(1, self._n)
            times = [_step_time(clock, context) for clock in self.shape.clocks]
            hop = self.shape.hop_latency_s / len(times) + num_decodes * self.shape.hop_token_s / len(times)
            chosen = self._chosen[num_decodes] = choose_num_micro_batches(num_decodes, times, hop)
        return chosen

    def _round_s(self, context_tokens: float) -> tuple[float, list[float]]:
        """Duration of a round without prompts, and each stage's busy time in it."""
        k = self._micro_batches(self._n)
        size, context = self._n / k, context_tokens / k
        times = [clock.step_s(size, context) for clock in self.shape.clocks]
        hops = self.shape.hop_latency_s + size * self.shape.hop_token_s
        return max(k * max(times), sum(times) + hops), [k * t for t in times]

    def _decode_rounds(self, until_s: float) -> None:
        """As many rounds as end nothing before the last, stay below `until_s` but for the last, and fit the cache."""
        n = self._n
        room = self.shape.kv_tokens - self._context_tokens
        if room < n:
            self._preempt()
            return
        first, _ = self._round_s(self._context_tokens)
        wanted = int(np.ceil((until_s - self.now_s) / first)) if np.isfinite(until_s) else 1 << 30
        rounds = max(1, min(int(self._left[:n].min()), room // n, wanted))
        duration, busy = self._round_s(self._context_tokens + n * (rounds - 1) / 2)
        self.now_s += rounds * duration
        for i, seconds in enumerate(busy):
            self.busy_s[i] += rounds * seconds
        self._grow(rounds)

    def _mixed_round(self) -> None:
        """Decodes and chunks of prompts in the same steps."""
        shape, n = self.shape, self._n
        num_steps = max(self._micro_batches(n), len(shape.clocks))
        size, context = n / num_steps, self._context_tokens / num_steps
        steps: list[list[float]] = []
        finished: list[Prompt] = []
        for _ in range(num_steps):
            budget = shape.max_num_batched_tokens - int(np.ceil(size))
            tokens = pairs = 0.0
            ended = 0
            for prompt in self._reading:
                chunk = prefill_chunk(prompt.tokens - prompt.done, budget)
                if chunk <= 0:
                    continue
                pairs += chunk * (prompt.done + chunk / 2)
                prompt.done += chunk
                budget -= chunk
                tokens += chunk
                if prompt.done == prompt.tokens:
                    ended += 1
                    finished.append(prompt)
            if tokens or size:
                steps.append([clock.step_s(size, context, tokens, pairs, ended) for clock in shape.clocks])
        busy = [sum(step[i] for step in steps) for i in range(len(shape.clocks))]
        hops = 0.0
        if len(shape.clocks) > 1:
            hops = shape.hop_latency_s + shape.max_num_batched_tokens * shape.hop_token_s
        self.now_s += max(max(busy), max(map(sum, steps)) + hops)
        for i, seconds in enumerate(busy):
            self.busy_s[i] += seconds
        if n:
            if shape.kv_tokens - self._context_tokens - self._reading_tokens < n:
                self._preempt()
            self._grow(1)
        for prompt in finished:
            self._start_decoding(prompt)

    # -- sequences -----------------------------------------------------------------------------------------------

    def _start_decoding(self, prompt: Prompt) -> None:
        self._reading.remove(prompt)
        self._reading_tokens -= prompt.tokens
        if np.isnan(self._first_token_s[prompt.request]):
            self._first_token_s[prompt.request] = self.now_s
        if prompt.outputs_left <= 1:
            self._done_s[prompt.request] = self.now_s
            self.num_unfinished -= 1
            return
        n = self._n
        self._request[n], self._left[n], self._context[n] = (
            prompt.request,
            prompt.outputs_left - 1,
            prompt.tokens + 1,
        )
        self._context_tokens += prompt.tokens + 1
        self._n += 1

    def _grow(self, rounds: int) -> None:
        """Every running sequence gets `rounds` tokens; those with none left are done."""
        n = self._n
        self._left[:n] -= rounds
        self._context[:n] += rounds
        self._context_tokens += rounds * n
        ended = self._left[:n] <= 0
        if ended.any():
            self._done_s[self._request[:n][ended]] = self.now_s
            self.num_unfinished -= int(ended.sum())
            self._keep(~ended)

    def _preempt(self) -> None:
        """Drop the newest sequence's cache; it waits at the head of the queue and is read again."""
        n = self._n
        newest = int(np.argmax(self._request[:n]))
        prompt = Prompt(int(self._request[newest]), int(self._context[newest]), int(self._left[newest]))
        keep = np.ones(n, dtype=bool)
        keep[newest] = False
        self._keep(keep)
        self._waiting.appendleft(prompt)
        self.num_preemptions += 1

    def _keep(self, keep: NDArray[np.bool_]) -> None:
        n, left = self._n, int(keep.sum())
        for array in (self._request, self._left, self._context):
            array[:left] = array[:n][keep]
        self._n = left
        self._context_tokens = int(self._context[:left].sum())


def _step_time(clock: StageClock, context: float) -> StepTime:
    return lambda size: clock.step_s(size, size * context)


def drain(replicas: Sequence[SimulatedReplica]) -> None:
    """Run until every request is done."""
    for replica in replicas:
        replica.advance(np.inf)
