"""The scheduler: turns requests into steps, and the ids that come back into outputs.

Owns the sequences, their KV blocks and the steps in flight. Which requests share a step is decided by
`policy.batching`. Does no I/O and reads no clock: the driver feeds it and sends what it returns.

Every stage runs steps in the order in which they are issued, so a block may be given to another sequence while a step
that still writes to it is in flight: the new owner's step comes later on every stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from bimetal.engine.driver.blocks import BlockPool, block_hash, root_hash
from bimetal.engine.driver.sequences import Sequence, SequenceTable
from bimetal.engine.driver.step_builder import Chunk, build_step
from bimetal.engine.wire.api import Generate, Output, TokenLogprob
from bimetal.engine.wire.step import MAX_SCORED_TOKENS, NO_TARGET, Sampled, Step
from bimetal.errors import RequestError
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


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_tokens: int
    num_stages: int
    eos_token_ids: tuple[int, ...] = ()
    enable_prefix_caching: bool = True
    revision: str = ""
    """Names the weights: prefixes are never shared across revisions."""
    num_micro_batches: int | None = None
    """None: chosen from the stages' measured step times."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A step, its number, and what each of its logit rows is for."""

    number: int
    step: Step
    rows: list[tuple[Sequence, int]]
    """(sequence, target): NO_TARGET, or the prompt token that the row scores."""


@dataclass(slots=True)
class Counters:
    """Since the start; the driver turns them into statistics."""

    num_steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class MaskDue:
    """A token mask to compute and send: for the next token of `sequence`, sampled in row `row` of step `step`."""

    sequence: Sequence
    step: int
    row: int


@dataclass(slots=True)
class Applied:
    outputs: list[Output] = field(default_factory=list)
    masks: list[MaskDue] = field(default_factory=list)


class Scheduler:
    def __init__(
        self, limits: SchedulerLimits, stage_times: Listing[StepTime], hop_s: float = 0.0, first_step: int = 1
    ) -> None:
        self.limits = limits
        self.counters = Counters()
        self.pool = BlockPool(limits.num_blocks)
        self.table = SequenceTable(limits.max_num_seqs, -(-limits.max_model_len // limits.block_tokens))
        self.waiting: deque[Sequence] = deque()
        self.outstanding: dict[int, Issued] = {}
        self._stage_times = list(stage_times)
        self._hop_s = hop_s
        self.smallest_chunk_tokens = smallest_chunk_tokens(stage_times)
        """Of a prompt that is cut to fill the pipeline."""
        self._prefilling: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}
        self._arrivals = 0
        self._next_step = first_step
        self._chosen: dict[int, int] = {}

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: Generate, seed: int, matcher: object = None, now_s: float = 0.0) -> Sequence:
        """Queue a request; RequestError if it can never run."""
        num_prompt = len(request.prompt_token_ids)
        limits = self.limits
        if num_prompt == 0:
            raise RequestError("the prompt has no tokens: send at least one", param="prompt")
        if num_prompt >= limits.max_model_len:
            raise RequestError(
                f"the prompt has {num_prompt} tokens, but prompt and output together may have {limits.max_model_len}: "
                "shorten it, or raise --max-model-len",
                param="prompt",
                code="context_length_exceeded",
            )
        if request.request_id in self._by_id:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        token_limit = min(num_prompt + request.sampling.max_tokens, limits.max_model_len)
        tokens = np.empty(token_limit, np.int32)
        tokens[:num_prompt] = request.prompt_token_ids
        sequence = Sequence(
            request=request,
            tokens=tokens,
            num_prompt=num_prompt,
            token_limit=token_limit,
            seed=seed,
            arrival=self._arrivals,
            root=root_hash(limits.revision, request.cache_salt),
            ending_ids=() if request.sampling.ignore_eos else limits.eos_token_ids,
            deadline_at_s=None if request.deadline_s is None else now_s + request.deadline_s,
            num_tokens=num_prompt,
            matcher=matcher,
        )
        self._arrivals += 1
        self._by_id[request.request_id] = sequence
        self.waiting.append(sequence)
        return sequence

    def abort(self, request_ids: Iterable[str]) -> Applied:
        """Forget requests and free their blocks at once. Unknown ids are ignored: they have just finished."""
        applied = Applied()
        for request_id in request_ids:
            sequence = self._by_id.get(request_id)
            if sequence is not None:
                self._finish(sequence, applied)
        return applied

    def expire(self, now_s: float) -> Applied:
        """End requests whose deadline has passed."""
        applied = Applied()
        late = [s for s in self._by_id.values() if s.deadline_at_s is not None and s.deadline_at_s <= now_s]
        for sequence in late:
            applied.outputs.append(Output(sequence.request.request_id, finish_reason="deadline"))
            self._finish(sequence, applied)
        return applied

    @property
    def num_unfinished(self) -> int:
        return len(self._by_id)

    @property
    def num_micro_batches(self) -> int:
        """In flight for the sequences that now decode."""
        return self._num_micro_batches(int(np.count_nonzero(self.table.ready_to_decode())))

    def _num_micro_batches(self, num_decodes: int) -> int:
        if self.limits.num_micro_batches is not None:
            return self.limits.num_micro_batches
        if self._prefilling or (self.waiting and self.table.free_slots):
            return num_micro_batches_with_prefill(self.limits.num_stages)
        chosen = self._chosen.get(num_decodes)
        if chosen is None:
            chosen = choose_num_micro_batches(num_decodes, self._stage_times, self._hop_s)
            self._chosen[num_decodes] = chosen
        return chosen

    # -- steps ---------------------------------------------------------------------------------------------------

    def schedule(self) -> Issued | None:
        """The next step, or None if there is nothing to run or enough is in flight."""
        table = self.table
        ready = table.ready_to_decode()
        num_micro_batches = self._num_micro_batches(int(np.count_nonzero(ready)))
        if len(self.outstanding) >= max_outstanding_steps(self.limits.num_stages, num_micro_batches):
            return None
        oldest = next(iter(self.outstanding), None)
        slots = pick_decodes(ready, table.in_flight, table.last_step, oldest, num_micro_batches)
        slots = self._reserve_decode_blocks(slots[: self.limits.max_num_batched_tokens])
        chunks = self._prefill_chunks(self._budget() - len(slots))
        if not len(slots) and not chunks:
            return None
        number = self._next_step
        step, rows = build_step(table, slots, chunks, number, self.limits.block_tokens)
        issued = Issued(number, step, rows)
        self._next_step += 1
        self.counters.num_steps += 1
        self._advance(issued, slots, chunks)
        return issued

    def _reserve_decode_blocks(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """Give each sequence the block that its next token needs, pre-empting the newest ones where none is left."""
        table = self.table
        short = slots[table.num_scheduled[slots] // self.limits.block_tokens >= table.num_blocks[slots]]
        if not len(short):
            return slots
        dropped: set[int] = set()
        for slot in short:
            if int(slot) in dropped:
                continue
            sequence = table.sequences[slot]
            assert sequence is not None
            while (taken := self.pool.take(1)) is None:
                victim = self._newest_running()
                assert victim.slot is not None
                dropped.add(victim.slot)
                self._preempt(victim)
                if victim is sequence:
                    break
            if taken is not None:
                sequence.blocks += taken
                table.append_block(int(slot), taken[0])
        return np.array([s for s in slots if int(s) not in dropped], np.intp) if dropped else slots

    def _newest_running(self) -> Sequence:
        return max((s for s in self.table.sequences if s is not None), key=lambda s: s.arrival)

    def _preempt(self, sequence: Sequence) -> None:
        """Drop its KV; it waits at the head of the queue and is computed again, output tokens included."""
        self.counters.num_preemptions += 1
        self._leave_slot(sequence)
        self.waiting.appendleft(sequence)

    def _leave_slot(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            self.table.remove(sequence.slot)
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.hashes = []

    def _budget(self) -> int:
        """Tokens of the next step."""
        limits = self.limits
        if limits.num_stages == 1 or not (self._prefilling or self.waiting):
            return limits.max_num_batched_tokens
        known = sum(s.num_tokens - int(self.table.num_scheduled[s.slot]) for s in self._prefilling)
        free = len(self.table.free_slots)
        known += sum(s.num_tokens for s in islice(self.waiting, free))
        return prefill_budget(
            limits.max_num_batched_tokens, known, limits.num_stages, self.smallest_chunk_tokens
        )

    def _prefill_chunks(self, budget: int) -> list[Chunk]:
        table = self.table
        chunks = []
        scores_left = MAX_SCORED_TOKENS
        for sequence in self._prefilling:
            room = min(budget, scores_left) if sequence.scores_prompt else budget
            if room <= 0:
                break
            assert sequence.slot is not None
            start = int(table.num_scheduled[sequence.slot])
            size = prefill_chunk(sequence.num_tokens - start, room)
            chunks.append(Chunk(sequence, start, size))
            budget -= size
            scores_left -= size * sequence.scores_prompt
        while self.waiting and table.free_slots:
            sequence = self.waiting[0]
            if (
                sequence.in_flight
            ):  # pre-empted with a token on its way: its prompt is not known to the end yet
                break
            room = min(budget, scores_left) if sequence.scores_prompt else budget
            if room <= 0:
                break
            start_or_none = self._admit(sequence)
            if start_or_none is None:
                break
            self.waiting.popleft()
            size = prefill_chunk(sequence.num_tokens - start_or_none, room)
            chunks.append(Chunk(sequence, start_or_none, size))
            self._prefilling.append(sequence)
            budget -= size
            scores_left -= size * sequence.scores_prompt
        chunks.sort(key=lambda c: c.size != 1)  # single rows first: they are decodes to the kernels
        return chunks

    def _admit(self, sequence: Sequence) -> int | None:
        """Find its cached prefix, take blocks for the rest, give it a slot. None if the blocks are not there."""
        block_tokens = self.limits.block_tokens
        hits = self._cached_prefix(sequence)
        num_new = -(-sequence.num_tokens // block_tokens) - len(hits)
        if num_new > self.pool.num_free - self.pool.num_free_of(hits):
            sequence.hashes = []
            return None
        for block in hits:
            self.pool.share(block)
        fresh = self.pool.take(num_new)
        assert fresh is not None
        sequence.blocks = hits + fresh
        num_computed = len(hits) * block_tokens
        if not sequence.started:
            sequence.num_cached = min(num_computed, sequence.num_prompt)
            self.counters.prompt_tokens += sequence.num_prompt
        self.counters.prefix_query_tokens += sequence.num_tokens
        self.counters.prefix_hit_tokens += num_computed
        slot = self.table.place(sequence, num_computed)
        self.table.set_blocks(slot, sequence.blocks)
        return num_computed

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the longest known prefix. At least one token is left to compute, for its logits."""
        sequence.hashes = []
        if not self.limits.enable_prefix_caching or sequence.request.sampling.prompt_logprobs is not None:
            return []
        block_tokens = self.limits.block_tokens
        hits: list[int] = []
        parent = sequence.root
        for start in range(0, sequence.num_tokens - block_tokens, block_tokens):
            parent = block_hash(parent, sequence.tokens[start : start + block_tokens])
            block = self.pool.find(parent)
            if block is None:
                break
            hits.append(block)
            sequence.hashes.append(parent)
        return hits

    def _advance(self, issued: Issued, slots: NDArray[np.intp], chunks: list[Chunk]) -> None:
        """Account for a step as if it had run."""
        table = self.table
        table.num_scheduled[slots] += 1
        for chunk in chunks:
            slot = chunk.sequence.slot
            assert slot is not None
            table.num_scheduled[slot] = chunk.start + chunk.size
            if chunk.is_last:
                self._prefilling.remove(chunk.sequence)
                table.prefilling[slot] = False
            self._name_full_blocks(chunk.sequence)
        for row, (sequence, target) in enumerate(issued.rows):
            if target == NO_TARGET:
                assert sequence.slot is not None
                sequence.in_flight += 1
                table.in_flight[sequence.slot] += 1
                table.last_step[sequence.slot] = issued.number
                if sequence.matcher is not None:
                    sequence.mask_due = (issued.number, row)
        self.outstanding[issued.number] = issued

    def _name_full_blocks(self, sequence: Sequence) -> None:
        """Make blocks findable whose tokens are all known and whose KV is written by steps issued so far."""
        if not self.limits.enable_prefix_caching or sequence.slot is None:
            return
        block_tokens = self.limits.block_tokens
        full = min(int(self.table.num_scheduled[sequence.slot]), sequence.num_tokens) // block_tokens
        for i in range(len(sequence.hashes), full):
            parent = sequence.hashes[-1] if sequence.hashes else sequence.root
            name = block_hash(parent, sequence.tokens[i * block_tokens : (i + 1) * block_tokens])
            sequence.hashes.append(name)
            self.pool.name(sequence.blocks[i], name)

    # -- results -------------------------------------------------------------------------------------------------

    def masks_ready(self, issued: Issued) -> list[MaskDue]:
        """Masks that a step just issued needs and that depend on nothing in flight."""
        if issued.step.masked is None:
            return []
        return [
            self._pop_mask(sequence)
            for sequence, target in issued.rows
            if target == NO_TARGET and sequence.mask_due is not None and sequence.in_flight == 1
        ]

    def _pop_mask(self, sequence: Sequence) -> MaskDue:
        assert sequence.mask_due is not None
        due = MaskDue(sequence, *sequence.mask_due)
        sequence.mask_due = None
        return due

    def apply(self, number: int, sampled: Sampled | None) -> Applied:
        """Take in a step's ids (None: it had no logit rows). Steps return in the order in which they were issued."""
        issued = self.outstanding.pop(number)
        applied = Applied()
        if sampled is None:
            return applied
        ids = sampled.ids.tolist()
        for row, (sequence, target) in enumerate(issued.rows):
            if target != NO_TARGET:
                if not sequence.finished:
                    wanted = sequence.request.sampling.prompt_logprobs or 0
                    sequence.prompt_logprobs.append(_logprob(sampled, row, wanted))
                continue
            sequence.in_flight -= 1
            if sequence.finished:
                continue
            if sequence.slot is not None:
                self.table.in_flight[sequence.slot] -= 1
            self._take_token(sequence, ids[row], sampled, row, applied)
        return applied

    def _take_token(
        self, sequence: Sequence, token: int, sampled: Sampled, row: int, applied: Applied
    ) -> None:
        sampling = sequence.request.sampling
        sequence.tokens[sequence.num_tokens] = token
        sequence.num_tokens += 1
        self.counters.output_tokens += 1
        if sequence.slot is not None:
            self.table.num_tokens[sequence.slot] = sequence.num_tokens
            self.table.last_token[sequence.slot] = token
            if sequence.num_tokens % self.limits.block_tokens == 1:
                self._name_full_blocks(sequence)
        stop = self._stop_reason(sequence, token)
        ended = stop is not None or sequence.num_tokens >= sequence.token_limit
        hidden = stop is not None
        prompt_logprobs = None
        if not sequence.started and sampling.prompt_logprobs is not None:
            prompt_logprobs = tuple(sequence.prompt_logprobs)
        first = not sequence.started
        sequence.started = True
        applied.outputs.append(
            Output(
                sequence.request.request_id,
                token_ids=() if hidden else (token,),
                logprobs=()
                if hidden or sampling.logprobs is None
                else (_logprob(sampled, row, sampling.logprobs),),
                prompt_logprobs=prompt_logprobs,
                num_cached_tokens=sequence.num_cached if first or ended else 0,
                finish_reason=("stop" if stop is not None else "length") if ended else None,
                stop_token_id=stop if stop is not None and token in sampling.stop_token_ids else None,
            )
        )
        if sequence.matcher is not None:
            sequence.matcher.consume(token)
        if ended:
            self._finish(sequence, applied)
        elif sequence.mask_due is not None:
            applied.masks.append(self._pop_mask(sequence))

    def _stop_reason(self, sequence: Sequence, token: int) -> int | None:
        sampling = sequence.request.sampling
        is_held = sequence.num_output < sampling.min_tokens
        if is_held and not (sequence.matcher is not None and sequence.matcher.is_over):
            return None
        if token in sampling.stop_token_ids or token in sequence.ending_ids:
            return token
        return None

    def _finish(self, sequence: Sequence, applied: Applied) -> None:
        sequence.finished = True
        del self._by_id[sequence.request.request_id]
        if sequence.slot is None and sequence in self.waiting:
            self.waiting.remove(sequence)
        self._leave_slot(sequence)
        if sequence.mask_due is not None:  # a step in flight still waits for it; any mask will do
            applied.masks.append(self._pop_mask(sequence))


def _logprob(sampled: Sampled, row: int, num_top: int) -> TokenLogprob:
    assert sampled.logprobs is not None and sampled.ranks is not None
    assert sampled.top_ids is not None and sampled.top_logprobs is not None
    return TokenLogprob(
        float(sampled.logprobs[row]),
        int(sampled.ranks[row]),
        tuple(sampled.top_ids[row, :num_top].tolist()),
        tuple(sampled.top_logprobs[row, :num_top].tolist()),
    )
