"""Every family, split or not, gives the greedy tokens of `transformers`: mixed lengths together, prompts in chunks,
shared prefixes found in the cache, and a KV cache so small that sequences are pre-empted."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.engine.checkpoints import (
    FAMILIES,
    VOCAB_SIZE,
    assert_greedy,
    greedy,
    load_reference,
    make_checkpoint,
)
from tests.engine.serving import greedy_params, run_all, threaded_engine, tokens_of

from bimetal.engine.wire.api import Generate

NUM_TOKENS = 24


def make_prompts() -> list[list[int]]:
    """Sixteen of 1 to 120 tokens; six of them share their first 40, one is another's copy."""
    rng = random.Random(1)
    lengths = [1, 2, 7, 15, 16, 17, 33, 60, 90, 120]
    prompts = [[rng.randrange(2, VOCAB_SIZE) for _ in range(n)] for n in lengths]
    shared = [rng.randrange(2, VOCAB_SIZE) for _ in range(40)]
    prompts += [shared + [rng.randrange(2, VOCAB_SIZE) for _ in range(n)] for n in (1, 5, 9, 24, 30)]
    return [*prompts, list(prompts[9])]


PROMPTS = make_prompts()


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    return folder, load_reference(folder)


@pytest.mark.parametrize(
    "boundaries", [(0, 4), (0, 1, 4), (0, 1, 2, 4)], ids=["1 stage", "2 stages", "3 stages"]
)
def test_greedy_tokens_equal_transformers(family: tuple[Path, Any], boundaries: tuple[int, ...]) -> None:
    folder, reference = family
    plan = {"max_model_len": 160}
    # 26 blocks of 16 tokens: the sixteen requests need about 60.
    with threaded_engine(
        folder,
        boundaries,
        plan=plan,
        max_num_batched_tokens=32,
        kv_cache_bytes=_cache_bytes(folder, boundaries, 26),
    ) as driver:
        requests = [Generate(str(i), tuple(p), greedy_params(NUM_TOKENS)) for i, p in enumerate(PROMPTS)]
        outputs = run_all(driver, requests)
        stats = driver.stats()
        assert stats.num_preemptions > 0, "the cache was meant to be too small"
        assert stats.prefix_hit_tokens > 0, "shared prefixes were meant to be found"
        assert stats.num_running == stats.num_waiting == 0
        assert stats.kv_used_ratio == 0.0, "blocks leaked"
    for i, prompt in enumerate(PROMPTS):
        assert_greedy(reference, prompt, tokens_of(outputs[str(i)]), NUM_TOKENS, f"prompt {i}")


def _cache_bytes(folder: Path, boundaries: tuple[int, ...], num_blocks: int) -> int:
    """Of the stage with most layers, which then is the one that limits the blocks."""
    from bimetal.catalog.models import load_model_spec

    layers = max(b - a for a, b in itertools.pairwise(boundaries))
    return num_blocks * 16 * load_model_spec(str(folder)).kv_bytes_per_token("float32", layers)


def _zero_attention(model: transformers.PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()


def _drop_layer(model: transformers.PreTrainedModel) -> None:
    del model.model.layers[2]


def _change_rope_theta(model: transformers.PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq *= 1.3


def _drop_bias(model: transformers.PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias") or name.endswith("q_proj.bias") or name.endswith("v_proj.bias"):
            parameter.zero_()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[list[int], list[int]]]]:
    """A checkpoint, and what follows each prompt of more than one token."""
    folder = make_checkpoint("qwen2", tmp_path_factory.mktemp("sound"), use_sliding_window=False)
    model = load_reference(folder)
    followed = [(p, greedy(model, p, NUM_TOKENS)) for p in PROMPTS if len(p) > 1]
    with torch.inference_mode():
        assert all(_follows(model, prompt, tokens) for prompt, tokens in followed)
    return folder, followed


@pytest.mark.parametrize("mistake", [_zero_attention, _drop_layer, _change_rope_theta, _drop_bias])
@torch.inference_mode()
def test_mistakes_show(sound: tuple[Path, list[tuple[list[int], list[int]]]], mistake: object) -> None:
    """The checkpoints are sensitive: each mistake changes every sequence of more than one token."""
    folder, followed = sound
    model = load_reference(folder)
    mistake(model)  # type: ignore[operator]
    unchanged = [prompt for prompt, tokens in followed if _follows(model, prompt, tokens)]
    assert not unchanged


def _follows(model: Any, prompt: list[int], tokens: list[int]) -> bool:
    """Whether greedy decoding gives these tokens: each is the likeliest after those before it."""
    logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return bool((logits.argmax(dim=-1) == torch.tensor(tokens)).all())
