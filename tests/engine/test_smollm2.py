"""A real model: SmolLM2 in float32 gives transformers' greedy tokens, split or not; in bfloat16 it stays close."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.engine.checkpoints import assert_greedy, load_reference
from tests.engine.serving import greedy_params, run_all, threaded_engine, tokens_of
from tokenizers import Tokenizer

from bimetal.engine.wire.api import Generate, SamplingParams

pytestmark = pytest.mark.slow

NUM_TOKENS = 64
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea,",
    "Water boils at",
    "The three primary colours are",
    "In 1969, humans first",
    "To bake bread you need",
    "The opposite of hot is",
    "A prime number is",
    "My favourite thing about mountains is",
)


@pytest.fixture(scope="module")
def reference(demo_model: Path) -> Any:
    return load_reference(demo_model)


@pytest.fixture(scope="module")
def prompts(demo_model: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    return [tokenizer.encode(p).ids for p in PROMPTS]


@pytest.mark.parametrize("boundaries", [(0, 30), (0, 18, 30)], ids=["1 stage", "2 stages"])
def test_greedy_tokens_equal_transformers(
    demo_model: Path, prompts: list[list[int]], reference: Any, boundaries: tuple[int, ...]
) -> None:
    with threaded_engine(demo_model, boundaries) as driver:
        requests = [Generate(str(i), tuple(p), greedy_params(NUM_TOKENS)) for i, p in enumerate(prompts)]
        outputs = run_all(driver, requests)
    for i, prompt in enumerate(prompts):
        assert_greedy(reference, prompt, tokens_of(outputs[str(i)]), NUM_TOKENS, PROMPTS[i])


def test_bfloat16_stays_close(demo_model: Path, prompts: list[list[int]]) -> None:
    """Teacher-forced over text of the model's own: the same most likely token, and nearly the same log-probabilities."""
    agree = total = 0
    divergences = []
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=5)
    with threaded_engine(demo_model, (0, 18, 30), plan={"dtype": "float32"}) as exact:
        written = run_all(
            exact, [Generate(str(i), tuple(p), greedy_params(12)) for i, p in enumerate(prompts[:3])]
        )
        texts = [tuple(p + tokens_of(written[str(i)])) for i, p in enumerate(prompts[:3])]
        requests = [Generate(str(i), t, sampling) for i, t in enumerate(texts)]
        wanted = run_all(exact, requests)
    with threaded_engine(demo_model, (0, 18, 30), plan={"dtype": "bfloat16"}) as rounded:
        found = run_all(rounded, requests)
    for i in range(len(texts)):
        ours, theirs = found[str(i)][0].prompt_logprobs, wanted[str(i)][0].prompt_logprobs
        assert ours is not None
        assert theirs is not None
        for a, b in zip(ours, theirs, strict=True):
            total += 1
            agree += a.top_ids[0] == b.top_ids[0]
            known = dict(zip(a.top_ids, a.top_logprobs, strict=True))
            shared = [(p, known[t]) for t, p in zip(b.top_ids, b.top_logprobs, strict=True) if t in known]
            divergences.append(sum(2.718281828**p * (p - q) for p, q in shared))
    assert agree / total > 0.95
    assert abs(sum(divergences) / len(divergences)) < 0.01
