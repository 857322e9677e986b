"""A spreadsheet engine recalculates the workbook to the figures of the Python equations, to the cent."""

from pathlib import Path

import formulas
import openpyxl
import pytest

from bimetal.catalog.document import Document
from bimetal.cli.tco_model import throughput_of
from bimetal.economics.binding import bind
from bimetal.economics.scenario import load_scenario, parse_scenario
from bimetal.economics.tco import price_fleet
from bimetal.economics.uncertainty import central_values
from bimetal.economics.workbook import write_workbook

SCENARIOS = Path(__file__).parents[2] / "examples" / "scenarios"
KEYS = (
    *("chip_usd", "system_usd", "npv_usd", "annualised_usd", "usd_per_million_output_tokens"),
    *("revenue_usd", "profit_usd"),
)
HARD = """\
name: hard
finance: {horizon_years: 2, wacc_ratio: 0.1, flows: mid-year, inflation_ratio: 0.03, tax_ratio: 0.25}
site:
  own: {usd_per_kwh: 0.1, pue_ratio: 1.3, cooling_usd_per_kw: 1500}
  duty_ratio: 0.02
  vat_ratio: 0.01
workload: {utilisation_ratio: 0.6, demand_output_tokens_per_s: 4000, revenue_usd_per_million_output_tokens: 0.3}
gpus:
  H100:
    price_usd: {low: 22000, high: 25000}
    output_tokens_per_s: 1000
    lead_time_weeks: 20
    deposit_ratio: 0.3
    residual_3y_ratio: 0.3
    successor_year: 1
    successor_drop_ratio: 0.2
    support_ratio: 0.05
    uptime_ratio: 0.99
    promised_uptime_ratio: 0.999
    sla_credit_ratio: 0.1
    discounts: [{name: a, ratio: 0.1, base: list}, {name: b, ratio: 0.05, base: remaining}]
  B200: {price_usd: 40000, on_demand_usd_per_h: 4, output_tokens_per_s: 3000, residual_3y_ratio: 0.3}
fleets:
  - name: one
    groups: [{gpu: H100, count: 8, years: [0, 1]}, {gpu: B200, count: 4, years: [1, 2]}]
    qualification_usd: 5000
  - name: two
    groups: [{gpu: H100, count: 8}, {gpu: H100, count: 2, terms: reserved}, {gpu: B200, count: 1, terms: on-demand}]
waiting: {cloud_usd_per_h: 4, bridged_ratio: 0.5, idle_usd_per_year: 90000}
"""


def recalculate(path, folder):
    """Summary row label to the values of all fleets."""
    model = formulas.ExcelModel().loads(str(path)).finish()
    model.calculate()
    model.write(dirpath=str(folder))
    sheet = openpyxl.load_workbook(folder / path.name.upper())["SUMMARY"]
    return {row[0].value: [cell.value for cell in row[1:]] for row in sheet.iter_rows()}


def expect_same(scenario, path, folder):
    write_workbook(scenario, path)
    found = recalculate(path, folder)
    tcos = [price_fleet(f) for f in bind(scenario, central_values(scenario.quantities))]
    for key in KEYS:
        assert found[key][: len(tcos)] == pytest.approx([float(getattr(t, key)) for t in tcos], abs=0.005)
    return found


def test_late_delivery_to_the_cent(tmp_path):
    expect_same(
        load_scenario(SCENARIOS / "late-delivery.yaml", throughput_of),
        tmp_path / "tco.xlsx",
        tmp_path / "out",
    )


def test_tax_discounts_credits_revenue_and_replacement_to_the_cent(tmp_path):
    scenario = parse_scenario(Document(HARD, "hard.yaml"), Path("."))
    expect_same(scenario, tmp_path / "tco.xlsx", tmp_path / "out")


@pytest.mark.parametrize(
    ("path", "value"),
    [("finance.tax_ratio", 0.25), ("gpus.H100.tdp_w", 1400.0), ("fleets.all.output_tokens_per_s", 70.0)],
)
def test_inputs_at_zero_and_from_catalogue_or_plan_are_live_too(tmp_path, path, value):
    (tmp_path / "plan.yaml").write_text(
        "version: 1\nmodel: m\npredicted_output_tokens_per_s: 3000\nreplicas:\n- name: r\n  stages:\n"
        "  - {node: a, gpu: H100, start_layer: 0, end_layer: 2}\n"
    )
    text = (
        "name: s\nfinance: {horizon_years: 1, wacc_ratio: 0.1}\nsite: {own: {usd_per_kwh: 0.1, pue_ratio: 1.3}}\n"
        "workload: {utilisation_ratio: 0.6}\ngpus: {H100: {price_usd: 25000}}\n"
        "fleets: [{name: all, plan: plan.yaml, groups: [{gpu: H100, count: 8}]}]\n"
    )
    scenario = parse_scenario(Document(text, "s.yaml"), tmp_path)
    before = expect_same(scenario, tmp_path / "tco.xlsx", tmp_path / "out")
    book = openpyxl.load_workbook(tmp_path / "tco.xlsx")
    next(row[1] for row in book["inputs"].iter_rows() if row[0].value == path).value = value
    book.save(tmp_path / "changed.xlsx")
    after = recalculate(tmp_path / "changed.xlsx", tmp_path / "out")
    (fleet,) = bind(scenario, {**central_values(scenario.quantities), path: value})
    key = "usd_per_million_output_tokens"
    assert after[key][0] == pytest.approx(float(price_fleet(fleet).usd_per_million_output_tokens))
    assert after[key][0] != pytest.approx(before[key][0])


def test_names_and_sources_are_text_and_never_formulas(tmp_path):
    text = HARD.replace("name: one", "name: '=1+1'").replace(
        "price_usd: 40000", "price_usd: {value: 40000, source: '=2+2'}"
    )
    write_workbook(parse_scenario(Document(text, "s.yaml"), Path(".")), tmp_path / "tco.xlsx")
    book = openpyxl.load_workbook(tmp_path / "tco.xlsx")
    assert book["summary"]["B1"].value == "'=1+1"
    sources = [row[4] for row in book["inputs"].iter_rows()]
    assert not any(cell.data_type == "f" for cell in sources)


def test_a_price_changed_in_the_sheet_moves_the_total(tmp_path):
    scenario = load_scenario(SCENARIOS / "case-study.yaml")
    before = expect_same(scenario, tmp_path / "tco.xlsx", tmp_path / "out")
    book = openpyxl.load_workbook(tmp_path / "tco.xlsx")
    cell = next(row[1] for row in book["inputs"].iter_rows() if row[0].value == "gpus.MI300X.price_usd")
    cell.value = 15_000
    book.save(tmp_path / "changed.xlsx")
    after = recalculate(tmp_path / "changed.xlsx", tmp_path / "out")
    assert before["chip_usd"][1] - after["chip_usd"][1] == pytest.approx(400 * 9_000)
    assert after["npv_usd"][0] == pytest.approx(before["npv_usd"][0])
    values = {**central_values(scenario.quantities), "gpus.MI300X.price_usd": 15_000.0}
    assert after["npv_usd"][1] == pytest.approx(
        float(price_fleet(bind(scenario, values)[1]).npv_usd), abs=0.005
    )
