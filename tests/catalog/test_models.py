"""Published parameter counts, hand-computed KV bytes, both spellings of config.json, every error."""

import json

import pytest

from bimetal.catalog.models import builtin_model, builtin_models, load_model_spec, parse_config
from bimetal.errors import ConfigError

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 20000.0,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("Llama-3.1-8B", 8.03, 8.03),
        ("Llama-3.1-70B", 70.55, 70.55),
        ("Llama-3.1-405B", 405.85, 405.85),
        ("Mixtral-8x7B", 46.70, 12.88),
        ("Mixtral-8x22B", 140.6, 39.2),
        ("Qwen3-32B", 32.76, 32.76),
        ("Qwen3-30B-A3B", 30.53, 3.35),
        ("Qwen3-235B-A22B", 235.09, 22.19),
        ("Llama-2-70B", 68.98, 68.98),
        ("Llama-2-7B", 6.74, 6.74),
    ],
)
def test_totals_are_the_published_ones(name, billions, active):
    spec = builtin_model(name)
    assert spec.num_params / 1e9 == pytest.approx(billions, rel=7e-4)
    assert spec.num_active_params / 1e9 == pytest.approx(active, rel=3e-3)


@pytest.mark.parametrize(
    ("name", "layers", "kv_heads", "head_dim"),
    [
        ("Llama-3.1-8B", 32, 8, 128),
        ("Llama-3.1-70B", 80, 8, 128),
        ("Llama-3.1-405B", 126, 8, 128),
        ("Mixtral-8x7B", 32, 8, 128),
        ("Mixtral-8x22B", 56, 8, 128),
        ("Qwen3-32B", 64, 8, 128),
        ("Qwen3-30B-A3B", 48, 4, 128),
    ],
)
def test_kv_bytes_per_token(name, layers, kv_heads, head_dim):
    spec = builtin_model(name)
    assert spec.kv_bytes_per_token() == 2 * layers * kv_heads * head_dim * 2
    assert spec.kv_bytes_per_token("float8") == layers * kv_heads * head_dim * 2
    assert spec.kv_bytes_per_token("bfloat16", num_layers=1) == 2 * kv_heads * head_dim * 2


def test_stages_hold_every_weight_once():
    spec = builtin_model("Llama-3.1-8B")
    assert spec.stage_params(0, 10) + spec.stage_params(10, 32) == spec.num_params
    assert spec.stage_params(0, 32) == spec.num_params


def test_tied_embeddings_are_held_twice_only_when_split():
    spec = parse_config({**LLAMA, "tie_word_embeddings": True}, "tied")
    assert spec.stage_params(0, 3) == spec.num_params
    assert spec.stage_params(0, 1) + spec.stage_params(1, 3) == spec.num_params + spec.embedding_params


def test_a_tiny_llama_by_hand():
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 2 * 64
    mlp = 3 * 64 * 96
    spec = parse_config(LLAMA, "tiny")
    assert spec.num_params == 3 * (attention + mlp) + 2 * 100 * 64 + 64
    biased = parse_config({**LLAMA, "attention_bias": True, "mlp_bias": True}, "biased")
    assert biased.num_params - spec.num_params == 3 * (64 + 2 * 32 + 64 + 2 * 96 + 64)


@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"])
def test_both_spellings_of_every_family_are_one_model(family):
    """transformers 4 writes rope_theta and torch_dtype, transformers 5 rope_parameters and dtype."""
    shared = {k: v for k, v in LLAMA.items() if k != "rope_theta"} | {"model_type": family}
    if family == "mixtral":
        shared |= {"num_local_experts": 4, **MOE}
    if family == "qwen3_moe":
        shared |= {"num_experts": 4, **MOE}
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    four = shared | {"rope_theta": 5e5, "rope_scaling": scaling, "torch_dtype": "float16"}
    five = shared | {"rope_parameters": {"rope_theta": 5e5, **scaling}, "dtype": "float16"}
    spec = parse_config(four, "m")
    assert spec == parse_config(five, "m")
    assert (spec.rope_theta, spec.dtype, spec.family) == (5e5, "float16", family)
    assert spec.rope_scaling is not None
    assert spec.rope_scaling.factor == 8.0
    assert spec.qk_norm == family.startswith("qwen3")
    assert spec.qkv_bias == (family == "qwen2")
    assert spec.head_dim == (128 if family.startswith("qwen3") else 16)
    assert spec.num_experts == (4 if family in ("mixtral", "qwen3_moe") else 0)


def test_linear_scaling_in_the_old_spelling():
    spec = parse_config({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2}}, "m")
    assert spec.rope_scaling is not None
    assert (spec.rope_scaling.kind, spec.rope_scaling.factor) == ("linear", 2.0)


def test_sliding_windows():
    mistral = parse_config({**LLAMA, "model_type": "mistral", "sliding_window": 64}, "m")
    assert [mistral.sliding_window(i) for i in range(3)] == [64, 64, 64]
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 64}
    assert parse_config(qwen, "off").sliding_windows == ()
    late = parse_config({**qwen, "use_sliding_window": True, "max_window_layers": 2}, "m")
    assert [late.sliding_window(i) for i in range(3)] == [None, None, 64]
    listed = {
        **qwen,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    }
    assert [parse_config(listed, "m").sliding_window(i) for i in range(3)] == [64, None, None]


def test_mixture_with_dense_layers():
    config = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 8, **MOE}
    spec = parse_config({**config, "decoder_sparse_step": 2, "mlp_only_layers": [1]}, "m")
    assert spec.dense_layers == (0, 1, 2)
    spec = parse_config({**config, "mlp_only_layers": [0]}, "m")
    assert [spec.has_experts(i) for i in range(3)] == [False, True, True]
    assert spec.mlp_params(0) == 3 * 64 * 96
    assert spec.mlp_params(1) == 64 * 8 + 8 * 3 * 64 * 32
    assert spec.mlp_params(1, 2) == 64 * 8 + 2 * 3 * 64 * 32


@pytest.mark.parametrize("given", [7, [7, 9], None])
def test_eos_may_be_one_many_or_none(given):
    expected = {7: (7,), None: ()}.get(given if not isinstance(given, list) else 0, (7, 9))
    assert parse_config({**LLAMA, "eos_token_id": given}, "m").eos_token_ids == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope scaling 'yarn' is not supported"),
        ({"num_key_value_heads": 3}, "4 heads are no multiple of 3"),
    ],
)
def test_errors_name_the_field_and_the_value(change, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({**LLAMA, **change}, "m")


@pytest.mark.parametrize(
    "field", ["num_hidden_layers", "vocab_size", "rms_norm_eps", "max_position_embeddings"]
)
def test_a_missing_field_is_named(field):
    with pytest.raises(ConfigError, match=f"lacks '{field}'"):
        parse_config({k: v for k, v in LLAMA.items() if k != field}, "m")


def test_lookup_by_name_forgives_case_organisation_and_instruct():
    spec = builtin_models()["Llama-3.1-70B"]
    assert builtin_model("meta-llama/llama-3.1-70b") is spec
    assert builtin_model("Llama-3.1-70B-Instruct") is spec
    with pytest.raises(ConfigError, match=r"neither a folder .* one of Llama-2-70B"):
        builtin_model("Llama-9")


def test_load_from_folder_file_and_catalogue(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        load_model_spec(str(folder))
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert load_model_spec(str(folder)) == load_model_spec(str(folder / "config.json"))
    assert load_model_spec(str(folder)).name == "tiny"
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="expected a JSON object, got list"):
        load_model_spec(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load_model_spec(str(folder))
    assert load_model_spec("Mixtral-8x7B").num_experts == 8


def test_models_that_can_only_be_planned():
    from bimetal.catalog.planned_models import planned_model

    gpt_oss = planned_model("openai/gpt-oss-120b")
    assert gpt_oss.num_params / 1e9 == pytest.approx(116.8, abs=0.05)
    assert gpt_oss.num_active_params / 1e9 == pytest.approx(
        5.1 + 0.58, abs=0.05
    )  # published without the embedding
    deepseek = planned_model("DeepSeek-R1")
    assert deepseek.num_params / 1e9 == pytest.approx(671, abs=0.5)
    assert deepseek.num_active_params / 1e9 == pytest.approx(37.5, abs=0.2)
    assert deepseek.kv_bytes_per_token() == 61 * (512 + 64) * 2
    assert planned_model("Llama-3.1-8B") is builtin_model("Llama-3.1-8B")
    with pytest.raises(ConfigError, match="gpt-oss-120b, DeepSeek-R1"):
        planned_model("Llama-9")
    with pytest.raises(ConfigError, match="in the catalogue"):
        builtin_model("gpt-oss-120b")
