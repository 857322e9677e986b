"""`bimetal plan` with a demand file, as a user meets it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from bimetal.cli.placement import plan_of_file
from bimetal.cli.plan import command
from bimetal.errors import BimetalError, ConfigError, InfeasibleError
from bimetal.plan import load_plan
from bimetal.simulate.shapes import replica_shape

FLEET = Path(__file__).parents[2] / "examples" / "fleet.yaml"
SMALL = """\
stock:
  - {gpu: H100, count: 8, price_usd_per_h: 2.0}
  - {gpu: MI300X, count: 8, price_usd_per_h: 2.0}
models: [{name: Llama-3.1-8B}]
demand:
  - {name: chat, kind: interactive, model: Llama-3.1-8B, rate_per_s: 10, input_tokens: 400, output_tokens: 100,
     ttft_p99_s: 1, tpot_p99_s: 0.06}
  - {name: night, kind: batch, model: Llama-3.1-8B, requests: 1e5, input_tokens: 400, output_tokens: 100, deadline_h: 5}
"""


@pytest.fixture
def demand_file(tmp_path):
    path = tmp_path / "demand.yaml"
    path.write_text(SMALL)
    return path


def run(*arguments):
    result = CliRunner().invoke(
        command, [str(a) for a in arguments], catch_exceptions=False, env={"COLUMNS": "80"}
    )
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """What one whole run prints and writes."""
    folder = tmp_path_factory.mktemp("full")
    (folder / "demand.yaml").write_text(SMALL)
    output = run(folder / "demand.yaml", "-o", folder / "out.yaml", "--html", folder / "p.html")
    return output, yaml.safe_load((folder / "out.yaml").read_text()), (folder / "p.html").read_text()


def test_tables_fit_80_columns_and_say_all_that_matters(full):
    output, _, _ = full
    assert max(len(line) for line in output.splitlines() if not line.startswith(("written", "/"))) <= 80
    for words in (
        *("chat: Llama-3.1-8B", "night: ", "Chosen", "$/Mtok", "TTFT p50/p99", "all NVIDIA", "all AMD"),
        *(
            "unsplit mix",
            "binds:",
            "Relaxed one at a time and solved again",
            "Cost against latency",
            "simulated:",
        ),
        *(
            "$/GPU-hour: ",
            "(given in the file)",
            "docs/accuracy.md",
            "rented)",
            "+: takes",
            "!: broke",
            "proof: no other fleet",
        ),
    ):
        assert words in output


def test_the_document_holds_the_comparison_and_the_proof(full):
    _, document, _ = full
    plan = document["plan"]
    assert plan["kept_limits"] is True
    assert 0 <= plan["gap_ratio"] <= 0.005 + 1e-9
    assert plan["classes"]["chat"]["tpot_s"]["p99"] <= 0.06
    assert plan["goodput_tokens_per_s"] > 0
    names = [a["name"] for a in document["alternatives"]]
    assert names[:4] == ["best of all", "all NVIDIA", "all AMD", "unsplit mix"]
    for a in document["alternatives"]:
        assert a["usd_per_h"] >= plan["usd_per_h"] - 1e-6
    for a in document["alternatives"]:
        chance = a["chance_chosen_is_cheaper"]
        assert chance is None or 0 <= chance <= 1
        assert (chance is None) <= (a["usd_per_h"] == plan["usd_per_h"])  # only the plan itself has none
    assert any(a["chance_chosen_is_cheaper"] is not None for a in document["alternatives"])
    costs = [p["usd_per_h"] for p in document["front"] if p["usd_per_h"] is not None]
    assert costs == sorted(costs, reverse=True)


def test_the_page_holds_everything(full):
    _, _, page = full
    assert "Cost against latency" in page
    assert "Plotly" in page
    assert "<script src" not in page
    for words in (
        "Planned on 2",
        "requests/s of",
        "TTFT p50/p99",
        "$/GPU-hour: ",
        "+: takes more than there is",
    ):
        assert words in page


def test_json_is_the_only_thing_on_stdout(demand_file):
    """As a process: the solver's greeting would go past click."""
    code = [sys.executable, "-m", "bimetal.cli.main", "plan", str(demand_file), "--quick", "--json"]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["plan"]["usd_per_h"] > 0


def test_what_the_solver_prints_is_not_on_stdout():
    code = (
        "import ctypes; from bimetal.cli.plan_stdout import clean_stdout\n"
        "with clean_stdout(): ctypes.CDLL(None).printf(b'HighsMipSolverData\\n')\n"
        "print('{}')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("{}\n", "HighsMipSolverData\n")


def test_a_mix_that_loses_is_said_to_lose(demand_file):
    demand_file.write_text(
        SMALL.replace(
            "gpu: MI300X, count: 8, price_usd_per_h: 2.0", "gpu: MI300X, count: 8, price_usd_per_h: 0.2"
        )
    )
    document = json.loads(run(demand_file, "--json", "--quick"))
    assert any(line.startswith("mixing loses: AMD alone") for line in document["verdict"])
    assert set(document["plan"]["gpus"]) == {"MI300X"}


def test_what_the_engine_runs_is_written_as_its_plan(demand_file, tmp_path):
    demand_file.write_text(SMALL + "runnable_only: true\n")
    output = run(demand_file, "--quick", "-o", tmp_path / "out.yaml")
    written = sorted(tmp_path.glob("out-*.yaml"))
    assert written
    for path in written:
        assert str(path.name) in output.replace("\n", "")
        plan = load_plan(path)
        assert plan.dtype == "bfloat16"
        assert all(stage.tensor_parallel == 1 for stage in plan.replicas[0].stages)
        shape = replica_shape(plan, plan.replicas[0], lambda a, b: None, max_num_batched_tokens=2048)
        assert shape.kv_tokens > plan.max_model_len
    assert "chosen:" in (tmp_path / "out.yaml").read_text()


def test_a_decision_is_no_plan_and_says_which_files_are(demand_file, tmp_path):
    demand_file.write_text(SMALL + "runnable_only: true\n")
    decision = tmp_path / "out.yaml"
    run(demand_file, "--quick", "-o", decision)
    first = sorted(tmp_path.glob("out-*.yaml"))[0]
    for read in (load_plan, plan_of_file):
        with pytest.raises(ConfigError, match="is the decision on a whole fleet") as error:
            read(decision)
        assert f"bimetal serve {first}" in str(error.value)
        assert "\n" not in str(error.value)
    for path in tmp_path.glob("out-*.yaml"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"out-0\.yaml.* are gone: write them with `bimetal plan"):
        load_plan(decision)


def test_what_the_engine_cannot_run_is_marked_and_not_written(demand_file, tmp_path):
    demand_file.write_text(SMALL.replace("Llama-3.1-8B", "gpt-oss-120b"))
    output = run(demand_file, "--quick", "-o", tmp_path / "out.yaml")
    assert "priced only" in output
    assert "the engine does not know gpt-oss-120b" in output.replace("\n", " ")
    assert not list(tmp_path.glob("out-*.yaml"))
    assert "there is none to serve" in output
    (tmp_path / "out-0.yaml").write_text("of another plan")
    with pytest.raises(ConfigError, match="no plans were written with it"):
        load_plan(tmp_path / "out.yaml")


def test_nothing_fits_is_an_error_that_helps(demand_file):
    demand_file.write_text(SMALL.replace("rate_per_s: 10,", "rate_per_s: 10000,"))
    with pytest.raises(InfeasibleError, match=r"stock of .* binds: .* more .* would do"):
        run(demand_file, "--quick")


def test_goodput_under_a_budget(demand_file):
    poor = (
        SMALL.replace("rate_per_s: 10,", "rate_per_s: 2000,")
        + "objective: goodput\nsite: {budget_usd_per_h: 20}\n"
    )
    demand_file.write_text(poor)
    document = json.loads(run(demand_file, "--json", "--quick"))
    assert 0 < document["plan"]["usd_per_h"] <= 20
    assert document["plan"]["output_tokens_per_s"] < 2000 * 100
    words = run(demand_file, "--quick").replace("\n", " ")
    assert "% of what chat asks for is served" in words
    assert "less per hour" not in words
    assert "as cheap" not in words


def test_a_budget_that_buys_nothing_of_one_vendor(demand_file):
    dear = SMALL.replace("MI300X, count: 8, price_usd_per_h: 2.0", "MI300X, count: 8, price_usd_per_h: 90.0")
    demand_file.write_text(dear + "objective: goodput\nsite: {budget_usd_per_h: 20}\n")
    document = json.loads(run(demand_file, "--json", "--quick"))
    (none,) = [a for a in document["alternatives"] if a["name"] == "all AMD"]
    assert none["output_tokens_per_s"] == 0
    assert none["chance_chosen_is_cheaper"] is None
    assert "no GPUs" in run(demand_file, "--quick")


def test_the_document_says_what_was_asked_and_how_much_of_it_is_served(demand_file):
    poor = SMALL.replace("rate_per_s: 10,", "rate_per_s: 2000,")
    demand_file.write_text(poor + "objective: goodput\nsite: {budget_usd_per_h: 20}\n")
    document = json.loads(run(demand_file, "--json", "--quick"))
    chat, night = document["demand"]["chat"], document["demand"]["night"]
    assert (chat["model"], chat["requests_per_s"], chat["tpot_p99_s"]) == ("Llama-3.1-8B", 2000, 0.06)
    assert (night["requests_per_s"], night["ttft_p99_s"]) == (pytest.approx(1e5 / 18000), None)
    served, plan = document["plan"]["served_ratio"], document["plan"]
    assert 0 < served["chat"] < 1
    tokens = {
        name: asked["requests_per_s"] * asked["output_tokens"] for name, asked in document["demand"].items()
    }
    total = sum(served[name] * tokens[name] for name in tokens)
    assert plan["output_tokens_per_s"] == pytest.approx(total, rel=1e-4)
    first = document["alternatives"][0]
    low, high = first["usd_per_million_output_tokens_90"]
    assert low <= first["usd_per_million_output_tokens_median"] <= (high or float("inf"))


def test_answers_of_one_token_have_no_time_per_token(demand_file):
    demand_file.write_text(
        SMALL.split("  - {name: night")[0].replace("output_tokens: 100", "output_tokens: 1")
    )
    output = run(demand_file, "--html", demand_file.with_suffix(".html"))
    assert "nan" not in output
    assert (
        "nan"
        not in demand_file.with_suffix(".html").read_text().split("<h2>Replicas")[1].split("<section>")[0]
    )
    assert re.search(r"chat, p50/p95/p99: TTFT [\d./]+ s, 1\d\d", output)


def test_a_plan_above_the_power_cap_is_not_said_to_need_more_gpus(demand_file):
    """One class may run on AMD only where the cap forbids it."""
    demand_file.write_text(
        """\
stock: [{gpu: H100, count: 64}, {gpu: MI300X, count: 64}]
models: []
site: {power_cap_w: 60000}
demand: [{name: tune, kind: fine-tuning, gpu_hours: 700, deadline_h: 24}]
"""
    )
    words = " ".join(run(demand_file, "--quick").split())
    assert "all AMD: 40 MI300X (5 nodes of 8 rented) (above the power cap)" in words
    assert "(more than there is)" not in words


def test_names_can_be_read_in_a_narrow_terminal(demand_file):
    output = (
        CliRunner()
        .invoke(command, [str(demand_file), "--quick"], catch_exceptions=False, env={"COLUMNS": "60"})
        .output
    )
    assert max(map(len, output.splitlines())) <= 60
    assert re.search(r"^all NVIDIA +\d", output, re.MULTILINE)
    assert "TPOT p50/p99" in output


def test_no_plan_is_written_over_the_demand(demand_file):
    """plan.yaml comes with plan-0.yaml, plan-1.yaml, ..."""
    demand = demand_file.rename(demand_file.with_name("plan-0.yaml"))
    demand.write_text(SMALL.replace("stock:", "runnable_only: true\nstock:"))
    before = demand.read_text()
    with pytest.raises(ConfigError, match=r"plan-0.yaml: is the file to be planned and would be lost"):
        run(demand, "--quick", "-o", demand.with_name("plan.yaml"))
    assert demand.read_text() == before
    with pytest.raises(ConfigError, match="for the plan and for the page"):
        run(demand, "--quick", "-o", demand.with_name("x"), "--html", demand.with_name("x"))


def test_batch_work_alone_has_no_cost_against_latency(demand_file):
    night = [line for line in SMALL.splitlines(keepends=True) if "chat" not in line and "ttft" not in line]
    demand_file.write_text("".join(line for line in night if "MI300X" not in line))
    output = run(demand_file)
    assert "night" in output
    assert "Cost against latency" not in output


def test_wrong_use_is_an_error_for_people(demand_file, tmp_path):
    with pytest.raises(ConfigError, match="go with a demand file"):
        run(FLEET, "--quick")
    with pytest.raises(BimetalError, match="a folder that exists"):
        run(demand_file, "--quick", "-o", tmp_path / "no" / "x.yaml")
    with pytest.raises(ConfigError, match="is a folder: give the path of a file in it"):
        run(demand_file, "--quick", "-o", tmp_path)
    with pytest.raises(ConfigError, match="would be lost: give another path"):
        run(demand_file, "--quick", "-o", demand_file)
    assert demand_file.read_text() == SMALL
    demand_file.write_text(SMALL.replace("count: 8", "count: zero", 1))
    with pytest.raises(ConfigError, match=r"demand.yaml:2: stock\[0\].count"):
        run(demand_file)


def test_the_readmes_example(tmp_path):
    """Whatever the coefficients say: every alternative is there, with its price or what it lacks, and none is cheaper."""
    example = Path(__file__).parents[2] / "examples" / "plans" / "azure-70b.yaml"
    document = json.loads(run(example, "--json", "--quick", "-o", tmp_path / "out.yaml"))
    plan, alternatives = document["plan"], document["alternatives"]
    written = sorted(path.name for path in tmp_path.glob("out-*.yaml"))
    assert sorted(document["plan_files"]) == written
    today = next((a for a in alternatives if a["name"] == "runs on bimetal today" and "replicas" in a), None)
    if today and any(r["not_runnable"] for r in plan["replicas"]):
        assert len([name for name in written if "today" in name]) == len(today["replicas"])
        with pytest.raises(ConfigError, match=r"bimetal serve .*out-"):
            load_plan(tmp_path / "out.yaml")
    for path in tmp_path.glob("out-*.yaml"):
        assert load_plan(path).replicas
    for priced in (a for a in alternatives if "holdings" in a):
        assert sum(h["number"] for h in priced["holdings"]) == sum(priced["gpus"].values())
    names = [a["name"] for a in alternatives]
    assert names[:4] == ["best of all", "all NVIDIA", "all AMD", "unsplit mix"]
    assert names[4:] in ([], ["runs on bimetal today"])
    for a in alternatives:
        assert a["reasons"] or a["usd_per_h"] >= plan["usd_per_h"]
        assert bool(a["beyond_stock"]) <= any("binds" in reason for reason in a["reasons"])
    assert plan["gap_ratio"] <= 0.005
    assert document["verdict"]
    words = " ".join(run(example, "--quick").split())
    assert ("runs on bimetal today" in words) <= ("nothing of bimetal has run on AMD hardware yet" in words)


def test_free_gpus_are_planned_and_drawn(demand_file):
    """All points of cost against latency are 0."""
    lines = SMALL.replace("price_usd_per_h: 2.0", "owned: 8").splitlines(keepends=True)
    demand_file.write_text("".join(line for line in lines if "MI300X" not in line and "night" not in line))
    output = run(demand_file)
    assert "# $0.000/Mtok" in output
    assert "90% 0.00 to 0.00" in output
