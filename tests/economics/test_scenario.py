"""A scenario file: what it may say, and how it is told what is wrong."""

from pathlib import Path

import pytest

from bimetal.catalog.document import Document
from bimetal.catalog.hardware import find_gpu
from bimetal.cli.tco_model import throughput_of
from bimetal.economics.analysis import rent_or_own
from bimetal.economics.binding import bind, bind_one
from bimetal.economics.scenario import catalogue_quantity, check_comparable, parse_scenario
from bimetal.economics.scenario_file import (
    Colocation,
    Discount,
    Finance,
    FleetFields,
    GpuFields,
    GroupFields,
    OwnPower,
    Serving,
    SiteFields,
    WaitingFields,
    Workload,
)
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
        ("price_usd: 25000", "price_usd: -1", ("s.yaml:9", "gpus.H100.price_usd", "[0, 1e+15]", "-1")),
        ("price_usd: 25000", "price_usd: true", ("s.yaml:9", "gpus.H100.price_usd", "number", "True")),
        ("count: 8", "count: true", ("s.yaml:13", "fleets[0].groups[0].count", "True")),
        ("name: test", "name: test\ncurrency: {name: EUR, per_usd: yes}", ("s.yaml:2", "per_usd", "true")),
        ("pue_ratio: 1.3", "pue_ratio: 0.9", ("s.yaml:4", "site.own.pue_ratio", "[1, 5]", "0.9")),
        (
            "utilisation_ratio: 0.6",
            "utilisation_ratio: 1.2",
            ("s.yaml:6", "utilisation_ratio", "[1e-06, 1]", "1.2"),
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
        ("price_usd: 25000", "price_usd: 1e+300", ("gpus.H100.price_usd", "1e+15", "1e+300")),
        ("price_usd: 25000", f"price_usd: 1{'0' * 400}", ("gpus.H100.price_usd", "1e+15", "000...")),
        ("output_tokens_per_s: 1000", "output_tokens_per_s: 0", ("gpus.H100.output_tokens_per_s", "1e-06")),
        ("utilisation_ratio: 0.6", "utilisation_ratio: 0", ("workload.utilisation_ratio", "1e-06")),
        ("wacc_ratio: 0.08", "wacc_ratio: 0.08, tax_ratio: 1", ("finance.tax_ratio", "0.99")),
        ("count: 8", "count: true", ("fleets[0].groups[0].count", "True")),
        ("name: test", "name: test\nseed: -1", ("seed", "-1")),
        (
            "utilisation_ratio: 0.6\n",
            "utilisation_ratio: 0.6\n  input_tokens_per_output_token: 1\n"
            "serving: {model: Llama-3.1-70B, input_tokens: 2048, output_tokens: 256, concurrency: 8}\n",
            ("s.yaml:7", "workload.input_tokens_per_output_token", "is 1", "serving has 8"),
        ),
        ("name: test", "name: test\ncurrency: {name: USD, per_usd: 0.9}", ("currency", "one USD")),
        ("name: test", "name: test\ncurrency: {name: EUR, per_usd: .inf}", ("currency.per_usd", "inf")),
        (
            "  - name: a\n",
            "  - name: a\n    groups: [{gpu: H100, count: 1}]\n  - name: a\n",
            ("s.yaml:14", "fleets[1].name", "'a' is taken"),
        ),
        (
            "price_usd: 25000",
            "price_usd: 25000\n    discounts: [{name: d, ratio: 0.1, base: list}, {name: d, ratio: 0.2, base: list}]",
            ("gpus.H100.discounts[1].name", "'d' is taken"),
        ),
        (
            "price_usd: 25000",
            "price_usd: 25000\n    discounts: [{name: c, ratio: 0.6, base: list}, {name: d, ratio: {low: 0, high: 0.6}, base: list}]",
            ("gpus.H100.discounts", "120% off the price", "at most 100%"),
        ),
        (
            "price_usd: 25000",
            "price_usd: 25000\n    lead_time_weeks: {low: 100, high: 200}",
            ("gpus.H100.lead_time_weeks", "200 weeks", "156.4"),
        ),
        (
            "name: test",
            "name: test\ncorrelations: [[x, x, 0.5]]",
            ("correlations[0]", "two different inputs"),
        ),
        (
            "name: test",
            "name: test\ncorrelations: [[x, y, 0.5], [y, x, 0.4]]",
            ("correlations[1]", "each pair once"),
        ),
        ("name: test", "name: test\ncorrelations: [[x, y, 1]]", ("correlations[0]", "below 1, got 1")),
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


def test_a_gpu_that_is_only_asked_about_is_filled_in_and_checked_too():
    asked = TEXT.replace("fleets:", "  MI300X: {lead_time_weeks: 200}\nfleets:") + "rent_or_own: [MI300X]\n"
    with pytest.raises(ConfigError, match=r"gpus\.MI300X\.lead_time_weeks: may reach 200 weeks"):
        parse(asked)
    scenario = parse(asked.replace("200", "20"))
    assert scenario.quantities["gpus.MI300X.tdp_w"].central == 750
    bare = TEXT.replace("fleets:", "  MI455X: {price_usd: 60000}\nfleets:") + "rent_or_own: [MI455X]\n"
    with pytest.raises(ConfigError, match=r"gpus\.MI455X\.tdp_w"):
        parse(bare)


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


def test_a_plan_speaks_for_its_own_fleet_alone(tmp_path):
    """Its mean over both vendors once became every fleet's rate for those GPUs."""
    (tmp_path / "plan.yaml").write_text(
        "version: 1\nmodel: m\npredicted_output_tokens_per_s: 1500\nreplicas:\n- name: r\n  stages:\n"
        "  - {node: a, gpu: H100, start_layer: 0, end_layer: 2}\n"
        "  - {node: b, gpu: MI300X, start_layer: 2, end_layer: 4}\n"
    )
    mixed = "  - name: b\n    plan: plan.yaml\n    groups: [{gpu: H100, count: 4}, {gpu: MI300X, count: 4}]\n"
    text = TEXT.replace("fleets:", "  MI300X: {price_usd: 15000}\nfleets:") + mixed
    scenario = parse_scenario(Document(text, "s.yaml"), tmp_path)
    alone, both = (price_fleet(f) for f in bind(scenario, central_values(scenario.quantities)))
    assert alone.tokens[0] == pytest.approx(8 * 1000 * 0.6 * 8760 * 3600)
    assert both.tokens[0] == pytest.approx(4 * 1500 * 0.6 * 8760 * 3600)


def test_one_gpu_for_placement_bears_nothing_of_its_fleet():
    extras = "waiting: {idle_usd_per_year: 1000000, cloud_usd_per_h: 3, bridged_ratio: 0.5}\n"
    late = TEXT.replace("price_usd: 25000", "price_usd: 25000\n    lead_time_weeks: 26")
    fleet = "    throughput_ratio: 0.5\n    qualification_usd: 1000000\n    stack_usd_per_year: 1000000\n"
    revenue = "workload:\n  revenue_usd_per_million_output_tokens: 9"
    plain, loaded = parse(late), parse(late.replace("workload:", revenue) + fleet + extras)
    costs = [
        price_fleet(bind_one(s, "H100", central_values(s.quantities))).usd_per_million_output_tokens
        for s in (plain, loaded)
    ]
    assert float(costs[0]) == pytest.approx(float(costs[1]))


def test_an_hour_of_owning_is_of_the_hours_there_and_before_tax_as_rents_are():
    rent = "    on_demand_usd_per_h: 3\n    discounts: [{name: d, ratio: 0.1, applies_to: on-demand, base: list}]\n"
    text = TEXT.replace("    output_tokens", rent + "    output_tokens") + "rent_or_own: [H100]\n"
    text = text.replace("wacc_ratio: 0.08", "wacc_ratio: 0")
    (plain,), (taxed,), (late,) = (
        rent_or_own(s, central_values(s.quantities))
        for s in (
            parse(text),
            parse(text.replace("wacc_ratio: 0", "wacc_ratio: 0, tax_ratio: 0.3")),
            parse(text.replace("price_usd: 25000", f"price_usd: 25000\n    lead_time_weeks: {365 / 7}")),
        )
    )
    kwh = 0.7 * 1.3 * 0.1
    assert plain.own_usd_per_h.p50 == pytest.approx(25_000 / 3 / 8760 + kwh)
    assert plain.break_even_utilisation.p50 == pytest.approx((25_000 / 3 / 8760 + kwh) / 2.7)
    assert taxed.own_usd_per_h.p50 == pytest.approx(plain.own_usd_per_h.p50)
    assert taxed.break_even_utilisation.p50 == pytest.approx(plain.break_even_utilisation.p50)
    assert late.own_usd_per_h.p50 == pytest.approx(25_000 / 2 / 8760 + kwh)


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
    near = [
        parse(
            TEXT.replace("workload:", f"workload:\n  demand_output_tokens_per_s: {x}")
            + "compare_per: fleet\n"
        )
        for x in (1234567, 1234568)
    ]
    with pytest.raises(ConfigError, match=r"1234568, in s\.yaml 1234567"):
        check_comparable(near)


def test_the_scenario_in_the_docs_prices_and_every_field_is_in_its_table():
    page = (Path(__file__).parents[2] / "docs" / "economics.md").read_text(encoding="utf-8")
    text = page.split("```yaml\n")[1].split("```")[0]
    scenario = parse_scenario(Document(text, "docs"), Path("."), throughput_of)
    costs = [price_fleet(f).npv_usd for f in bind(scenario, central_values(scenario.quantities))]
    assert float(costs[0]) > float(costs[1]) > 0
    parts = (
        Finance,
        OwnPower,
        Colocation,
        SiteFields,
        Workload,
        Serving,
        GpuFields,
        GroupFields,
        FleetFields,
    )
    for part in (*parts, WaitingFields, Discount):
        for field in part.model_fields:
            assert f"`{field}`" in page or f".{field}`" in page or f"[].{field}" in page, field
