"""`bimetal tco` as a user meets it."""

import csv
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bimetal.cli.tco import command
from bimetal.errors import ConfigError

SCENARIOS = Path(__file__).parents[2] / "examples" / "scenarios"


def run(*args):
    result = CliRunner().invoke(command, [*map(str, args)], env={"COLUMNS": "80"}, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_scenarios_price_within_80_columns(path):
    output = run(path, "--draws", "500")
    assert max(map(len, output.splitlines())) <= 80
    for word in ("NPV is cash only", "per million output tokens", "break-even", "[p10, p90]"):
        assert word in output


def test_case_study_is_cheaper_per_fleet_and_dearer_per_token():
    decision = json.loads(run(SCENARIOS / "case-study.yaml", "--json"))["decisions"][0]
    savings = decision["savings"]
    assert savings["chip_ratio"]["p50"] == pytest.approx(0.08)
    assert 0 < savings["tco_ratio"]["p50"] < savings["chip_ratio"]["p50"]
    assert savings["per_token_ratio"]["p50"] < 0


def test_every_row_explains_itself():
    path = SCENARIOS / "case-study-2026.yaml"
    output = " ".join(run(path, "--explain").split())
    for word in ("= GPUs x price", "runlocalai.co pulse", "2026 Q1", "UNVERIFIED"):
        assert word in output
    rows = list(csv.DictReader(io.StringIO(run(path, "--csv"))))
    assert {row["fleet"] for row in rows} == {"all-h100", "mixed"}
    assert all(row["formula"] and row["inputs"] and row["sources"] and row["price_dates"] for row in rows)
    total = sum(float(row["npv_p50_usd"]) for row in rows if row["fleet"] == "mixed")
    fleets = json.loads(run(path, "--json"))["fleets"]
    assert total == pytest.approx(fleets[1]["tco"]["p50"], rel=0.01)


def test_changing_one_price_says_by_how_much_the_decision_moves():
    output = " ".join(run(SCENARIOS / "case-study.yaml", "--set", "gpus.MI300X.price_usd=15000").split())
    assert "with gpus.MI300X.price_usd=15000: mixed saves" in output
    assert "points). The decision flips." in output


def test_scenarios_are_compared_on_shared_draws():
    path = SCENARIOS / "case-study.yaml"
    document = json.loads(run(path, "--compare", path, "--json"))
    same = document["decisions"][1]
    assert same["fleet"] == "case-study (case-study.yaml) #2: all-h100"
    assert set(same["savings"]["tco"].values()) == {0.0}


def test_rent_or_own_prints_a_break_even_none_or_no_price_for_each():
    found = {r["gpu"]: r for r in json.loads(run(SCENARIOS / "rent-vs-own.yaml", "--json"))["rent_or_own"]}
    assert list(found) == ["H100", "H200", "MI300X", "B200", "MI355X"]
    assert found["MI355X"]["verdict"] == "no price" and found["MI355X"]["missing"] == "no on-demand price"
    for gpu in ("H100", "H200", "MI300X", "B200"):
        share = found[gpu]["break_even_utilisation"]["p50"]
        assert found[gpu]["verdict"] == ("none" if share > 1 else f"{share:.0%}")
    text = run(SCENARIOS / "rent-vs-own.yaml")
    for gpu in ("H100", "H200"):
        assert f"{gpu}: three-year rental is below owning" in text


def test_other_currency_by_a_given_rate(tmp_path):
    text = (SCENARIOS / "case-study.yaml").read_text()
    (tmp_path / "eur.yaml").write_text(text + "currency: {name: EUR, per_usd: 0.5}\n")
    usd, eur = (json.loads(run(p, "--json")) for p in (SCENARIOS / "case-study.yaml", tmp_path / "eur.yaml"))
    assert eur["fleets"][0]["tco"]["p50"] == pytest.approx(usd["fleets"][0]["tco"]["p50"] / 2)
    assert eur["decisions"][0]["savings"]["tco_ratio"] == usd["decisions"][0]["savings"]["tco_ratio"]


@pytest.mark.parametrize(
    "change", ["gpus.MI300X.price_usd", "gpus.B300.price_usd=1", "fleets.nobody.x=1", "fleets.x=1"]
)
def test_bad_changes_are_refused(change):
    with pytest.raises(ConfigError):
        run(SCENARIOS / "case-study.yaml", "--set", change)


def test_the_option_on_a_second_source_is_worth_what_its_formula_says(tmp_path):
    text = (SCENARIOS / "case-study.yaml").read_text()
    option = (
        "{late_ratio: 0.5, cost_of_late_usd: 1000000, divertible_ratio: 0.4, cost_of_diverting_usd: 150000}"
    )
    (tmp_path / "s.yaml").write_text(f"{text}second_source: {option}\n")
    # 0.5 x (0.4 x 1,000,000 - 150,000)
    worth = json.loads(run(tmp_path / "s.yaml", "--json"))["second_sources"]["case-study"]
    assert worth["worth"]["p50"] == pytest.approx(125_000)
    assert worth["without"]["p50"] - worth["with"]["p50"] == pytest.approx(125_000)
    assert "125,000 USD" in run(tmp_path / "s.yaml")


def test_doubtful_inputs_are_named_before_the_figures(tmp_path):
    output = " ".join(run(SCENARIOS / "case-study-2026.yaml").split())
    assert "UNVERIFIED in the catalogue: gpus.MI300X.price_usd" in output
    assert "from the performance model, not measured: gpus.H100.output_tokens_per_s" in output
    assert output.index("UNVERIFIED") < output.index("TCO (NPV)")
    part = "{price_usd: 60000, tdp_w: 2300, output_tokens_per_s: 5000}"
    text = (SCENARIOS / "case-study.yaml").read_text().replace("fleets:", f"  MI455X: {part}\nfleets:")
    (tmp_path / "next.yaml").write_text(text + "  - name: next\n    groups: [{gpu: MI455X, count: 100}]\n")
    assert "announced, not shipping: MI455X" in run(tmp_path / "next.yaml")


def test_placement_rules_are_priced_and_say_what_breaking_them_costs(tmp_path):
    path = SCENARIOS / "case-study-2026.yaml"
    real_time, batch, tuning = json.loads(run(path, "--json"))["placement"]
    assert (1 + real_time["broken_ratio"]["p50"]) * (1 + batch["broken_ratio"]["p50"]) == pytest.approx(
        1.0, abs=1e-3
    )
    # (192 - 13.5) / 0.7 = 255 samples, 512 / 255 -> 3 steps; (80 - 13.5) / 0.7 = 95, 6 steps.
    assert [(b["samples"], b["accumulation_steps"]) for b in tuning["batches"]] == [(255, 3), (95, 6)]
    assert "fine-tuning on MI300X" in run(path) and "real-time under 100.00 ms on H100" in run(path)
    (tmp_path / "bad.yaml").write_text(path.read_text().replace("instead: MI300X, lat", "instead: B200, lat"))
    with pytest.raises(ConfigError, match=r"placement\[0\].instead: 'B200' is bought for no fleet"):
        run(tmp_path / "bad.yaml")
