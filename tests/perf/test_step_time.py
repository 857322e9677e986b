"""The equations by hand on a CPU, where every coefficient is 1, and their limits on GPUs."""

import pytest

from bimetal.catalog.hardware import cpu_spec, find_gpu
from bimetal.catalog.models import builtin_model
from bimetal.perf.equations import ROOFLINE_POWER
from bimetal.perf.step_time import StageShape, decode_step, decode_steps

DEVICE = cpu_spec(memory_bytes=1e12, memory_bytes_per_s=1e12, flops_per_s=1e15)
MODEL = builtin_model("Llama-3.1-8B")


def test_by_hand():
    step = decode_step(StageShape(MODEL, 0, 16, DEVICE), num_seqs=4, mean_context=1000)
    layers = 16 * MODEL.layer_params(0)
    assert step.weights_s == pytest.approx(layers * 2 / 1e12)
    assert step.kv_s == pytest.approx(4 * 1000 * 16 * 4096 / 1e12)
    assert step.compute_s == pytest.approx(2 * layers * 4 / 1e15)
    assert step.network_s == 0
    assert step.binds == "weights"
    p = ROOFLINE_POWER
    expected = (step.weights_s**p + step.compute_s**p) ** (1 / p) + step.kv_s
    assert step.step_s == pytest.approx(expected, rel=1e-3)


def test_float32_moves_twice_the_bytes():
    narrow = decode_step(StageShape(MODEL, 16, 32, DEVICE, dtype="bfloat16"), 4, 1000)
    wide = decode_step(StageShape(MODEL, 16, 32, DEVICE, dtype="float32"), 4, 1000)
    assert wide.weights_s == pytest.approx(2 * narrow.weights_s)
    assert wide.kv_s == pytest.approx(2 * narrow.kv_s)


def test_the_head_is_read_and_the_embedding_is_not():
    first = decode_step(StageShape(MODEL, 0, 16, DEVICE), 1, 1)
    last = decode_step(StageShape(MODEL, 16, 32, DEVICE), 1, 1)
    assert last.weights_s - first.weights_s == pytest.approx(MODEL.embedding_params * 2 / 1e12)


def test_what_binds_changes_with_the_load():
    shape = StageShape(MODEL, 0, 32, find_gpu("H100"))
    assert decode_step(shape, 1, 100).binds == "weights"
    assert decode_step(shape, 256, 8000).binds == "kv cache"
    assert decode_step(shape, 8192, 1).binds in ("compute", "overhead")
    assert decode_step(shape, 8192, 1).compute_s > decode_step(shape, 8192, 1).weights_s
    crowded = StageShape(builtin_model("Llama-3.1-70B"), 0, 80, find_gpu("MI300X"), tensor_parallel=2)
    assert decode_step(crowded, 2000, 1).network_s > 0


def test_halves_add_up_to_the_whole_but_for_the_step_itself():
    """Layers cost the same wherever they are; a stage more costs one more step's fixed part."""
    gpu = find_gpu("MI300X")
    model = builtin_model("Llama-3.1-70B")
    whole = decode_step(StageShape(model, 0, 80, gpu), 16, 1000)
    halves = decode_steps([StageShape(model, 0, 40, gpu), StageShape(model, 40, 80, gpu)], 16, 1000)
    assert sum(h.weights_s for h in halves) == pytest.approx(whole.weights_s)
    assert sum(h.kv_s for h in halves) == pytest.approx(whole.kv_s)
    assert whole.step_s < sum(h.step_s for h in halves) < whole.step_s + 2e-3


def test_more_ranks_than_kv_heads_copy_the_cache():
    one = StageShape(builtin_model("Qwen3-30B-A3B"), 0, 48, find_gpu("H100"))
    eight = StageShape(one.model, 0, 48, one.device, tensor_parallel=8)
    assert eight.kv_bytes_per_token == 2 * one.kv_bytes_per_token


def test_experts_read_grow_from_the_chosen_to_all():
    model = builtin_model("Mixtral-8x7B")
    shape = StageShape(model, 0, 32, DEVICE)
    one = decode_step(shape, 1, 1).weights_s
    many = decode_step(shape, 4096, 1).weights_s
    assert one * 1e12 / 2 == pytest.approx(model.num_active_params - model.embedding_params, rel=1e-3)
    assert many * 1e12 / 2 == pytest.approx(model.num_params - model.embedding_params, rel=1e-3)
