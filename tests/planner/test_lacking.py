"""What alternatives are said to lack: cheap to know, and enough."""

import re
from datetime import date
from pathlib import Path

import pytest

from bimetal.catalog.demand import parse_demand
from bimetal.cli.plan_page import render_page
from bimetal.cli.plan_words import marked_name, run_lines
from bimetal.perf.calibration import published_calibration
from bimetal.planner.decide import FleetPlanner
from bimetal.planner.decision import decide
from bimetal.planner.deployment import NOT_ON_AMD

TEXT = """\
stock: [{gpu: H100, count: 8}, {gpu: MI300X, count: 8}]
models: [{name: Llama-3.1-8B}]
default_link: 400GbE
demand:
  - {name: chat, kind: interactive, model: Llama-3.1-8B, rate_per_s: RATE, input_tokens: 500, output_tokens: 100,
     ttft_p99_s: 2, tpot_p99_s: 0.08}
"""


def decided(text):
    demand = parse_demand(text, "d.yaml")
    return decide(demand, Path(), published_calibration(), simulate=False, explore=False)


def alternatives(text):
    return {a.name: a for a in decided(text).alternatives}


@pytest.fixture(scope="module")
def most():
    """Requests a second that all GPUs together serve, nearly."""
    text = TEXT.replace("RATE", "1e5") + "objective: goodput\n"
    planner = FleetPlanner(parse_demand(text, "d.yaml"), Path(), published_calibration())
    plan = planner.plan("best of all", simulate=False)
    return 1e5 * plan.optimum.chosen.served_ratio[0] * 0.97


def test_nothing_is_enumerated_anew_for_an_alternative(most, monkeypatch):
    def refused(self, demand):
        raise AssertionError("templates were enumerated anew")

    monkeypatch.setattr(FleetPlanner, "with_demand", refused)
    decision = decided(TEXT.replace("RATE", f"{most:.6g}"))
    beyond = {a.name: a for a in decision.alternatives if a.beyond_stock}
    assert {"all NVIDIA", "all AMD"} <= set(beyond)
    assert [marked_name(decision, a) for a in beyond.values()] == [f"{name}+" for name in beyond]
    assert marked_name(decision, decision.alternatives[0]) == "best of all*"
    words = "neither vendor's GPUs in stock are enough alone: only AMD and NVIDIA together serve this demand"
    assert words in decision.verdict
    assert run_lines(decision).count(NOT_ON_AMD) == 1
    page = render_page(decision, date(2026, 11, 30))
    assert "Planned on 2026-11-30" in page
    assert "all AMD: stock of MI300X binds" in page
    assert not any("against all" in line for line in decision.verdict)  # what cannot be had is no doubt


def test_stock_that_an_alternative_lacks_is_enough_when_it_is_there(most):
    text = TEXT.replace("RATE", f"{most:.6g}")
    lack = alternatives(text)["all NVIDIA"]
    (line,) = [line for line in lack.reasons if "stock of H100" in line]
    more = int(re.search(r"takes (\d+) more", line)[1])
    enough = alternatives(text.replace("H100, count: 8", f"H100, count: {8 + more}"))["all NVIDIA"]
    assert not enough.beyond_stock
    assert not enough.reasons
    assert enough.plan.usd_per_h == pytest.approx(lack.plan.usd_per_h)
    assert any("of the output tokens asked for can be served" in line for line in lack.reasons)


def test_power_and_budget_that_an_alternative_lacks_are_named():
    """NVIDIA alone is too dear and, apart from that, draws too much."""
    dear = TEXT.replace("RATE", "200").replace("H100, count: 8", "H100, count: 64, price_usd_per_h: 9")
    poor = alternatives(dear + "site: {budget_usd_per_h: 30}\n")["all NVIDIA"]
    assert any(line.startswith("budget of $30.00/h binds") for line in poor.reasons)
    assert not any("stock of" in line for line in poor.reasons)
    hot = dear.replace("H100, count: 64", "H100, count: 64, power_w: 9000")
    capped = alternatives(hot + "site: {power_cap_w: 30000}\n")["all NVIDIA"]
    assert any(line.startswith("power cap of 30 kW binds") for line in capped.reasons)


def test_latency_that_no_gpu_of_a_vendor_keeps_is_named():
    strict = TEXT.replace("RATE", "1").replace("tpot_p99_s: 0.08", "tpot_p99_s: 0.0045")
    found = alternatives(strict)
    lacking = [a for a in found.values() if a.plan is None]
    assert lacking
    for a in lacking:
        assert a.reasons == (
            "latency of class chat binds: no such replica keeps TTFT p99 2 s and TPOT p99 4.5 ms",
        )
