"""`SimulatedReplica`: one stage with continuous batching, on modelled time.

Decides as the engine's scheduler does, through the same `policy` functions: decodes first, prompts in chunks beside them
under a token budget, first come first served, the newest pre-empted when the cache is full; a step is issued while the one
before it runs. Steps without a prompt are taken many at a time, since nothing is decided between them. Does not know where
requests come from; several stages are `pipeline`'s.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bimetal.policy.batching import prefill_chunk
from bimetal.simulate.shapes import ReplicaShape


@dataclass(slots=True)
class Prompt:
    """A request that is being read."""

    request: int
    tokens: int
    """To read in all: the prompt, and after a pre-emption what was generated too."""
    outputs_left: int
    at_s: float
    """When it came."""
    done: int = 0


class SimulatedReplica:
    def __init__(
        self, shape: ReplicaShape, first_token_s: NDArray[np.float64], done_s: NDArray[np.float64]
    ) -> None:
        self.shape = shape
        (self._clock,) = shape.clocks
        self.now_s = 0.0
        self.busy_s = [0.0]
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
        self._ahead_s = 0.0
        """Steps are issued so long before they start: who comes later is not in them."""
        self._context_tokens = 0
        self._reading_tokens = 0
        self.next_change_s = np.inf
        """No request can finish before this."""

    def submit(self, request: int, input_tokens: int, output_tokens: int, at_s: float) -> None:
        """Queue a request that arrives at `at_s`; `advance` to that time first."""
        if not self.num_unfinished:
            self.now_s, self._ahead_s = max(self.now_s, at_s), 0.0
        self.num_unfinished += 1
        self._waiting.append(Prompt(request, input_tokens, output_tokens, at_s))
        self.next_change_s = min(self.next_change_s, self.now_s)

    def advance(self, until_s: float) -> None:
        """Run whole steps until the clock has reached `until_s` or nothing is left to do."""
        while self.now_s < until_s and self.num_unfinished:
            self._admit()
            if self._reading:
                self._mixed_step()
            else:
                self._decode_steps(until_s)
        if not self.num_unfinished:
            self.next_change_s = np.inf
        elif self._reading or not self._n:
            self.next_change_s = self.now_s
        else:
            steps = int(self._left[: self._n].min())
            self.next_change_s = self.now_s + (steps - 1) * self._step_s(self._context_tokens)

    # -- admission -----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        shape = self.shape
        while self._waiting and self._n + len(self._reading) < shape.max_num_seqs:
            prompt = self._waiting[0]
            if prompt.at_s > self.now_s - self._ahead_s and (self._n or self._reading):
                return
            if self._context_tokens + self._reading_tokens + prompt.tokens + 1 > shape.kv_tokens:
                if self._n or self._reading:
                    return
                prompt.tokens = shape.kv_tokens - 1  # alone it still runs, as far as the cache reaches
                prompt.outputs_left = 1
            self._waiting.popleft()
            self._reading.append(prompt)
            self._reading_tokens += prompt.tokens

    # -- steps ---------------------------------------------------------------------------------------------------

    def _step_s(self, context_tokens: float) -> float:
        """Of a step without prompts."""
        return self._clock.step_s(self._n, context_tokens)

    def _run(self, num_steps: int, step_s: float) -> None:
        self.now_s += num_steps * step_s
        self.busy_s[0] += num_steps * step_s
        self._ahead_s = step_s

    def _decode_steps(self, until_s: float) -> None:
        """As many steps as end nothing before the last, stay below `until_s` but for the last, and fit the cache."""
        n = self._n
        room = self.shape.kv_tokens - self._context_tokens
        if room < n:
            self._preempt()
            return
        first = self._step_s(self._context_tokens)
        wanted = int(np.ceil((until_s - self.now_s) / first)) if np.isfinite(until_s) else 1 << 30
        steps = 1 if self._waiting else max(1, min(int(self._left[:n].min()), room // n, wanted))
        self._run(steps, self._step_s(self._context_tokens + n * (steps - 1) / 2))
        self._grow(steps)

    def _mixed_step(self) -> None:
        """Decodes and chunks of prompts together."""
        shape, n = self.shape, self._n
        budget = shape.max_num_batched_tokens - n
        tokens = pairs = 0.0
        finished: list[Prompt] = []
        for prompt in self._reading:
            chunk = prefill_chunk(prompt.tokens - prompt.done, budget)
            if chunk <= 0:
                break
            pairs += chunk * (prompt.done + chunk / 2)
            prompt.done += chunk
            budget -= chunk
            tokens += chunk
            if prompt.done == prompt.tokens:
                finished.append(prompt)
        self._run(1, self._clock.step_s(n, self._context_tokens, tokens, pairs, len(finished)))
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

    def _grow(self, steps: int) -> None:
        """Every running sequence gets `steps` tokens; those with none left are done."""
        n = self._n
        self._left[:n] -= steps
        self._context[:n] += steps
        self._context_tokens += steps * n
        ended = self._left[:n] <= 0
        if ended.any():
            self._done_s[self._request[:n][ended]] = self.now_s
            self.num_unfinished -= int(ended.sum())
            self._keep(~ended)

    def _preempt(self) -> None:
        """Drop the newest sequence's cache; it waits at the head of the queue and is read again."""
        n = self._n
        newest = int(np.argmax(self._request[:n]))
        prompt = Prompt(
            int(self._request[newest]), int(self._context[newest]), int(self._left[newest]), self.now_s
        )
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
