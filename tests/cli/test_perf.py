"""`bimetal perf` as a user meets it."""

import csv
import json

import pytest
from click.testing import CliRunner

from bimetal.cli.perf import command
from bimetal.errors import BimetalError

COLUMNS = "gpu,n_gpus,tp,model,model_canonical,weight_dtype,isl,osl,load,concurrency_or_batch,out_tok_s,tpot_ms_p50,ttft_ms_p50,engine"
ROWS = (
    "H100-SXM-80GB,4,4,x/Llama-3.1-70B,Llama-3.x-70B,fp8,1000,1000,closed-loop,16,,11.5,150,vllm",
    "MI355X,8,8,x/Llama-3.1-405B,Llama-3.1-405B,fp8,1000,1000,closed-loop,16,,16.0,,vllm",
    'MI300X,8,,llama2-70b-99.9,Llama-2-70B,fp8,"OpenOrca, isl<=1024",300,mlperf-offline,,24000,,,vLLM',
    "TPU,8,8,x/Llama-3.1-70B,Llama-3.x-70B,fp8,1000,1000,closed-loop,16,,9,,vllm",
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("\n".join((COLUMNS, *ROWS)) + "\n")
    return path


def run(*arguments):
    return CliRunner().invoke(
        command, [str(a) for a in arguments], catch_exceptions=False, env={"COLUMNS": "80"}
    )


def test_rows_never_seen_are_predicted_or_refused(file):
    document = json.loads(run("validate", file, "--json").output)
    assert document["num_refused"] == 1
    assert "not in the catalogue" in next(iter(document["refusals"]))
    assert {g["gpu"] for g in document["groups"]} == {"H100-SXM-80GB", "MI355X", "MI300X"}
    assert document["num_fitted"] == 0
    assert document["totals"]["tpot"]["num"] == 2
    assert document["totals"]["tpot"]["mean_error_ratio"] < 0.5
    assert document["totals"]["rate"]["num"] == 1


def test_the_table_fits_and_says_what_was_refused(file):
    output = run("validate", file).output
    assert max(map(len, output.splitlines())) <= 80
    for words in ("MI355X", "Llama-3.1-405B", "1 row(s) refused", "90% intervals cover"):
        assert words in output


def test_published_rows_are_recognised(tmp_path):
    from importlib import resources

    source = (resources.files("bimetal.catalog") / "data" / "measured.csv").read_text().splitlines()
    rows = list(csv.reader(source))
    path = tmp_path / "some.csv"
    with path.open("w", newline="") as handle:
        csv.writer(handle).writerows([rows[0], *rows[500:520]])
    output = run("validate", path).output
    assert "were part of the fit" in output


def test_an_estimate_has_intervals_and_says_what_it_rests_on():
    output = run("estimate", "MI300X", "Llama-3.1-70B", "-t", 8, "--engine", "vllm-rocm").output
    assert "90%:" in output
    assert "measurements of MI300X" in output
    document = json.loads(run("estimate", "mi355x", "Llama-3.1-70B", "-t", 8, "--json").output)
    assert document["tpot_s"]["low"] < document["tpot_s"]["value"] < document["tpot_s"]["high"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("validate", "none.csv"), "No such file"),
        (("estimate", "H10", "Llama-3.1-70B"), "did you mean H100"),
        (("estimate", "H100", "Llama-9"), "neither a folder"),
        (("estimate", "H100", "Llama-3.1-405B"), "raise tensor parallelism"),
    ],
)
def test_errors_are_for_people(arguments, message):
    with pytest.raises(BimetalError, match=message):
        run(*arguments)


@pytest.mark.parametrize("option", ["--input-tokens", "--output-tokens", "--concurrency"])
@pytest.mark.parametrize("value", ["nan", "inf", "1e300"])
def test_what_is_no_number_is_refused(option, value):
    result = run("estimate", "H100", "Llama-3.1-70B", "-t", 8, option, value)
    assert result.exit_code == 2
    assert "the range" in result.output


def test_a_curve_is_written_where_it_can_be(tmp_path):
    with pytest.raises(BimetalError, match="No such file or directory: give a path in a folder that exists"):
        run("power", "-o", tmp_path / "no" / "curve.json")
