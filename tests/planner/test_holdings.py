"""What is owned, what is paid for, and what is said of both, against sums by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from bimetal.catalog.demand import parse_demand
from bimetal.perf.calibration import published_calibration
from bimetal.planner.decide import FleetPlanner
from bimetal.planner.decision import _compared, _verdict
from bimetal.planner.deployment import NOT_ON_AMD, deployments, run_notes
from bimetal.planner.holdings import holdings, paid_usd_per_h, price_lines, usd_per_h_as_if_rented

TEXT = """\
stock:
  - {gpu: H100, count: 40, owned: 8, price_usd_per_h: 2}
  - {gpu: MI300X, count: 16, purchase_usd: 35040, power_w: 1000}
models: [{name: Llama-3.1-8B}]
default_link: 400GbE
demand:
  - {name: chat, kind: interactive, model: Llama-3.1-8B, rate_per_s: 400, input_tokens: 600, output_tokens: 200,
     ttft_p99_s: 2, tpot_p99_s: 0.08}
"""


def planner(text):
    return FleetPlanner(parse_demand(text, "d.yaml"), Path(), published_calibration())


def of_vendor(p, vendor, name):
    return p.plan(name, [t.vendors == {vendor} for t in p.templates], simulate=False)


@pytest.fixture(scope="module")
def plans():
    p = planner(TEXT)
    return p, of_vendor(p, "NVIDIA", "all NVIDIA"), of_vendor(p, "AMD", "all AMD")


def test_owned_gpus_are_told_from_whole_nodes_beside_them(plans):
    p, nvidia, amd = plans
    (own,) = holdings(p.demand.stock, nvidia)
    assert own.owned == 8
    assert own.nodes >= 1
    assert own.number == 8 + 8 * own.nodes == nvidia.gpus[0]
    assert own.words.startswith(f"{own.number} H100-SXM-80GB (8 owned, {own.nodes} node")
    assert own.words.endswith("of 8 more rented)")
    assert (
        paid_usd_per_h(nvidia) == pytest.approx(2 * 8 * own.nodes) == nvidia.usd_per_h
    )  # power is not priced
    assert usd_per_h_as_if_rented(nvidia) == pytest.approx(2 * own.number)
    (bought,) = holdings(p.demand.stock, amd)
    assert bought.owned == 0
    assert bought.words.endswith("bought)")
    assert paid_usd_per_h(amd) == pytest.approx(bought.number * 1.0)  # 35040 over four years


def test_every_price_says_where_it_is_from():
    demand = parse_demand(
        TEXT.replace("MI300X, count: 16, purchase_usd: 35040", "MI300X, count: 16"), "d.yaml"
    )
    given, owned, catalogue = price_lines(demand)
    assert given == "$/GPU-hour: H100-SXM-80GB 2.00 (given in the file)"
    assert owned.startswith(
        "$/GPU-hour: owned H100-SXM-80GB 0.00 (its power, which site.electricity_usd_per_kwh"
    )
    assert catalogue.startswith("$/GPU-hour: MI300X 1.55 (catalogue, three-year rental: ")
    assert "2026-04" in catalogue
    priced = parse_demand(TEXT + "site: {electricity_usd_per_kwh: 0.1}\n", "d.yaml")
    assert any(
        "MI300X 1.10 ($35040 given in the file over 4 years, with power" in x for x in price_lines(priced)
    )


def test_a_tie_is_no_gain(plans):
    p, nvidia, _ = plans
    words = _compared(p.demand, "mixing AMD and NVIDIA", nvidia, nvidia, "all NVIDIA")
    cost = f"${nvidia.usd_per_h:.2f}/h"
    assert words == f"mixing AMD and NVIDIA ties with all NVIDIA: {cost} against {cost}"


def test_what_owned_gpus_have_to_do_with_a_gain_is_said(plans):
    p, nvidia, amd = plans
    chosen = replace(amd.optimum.chosen, usd_per_h=nvidia.usd_per_h + 10)
    dear = replace(amd, optimum=replace(amd.optimum, chosen=chosen))
    words = _compared(p.demand, "mixing", nvidia, dear, "all AMD")
    assert "It uses 8 owned GPUs, all AMD 0" in words
    assert f"costs ${paid_usd_per_h(nvidia):.2f}/h against ${paid_usd_per_h(amd):.2f}/h" in words
    assert f"would be ${2 * nvidia.gpus[0]:.2f}/h against ${amd.gpus[1]:.2f}/h" in words
    assert "%" not in words


def test_power_that_is_not_priced_is_said_where_owned_gpus_are_used(plans):
    p, nvidia, amd = plans
    said = "8 owned GPUs count as free, since power is not priced: give site.electricity_usd_per_kwh"
    assert said in _verdict(p.demand, nvidia, [])
    assert not any("count as free" in line for line in _verdict(p.demand, amd, []))
    priced = planner(TEXT + "site: {electricity_usd_per_kwh: 0.1}\n").demand
    assert not any("count as free" in line for line in _verdict(priced, nvidia, []))


def test_what_running_takes_is_said_of_amd_gpus_and_of_several_replicas(plans):
    p, nvidia, amd = plans
    assert NOT_ON_AMD in run_notes(amd)
    assert NOT_ON_AMD not in run_notes(nvidia)
    number = sum(group.number for group in nvidia.groups)
    assert number > 1
    assert run_notes(nvidia)[0].startswith(
        f"these {number} replicas are {number} times `bimetal serve`, with a router"
    )
    for plan in (nvidia, amd):
        for d in deployments(p, plan):
            assert (NOT_ON_AMD in d.plan.reasons) == (plan is amd)
