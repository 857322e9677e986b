"""Rows as points: every column that matters, every gap filled with a reason, every fault refused with one."""

import csv
from pathlib import Path

import pytest

from bimetal.errors import ConfigError
from bimetal.perf.measurements import REQUIRED, parse_rows, published, read_measurements
from bimetal.perf.observations import observe

ROW = {
    "row_id": "1",
    "gpu": "H100-SXM-80GB",
    "n_gpus": "2",
    "tp": "2",
    "model": "meta-llama/Llama-3.1-70B",
    "model_canonical": "Llama-3.x-70B",
    "weight_dtype": "fp8",
    "kv_dtype": "",
    "isl": "1024",
    "osl": "512",
    "load": "closed-loop",
    "concurrency_or_batch": "16",
    "tpot_ms_p50": "20.0",
    "ttft_ms_p50": "300",
    "engine": "vllm",
    "engine_version": "0.12.0",
    "source_group": "somebody",
}


def parse(**changes):
    return parse_rows([{**ROW, **changes}])


def only(**changes):
    found = parse(**changes)
    assert not found.refusals, found.refusals
    return found.measurements[0]


def refusal(**changes):
    found = parse(**changes)
    assert not found.measurements
    return found.refusals[0].reason


def test_a_plain_row():
    m = only()
    p = m.point
    assert (p.gpu.name, p.model.name, p.engine, p.weight_format) == (
        "H100-SXM-80GB",
        "Llama-3.1-70B",
        "vllm",
        "float8",
    )
    assert (p.tensor_parallel, p.input_tokens, p.output_tokens, p.concurrency) == (2, 1024, 512, 16)
    assert (m.tpot_s, m.ttft_s, m.output_tokens_per_s) == (0.02, 0.3, None)


def test_names_are_those_of_families():
    assert only(engine="TensorRT-LLM").point.engine == "tensorrt-llm"
    assert only(engine="vLLM (early 2024)").point.engine == "vllm-2024"
    assert only(engine="vLLM", gpu="MI300X").point.engine == "vllm-rocm"
    assert only(engine="vLLM (ROCm fork)", gpu="MI300X").point.engine == "vllm-rocm"
    assert only(gpu="H100-SXM-80GB(power-capped)").power_capped


def test_uniform_lengths_are_scored_at_their_mean():
    p = only(load="closed-loop (InferenceX random, lengths U[0.8,1.0]x)").point
    assert (p.input_tokens, p.output_tokens) == (pytest.approx(921.6), pytest.approx(460.8))


def test_a_missing_dtype_is_the_checkpoints_and_said():
    m = only(weight_dtype="", tpot_ms_p50="40")
    assert m.point.weight_format == "bfloat16"
    assert any("16-bit weights" in reason for reason in m.filled_in)
    assert only(weight_dtype="", model="nvidia/Llama-3.1-70B-FP8").point.weight_format == "float8"
    assert only(model_canonical="gpt-oss-120b", weight_dtype="fp8").point.weight_format == "mxfp4"


def test_the_cache_is_as_wide_as_the_engine_makes_it():
    assert only().point.kv_bytes == 2
    assert only(engine="trtllm").point.kv_bytes == 1
    assert only(kv_dtype="fp16", engine="trtllm").point.kv_bytes == 2
    assert only(kv_dtype="fp8").point.kv_bytes == 1


def test_the_sources_tag_corrects_multiplied_ranks():
    m = only(source="x_c8_tp2_ep2_934", tp="4", n_gpus="4")
    assert (m.point.tensor_parallel, m.num_gpus) == (2, 2)


def test_missing_ranks_are_the_fewest_that_hold_the_model():
    m = only(tp="", n_gpus="8", load="mlperf-offline", out_tok_s="24000")
    assert m.point.tensor_parallel == 2
    assert m.replicas == 4
    assert [o.value for o in observe([m]) if o.query.target == "rate"] == [6000]


def test_end_to_end_over_output_length_includes_prefill():
    m = only(load="static-batch latency", tpot_ms_p50="", ttft_ms_p50="", e2e_s="10.24")
    assert m.tpot_s == pytest.approx(0.02)
    assert m.tpot_includes_prefill
    assert only(load="static-batch", notes="tpot=e2e/osl incl. prefill").tpot_includes_prefill
    assert not only(load="static-batch").tpot_includes_prefill


def test_derived_throughput_is_not_scored():
    m = only(out_tok_s="800", notes="out_tok_s derived from concurrency/(TTFT+TPOT*(osl-1))")
    assert [o.query.target for o in observe([m])] == ["tpot", "ttft"]
    assert [o.query.target for o in observe([only(out_tok_s="800")])] == ["tpot", "ttft", "rate"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": "TPU"}, "not in the catalogue"),
        ({"model_canonical": "Llama-9"}, "neither a folder"),
        ({"engine": "mystery"}, "engine 'mystery' is not known"),
        ({"load": "sunshine"}, "load 'sunshine' is not one that is modelled"),
        ({"concurrency_or_batch": ""}, "without its concurrency"),
        ({"weight_dtype": "int3"}, "weight_dtype 'int3' is not known"),
        ({"isl": "some prompts"}, "neither a number nor a known data set"),
        ({"isl": "-4"}, "must be positive"),
        ({"osl": "0"}, "osl '0' must be positive"),
        ({"osl": ""}, "osl '' must be positive"),
        ({"tpot_ms_p50": "fast"}, "tpot_ms_p50 'fast' is not a number"),
        ({"tpot_ms_p50": "-1"}, "finite and not negative"),
        ({"tpot_ms_p50": "inf"}, "finite and not negative"),
        ({"tpot_ms_p50": "", "ttft_ms_p50": ""}, "nothing measured that can be predicted"),
        ({"tpot_ms_p50": "5"}, "faster than its weights"),
        (
            {"tpot_ms_p50": "0", "ttft_ms_p50": "0", "out_tok_s": "0"},
            "nothing measured that can be predicted",
        ),
        ({"tp": "0.5"}, "tp '0.5' must be a whole number of GPUs"),
        ({"n_gpus": "1e300"}, "n_gpus '1e300' must be a whole number of GPUs"),
        ({"notes": "DERIVED: exactly 2x the 4-GPU row"}, "a multiple of another row"),
    ],
)
def test_faults_are_refused_with_a_reason(changes, reason):
    assert reason in refusal(**changes)


def test_repeats_are_dropped_whatever_their_source():
    found = parse_rows(
        [ROW, {**ROW, "row_id": "2", "source": "elsewhere", "date": "2026"}, {**ROW, "tpot_ms_p50": "21"}]
    )
    assert (len(found.measurements), found.num_duplicates) == (2, 1)


def test_files(tmp_path):
    path = tmp_path / "rows.csv"
    with pytest.raises(ConfigError, match="No such file"):
        read_measurements(path)
    path.write_text("gpu,model\nH100,x\n")
    with pytest.raises(ConfigError, match="lacks the column"):
        read_measurements(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not text"):
        read_measurements(path)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(ROW))
        writer.writeheader()
        writer.writerow(ROW)
    assert len(read_measurements(path).measurements) == 1
    assert set(REQUIRED) <= set(ROW)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_measurements(path).measurements[0].row == ROW["row_id"]


@pytest.mark.parametrize("number", range(1, len(REQUIRED)))
def test_short_and_long_rows_are_refused_with_a_reason(tmp_path, number):
    path = tmp_path / "rows.csv"
    names = ("load", "engine", "gpu", "model", "isl", "osl")
    values = ("offline", "vllm", "H100", "Llama-3.1-70B", "1000", "1000")
    path.write_text(",".join(names) + "\n" + ",".join(values[:number]) + "\n" + ",".join(values * 2) + "\n")
    found = read_measurements(path)
    assert len(found.refusals) == 2
    assert all(refusal.reason for refusal in found.refusals)


def test_the_published_rows():
    rows = published()
    total = len(rows.measurements) + len(rows.refusals) + rows.num_duplicates
    assert total == 2661
    assert rows.num_duplicates >= 102
    assert len(rows.refusals) < 80
    groups = {}
    for m in rows.measurements:
        groups.setdefault(m.group, set()).add((m.point.engine, m.point.version))
    assert any(len(versions) > 1 for versions in groups.values())  # one group spans engines and versions


def test_a_misspelt_column_is_named_and_an_own_one_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    row = "H100,llama-3.x-70b,1024,1024,closed-loop,vllm,16"
    head = "gpu,model,isl,osl,load,engine,concurrency_or_batch"
    path.write_text(f"{head},tpot_mean_ms\n{row},20\n")
    with pytest.raises(ConfigError, match="column 'tpot_mean_ms' is not known: did you mean tpot_ms_mean"):
        read_measurements(path)
    path.write_text(f"{head},tpot_ms_mean,who_ran_it\n{row},20,us\n")
    assert len(read_measurements(path).measurements) + len(read_measurements(path).refusals) == 1
