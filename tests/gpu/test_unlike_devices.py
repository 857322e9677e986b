"""One model over unlike devices: GPU alone, GPU then CPU, CPU then GPU, GPU twice, all with the CPU's greedy tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.checkpoints import assert_greedy, load_reference, make_checkpoint
from tests.engine.serving import greedy_params, run_all, threaded_engine, tokens_of
from tests.engine.test_families import NUM_TOKENS, PROMPTS

from bimetal.engine.wire.api import Generate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device here"),
]

PLACEMENTS = {
    "gpu": ((0, 4), ("gpu",)),
    "gpu, cpu": ((0, 2, 4), ("gpu", "cpu")),
    "cpu, gpu": ((0, 1, 4), ("cpu", "gpu")),
    "gpu, gpu": ((0, 3, 4), ("gpu", "gpu")),
}


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3_moe"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}
    if request.param == "qwen2":
        del sizes["head_dim"]  # Qwen2 has none: 256 / 4
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param), **sizes)
    return folder, load_reference(folder)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_placements_agree(checkpoint: tuple[Path, Any], placement: str, eager: bool) -> None:
    folder, reference = checkpoint
    boundaries, devices = PLACEMENTS[placement]
    with threaded_engine(
        folder,
        boundaries,
        devices=devices,
        plan={"max_model_len": 192},
        block_tokens=64,
        max_num_batched_tokens=48,
        kv_cache_bytes=1 << 24,
        enforce_eager=eager,
    ) as driver:
        requests = [Generate(str(i), tuple(p), greedy_params(NUM_TOKENS)) for i, p in enumerate(PROMPTS)]
        outputs = run_all(driver, requests)
    for i, prompt in enumerate(PROMPTS):
        assert_greedy(reference, prompt, tokens_of(outputs[str(i)]), NUM_TOKENS, f"prompt {i}")
