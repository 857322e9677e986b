"""The roofline by hand, and its limits."""

import pytest

from bimetal.catalog.hardware import cpu_spec, find_gpu
from bimetal.catalog.models import builtin_model
from bimetal.perf.step_time import StageShape, decode_step, distinct_experts

DEVICE = cpu_spec(memory_bytes=1e12, memory_bytes_per_s=1e12, flops_per_s=1e15)
MODEL = builtin_model("Llama-3.1-8B")


def test_by_hand():
    step = decode_step(StageShape(MODEL, 0, 16, DEVICE), num_seqs=4, mean_context=1000)
    layers = 16 * MODEL.layer_params(0)
    assert step.weights_s == pytest.approx(layers * 2 / 1e12)
    assert step.kv_s == pytest.approx(4 * 1000 * 16 * 4096 / 1e12)
    assert step.compute_s == pytest.approx((2 * layers * 4 + 4 * 4096 * 16 * 4000) / 1e15)
    assert step.network_s == 0
    assert step.binds == "weights"
    assert step.step_s == step.weights_s + step.kv_s


def test_the_head_is_read_and_the_embedding_is_not():
    first = decode_step(StageShape(MODEL, 0, 16, DEVICE), 1, 0)
    last = decode_step(StageShape(MODEL, 16, 32, DEVICE), 1, 0)
    assert last.weights_s - first.weights_s == pytest.approx((MODEL.embedding_params + 4096) * 2 / 1e12)


def test_what_binds_changes_with_the_load():
    shape = StageShape(MODEL, 0, 32, find_gpu("H100"))
    assert decode_step(shape, 1, 100).binds == "weights"
    assert decode_step(shape, 256, 8000).binds == "kv cache"
    assert decode_step(shape, 4096, 1).binds == "compute"
    crowded = StageShape(builtin_model("Llama-3.1-70B"), 0, 80, find_gpu("MI300X"), tensor_parallel=2)
    assert decode_step(crowded, 2000, 1).network_s > 0


def test_more_ranks_than_kv_heads_copy_the_cache():
    one = StageShape(builtin_model("Qwen3-30B-A3B"), 0, 48, find_gpu("H100"))
    eight = StageShape(one.model, 0, 48, one.device, tensor_parallel=8)
    assert eight.kv_bytes_per_token == 2 * one.kv_bytes_per_token


def test_experts_read_grow_from_the_chosen_to_all():
    assert distinct_experts(8, 2, 1) == pytest.approx(2)
    assert distinct_experts(8, 2, 2) == pytest.approx(3.5)
    assert distinct_experts(128, 8, 10_000) == pytest.approx(128)
    shape = StageShape(builtin_model("Mixtral-8x7B"), 0, 32, DEVICE)
    assert decode_step(shape, 1, 0).weights_s < decode_step(shape, 64, 0).weights_s / 2
