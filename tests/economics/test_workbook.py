"""A spreadsheet engine recalculates the workbook to the figures of the Python equations, to the cent."""

from pathlib import Path

import formulas
import openpyxl
import pytest

from bimetal.catalog.document import Document
from bimetal.cli.tco_model import throughput_of
from bimetal.economics.scenario import bind, load_scenario, parse_scenario
from bimetal.economics.tco import price_fleet
from bimetal.economics.uncertainty import central_values
from bimetal.economics.workbook import write_workbook

SCENARIOS = Path(__file__).parents[2] / "examples" / "scenarios"
KEYS = ("chip_usd", "system_usd", "npv_usd", "annualised_usd", "usd_per_million_output_tokens")
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
  B200: {price_usd: 40000, output_tokens_per_s: 3000, residual_3y_ratio: 0.3}
fleets:
  - name: one
    groups: [{gpu: H100, count: 8, years: [0, 1]}, {gpu: B200, count: 4, years: [1, 2]}]
    qualification_usd: 5000
  - name: two
    groups: [{gpu: H100, count: 8}, {gpu: H100, count: 2, terms: reserved}]
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
