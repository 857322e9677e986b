"""State of requests inside the driver: one `Sequence` each, and a table of those that run.

The table is a structure of arrays over `max_num_seqs` slots, so that a decode step of hundreds of sequences is built with
a handful of numpy calls. A slot is also the sequence's place in the stages' pool of sampled ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bimetal.engine.wire.api import Generate, TokenLogprob

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SMALLEST_TEMPERATURE = 1e-5


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.float32]:
    """One number in [0, 1) for each (seed, position), by the splitmix64 mix: the same on every machine and in any batch."""
    z = seeds + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    u: NDArray[np.float32] = (z >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return u


@dataclass(slots=True, eq=False)
class Sequence:
    """One request from arrival to its last token. `tokens[:num_tokens]` are known, prompt first."""

    request: Generate
    tokens: NDArray[np.int32]
    num_prompt: int
    token_limit: int
    """It ends when this many tokens are known."""
    seed: int
    arrival: int
    root: bytes
    ending_ids: tuple[int, ...] = ()
    """End-of-sequence ids that end it, stop tokens apart."""
    deadline_at_s: float | None = None
    num_tokens: int = 0
    in_flight: int = 0
    """Steps issued that will sample a token for it and have not returned."""
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """Names of its full blocks, in order."""
    num_cached: int = 0
    num_scored: int = 1
    """Prompt tokens whose log-probability was asked of a step (the first has none)."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    started: bool = False
    finished: bool = False
    matcher: Any = None
    mask_due: tuple[int, int] | None = None
    """(step, row) that waits for a token mask, which depends on ids still in flight."""
    bias_ids: NDArray[np.int32] = field(init=False)
    bias_values: NDArray[np.float32] = field(init=False)
    """Of each of its rows: kept as arrays, since a request may bias every token there is, and every step says so again."""

    def __post_init__(self) -> None:
        bias = self.request.sampling.logit_bias
        self.bias_ids = np.fromiter(bias.keys(), np.int32, len(bias))
        self.bias_values = np.fromiter(bias.values(), np.float32, len(bias))

    @property
    def scores_prompt(self) -> bool:
        """Prompt tokens in its next step get rows of logits, too."""
        return self.request.sampling.prompt_logprobs is not None and not self.started

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt


class SequenceTable:
    """The running sequences' state by slot."""

    def __init__(self, max_num_seqs: int, max_blocks_per_sequence: int) -> None:
        n = max_num_seqs
        self.sequences: list[Sequence | None] = [None] * n
        self.free_slots = list(range(n - 1, -1, -1))
        self.running = np.zeros(n, np.bool_)
        self.prefilling = np.zeros(n, np.bool_)
        """Its last known token is in no step yet; the scheduler takes such sequences from a list of their own."""
        self.num_tokens = np.zeros(n, np.int32)
        self.num_scheduled = np.zeros(n, np.int32)
        """Tokens whose KV is written by steps issued so far; position of the next."""
        self.in_flight = np.zeros(n, np.int32)
        self.last_step = np.zeros(n, np.int64)
        self.token_limit = np.zeros(n, np.int32)
        self.last_token = np.zeros(n, np.int32)
        self.num_blocks = np.zeros(n, np.int32)
        self.block_table = np.zeros((n, max_blocks_per_sequence), np.int32)
        self.seeds = np.zeros(n, np.uint64)
        self.temperature = np.zeros(n, np.float32)
        self.top_k = np.zeros(n, np.int32)
        self.top_p = np.ones(n, np.float32)
        self.min_p = np.zeros(n, np.float32)
        self.num_logprobs = np.full(n, -1, np.int32)
        self.special = np.zeros(n, np.bool_)
        """Has penalties, biases, a minimum length or a grammar: its rows need more than the arrays here."""

    @property
    def num_running(self) -> int:
        return len(self.sequences) - len(self.free_slots)

    def place(self, sequence: Sequence, num_computed: int) -> int:
        """Give a waiting sequence a slot; its first `num_computed` tokens are in the KV cache already."""
        slot = self.free_slots.pop()
        s = sequence.request.sampling
        sequence.slot = slot
        self.sequences[slot] = sequence
        self.running[slot] = True
        self.prefilling[slot] = True
        self.num_tokens[slot] = sequence.num_tokens
        self.num_scheduled[slot] = num_computed
        self.in_flight[slot] = 0
        self.last_step[slot] = -1
        self.token_limit[slot] = sequence.token_limit
        self.last_token[slot] = sequence.tokens[sequence.num_tokens - 1]
        self.seeds[slot] = sequence.seed
        # Below this a division of logits may overflow, and nothing but the largest is ever drawn.
        self.temperature[slot] = s.temperature if s.temperature >= _SMALLEST_TEMPERATURE else 0.0
        self.top_k[slot] = s.top_k
        self.top_p[slot] = s.top_p
        self.min_p[slot] = s.min_p
        self.num_logprobs[slot] = -1 if s.logprobs is None else s.logprobs
        self.special[slot] = bool(
            s.repetition_penalty != 1.0
            or s.presence_penalty
            or s.frequency_penalty
            or s.logit_bias
            or s.min_tokens
            or sequence.matcher is not None
        )
        return slot

    def set_blocks(self, slot: int, blocks: list[int]) -> None:
        self.block_table[slot, : len(blocks)] = blocks
        self.num_blocks[slot] = len(blocks)

    def append_block(self, slot: int, block: int) -> None:
        self.block_table[slot, self.num_blocks[slot]] = block
        self.num_blocks[slot] += 1

    def remove(self, slot: int) -> None:
        sequence = self.sequences[slot]
        if sequence is not None:
            sequence.slot = None
        self.sequences[slot] = None
        self.running[slot] = False
        self.free_slots.append(slot)

    def ready_to_decode(self) -> NDArray[np.bool_]:
        """Sequences whose next step is one token: everything before it is scheduled, and the limit is not reached."""
        expected = self.num_tokens + self.in_flight
        ready: NDArray[np.bool_] = (
            self.running
            & ~self.prefilling
            & (self.num_scheduled == expected - 1)
            & (expected < self.token_limit)
        )
        return ready
