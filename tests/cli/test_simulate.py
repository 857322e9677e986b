"""`bimetal simulate` as a user meets it, on a slice of a real trace's shape."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from bimetal.cli.plan import command as plan_command
from bimetal.cli.simulate import command
from bimetal.errors import BimetalError

EXAMPLE = Path(__file__).parents[2] / "examples" / "fleet.yaml"


@pytest.fixture
def files(tmp_path):
    plan, trace = tmp_path / "plan.yaml", tmp_path / "trace.csv"
    CliRunner().invoke(plan_command, [str(EXAMPLE), "-o", str(plan)], catch_exceptions=False)
    rng = np.random.default_rng(3)
    arrivals = np.cumsum(rng.exponential(0.5, 120))
    lines = [f"{t:.3f},{rng.integers(10, 2000)},{rng.integers(1, 300)}" for t in arrivals]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n")
    return plan, trace


def run(*arguments):
    result = CliRunner().invoke(
        command, [str(a) for a in arguments], catch_exceptions=False, env={"COLUMNS": "80"}
    )
    assert result.exit_code == 0, result.output
    return result.output


def test_table_and_document_say_the_same(files):
    output = run(*files, "--fleet", EXAMPLE, "--ttft-slo", 2, "--tpot-slo", 0.1)
    assert max(map(len, output.splitlines())) <= 80
    for words in ("TTFT", "p99", "goodput", "2 x H100-SXM-80GB", "1 x MI300X"):
        assert words in output
    document = json.loads(run(*files, "--fleet", EXAMPLE, "--json"))
    assert document["classes"][0]["num_requests"] == 120
    assert document["gpus"][0]["busy_ratio"] <= 1


def test_more_copies_serve_faster(files):
    def p95(*more):
        return json.loads(run(*files, "--compress", 20, "--json", *more))["classes"][0]["ttft_s"]["95"]

    assert p95("--copies", 4) < p95()


def test_files_are_written(files, tmp_path):
    pyarrow = pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("matplotlib")
    run(*files, "-o", tmp_path / "r.parquet", "--plot", tmp_path / "t.png", "--requests", 30)
    table = pyarrow.read_table(tmp_path / "r.parquet")
    assert table.num_rows == 30
    assert min(table["ttft_s"].to_pylist()) > 0
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_requests_that_would_be_refused_are_left_out_and_counted(files, tmp_path):
    """The plan's max_model_len is 8192; an answer of a thousand million tokens would take its time."""
    plan, trace = files
    with trace.open("a") as file:
        file.write("1e6,8000,192\n1e6,8000,193\n1e6,100,999999999\n")
    document = json.loads(run(plan, trace, "--json"))
    assert (document["classes"][0]["num_requests"], document["num_refused"]) == (121, 2)
    assert "2 of 123 requests left out: longer" in " ".join(run(plan, trace).split())
    long = tmp_path / "long.csv"
    long.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,9000,1\n")
    with pytest.raises(BimetalError, match=r"all 1 requests are longer, .* max_model_len 8192"):
        run(plan, long)


def test_what_cannot_be_written_is_named(files, tmp_path):
    pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("matplotlib")
    with pytest.raises(BimetalError, match=f"{tmp_path}: .*s a directory"):
        run(*files, "-o", tmp_path, "--requests", 3)
    with pytest.raises(BimetalError, match=r"t.xyz: Format 'xyz' is not supported.*give another ending"):
        run(*files, "--plot", tmp_path / "t.xyz", "--requests", 3)


def test_a_limit_that_is_no_number_is_refused(files):
    result = CliRunner().invoke(command, [*map(str, files), "--ttft-slo", "nan"])
    assert result.exit_code == 2
    assert "not a number in the range x>0" in result.output


def test_errors_are_for_people(files, tmp_path):
    plan, trace = files
    with pytest.raises(BimetalError, match="No such file"):
        run(plan, tmp_path / "none.csv")
    with pytest.raises(BimetalError, match="compression 0"):
        run(plan, trace, "--compress", 0)
    other = tmp_path / "other.yaml"
    other.write_text("model: Llama-3.1-8B\nnodes: [{name: x, gpu: H100}]\n")
    with pytest.raises(BimetalError, match="has no node 'green'"):
        run(plan, trace, "--fleet", other)
