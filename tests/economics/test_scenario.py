"""A scenario file: what it may say, and how it is told what is wrong."""

from pathlib import Path

import pytest

from bimetal.catalog.document import Document
from bimetal.catalog.hardware import find_gpu
from bimetal.economics.scenario import bind, catalogue_quantity, check_comparable, parse_scenario
from bimetal.economics.tco import price_fleet
from bimetal.economics.uncertainty import central_values
from bimetal.errors import ConfigError

TEXT = """\
name: test
finance: {horizon_years: 3, wacc_ratio: 0.08}
site:
  own: {usd_per_kwh: 0.1, pue_ratio: 1.3}
workload:
  utilisation_ratio: 0.6
gpus:
  H100:
    price_usd: 25000
    output_tokens_per_s: 1000
fleets:
  - name: a
    groups: [{gpu: H100, count: 8}]
"""


def parse(text):
    return parse_scenario(Document(text, "s.yaml"), Path("."))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("price_usd: 25000", "price_usd: -1", ("s.yaml:9", "gpus.H100.price_usd", "at least 0", "-1")),
        ("pue_ratio: 1.3", "pue_ratio: 0.9", ("s.yaml:4", "site.own.pue_ratio", "[1, 5]", "0.9")),
        (
            "utilisation_ratio: 0.6",
            "utilisation_ratio: 1.2",
            ("s.yaml:6", "utilisation_ratio", "[0, 1]", "1.2"),
        ),
        ("horizon_years: 3", "horizon_years: 0", ("s.yaml:2", "finance.horizon_years", "0")),
        (
            "price_usd: 25000",
            "price_usd: {low: 9, high: 5}",
            ("s.yaml:9", "gpus.H100.price_usd", "low <= high", "9, 5"),
        ),
        ("name: test", "name: test\ncurrency: {name: EURO}", ("currency.name", "EURO")),
        ("name: test", "name: test\ncurrency: {name: EUR}", ("currency", "per_usd")),
        ("  H100:", "  H1000:", ("s.yaml:8", "H1000", "did you mean")),
        ("gpu: H100,", "gpu: B200,", ("s.yaml:13", "fleets[0].groups[0].gpu", "B200", "H100")),
        ("    price_usd: 25000\n", "    tdp_w: -5\n", ("gpus.H100.tdp_w", "-5")),
        ("    output_tokens_per_s: 1000\n", "", ("gpus.H100.output_tokens_per_s", "missing")),
        (
            "  own: {",
            "  colocation: {usd_per_kw_month: 200, energy_included: true}\n  own: {",
            ("site", "either"),
        ),
        (
            "own: {usd_per_kwh: 0.1, pue_ratio: 1.3}",
            "colocation: {usd_per_kw_month: 200, energy_included: true, usd_per_kwh: 0.1}",
            ("site.colocation", "energy is paid once"),
        ),
        ("count: 8", "count: 8, years: [2, 5]", ("fleets[0].groups[0].years", "<= 3")),
        (
            "name: test",
            "name: test\nplacement: [{work: fine-tuning, gpu: H100, instead: H100}]",
            ("s.yaml:2", "placement[0]", "give training"),
        ),
        ("price_usd: 25000", "price_usd: .nan", ("gpus.H100.price_usd", "nan")),
        ("wacc_ratio: 0.08", "wacc_ratio: {p10: 0, p90: 0.1}", ("wacc_ratio", "above 0")),
    ],
)
def test_refusals_name_file_field_value_and_range(old, new, said):
    assert old in TEXT
    with pytest.raises(ConfigError) as caught:
        parse(TEXT.replace(old, new))
    for word in said:
        assert word in str(caught.value)


def test_no_price_anywhere_is_an_error_that_names_the_field():
    with pytest.raises(ConfigError, match=r"gpus\.H100-NVL\.price_usd: no price of H100-NVL-94GB"):
        parse(TEXT.replace("H100", "H100-NVL").replace("    price_usd: 25000\n", ""))


def test_price_left_out_comes_from_the_catalogue_with_source_and_date():
    scenario = parse(TEXT.replace("    price_usd: 25000\n", ""))
    price = scenario.quantities["gpus.H100.price_usd"]
    assert price.numbers == find_gpu("H100").purchase_usd
    assert price.date == "2026 Q1" and price.source.startswith("catalogue: runlocalai")
    doubtful = catalogue_quantity(find_gpu("MI300X"), "price_usd")
    assert doubtful is not None and "UNVERIFIED" in doubtful.source


def test_discounts_name_their_base_and_apply_in_order():
    cuts = """
    discounts:
      - {name: volume, ratio: 0.2, base: list}
      - {name: rival, ratio: 0.1, base: remaining}
"""
    scenario = parse(TEXT.replace("    price_usd: 25000\n", "    price_usd: 25000" + cuts))
    fleet = bind(scenario, central_values(scenario.quantities))[0]
    assert fleet.groups[0].price_usd == pytest.approx(25_000 * 0.8 * 0.9)


def test_plan_gives_throughput_in_its_proportions(tmp_path):
    (tmp_path / "plan.yaml").write_text(
        "version: 1\nmodel: m\npredicted_output_tokens_per_s: 3000\nreplicas:\n- name: r\n  stages:\n"
        "  - {node: a, gpu: H100, start_layer: 0, end_layer: 2, device_indices: [0, 1]}\n"
        "  - {node: b, gpu: MI300X, start_layer: 2, end_layer: 4}\n"
    )
    text = TEXT.replace("    output_tokens_per_s: 1000\n", "  MI300X: {price_usd: 15000}\n").replace(
        "groups: [{gpu: H100, count: 8}]",
        "plan: plan.yaml\n    groups: [{gpu: H100, count: 8}, {gpu: MI300X, count: 4}]",
    )
    scenario = parse_scenario(Document(text, "s.yaml"), tmp_path)
    tco = price_fleet(bind(scenario, central_values(scenario.quantities))[0])
    assert tco.tokens[0] == pytest.approx(4 * 3000 * 0.6 * 8760 * 3600)
    with pytest.raises(ConfigError, match="proportions"):
        parse_scenario(Document(text.replace("count: 4", "count: 3"), "s.yaml"), tmp_path)


def test_missed_promise_returns_its_credit():
    sla = "    promised_uptime_ratio: 0.999\n    uptime_ratio: 0.99\n    sla_credit_ratio: 0.1\n    support_ratio: 0.05\n"
    scenario = parse(TEXT.replace("    price_usd: 25000\n", "    price_usd: 25000\n" + sla))
    tco = price_fleet(bind(scenario, central_values(scenario.quantities))[0])
    support = next(line for line in tco.lines if line.label.endswith("support"))
    assert support.usd[0] == pytest.approx(8 * 25_000 * 0.05 * 0.9)
    assert tco.tokens[0] == pytest.approx(8 * 1000 * 0.99 * 0.6 * 8760 * 3600)


def test_different_demand_is_not_compared_per_fleet():
    demand = "workload:\n  demand_output_tokens_per_s: 500"
    one, two = parse(TEXT + "compare_per: fleet\n"), parse(TEXT.replace("workload:", demand))
    with pytest.raises(ConfigError, match="compare_per to token"):
        check_comparable([one, two])
    check_comparable([parse(TEXT), two])
