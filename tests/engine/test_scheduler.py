"""The scheduler against a model that is a function: every request gets the tokens it would get alone, whatever comes and
goes beside it, and no block is ever lost or shared by mistake."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bimetal.engine.driver.blocks import BlockPool, block_hash, root_hash
from bimetal.engine.driver.scheduler import Scheduler, SchedulerLimits
from bimetal.engine.driver.sequences import uniforms
from bimetal.engine.wire.api import Generate, Output, SamplingParams
from bimetal.engine.wire.step import MAX_SCORED_TOKENS, NO_TARGET, Sampled, Step
from bimetal.errors import RequestError

VOCAB = 50


def next_token(context: tuple[int, ...]) -> int:
    """The model: any change anywhere in the context changes what follows."""
    value = 7
    for token in context:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB


class FunctionModel:
    """Executes steps as stages do: KV slots hold tokens, a step reads its context from them alone."""

    def __init__(self, num_slots: int, num_sequence_slots: int) -> None:
        self.kv = np.full(num_slots, -1, np.int64)
        self.pool = np.zeros(num_sequence_slots, np.int64)

    def run(self, step: Step, block_tokens: int) -> Sampled:
        ids = np.where(step.token_ids < 0, self.pool[np.maximum(-1 - step.token_ids, 0)], step.token_ids)
        self.kv[step.slots] = ids
        sampled = []
        for row, sequence in zip(step.logit_rows, step.logit_sequences, strict=True):
            length = int(step.positions[row]) + 1
            places = np.arange(length)
            slots = step.block_tables[sequence][places // block_tokens] * block_tokens + places % block_tokens
            sampled.append(next_token(tuple(int(t) for t in self.kv[slots])))
            self.pool[step.sequence_slots[sequence]] = sampled[-1]
        return Sampled(np.array(sampled, np.int32))


def alone(prompt: tuple[int, ...], num_tokens: int, eos: tuple[int, ...]) -> list[int]:
    """What a request should get; ends before an end-of-sequence token."""
    context = list(prompt)
    for _ in range(num_tokens):
        token = next_token(tuple(context))
        if token in eos:
            break
        context.append(token)
    return context[len(prompt) :]


prompts = st.lists(st.integers(0, 3), min_size=1, max_size=40).map(tuple)
requests = st.lists(st.tuples(prompts, st.integers(1, 30)), min_size=1, max_size=14)


@settings(max_examples=150, deadline=None)
@given(
    requests=requests,
    num_stages=st.integers(1, 4),
    num_micro_batches=st.sampled_from([None, 1, 2, 3]),
    block_tokens=st.sampled_from([2, 4, 16]),
    spare_blocks=st.integers(0, 30),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(6, 40),
    eos=st.sampled_from([(), (11,), (3, 17, 29)]),
    caching=st.booleans(),
    aborts=st.sets(st.integers(0, 13)),
    seed=st.integers(0, 1000),
)
def test_every_request_gets_its_own_tokens(
    requests: list[tuple[tuple[int, ...], int]],
    num_stages: int,
    num_micro_batches: int | None,
    block_tokens: int,
    spare_blocks: int,
    max_num_seqs: int,
    budget: int,
    eos: tuple[int, ...],
    caching: bool,
    aborts: set[int],
    seed: int,
) -> None:
    max_model_len = 72
    num_blocks = -(-max_model_len // block_tokens) + spare_blocks
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        num_stages=num_stages,
        eos_token_ids=eos,
        enable_prefix_caching=caching,
        num_micro_batches=num_micro_batches,
    )
    scheduler = Scheduler(limits, [lambda n: 0.01 + 0.001 * n] * num_stages, 0.001)
    model = FunctionModel(num_blocks * block_tokens, max_num_seqs)
    rng = np.random.default_rng(seed)
    found: dict[str, list[int]] = {str(i): [] for i in range(len(requests))}
    finished: set[str] = set()
    waiting = list(enumerate(requests))
    in_flight: list[tuple[int, Sampled]] = []

    def take(outputs: list[Output]) -> None:
        for output in outputs:
            assert output.request_id not in finished, "nothing comes after the last output"
            found[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                finished.add(output.request_id)

    aborted: set[str] = set()
    for _ in range(5000):
        if waiting and rng.random() < 0.5:
            i, (prompt, num_tokens) = waiting.pop(0)
            sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
            scheduler.add(Generate(str(i), prompt, sampling), seed=i)
        while (issued := scheduler.schedule()) is not None:
            assert issued.step.num_tokens <= budget
            starts = issued.step.query_starts
            assert (starts[1 : issued.step.num_decodes + 1] - starts[: issued.step.num_decodes] == 1).all()
            in_flight.append((issued.number, model.run(issued.step, block_tokens)))
        if aborts and rng.random() < 0.1:
            name = str(aborts.pop())
            if name in found and name not in finished:
                aborted.add(name)
                scheduler.abort([name])
        if in_flight:
            take(scheduler.apply(*in_flight.pop(0)).outputs)
        elif not waiting and not scheduler.num_unfinished:
            break
    assert not scheduler.num_unfinished, "some request never ends"
    assert not in_flight
    for i, (prompt, num_tokens) in enumerate(requests):
        expected = alone(prompt, min(num_tokens, max_model_len - len(prompt)), eos)
        if str(i) in aborted:
            assert found[str(i)] == expected[: len(found[str(i)])]
        else:
            assert found[str(i)] == expected
    assert scheduler.pool.num_free == num_blocks
    assert scheduler.table.num_running == 0


def _limits(**changes: object) -> SchedulerLimits:
    return SchedulerLimits(
        **{
            **{
                "max_num_seqs": 4,
                "max_num_batched_tokens": 16,
                "max_model_len": 32,
                "num_blocks": 16,
                "block_tokens": 4,
                "num_stages": 1,
            },
            **changes,
        }
    )  # type: ignore[arg-type]


def test_requests_that_can_never_run_are_refused() -> None:
    scheduler = Scheduler(_limits(), [lambda n: 0.01])
    with pytest.raises(RequestError, match="32 tokens, but prompt and output together may have 32"):
        scheduler.add(Generate("a", tuple(range(32)), SamplingParams()), 0)
    with pytest.raises(RequestError, match="no tokens"):
        scheduler.add(Generate("a", (), SamplingParams()), 0)
    scheduler.add(Generate("a", (1,), SamplingParams()), 0)
    with pytest.raises(RequestError, match="in use"):
        scheduler.add(Generate("a", (1,), SamplingParams()), 0)


def test_deadlines_end_requests_and_free_their_blocks() -> None:
    scheduler = Scheduler(_limits(), [lambda n: 0.01])
    scheduler.add(Generate("late", (1, 2, 3), SamplingParams(), deadline_s=1.0), 0, now_s=10.0)
    scheduler.add(Generate("waits", (1, 2, 3), SamplingParams()), 0, now_s=10.0)
    scheduler.schedule()
    assert not scheduler.expire(10.9).outputs
    outputs = scheduler.expire(11.0).outputs
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("late", "deadline")]
    assert scheduler.num_unfinished == 1


def test_a_step_scores_no_more_prompt_tokens_than_stages_have_memory_for() -> None:
    """A row of logits may be half a megabyte, and a budget is made for rows of hidden states."""
    limits = _limits(max_model_len=4096, num_blocks=4096, max_num_batched_tokens=2048)
    scheduler = Scheduler(limits, [lambda n: 0.01])
    sampling = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=0)
    for i in range(2):
        scheduler.add(Generate(f"scored{i}", (3,) * 700, sampling), 0)
        scheduler.add(Generate(f"not{i}", (4,) * 700, SamplingParams(max_tokens=2, temperature=0.0)), 0)
    num_scored = {"scored0": 0, "scored1": 0}
    while scheduler.num_unfinished:
        issued = scheduler.schedule()
        assert issued is not None
        for sequence, target in issued.rows:
            if target != NO_TARGET:
                num_scored[sequence.request.request_id] += 1
        assert sum(target != NO_TARGET for _, target in issued.rows) <= MAX_SCORED_TOKENS
        r = issued.step.num_logit_rows
        zeros = np.zeros(r, np.int32)
        scheduler.apply(
            issued.number,
            Sampled(
                zeros,
                zeros.astype(np.float32),
                zeros,
                np.zeros((r, 0), np.int32),
                np.zeros((r, 0), np.float32),
            ),
        )
    assert num_scored == {"scored0": 699, "scored1": 699}


def test_a_prefix_is_found_within_one_salt_only() -> None:
    scheduler = Scheduler(_limits(), [lambda n: 0.01])
    prompt = tuple(range(9))
    for name, salt in (("first", "s"), ("same", "s"), ("other", "t")):
        scheduler.add(Generate(name, prompt, SamplingParams(max_tokens=1), cache_salt=salt), 0)
        issued = scheduler.schedule()
        assert issued is not None
        output = scheduler.apply(issued.number, Sampled(np.array([1], np.int32))).outputs[0]
        assert output.num_cached_tokens == (8 if name == "same" else 0)
        assert issued.step.num_tokens == (1 if name == "same" else 9)


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 12))
def test_blocks_are_held_named_and_given_back(choices: list[int], num_blocks: int) -> None:
    """Random takes, shares and releases against a plain count of holders."""
    pool = BlockPool(num_blocks)
    held: list[int] = []
    for i, choice in enumerate(choices):
        name = block_hash(root_hash("r", ""), np.array([choice], np.int32))
        if choice < 4:
            taken = pool.take(1)
            assert (taken is None) == (len(set(held)) == num_blocks)
            if taken is not None:
                assert taken[0] not in held, "a block that somebody holds was given away"
                held += taken
                pool.name(taken[0], name)
        elif choice < 7:
            block = pool.find(name)
            if block is not None:
                pool.share(block)
                held.append(block)
        elif held:
            pool.release([held.pop(i % len(held))])
        assert pool.num_free == num_blocks - len(set(held))


def test_uniforms_are_uniform_and_depend_on_seed_and_position_only() -> None:
    seeds = np.repeat(np.arange(50, dtype=np.uint64), 200)
    positions = np.tile(np.arange(200, dtype=np.int32), 50)
    values = uniforms(seeds, positions)
    assert values.min() >= 0
    assert values.max() < 1
    counts, _edges = np.histogram(values, 20, (0, 1))
    assert abs(counts - 500).max() < 120  # five standard deviations
    assert len(np.unique(values)) > 9950
    np.testing.assert_array_equal(values[[3, 777]], uniforms(seeds[[3, 777]], positions[[3, 777]]))
