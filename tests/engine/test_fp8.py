"""FP8 checkpoints give the tokens of transformers on the numbers that they mean; what cannot be read says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.checkpoints import assert_greedy, edit_config, load_reference, make_checkpoint
from tests.engine.quantise import FP8, STYLES, quantise_checkpoint
from tests.engine.serving import greedy_params, run_all, threaded_engine, tokens_of
from tests.engine.test_families import PROMPTS

from bimetal.catalog.models import load_model_spec
from bimetal.catalog.quantization import parse_quantization
from bimetal.engine.kernels.encoding import (
    E4M3FN,
    E4M3FNUZ,
    Encoding,
    ScaledWeight,
    fnuz_from_fn,
    stack_rows,
)
from bimetal.engine.kernels.torch_reference import TorchKernels
from bimetal.engine.stage import session
from bimetal.engine.stage.checkpoint import Checkpoint, DummyWeights
from bimetal.engine.stage.weights import StageWeights, load_stage_weights
from bimetal.engine.wire.api import Generate
from bimetal.errors import ConfigError, StageError

NUM_TOKENS = 16
CPU = torch.device("cpu")
FAMILIES = ("llama", "mixtral", "qwen3", "qwen3_moe")


@pytest.fixture(scope="module", params=FAMILIES)
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def _load(folder: Path, start: int, end: int, kernels: TorchKernels | None = None) -> StageWeights:
    spec = load_model_spec(str(folder))
    source = Checkpoint(folder, spec.quantization)
    return load_stage_weights(
        spec, source, start, end, CPU, torch.float32, lambda *_: None, kernels or TorchKernels()
    )


def _run(folder: Path, bounds: tuple[int, ...], **options: Any) -> list[list[int]]:
    with threaded_engine(folder, bounds, **options) as driver:
        requests = [Generate(str(i), tuple(p), greedy_params(NUM_TOKENS)) for i, p in enumerate(PROMPTS[:8])]
        outputs = run_all(driver, requests)
    return [tokens_of(outputs[str(i)]) for i in range(8)]


@pytest.mark.parametrize("style", list(STYLES))
def test_tokens_are_those_of_the_numbers_meant(plain: Path, style: str, tmp_path: Path) -> None:
    quantised, meant = quantise_checkpoint(plain, style, tmp_path)
    reference = load_reference(meant)
    for bounds in ((0, 4), (0, 1, 4)):
        for i, found in enumerate(_run(quantised, bounds)):
            assert_greedy(reference, PROMPTS[i], found, NUM_TOKENS, f"{style}, {bounds}, prompt {i}")


@pytest.mark.parametrize("style", list(STYLES))
def test_weights_kept_in_eight_bits_mean_the_same(
    plain: Path, style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised, meant = quantise_checkpoint(plain, style, tmp_path)
    reference = load_reference(meant)
    monkeypatch.setattr(session, "choose_kernels", lambda *_: TorchKernels(keeps_fp8=True))
    for i, found in enumerate(_run(quantised, (0, 2, 4))):
        assert_greedy(reference, PROMPTS[i], found, NUM_TOKENS, f"{style}, prompt {i}")


def test_parts_of_a_fused_matrix_keep_their_own_scales(tmp_path: Path) -> None:
    plain = make_checkpoint("llama", tmp_path / "plain")
    tensors = load_file(plain / "model.safetensors")
    for factor, part in ((100.0, "q"), (0.01, "k"), (3.0, "v")):
        tensors[f"model.layers.0.self_attn.{part}_proj.weight"] *= factor
    save_file(tensors, plain / "model.safetensors")
    for style in STYLES:
        quantised, meant = quantise_checkpoint(plain, style, tmp_path / style.replace(", ", "-"))
        expected = load_file(meant / "model.safetensors")
        names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
        rows = torch.cat([expected[name] for name in names])
        kept = _load(quantised, 0, 1, TorchKernels(keeps_fp8=True)).layers[0].qkv.weight
        assert isinstance(kept, ScaledWeight)
        assert kept.payload.dtype == FP8
        assert torch.equal(kept.widened(torch.float32), rows)
        x = torch.randn(3, rows.shape[1])
        assert torch.allclose(_load(quantised, 0, 1).layers[0].qkv(x), x @ rows.T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("style", ["compressed-tensors, channel", "fp8, block"])
def test_a_stage_reads_its_own_bytes_only(plain: Path, style: str, tmp_path: Path) -> None:
    quantised, _ = quantise_checkpoint(plain, style, tmp_path)
    spec = load_model_spec(str(quantised))
    tensors = load_file(quantised / "model.safetensors")
    whole = sum(t.nbytes for t in tensors.values())
    total = held = 0
    for start, end in ((0, 1), (1, 3), (3, 4)):
        source = Checkpoint(quantised, spec.quantization)
        reports: list[tuple[int, int]] = []
        weights = load_stage_weights(
            spec,
            source,
            start,
            end,
            CPU,
            torch.float32,
            lambda *done, reports=reports: reports.append(done),
            TorchKernels(keeps_fp8=True),
        )
        mine = [n for n in tensors if any(f".layers.{i}." in n for i in range(start, end))]
        mine += ["model.embed_tokens.weight"] if start == 0 or (end == 4 and spec.tied_embeddings) else []
        mine += [n for n in ("model.norm.weight", "lm_head.weight") if end == 4 and n in tensors]
        assert source.bytes_read == sum(tensors[n].nbytes for n in mine)
        assert reports == sorted(reports)
        assert reports[-1][0] == reports[-1][1]
        total += source.bytes_read
        held += weights.num_bytes
    tied = spec.tied_embeddings * tensors["model.embed_tokens.weight"].nbytes
    assert total == whole + tied
    assert held == total  # 8 bits stay 8 bits, and float32 was float32


def test_every_byte_means_the_same_in_both_encodings() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    before = bits.view(E4M3FN)
    weight = ScaledWeight(before.reshape(1, 256), torch.full((1, 1), 0.5), Encoding(E4M3FN))
    converted = weight.as_dtype(E4M3FNUZ)
    assert converted.encoding.dtype == converted.payload.dtype == E4M3FNUZ
    for byte, old, new in zip(
        range(256), weight.widened(torch.float32)[0], converted.widened(torch.float32)[0], strict=True
    ):
        if byte in (0x7F, 0xFF):
            assert old.isnan() and new.isnan()
        else:
            assert old == new, f"{byte:#x}: {old} became {new}"
    assert fnuz_from_fn(before).view(torch.uint8)[0x80] == 0
    same = [b for b in range(256) if b not in (0x80, 0x7F, 0xFF)]
    assert torch.equal(fnuz_from_fn(before).view(torch.uint8)[same], bits[same])


def test_blocks_that_no_part_ends_with_are_spread_over_rows() -> None:
    torch.manual_seed(0)
    parts = []
    for rows in (24, 32):  # blocks of 16 rows: the first part ends inside one
        payload = torch.randn(rows, 64).to(FP8)
        parts.append(ScaledWeight(payload, torch.rand(-(-rows // 16), 2) + 0.1, Encoding(FP8, 16, 32)))
    stacked = stack_rows(parts)
    assert stacked is not None
    assert stacked.encoding == Encoding(FP8, 1, 32)
    assert torch.equal(stacked.widened(torch.float32), torch.cat([p.widened(torch.float32) for p in parts]))
    aligned = stack_rows([parts[1], parts[0]])
    assert aligned is not None and aligned.encoding == Encoding(FP8, 16, 32)
    assert stack_rows([parts[0], ScaledWeight(parts[1].payload, torch.ones(32, 1), Encoding(FP8))]) is None


def test_dummy_weights_have_the_schemes_encoding(tmp_path: Path) -> None:
    quantised, _ = quantise_checkpoint(make_checkpoint("mixtral", tmp_path / "m"), "fp8, block", tmp_path)
    spec = load_model_spec(str(quantised))
    source = DummyWeights(CPU, torch.bfloat16, 0, spec.quantization)
    weights = load_stage_weights(
        spec, source, 0, 4, CPU, torch.bfloat16, lambda *_: None, TorchKernels(keeps_fp8=True)
    )
    mlp = weights.layers[0].mlp
    gate_up = mlp.gate_up
    assert isinstance(gate_up, ScaledWeight)
    values = gate_up.widened(torch.float32)
    assert 0.9e-3 < values.abs().max() < 1.1e-3
    assert values.std() == pytest.approx(1e-3 / 3**0.5, rel=0.1)


def test_a_plan_that_says_float8_runs_an_fp8_checkpoint_only(tmp_path: Path) -> None:
    plain = make_checkpoint("llama", tmp_path / "plain")
    quantised, _ = quantise_checkpoint(plain, "fp8, block", tmp_path)
    assert load_model_spec(str(quantised)).weight_dtype == "float8"
    with threaded_engine(quantised, (0, 4), plan={"dtype": "float8"}) as driver:
        assert driver.dtype == "float32"
        assert len(tokens_of(run_all(driver, [Generate("a", (3, 4), greedy_params(4))])["a"])) == 4
    with (
        pytest.raises(StageError, match=r"'float8' is not supported.*FP8 weights come from a checkpoint"),
        threaded_engine(plain, (0, 4), plan={"dtype": "float8"}),
    ):
        pass


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq 4"),
        ({"quant_method": "awq", "bits": 4}, "awq 4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt NVFP4"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 e5m2"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {
                    "g": {"weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group"}}
                },
            },
            r"nvfp4-pack-quantized, 4 bit float",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}},
            },
            "8 bit int",
        ),
    ],
)
def test_schemes_that_cannot_be_read_are_named_before_anything_loads(
    document: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folder = make_checkpoint("llama", tmp_path)
    edit_config(folder, quantization_config=document)
    with pytest.raises(ConfigError, match=f"{says}.* not supported: bimetal reads FP8 weights"):
        load_model_spec(str(folder))


def test_vendors_own_tools_are_read_by_the_same_rules() -> None:
    for document in (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}},
    ):
        found = parse_quantization({"quantization_config": document}, "m")
        assert found is not None and found.block is None


def test_broken_checkpoints_say_what_is_wrong(tmp_path: Path) -> None:
    plain = make_checkpoint("mixtral", tmp_path / "plain")
    quantised, _ = quantise_checkpoint(plain, "fp8, block", tmp_path)
    file = quantised / "model.safetensors"
    before = load_file(file)
    name = "model.layers.0.self_attn.o_proj"
    expert = "model.layers.0.block_sparse_moe.experts.1.w2"

    def broken(**changes: torch.Tensor | None) -> None:
        tensors = {n: changes.get(n, t) for n, t in before.items()}
        save_file({n: t for n, t in tensors.items() if t is not None}, file)

    broken(**{f"{name}.weight_scale_inv": None})
    with pytest.raises(StageError, match=f"no {name}.weight_scale_inv or weight_scale: the checkpoint"):
        _load(quantised, 0, 1)
    broken(**{f"{name}.weight_scale_inv": torch.ones(3, 7)})
    with pytest.raises(StageError, match=r"is \(3, 7\), which is a scale neither .* 16 by 32"):
        _load(quantised, 0, 1)
    broken(**{f"{name}.weight": before[f"{name}.weight"].float().to(torch.float8_e5m2)})
    with pytest.raises(StageError, match=r"stored as torch\.float8_e5m2"):
        _load(quantised, 0, 1)
    broken(**{"model.embed_tokens.weight": before["model.embed_tokens.weight"].to(FP8)})
    with pytest.raises(
        StageError, match=r"embed_tokens\.weight is stored as torch\.float8_e4m3fn, which only"
    ):
        _load(quantised, 0, 1)
    broken(**{f"{expert}.weight": before[f"{expert}.weight"].float()})
    with pytest.raises(StageError, match=f"{expert} is stored in another encoding than expert 0"):
        _load(quantised, 0, 1, TorchKernels(keeps_fp8=True))
    _load(quantised, 0, 1)  # widened, it does not matter
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = 128
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="gives blocks as 128, not as two numbers"):
        load_model_spec(str(quantised))
