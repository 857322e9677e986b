"""What `bimetal bench` says of utilisation, experts and kernels, against counts made another way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tests.engine.checkpoints import load_reference, make_checkpoint
from tests.engine.serving import threaded_engine
from torch.utils.flop_counter import FlopCounterMode

from bimetal.catalog.hardware import cpu_spec, find_gpu
from bimetal.catalog.models import builtin_model, load_model_spec
from bimetal.cli.bench import command
from bimetal.engine.bench import Workload, run_workload
from bimetal.engine.observe import observe, profile_kernels, stage_peaks, watch_experts
from bimetal.engine.stage.watch import family_of
from bimetal.engine.utilisation import is_routing_degenerate, least_distinct_experts, run_flops, step_bytes
from bimetal.errors import ConfigError
from bimetal.perf.step_time import StageShape


def _shape(folder: Path, start: int, end: int) -> StageShape:
    return StageShape(load_model_spec(str(folder)), start, end, cpu_spec(), dtype="float32")


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "qwen3_moe"])
def test_a_step_moves_the_checkpoints_bytes_and_the_caches(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(family, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    spec = load_model_spec(str(folder))
    held = sum(t.nbytes for name, t in tensors.items() if name != "model.embed_tokens.weight")
    if spec.tied_embeddings:
        held += tensors["model.embed_tokens.weight"].nbytes  # read as the output head
    held -= tensors["model.norm.weight"].nbytes  # 0.01% of it, which perf.work leaves out
    experts = sum(t.nbytes for name, t in tensors.items() if ".experts." in name)
    kv = 2 * spec.kv_size * 4 * 4  # both, values, layers, bytes
    for num_seqs, context, hit_ratio in ((1, 10, 1.0), (8, 200, 0.5)):
        expected = held - experts * (1 - hit_ratio) + num_seqs * (context + 1) * kv
        parts = [step_bytes(_shape(folder, *span), num_seqs, context, hit_ratio) for span in ((0, 3), (3, 4))]
        assert sum(parts) == pytest.approx(expected, rel=1e-6)


def test_windows_bound_what_is_read(tmp_path: Path) -> None:
    folder = make_checkpoint("mistral", tmp_path)
    window = 24
    short, long, longest = (step_bytes(_shape(folder, 0, 4), 4, n, 1.0) for n in (window - 4, window, 400))
    assert short < long == longest


def test_flops_are_those_that_torch_counts(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    model, spec, num_tokens = load_reference(folder), load_model_spec(str(folder)), 40
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(torch.arange(num_tokens).unsqueeze(0), use_cache=False)
    head = 2 * spec.hidden_size * spec.vocab_size
    unseen = 4 * spec.query_size * spec.num_layers * (num_tokens**2 - num_tokens * (num_tokens + 1) / 2)
    expected = counter.get_total_flops() - (num_tokens - 1) * head - unseen
    parts = [run_flops(_shape(folder, *span), num_tokens, 1) for span in ((0, 1), (1, 4))]
    assert sum(parts) == pytest.approx(expected, rel=0.01)  # norms count as products there


def test_published_shapes_move_what_is_known() -> None:
    """The floors of Llama-3.1-8B and Mixtral-8x7B: 15.0 and about 93 GB of weights a step."""
    for name, layers, gigabytes in (("Llama-3.1-8B", 32, 15.0), ("Mixtral-8x7B", 32, 93.1)):
        shape = StageShape(builtin_model(name), 0, layers, find_gpu("H200"))
        assert step_bytes(shape, 1, 0, 1.0) / 1e9 == pytest.approx(gigabytes, abs=0.1)


def test_experts_are_counted(tmp_path: Path) -> None:
    folder = make_checkpoint("mixtral", tmp_path)
    with threaded_engine(folder, (0, 1, 4), num_micro_batches=2) as driver:
        one = watch_experts(driver, Workload(1, 4, 6))
        many = watch_experts(driver, Workload(16, 4, 6))
    assert one is not None and many is not None
    assert one.distinct == (2.0,) * 4
    assert many.num_rows == 8
    assert all(2 < count <= 4 for count in many.distinct)
    assert not many.is_invalid  # not dummy


def test_dummy_routing_that_does_not_spread_is_invalid(tmp_path: Path) -> None:
    folder = make_checkpoint("mixtral", tmp_path, num_local_experts=8)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("gate.weight") and "layers.1." in name:
            tensor.zero_()
    save_file(tensors, folder / "model.safetensors")
    with threaded_engine(folder, (0, 4)) as driver:
        hit = watch_experts(driver, Workload(16, 4, 4))
    assert hit is not None
    assert hit.num_rows == 16
    assert hit.distinct[1] == 2.0
    assert is_routing_degenerate(hit.distinct, 8, 2, 16)
    assert not is_routing_degenerate(hit.distinct, 8, 2, 15)
    assert not is_routing_degenerate((7.5, 7.9), 8, 2, 32)
    assert is_routing_degenerate((7.49, 7.9), 8, 2, 32)
    assert 70 < least_distinct_experts(128, 8, 16) < 80


def test_profiles_name_the_families_and_leave_the_engine_as_it_was(tmp_path: Path) -> None:
    folder = make_checkpoint("mixtral", tmp_path)
    with threaded_engine(folder, (0, 4)) as driver:
        (times,) = profile_kernels(driver, Workload(4, 20, 8))
        peaks = stage_peaks(driver, "measured", None, None)
        result = run_workload(driver, Workload(4, 20, 8), seed=1)
        seen = observe(driver, Workload(4, 20, 8), result, peaks, profile=False)
    assert {"attention", "experts", "dense products", "norms", "rotary and KV write"} <= set(times.kernel_s)
    total = sum(times.kernel_s.values())
    assert 0.2 * times.busy_s < total <= 1.1 * times.busy_s
    assert times.kernel_s.get("other", 0.0) < 0.2 * total
    assert peaks[0] is not None and peaks[0].source == "measured"
    assert result.decode is not None
    assert 20 < result.decode.mean_context < 28
    (use,) = seen.stages
    assert use.step_bytes and use.mbu_ratio and use.mfu_ratio
    assert use.mbu_ratio == pytest.approx(
        use.step_bytes * result.decode.num_micro_batches / result.decode.round_s / peaks[0].bytes_per_s
    )


def test_a_workload_that_comes_again_finds_nothing_cached(tmp_path: Path) -> None:
    """Neither its own prompts nor those of a longer one, with the same seed."""
    folder = make_checkpoint("llama", tmp_path)
    with threaded_engine(folder, (0, 4)) as driver:
        for workload in (Workload(2, 40, 2), Workload(2, 40, 2), Workload(2, 60, 2)):
            run_workload(driver, workload, seed=1)
        assert driver.scheduler.counters.prefix_query_tokens > 0
        assert driver.scheduler.counters.prefix_hit_tokens == 0


def test_a_workload_too_long_is_refused_before_anything_loads(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    arguments = ["--model", str(folder), "--load-format", "dummy", "--max-model-len", "50", "-w", "1:48:20"]
    with pytest.raises(ConfigError, match="workload 1:48:20 needs 68 tokens a request"):
        CliRunner().invoke(command, arguments, catch_exceptions=False)


def test_peaks_come_from_where_they_are_said_to(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    with threaded_engine(folder, (0, 4)) as driver:
        assert stage_peaks(driver, "datasheet", None, None) == [None]
        (given,) = stage_peaks(driver, "datasheet", 1e9, 2e9)
        (partly,) = stage_peaks(driver, "measured", 1e9, None)
    assert given is not None and (given.bytes_per_s, given.flops_per_s, given.source) == (1e9, 2e9, "given")
    assert partly is not None and partly.bytes_per_s == 1e9 and partly.flops_per_s > 1e6


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("expert_gate_up_kernel", "experts"),
        ("place_kernel", "experts"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "dense products"),
        ("Cijk_Alik_Bljk_BBS_BH_MT256x256x64", "dense products"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("rms_norm_kernel", "norms"),
        ("scaled_linear_kernel", "dense products"),
        ("scaled_down_kernel", "experts"),
        ("greedy_kernel", "sampling"),
        ("void at::native::vectorized_elementwise_kernel", "other"),
    ],
)
def test_gpu_kernels_have_families(name: str, family: str) -> None:
    assert family_of(name) == family


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    folder = make_checkpoint("mixtral", tmp_path)
    arguments = ["--model", str(folder), "--layers", "2,2", "--num-threads", "1", "-w", "4:8:12", "--profile"]
    arguments += ["--load-format", "dummy", "--dtype", "float32"]
    result = CliRunner().invoke(command, [*arguments, "--json"], catch_exceptions=False)
    (document,) = json.loads(result.stdout)
    assert len(document["stages"]) == len(document["kernels"]) == len(document["peaks"]) == 2
    assert document["experts"]["num_experts"] == 4
    assert all(use["mbu_ratio"] > 0 and use["mfu_ratio"] > 0 for use in document["stages"])
    assert "attention" in document["kernels"][1]["kernel_s"]
