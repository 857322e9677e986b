"""Plans of whole fleets: right, feasible, and clear when nothing fits."""

import json
from itertools import combinations
from time import perf_counter

import pytest

from bimetal.catalog.fleet import parse_fleet
from bimetal.errors import ConfigError, InfeasibleError
from bimetal.plan import check_stages, dump_plan, parse_plan
from bimetal.planner.fleet_plan import Chain, plan_fleet
from bimetal.units import GIGA

MIXED = """\
model: Llama-3.1-70B
nodes:
  - {name: green, gpu: H100, num_gpus: 2, tensor_parallel: 2, address: "a:29400"}
  - {name: red, gpu: MI300X, address: "b:29400"}
links: [{between: [green, red], kind: 100GbE}]
limits: {max_model_len: 8192, max_num_seqs: 64, mean_context: 2048}
"""


def fleet(text=MIXED, **replacements):
    for old, new in replacements.items():
        text = text.replace(f"{old}: ", f"{old}: {new} #", 1)
    return parse_fleet(text, "f.yaml")


def test_the_optimum_of_a_real_fleet_is_the_best_of_all_boundaries():
    chain = Chain(fleet())
    best = chain.best()
    others = [chain.evaluate((0, cut, 80)) for cut in range(1, 80)]
    assert best.round_s == pytest.approx(min(split.round_s for split in others if split), rel=1e-9)


def test_three_stages_against_brute_force():
    text = MIXED.replace("Llama-3.1-70B", "Mixtral-8x7B").replace(
        "num_gpus: 2, tensor_parallel: 2", "num_gpus: 2"
    )
    chain = Chain(fleet(text))
    cuts = ((0, a, b, 32) for a, b in combinations(range(1, 32), 2))
    fitting = [split.round_s for split in map(chain.evaluate, cuts) if split]
    assert chain.best().round_s == pytest.approx(min(fitting), rel=1e-9)


def test_the_plan_is_complete_and_survives_its_file():
    plan = plan_fleet(fleet())
    stages = plan.replicas[0].stages
    check_stages(stages, 80, "plan")
    assert [(s.node, s.gpu, s.device_indices) for s in stages] == [
        ("green", "H100-SXM-80GB", (0, 1)),
        ("red", "MI300X", (0,)),
    ]
    assert stages[1].address == "b:29400"
    for stage in stages:
        assert stage.prediction is not None
        assert stage.prediction.kv_capacity_tokens >= 64 * 2048
    import yaml

    assert parse_plan(yaml.safe_load(dump_plan(plan)), "again") == plan


def test_the_split_that_maximises_throughput_is_not_the_one_that_balances_weights():
    """KV cache and bandwidth decide: here the better card takes more than its half, and an even split is slower."""
    plan = plan_fleet(fleet())
    first = plan.replicas[0].stages[0]
    assert first.num_layers != 40
    assert any("even split of the layers would reach" in reason for reason in plan.reasons)


def test_each_gpu_is_a_stage_of_its_own_on_its_own_port():
    plan = plan_fleet(fleet(MIXED.replace("num_gpus: 2, tensor_parallel: 2", "num_gpus: 2")))
    stages = plan.replicas[0].stages
    assert [(s.node, s.device_indices, s.address) for s in stages] == [
        ("green", (0,), "a:29400"),
        ("green", (1,), "a:29401"),
        ("red", (0,), "b:29400"),
    ]


def test_a_slow_wire_lowers_the_prediction():
    fast = plan_fleet(fleet()).predicted_output_tokens_per_s
    slow = plan_fleet(fleet(MIXED.replace("100GbE", "1GbE, latency_s: 0.02"))).predicted_output_tokens_per_s
    assert fast is not None
    assert slow is not None
    assert slow < 0.8 * fast


def test_memory_moves_layers_away():
    roomy = plan_fleet(fleet()).replicas[0].stages[0].num_layers
    tight = plan_fleet(fleet(MIXED.replace('2, address: "a', '2, memory_bytes: 50e9, address: "a')))
    stage = tight.replicas[0].stages[0]
    assert stage.num_layers < roomy
    chain = Chain(fleet(MIXED.replace('2, address: "a', '2, memory_bytes: 50e9, address: "a')))
    assert chain.missing[0, 0, stage.end_layer] <= 0 < chain.missing[0, 0, 41]


def test_too_little_memory_names_stage_bytes_and_remedy():
    small = MIXED.replace("gpu: MI300X", "gpu: MI210").replace("seqs: 64", "seqs: 128")
    with pytest.raises(
        InfeasibleError, match=r"lacks [\d.]+ (GB|MB) in the best split: layers .* lower max_num_seqs"
    ):
        plan_fleet(fleet(small))
    alone = small.replace("num_gpus: 2, tensor_parallel: 2", "num_gpus: 1")
    with pytest.raises(
        InfeasibleError, match=r"weighs 141\.1 GB, all stages .* add GPUs, or use dtype float8"
    ):
        plan_fleet(fleet(alone))


def test_the_remedy_holds():
    """Following the advice of the error gives a plan."""
    text = MIXED.replace("gpu: MI300X", "gpu: MI210").replace("seqs: 64", "seqs: 128")
    with pytest.raises(InfeasibleError) as error:
        plan_fleet(fleet(text))
    most = int(str(error.value).split("at most ")[1].split(",")[0])
    assert 1 <= most < 128
    lower = text.replace("max_num_seqs: 128", f"max_num_seqs: {most}")
    assert plan_fleet(fleet(lower)).replicas[0].stages[-1].end_layer == 80
    with pytest.raises(InfeasibleError):
        plan_fleet(fleet(text.replace("max_num_seqs: 128", f"max_num_seqs: {most + 1}")))


def test_more_stages_than_layers():
    text = "model: Llama-3.1-8B\nnodes: [{name: a, gpu: cpu, num_gpus: 33}]\nlimits: {max_num_seqs: 1}"
    with pytest.raises(InfeasibleError, match="33 stages for 32 layers"):
        plan_fleet(parse_fleet(text, "f"))


def test_heads_must_divide():
    text = MIXED.replace("num_gpus: 2, tensor_parallel: 2", "num_gpus: 3, tensor_parallel: 3")
    with pytest.raises(ConfigError, match="tensor_parallel 3 does not divide the 64 heads"):
        plan_fleet(fleet(text))


def test_unverified_figures_are_said_only_where_used():
    assert not any("unverified" in reason for reason in plan_fleet(fleet()).reasons)
    doubtful = plan_fleet(fleet(MIXED.replace("gpu: H100", "gpu: H100-NVL")))
    assert any("unverified figures of H100-NVL-94GB: memory_bytes" in reason for reason in doubtful.reasons)


def test_sixteen_stages_of_the_largest_model_are_planned_at_once():
    text = """\
model: Llama-3.1-405B
nodes:
  - {name: a, gpu: MI300X, num_gpus: 8, address: "a:1000"}
  - {name: b, gpu: H200, num_gpus: 8, address: "b:1000"}
limits: {max_num_seqs: 64, mean_context: 2048}
"""
    started = perf_counter()
    plan = plan_fleet(parse_fleet(text, "f"))
    assert perf_counter() - started < 20
    assert len(plan.replicas[0].stages) == 16
    assert sum(s.prediction.weight_bytes for s in plan.replicas[0].stages if s.prediction) > 800 * GIGA


FP8_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 4096,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fbgemm_fp8"},
}


def test_an_fp8_checkpoint_is_planned_in_the_8_bits_that_it_holds(tmp_path):
    """Hand count: a layer holds 4 x 1024^2 of attention, 3 x 1024 x 4096 of MLP and two norms; both ends of the model stay in
    16 bits; a token's keys and values are 2 x 4 x 1024 numbers of 16 bits."""
    (tmp_path / "config.json").write_text(json.dumps(FP8_CONFIG))
    layers, end = 4 * (4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024), 32000 * 1024
    weight_bytes = layers + 2 * 2 * end + 1024
    text = f"model: {tmp_path}\nnodes: [{{name: a, gpu: H100}}]\n"
    plan = plan_fleet(parse_fleet(text, "f"))
    (stage,) = plan.replicas[0].stages
    assert plan.dtype == "float8"
    assert stage.prediction.weight_bytes == weight_bytes
    assert stage.prediction.kv_capacity_tokens == int((80 * GIGA * 0.9 - weight_bytes) // (2 * 4 * 1024 * 2))
    wide = plan_fleet(parse_fleet(text + "dtype: bfloat16\n", "f")).replicas[0].stages[0].prediction
    assert wide.weight_bytes == 2 * (layers + 2 * end + 1024)
    on_cpu = plan_fleet(parse_fleet(text.replace("H100", "cpu, memory_bytes: 100e9"), "f"))
    assert on_cpu.replicas[0].stages[0].prediction.weight_bytes == wide.weight_bytes  # widened when loaded


def test_a_plain_checkpoint_is_planned_in_its_own_dtype(tmp_path):
    config = {key: value for key, value in FP8_CONFIG.items() if key != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    text = f"model: {tmp_path}\nnodes: [{{name: a, gpu: H100}}]\n"
    assert plan_fleet(parse_fleet(text, "f")).dtype == "float32"
    assert plan_fleet(fleet()).dtype == "bfloat16"
