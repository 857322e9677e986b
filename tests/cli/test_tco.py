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
    assert "the saving does not depend on workload.utilisation_ratio" in output
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


PLAIN = """\
name: plain
finance: {horizon_years: 3, wacc_ratio: 0.08}
site: {own: {usd_per_kwh: 0.1, pue_ratio: 1.3}}
workload: {utilisation_ratio: 0.6}
gpus:
  H100: {price_usd: 25000, output_tokens_per_s: 1000, residual_3y_ratio: 0.3}
fleets:
  - name: one
    groups: [{gpu: H100, count: 8}]
"""


def test_two_files_of_one_name_are_told_apart_and_both_conventions_are_printed(tmp_path):
    (tmp_path / "a.yaml").write_text(PLAIN)
    (tmp_path / "b.yaml").write_text(
        PLAIN.replace("wacc_ratio: 0.08", "wacc_ratio: 0.2, flows: mid-year").replace(
            "utilisation_ratio: 0.6", "utilisation_ratio: 0.6, input_tokens_per_output_token: 4"
        )
    )
    document = json.loads(run(tmp_path / "a.yaml", "--compare", tmp_path / "b.yaml", "--json"))
    assert [f["name"] for f in document["fleets"]] == ["plain (a.yaml): one", "plain (b.yaml): one"]
    assert list(document["inputs"]) == ["plain (a.yaml)", "plain (b.yaml)"]
    assert any("plain (b.yaml): nominal" in x and "20.0%" in x for x in document["conventions"])
    assert any("differ in input tokens per output token" in x and "1; 4" in x for x in document["doubts"])


@pytest.mark.filterwarnings("error")
def test_json_holds_only_numbers_where_a_saving_is_not_defined(tmp_path):
    rented = "{gpu: H100, count: 8, terms: on-demand}"
    text = (
        PLAIN.replace("{gpu: H100, count: 8}", rented)
        + "  - name: owned\n    groups: [{gpu: H100, count: 8}]\n"
    )
    (tmp_path / "s.yaml").write_text(text)
    document = json.loads(run(tmp_path / "s.yaml", "--json"), parse_constant=pytest.fail)
    assert "chip_ratio" not in document["decisions"][0]["savings"]
    output = run(tmp_path / "s.yaml")
    assert "inf" not in output.replace("inference", "") and "nan" not in output


def test_a_fleet_that_earns_shows_irr_and_payback_and_its_cost_per_token_stays(tmp_path):
    (tmp_path / "cost.yaml").write_text(PLAIN)
    (tmp_path / "earn.yaml").write_text(
        PLAIN.replace("{utilisation", "{revenue_usd_per_million_output_tokens: 1.5, utilisation")
    )
    cost, earn = (json.loads(run(tmp_path / f, "--json"))["fleets"][0] for f in ("cost.yaml", "earn.yaml"))
    assert earn["per_million_output_tokens"] == cost["per_million_output_tokens"]
    assert earn["profit"]["p50"] == pytest.approx(earn["revenue"]["p50"] - earn["tco"]["p50"])
    assert cost["irr"] is None and earn["irr"] > 0 and 0 < earn["payback_years"] < 3
    assert "IRR" in run(tmp_path / "earn.yaml") and "IRR" not in run(tmp_path / "cost.yaml")


def test_a_changed_price_moves_a_single_fleet_too(tmp_path):
    (tmp_path / "s.yaml").write_text(PLAIN)
    assert "one costs +" in run(tmp_path / "s.yaml", "--set", "gpus.H100.price_usd=3e4")


def test_parts_of_lists_are_changed_by_place_as_the_workbook_names_them():
    path = SCENARIOS / "case-study.yaml"
    changed = json.loads(run(path, "--set", "fleets.mixed.groups[1].count=0x1F4", "--json"))
    assert changed["fleets"][1]["chips"]["p50"] == pytest.approx(600 * 30_000 + 500 * 24_000)
    with pytest.raises(ConfigError, match="has no '7' there: use one of 0, 1"):
        run(path, "--set", "fleets.mixed.groups[7].count=1")


def test_discounts_are_named_beside_the_price_that_they_are_off(tmp_path):
    cut = "discounts: [{name: rival, ratio: {value: 0.1, source: quote}, base: list}], price_usd"
    (tmp_path / "s.yaml").write_text(PLAIN.replace("price_usd", cut))
    chips = next(
        r for r in json.loads(run(tmp_path / "s.yaml", "--json"))["fleets"][0]["rows"] if "chips" in r["row"]
    )
    assert chips["npv"]["p50"] == pytest.approx(8 * 22_500) and "after discounts" in chips["formula"]
    assert [x["input"] for x in chips["inputs"]] == ["gpus.H100.price_usd", "gpus.H100.discounts.rival.ratio"]


def test_power_rows_name_the_tdp_and_where_it_is_from(tmp_path):
    (tmp_path / "s.yaml").write_text(PLAIN)
    power = next(
        r for r in json.loads(run(tmp_path / "s.yaml", "--json"))["fleets"][0]["rows"] if "power" in r["row"]
    )
    tdp = next(x for x in power["inputs"] if x["input"] == "gpus.H100.tdp_w")
    assert tdp["value"] == "700" and tdp["source"].startswith("catalogue: ")


def test_outputs_never_land_on_a_scenario_or_on_one_another(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(PLAIN)
    for args in (
        ("--html", path),
        ("--html", tmp_path / "x", "--xlsx", tmp_path / "." / "x"),
        ("--html", tmp_path / "none" / "x.html"),
        ("--xlsx", tmp_path),
    ):
        with pytest.raises(ConfigError, match=r"give (another path|a file)"):
            run(path, *args)
    assert path.read_text() == PLAIN
    assert CliRunner().invoke(command, [str(path), "--json", "--csv"]).exit_code == 2


def test_stdout_is_json_alone_beside_other_outputs(tmp_path):
    (tmp_path / "s.yaml").write_text(PLAIN)
    args = [str(tmp_path / "s.yaml"), "--json", "--html", str(tmp_path / "p"), "--xlsx", str(tmp_path / "w")]
    result = CliRunner().invoke(command, args, catch_exceptions=False)
    assert json.loads(result.stdout)["fleets"] and "page in" in result.stderr
    result = CliRunner().invoke(
        command, ["audit", "--json", "-o", str(tmp_path / "a.md")], catch_exceptions=False
    )
    assert json.loads(result.stdout) and (tmp_path / "a.md").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["[/b] [red]", "‮ünï🙂", "</script><b>", "=1+1", "a: b"])
def test_any_name_is_printed_as_it_is(tmp_path, name):
    (tmp_path / "s.yaml").write_text(
        PLAIN.replace("name: one", f"name: {json.dumps(name, ensure_ascii=False)}"), encoding="utf-8"
    )
    assert name in run(tmp_path / "s.yaml")
    run(tmp_path / "s.yaml", "--html", tmp_path / "p.html", "--xlsx", tmp_path / "w.xlsx")
    assert "</script><b>" not in (tmp_path / "p.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must be a mapping"),
        ("a: &a [*a]\n", "is missing"),
        (PLAIN.replace("3, wacc", "3.5, wacc"), "3.5"),
    ],
)
def test_broken_files_are_errors_for_people(tmp_path, text, said):
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        run(tmp_path / "s.yaml")


def test_csv_gives_back_the_rows(tmp_path):
    text = PLAIN.replace("name: one", 'name: "a, \\"b\\"\\nc"')
    (tmp_path / "s.yaml").write_text(text)
    rows = list(csv.DictReader(io.StringIO(run(tmp_path / "s.yaml", "--csv"))))
    fleet = json.loads(run(tmp_path / "s.yaml", "--json"))["fleets"][0]
    assert {r["fleet"] for r in rows} == {fleet["name"]} == {'a, "b"\nc'}
    assert [r["row"] for r in rows] == [r["row"] for r in fleet["rows"]]
    assert sum(float(r["npv_p50_usd"]) for r in rows) == pytest.approx(fleet["tco"]["p50"], abs=0.05)


def test_a_break_even_starts_from_the_compared_fleets_own_value(tmp_path):
    two = "  - name: two\n    stack_usd_per_year: 9000\n    groups: [{gpu: H100, count: 8}]\n"
    (tmp_path / "a.yaml").write_text(PLAIN + two)
    dear = PLAIN.replace("name: plain", "name: dear").replace("25000", "40000").replace("0.3}", "0.1}")
    (tmp_path / "b.yaml").write_text(dear)
    document = json.loads(run(tmp_path / "a.yaml", "--compare", tmp_path / "b.yaml", "--json"))
    found = [{b["name"]: b["now"] for b in d["break_evens"]} for d in document["decisions"]]
    assert [now["gpus.H100.price_usd"] for now in found] == [25_000, 40_000]


def test_fleets_of_unlike_work_compared_per_fleet_are_flagged():
    doubts = json.loads(run(SCENARIOS / "case-study.yaml", "--set", "compare_per=fleet", "--json"))["doubts"]
    assert any("do not deliver the same tokens" in x for x in doubts)
    assert not any(
        "same tokens" in x for x in json.loads(run(SCENARIOS / "case-study.yaml", "--json"))["doubts"]
    )


def test_a_change_may_complete_a_scenario(tmp_path):
    (tmp_path / "s.yaml").write_text(PLAIN.replace("H100", "H100-NVL").replace("price_usd: 25000, ", ""))
    args = [str(tmp_path / "s.yaml"), "--set", "gpus.H100-NVL.price_usd=9000", "--draws", "500"]
    result = CliRunner().invoke(command, args, catch_exceptions=False)
    assert result.exit_code == 0 and "TCO (NPV)" in result.stdout
    assert "no figures before the change" in result.stderr and "gpus.H100-NVL.price_usd" in result.stderr


@pytest.mark.parametrize("name", ["case-study", "rent-vs-own"])
def test_the_fleets_cost_the_same_at_each_break_even(name):
    path = SCENARIOS / f"{name}.yaml"
    for i, decision in enumerate(json.loads(run(path, "--draws", "100", "--json"))["decisions"], start=1):
        assert any(b["at"] for b in decision["break_evens"])
        for name, x in ((b["name"], x) for b in decision["break_evens"] for x in b["at"]):
            fleets = json.loads(run(path, "--draws", "100", "--set", f"{name}={x!r}", "--json"))["fleets"]
            costs = [f["at_median_inputs"]["per_million_output_tokens"] for f in fleets]
            assert costs[i] == pytest.approx(costs[0], rel=1e-9), (decision["fleet"], name)


@pytest.mark.filterwarnings("error")
def test_no_share_is_saved_of_nothing(tmp_path):
    text = PLAIN.replace("price_usd: 25000", "price_usd: 0").replace("usd_per_kwh: 0.1", "usd_per_kwh: 0")
    two = "  - name: two\n    stack_usd_per_year: 9000\n    groups: [{gpu: H100, count: 8}]\n"
    (tmp_path / "s.yaml").write_text(text + two)
    decision = json.loads(run(tmp_path / "s.yaml", "--json"), parse_constant=pytest.fail)["decisions"][0]
    assert list(decision["savings"]) == ["tco", "tokens_ratio"] and decision["break_evens"] == []
    output = run(tmp_path / "s.yaml", "--set", "workload.utilisation_ratio=0.5", "--html", tmp_path / "p")
    assert "no share is saved of a cost" in output and "nan" not in output
