"""`bimetal agree` on tiny checkpoints, and its figures on distributions whose divergence is known."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tests.engine.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.engine.serving import threaded_engine

from bimetal.cli.agree import command, plan_of_stages
from bimetal.engine.agreement import Agreement, Transcript, compare, divergence
from bimetal.engine.transcribe import Prompt, builtin_prompts, random_prompts, transcribe
from bimetal.engine.wire.api import TokenLogprob
from bimetal.errors import ConfigError

NUM_TOKENS = 12
PROMPTS = random_prompts(VOCAB_SIZE, seed=3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("mixtral", tmp_path_factory.mktemp("mixtral"))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> list[Transcript]:
    return _transcribe(checkpoint, (0, 4))


def _transcribe(
    folder: Path,
    bounds: Sequence[int],
    texts: Sequence[Prompt] = (),
    num_top: int = VOCAB_SIZE,
    dtype: str = "float32",
) -> list[Transcript]:
    with threaded_engine(folder, bounds, dtype=dtype) as driver:
        return transcribe(driver, PROMPTS, texts, NUM_TOKENS, num_top)


def _texts(a: Sequence[Transcript]) -> list[Prompt]:
    return [prompt + each.greedy for prompt, each in zip(PROMPTS, a, strict=True)]


def _compare(a: Sequence[Transcript], b: Sequence[Transcript], margin: float = 1e-4) -> Agreement:
    return compare(PROMPTS, a, b, VOCAB_SIZE, margin)


def test_split_or_not_the_same_weights_agree_wholly(checkpoint: Path, reference: list[Transcript]) -> None:
    found = _compare(reference, _transcribe(checkpoint, (0, 1, 4), _texts(reference)))
    assert found.is_exact
    assert found.agreed_min == found.agreed_median == NUM_TOKENS
    assert found.num_forks == 0
    assert found.top1_ratio == 1.0
    assert found.num_positions == sum(len(p) + NUM_TOKENS - 1 for p in PROMPTS)
    assert found.kl_max < 1e-8


def test_bf16_shows_as_a_small_divergence(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)  # without experts, whose routing rounding flips
    reference = _transcribe(folder, (0, 4))
    found = _compare(reference, _transcribe(folder, (0, 4), _texts(reference), dtype="bfloat16"), margin=0.5)
    assert 1e-6 < found.kl_mean < 0.05
    assert found.top1_ratio > 0.9
    for prompt in found.prompts:
        if prompt.fork is not None:
            assert prompt.fork.a_token != prompt.fork.b_token
            assert prompt.fork.is_explained == (prompt.fork.a_margin <= 0.5)


def test_a_changed_weight_shows(tmp_path: Path, checkpoint: Path, reference: list[Transcript]) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    name = "model.layers.2.self_attn.o_proj.weight"
    tensors[name] = torch.zeros_like(tensors[name])
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    changed = _transcribe(tmp_path, (0, 4), _texts(reference))
    found = _compare(reference, changed)
    assert found.num_unexplained_forks > 0
    assert found.top1_ratio < 0.9
    assert found.kl_mean > 0.1


def test_heads_bound_the_divergence_from_below(tmp_path: Path, reference: list[Transcript]) -> None:
    other = make_checkpoint("mixtral", tmp_path, num_experts_per_tok=1)
    texts = _texts(reference)
    exact = _compare(reference, _transcribe(other, (0, 4), texts))
    before = 0.0
    for num_top in (4, 64):
        heads = [
            Transcript(t.greedy, tuple(_head(s, num_top) for s in t.scores))
            for t in _transcribe(other, (0, 4), texts)
        ]
        a = [Transcript(t.greedy, tuple(_head(s, num_top) for s in t.scores)) for t in reference]
        found = _compare(a, heads)
        assert not found.is_exact
        assert found.num_top == num_top
        assert before < found.kl_mean < exact.kl_mean
        assert 0 < found.rest_mean <= found.rest_max <= 1
        before = found.kl_mean


def _head(scores: TokenLogprob, num_top: int) -> TokenLogprob:
    return TokenLogprob(scores.logprob, scores.rank, scores.top_ids[:num_top], scores.top_logprobs[:num_top])


def test_divergence_of_known_distributions() -> None:
    rng = random.Random(0)
    p, q = ([rng.random() for _ in range(50)] for _ in range(2))
    p, q = ([x / sum(each) for x in each] for each in (p, q))
    exact = sum(x * math.log(x / y) for x, y in zip(p, q, strict=True))
    a, b = (_reported(each) for each in (p, q))
    assert divergence(a, b, 50)[0] == pytest.approx(exact)
    kl, rest = divergence(_head(a, 20), _head(b, 20), 50)
    shared = set(a.top_ids[:20]) & set(b.top_ids[:20])
    assert 0 < kl < exact
    assert rest == pytest.approx(1 - sum(p[i] for i in shared))


def _reported(distribution: list[float]) -> TokenLogprob:
    order = sorted(range(len(distribution)), key=lambda i: -distribution[i])
    return TokenLogprob(0.0, 1, tuple(order), tuple(math.log(distribution[i]) for i in order))


def test_a_fork_is_explained_by_its_margin() -> None:
    close = TokenLogprob(0.0, 1, (7, 8), (-0.70, -0.71))
    for limit, is_explained in ((0.02, True), (0.001, False)):
        found = compare(
            [(1, 2)],
            [Transcript((7,), (close, close))],
            [Transcript((8,), (close, close))],
            9,
            limit,
        )
        fork = found.prompts[0].fork
        assert fork is not None
        assert fork.a_margin == pytest.approx(0.01)
        assert fork.is_explained is is_explained
        assert found.num_unexplained_forks == (not is_explained)


@pytest.mark.slow
def test_the_command(checkpoint: Path) -> None:
    arguments = ["--model", str(checkpoint), "--a", "cpu:4", "--b", "cpu:1,cpu:3", "--a-dtype", "float32"]
    arguments += ["--b-dtype", "float32", "--num-threads", "1", "--num-tokens", "4", "--top", "100", "--json"]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    document = json.loads(result.output)
    assert document["agreed_min"] == 4
    assert document["prompts_are_random"] is True
    assert document["is_exact"] is False
    assert document["kl_max"] < 1e-6


def test_placements_that_do_not_fit_say_so(checkpoint: Path) -> None:
    for text in ("cpu:3", "cpu:2,cpu", ":4", "cpu:x"):
        with pytest.raises(ConfigError, match=r"such as"):
            plan_of_stages(str(checkpoint), text, None)
    stages = plan_of_stages(str(checkpoint), "H200:1,cpu:1,H200:2", 2).replicas[0].stages
    assert [(s.start_layer, s.end_layer, s.device_indices) for s in stages] == [
        (0, 1, (0,)),
        (1, 2, (0,)),
        (2, 4, (1,)),
    ]
    assert len(builtin_prompts()) >= 12


def test_kernels_that_a_device_cannot_run_are_refused(checkpoint: Path) -> None:
    from bimetal.errors import StageError

    with (
        pytest.raises(StageError, match="kernels are triton, but this stage's device is a CPU"),
        threaded_engine(checkpoint, (0, 4), kernels="triton"),
    ):
        pass
