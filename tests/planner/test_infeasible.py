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


LARGE = """\
stock: [STOCK]
models: [{name: Llama-3.1-405B, dtype: DTYPE}]
default_link: 400GbE
demand:
  - {name: chat, kind: interactive, model: Llama-3.1-405B, rate_per_s: 1, input_tokens: 1000, output_tokens: 200,
     ttft_p99_s: 3, tpot_p99_s: 0.1}
"""


def large(stock, dtype):
    return LARGE.replace("STOCK", stock).replace("DTYPE", dtype)


@pytest.mark.parametrize(
    ("gpu", "per_node", "dtype"),
    [("H100", 8, "bfloat16"), ("MI300X", 4, "float8"), ("MI300X", 4, "bfloat16")],
)
def test_more_of_the_same_gpus_hold_a_model_that_one_node_does_not(gpu, per_node, dtype):
    """Templates that need more GPUs than there are do not exist before there are more."""
    lines = explain(planner(large(f"{{gpu: {gpu}, count: {per_node}, per_node: {per_node}}}", dtype)))
    (line,) = [line for line in lines if line.startswith("stock of")]
    more = int(number(line, r"binds: (\d+) more"))

    def with_more(gpus):
        return large(f"{{gpu: {gpu}, count: {per_node + gpus}, per_node: {per_node}}}", dtype)

    assert can_be_planned(with_more(more))
    assert more == per_node or not can_be_planned(with_more(more - per_node))
    assert not any("more memory" in line for line in lines)


def test_a_narrower_dtype_is_named_only_where_it_is_enough():
    lines = explain(planner(large("{gpu: H100, count: 8}", "bfloat16")))
    assert "dtype bfloat16 of Llama-3.1-405B binds: float8 would do" in lines
    assert can_be_planned(large("{gpu: H100, count: 8}", "float8"))
    lines = explain(planner(large("{gpu: MI300X, count: 4, per_node: 4}", "bfloat16")))
    assert not can_be_planned(large("{gpu: MI300X, count: 4, per_node: 4}", "float8"))
    assert not any("dtype bfloat16 of" in line for line in lines)


def test_a_few_gpus_of_each_kind_for_a_model_that_needs_more():
    few = "{gpu: H100, count: 2, per_node: 2}, {gpu: MI300X, count: 2, per_node: 2}"
    lines = explain(planner(large(few, "float8")))
    assert "not all of it from this stock" in lines[0]
    (line,) = lines[1:]
    more = int(number(line, r"stock of H100-SXM-80GB binds: (\d+) more"))
    assert can_be_planned(large(few.replace("H100, count: 2", f"H100, count: {2 + more}"), "float8"))
    assert not can_be_planned(large(few.replace("H100, count: 2", f"H100, count: {more}"), "float8"))
    lines = explain(planner(large(few, "bfloat16")))
    assert lines[-1].startswith("neither more of these GPUs nor a narrower dtype alone is enough")


def test_the_months_that_would_do_do():
    late = "{gpu: H100, count: 8, lead_time_months: 5}, {gpu: MI300X, count: 8, lead_time_months: 3.33333}"

    def needed_in(months):
        return large(late, "float8") + f"site: {{months_until_needed: {months}}}\n"

    (line,) = [line for line in explain(planner(needed_in(1))) if "lead time" in line]
    enough = number(line, r"months_until_needed ([\d.]+) in place of 1 would do")
    assert can_be_planned(needed_in(enough))
    assert not can_be_planned(needed_in(3.3))
