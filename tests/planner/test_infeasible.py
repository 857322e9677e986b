"""What is said to be enough is enough when it is typed in."""

import re
from pathlib import Path

import pytest

from bimetal.catalog.demand import parse_demand
from bimetal.errors import ConfigError, InfeasibleError
from bimetal.perf.calibration import published_calibration
from bimetal.planner.decide import FleetPlanner
from bimetal.planner.infeasible import explain, rounded_up

TEXT = """\
stock: [{gpu: H100, count: 16}, {gpu: MI300X, count: 16}]
models: [{name: Llama-3.1-8B}]
default_link: 400GbE
demand:
  - {name: chat, kind: interactive, model: Llama-3.1-8B, rate_per_s: 5, input_tokens: 500, output_tokens: 100,
     ttft_p99_s: 2, tpot_p99_s: 0.08}
"""


def planner(text):
    return FleetPlanner(parse_demand(text, "d.yaml"), Path(), published_calibration())


def can_be_planned(text):
    p = planner(text)
    try:
        p.solve(p.candidates())
    except InfeasibleError:
        return False
    return True


def number(line, pattern):
    found = re.search(pattern, line)
    assert found, line
    return float(found[1])


@pytest.mark.parametrize("asked", ["1e-6", "0.001"])
def test_the_latency_named_is_enough_however_far_it_is(asked):
    strict = TEXT.replace("tpot_p99_s: 0.08", f"tpot_p99_s: {asked}")
    assert not can_be_planned(strict)
    (line,) = explain(planner(strict))
    enough = number(line, r"servable at TPOT p99 ([\d.]+) ms") / 1e3
    assert can_be_planned(strict.replace(f"tpot_p99_s: {asked}", f"tpot_p99_s: {enough}"))
    assert not can_be_planned(strict.replace(f"tpot_p99_s: {asked}", f"tpot_p99_s: {enough / 1.5}"))


def test_only_the_limit_that_binds_is_relaxed():
    strict = TEXT.replace("ttft_p99_s: 2", "ttft_p99_s: 1e-9")
    (line,) = explain(planner(strict))
    enough = number(line, r"servable at TTFT p99 ([\d.]+) s")
    assert "TPOT p99" not in line.split("servable at")[1]
    assert can_be_planned(strict.replace("ttft_p99_s: 1e-9", f"ttft_p99_s: {enough}"))


def test_watts_and_dollars_that_would_do_do():
    tight = TEXT + "site: {power_cap_w: 1000}\n"
    (line,) = [line for line in explain(planner(tight)) if "power cap" in line]
    enough = number(line, r"binds: ([\d.]+) kW would do") * 1e3
    assert can_be_planned(TEXT + f"site: {{power_cap_w: {enough}}}\n")
    odd = TEXT.replace("count: 16}", "count: 16, price_usd_per_h: 1.00054}")  # a node is $8.00432
    (line,) = [line for line in explain(planner(odd + "site: {budget_usd_per_h: 1}\n")) if "budget" in line]
    enough = number(line, r"\$([\d.]+)/h would do")
    assert can_be_planned(odd + f"site: {{budget_usd_per_h: {enough}}}\n")
    assert not can_be_planned(odd + f"site: {{budget_usd_per_h: {enough - 0.01}}}\n")


def test_stock_is_no_remedy_where_the_budget_is_too_small_for_it():
    much = TEXT.replace("rate_per_s: 5", "rate_per_s: 2000")
    assert any("stock of" in line for line in explain(planner(much)))
    assert not any("stock of" in line for line in explain(planner(much + "site: {budget_usd_per_h: 20}\n")))


def test_what_is_typed_in_is_never_below_what_is_needed():
    for value in (1e-6, 0.0123401, 0.9999, 13_840.0001, 93.2):
        assert value * (1 - 1e-6) <= rounded_up(value) <= value * 1.01


@pytest.mark.parametrize(
    ("old", "new"),
    [("rate_per_s: 5", "rate_per_s: 1.0e+15"), ("count: 16}", "count: 16, price_usd_per_h: 1.0e+30}")],
)
def test_numbers_that_no_solver_takes_are_refused(old, new):
    with pytest.raises(ConfigError, match="less than or equal to"):
        planner(TEXT.replace(old, new))
