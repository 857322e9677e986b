"""What the fleet planner chooses from real models, GPUs and links, and why."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bimetal.catalog.demand import load_demand, parse_demand
from bimetal.errors import InfeasibleError
from bimetal.perf.calibration import published_calibration
from bimetal.planner.candidates import best_boundaries
from bimetal.planner.compare import servable_multiple
from bimetal.planner.decide import FleetPlanner
from bimetal.planner.decision import Alternative, _at_least, _choices, _gain
from bimetal.planner.infeasible import explain
from bimetal.planner.proof import Proof
from bimetal.planner.service import Load, largest_load

CHAT = """\
demand:
  - {name: chat, kind: interactive, model: Llama-3.1-70B, rate_per_s: 60, input_tokens: 1500, output_tokens: 150,
     ttft_p99_s: 2, tpot_p99_s: 0.08}
models: [{name: Llama-3.1-70B, dtype: float8}]
"""
BOTH = "stock: [{gpu: H100, count: 64}, {gpu: MI300X, count: 64}]\n"


def planner(text):
    return FleetPlanner(parse_demand(text, "d.yaml"), Path("."), published_calibration())


def chosen(text):
    """Templates of the cheapest plan by the formulas."""
    p = planner(text)
    return [p.templates[t] for t, _ in p.solve(p.candidates(), gap=0.0)[1].chosen.replicas]


def cost(text):
    p = planner(text)
    return p.solve(p.candidates(), gap=0.0)[1].objective


def crosses(template):
    return len(template.vendors) > 1


def test_caches_cross_vendors_only_where_the_wire_carries_them():
    much = CHAT.replace("rate_per_s: 60", "rate_per_s: 100")
    fast = chosen(BOTH + much + "default_link: 400GbE\n")
    assert any(t.kind == "prefill/decode" and crosses(t) for t in fast)
    slow = chosen(BOTH + much + "default_link: 1GbE\n")
    assert not any(crosses(t) for t in slow)


def test_no_split_crosses_vendors_over_1_gbe():
    p = planner(BOTH + CHAT + "default_link: 1GbE\n")
    candidates = p.candidates()
    split = [t.kind == "layer split" and crosses(t) for t in p.templates]
    whole = [t.kind == "replica" for t in p.templates]
    assert any(split)

    def per_gpu(mask):
        return (candidates.rate[mask][:, 0, 0] / candidates.usage[mask].sum(axis=1)).max()

    assert per_gpu(split) < 0.5 * per_gpu(whole)
    assert not any(crosses(t) for t in chosen(BOTH + CHAT + "default_link: 1GbE\n"))


HUGE = """\
stock: [{gpu: H100, count: 8}, {gpu: MI300X, count: 4, per_node: 4}]
models: [{name: Llama-3.1-405B}]
default_link: 400GbE
demand:
  - {name: chat, kind: interactive, model: Llama-3.1-405B, rate_per_s: 0.2, input_tokens: 500, output_tokens: 200,
     ttft_p99_s: 10, tpot_p99_s: 0.25}
"""


def test_a_model_that_neither_vendor_can_hold_is_split_over_both():
    (template,) = chosen(HUGE)
    assert template.kind == "layer split"
    assert template.vendors == {"NVIDIA", "AMD"}
    alone = HUGE.replace("{gpu: H100, count: 8}, ", "")
    with pytest.raises(InfeasibleError, match="class chat: no way of serving Llama"):
        chosen(alone)


def test_the_choice_flips_at_the_break_even_price():
    text = """\
stock: [{{gpu: H100, count: 64, price_usd_per_h: 1.0}}, {{gpu: MI300X, count: 64, price_usd_per_h: {price}}}]
models: [{{name: Llama-3.1-8B}}]
default_link: 1GbE
demand:
  - {{name: chat, kind: interactive, model: Llama-3.1-8B, rate_per_s: 150, input_tokens: 1000, output_tokens: 200,
     ttft_p99_s: 1, tpot_p99_s: 0.04}}
"""
    p = planner(text.format(price=1.0))
    nodes = {}
    for vendor in ("NVIDIA", "AMD"):
        only = p.candidates().keep([t.vendors == {vendor} for t in p.templates])
        nodes[vendor] = p.solve(only, gap=0.0)[1].chosen.nodes.sum()
    break_even = nodes["NVIDIA"] / nodes["AMD"]
    cheap, dear = chosen(text.format(price=break_even * 0.98)), chosen(text.format(price=break_even * 1.02))
    assert {v for t in cheap for v in t.vendors} == {"AMD"}
    assert {v for t in dear for v in t.vendors} == {"NVIDIA"}


def test_one_precision_and_no_gpu_without_it():
    p = planner("stock: [{gpu: A100-SXM, count: 8, price_usd_per_h: 1}, {gpu: H100, count: 64}]\n" + CHAT)
    assert {part.slot.gpu.name for t in p.templates for part in t.parts} == {"H100-SXM-80GB"}
    assert any("A100-SXM-80GB: it has no units of that width" in r for r in p.candidates().excluded)


def test_what_does_not_fit_is_left_out_with_its_reason():
    p = planner(HUGE)
    assert not any(t.kind == "replica" for t in p.templates)
    assert any("does not fit 1xH100-SXM-80GB" in r for r in p.candidates().excluded)
    assert any("more GPUs than are in stock" in r for r in p.candidates().excluded)


def test_late_parts_are_not_bought_and_power_binds():
    late = BOTH.replace("count: 64}]", "count: 64, price_usd_per_h: 1, lead_time_months: 9}]") + CHAT
    assert any(t.composition == (1,) or 1 in t.composition for t in chosen(late))
    needed = late + "site: {months_until_needed: 6}\n"
    assert all(t.composition == (0,) for t in chosen(needed))
    free = cost(BOTH + CHAT + "default_link: 400GbE\n")
    p = planner(BOTH + CHAT + "default_link: 400GbE\n")
    watts = p.plan("best", simulate=False).watts
    capped = BOTH + CHAT + f"default_link: 400GbE\nsite: {{power_cap_w: {watts - 1}}}\n"
    try:
        assert cost(capped) >= free
    except InfeasibleError:
        assert any("power cap" in line for line in explain(planner(capped)))


def test_why_nothing_fits_and_what_would_do():
    few = "stock: [{gpu: H100, count: 8}, {gpu: MI300X, count: 8, lead_time_months: 12}]\nsite: {months_until_needed: 1}\n"
    lines = explain(planner(few + CHAT))
    more = next(line for line in lines if line.startswith("stock of H100-SXM-80GB binds"))
    nodes = int(more.split("(")[1].split()[0])
    assert any("of the output tokens asked for can be served" in line for line in lines)
    enough = few.replace("count: 8}", f"count: {8 + 8 * nodes}}}", 1)
    chosen(enough + CHAT)
    with pytest.raises(InfeasibleError):
        chosen(enough.replace(f"{8 + 8 * nodes}", f"{8 * nodes}") + CHAT)


def test_a_limit_that_no_gpu_meets_is_named_with_the_nearest_that_one_does():
    strict = BOTH + CHAT.replace("tpot_p99_s: 0.08", "tpot_p99_s: 0.004")
    with pytest.raises(InfeasibleError, match="no way of serving Llama"):
        chosen(strict)
    (line,) = explain(planner(strict))
    assert "latency of class chat binds" in line
    assert "servable at" in line


def test_budget_binds_and_the_remedy_is_the_price():
    price = cost(BOTH + CHAT)
    poor = BOTH + CHAT + f"site: {{budget_usd_per_h: {price - 1}}}\n"
    lines = explain(planner(poor))
    assert any(f"budget of ${price - 1:.2f}/h binds: ${price:.2f}/h would do" in line for line in lines)


def test_fine_tuning_keeps_gpus_for_itself():
    job = "  - {name: tune, kind: fine-tuning, gpu_hours: 320, deadline_h: 20, gpus: [H100]}\n"
    text = BOTH + CHAT.replace("models:", job + "models:")
    p = planner(text)
    plan = p.plan("best", simulate=False)
    assert plan.optimum.chosen.jobs == {0: 0}
    assert plan.problem.jobs[0, 0] == 16
    serving = sum(plan.problem.usage[t, 0] * n for (t, _), n in plan.optimum.chosen.replicas.items())
    assert plan.gpus[0] >= serving + 16
    needs_memory = text.replace("deadline_h: 20", "deadline_h: 20, memory_bytes: 1.6e12")
    assert planner(needs_memory).plan("best", simulate=False).problem.jobs[0, 0] == 20


def test_fine_tuning_alone_is_a_demand_too():
    text = BOTH + "models: []\ndemand: [{name: tune, kind: fine-tuning, gpu_hours: 100, deadline_h: 10}]\n"
    plan = planner(text).plan("best")
    assert plan.gpus == (16, 0)  # ten on whole nodes of the cheaper kind
    assert plan.groups == ()


def test_n_plus_one_costs_more_and_survives_the_largest_replica():
    text = BOTH + CHAT + "default_link: 400GbE\n"
    p = planner(text.replace("tpot_p99_s: 0.08", "tpot_p99_s: 0.08, n_plus_one: true"))
    problem, found = p.solve(p.candidates(), gap=0.0)
    room = {key: problem.rate[key[0], key[1], 0] * n for key, n in found.chosen.replicas.items()}
    largest = max(problem.rate[t, k, 0] for t, k in room)
    assert sum(room.values()) - largest >= problem.wanted[0] * (1 - 1e-6)
    assert found.objective >= cost(text)


def test_goodput_is_compared_in_tokens_and_priced_once():
    """A fleet that serves half of what is asked costs what its half costs, on the draws as well."""
    text = (
        BOTH
        + CHAT.replace("rate_per_s: 60", "rate_per_s: 400")
        + "objective: goodput\nsite: {budget_usd_per_h: 60}\n"
    )
    p = planner(text)
    plan = p.plan("best of all", simulate=False)
    assert plan.optimum.chosen.served_ratio[0] < 0.5
    same = servable_multiple(plan.problem, plan, dict(plan_rates(plan)))
    assert same == pytest.approx(1.0, rel=0.05)
    less = replace(
        plan.optimum.chosen, served_ratio=plan.optimum.chosen.served_ratio * 0.8, usd_per_h=plan.usd_per_h
    )
    other = replace(plan, name="all AMD", optimum=replace(plan.optimum, chosen=less))
    assert _gain(p.demand, plan, other) == "25.0% more output tokens served"


def test_of_plans_that_pass_the_one_that_serves_most_is_kept_where_goodput_is_asked_for(monkeypatch):
    """Too much, then too little, then as much as the limits bear, all for the whole budget."""
    text = (
        BOTH
        + CHAT.replace("rate_per_s: 60", "rate_per_s: 400")
        + "objective: goodput\nsite: {budget_usd_per_h: 60}\n"
    )
    p = planner(text)
    seen, served = iter([(0.8, 1.3), (0.6, 0.7), (0.8, 0.95)]), []

    def simulated(templates, chosen):
        served.append((chosen.served_ratio[0], chosen.usd_per_h))
        return Proof((), {"chat": next(seen)})

    monkeypatch.setattr(p, "prove", simulated)
    plan = p.plan("best")
    assert served[1][0] < served[2][0] < served[0][0]
    assert plan.optimum.chosen.served_ratio[0] == served[2][0]


def plan_rates(plan):
    for t, k in plan.optimum.chosen.replicas:
        for c, rate in enumerate(plan.problem.rate[t, k]):
            if rate > 0:
                yield (t, k, c), float(rate)


def test_hops_with_an_unknown_tail_serve_no_strict_class():
    p = planner(BOTH + CHAT)
    evaluator = next(iter(p.evaluators.values()))
    split = next(t for t in p.templates if t.kind == "layer split" and crosses(t))
    machines = evaluator.machines([split])
    unknown = replace(machines, hop_p99_s=np.array([np.inf]))
    traffic = p.traffic[0]
    strict, loose = evaluator.limits(traffic), replace(evaluator.limits(traffic), tpot_s=0.1)
    assert largest_load(Load(traffic, p.engine, unknown), strict)[0] == 0
    known, blind = (largest_load(Load(traffic, p.engine, m), loose)[0] for m in (machines, unknown))
    assert blind == pytest.approx(known)


def test_boundaries_are_the_best_of_all():
    p = planner(BOTH + CHAT + "default_link: 400GbE\n")
    evaluator = next(iter(p.evaluators.values()))
    slots = evaluator.tables.slots
    pair = next(
        np.array([[a, b]])
        for a, first in enumerate(slots)
        for b, second in enumerate(slots)
        if first.label == "4xH100-SXM-80GB" and second.label == "2xMI300X"
    )
    (cut,) = best_boundaries(evaluator, p.traffic[0], pair)
    loads = []
    for end in range(1, 80):
        machines = evaluator.tables.chains(pair, np.array([[0, end, 80]]))
        load = Load(p.traffic[0], p.engine, machines)
        n = largest_load(load, evaluator.limits(p.traffic[0]))
        loads.append(float(load.rate(np.maximum(n, 1e-9))[0]) if n[0] > 0 else 0.0)
    assert loads[cut - 1] >= 0.995 * max(loads)


def test_a_plan_is_simulated_and_keeps_its_limits():
    p = planner(BOTH + CHAT.replace("rate_per_s: 60", "rate_per_s: 20"))
    plan = p.plan("best", [t.kind == "replica" for t in p.templates])
    (seen,) = plan.replays
    assert plan.passed
    assert seen.ttft_s[99] <= 2
    assert seen.tpot_s[99] <= 0.08
    assert seen.met_ratio > 0.98
    assert plan.num_rounds <= 5


def test_what_fails_in_simulation_is_tightened():
    """Formulas that promise half the latency are found out."""
    from bimetal.planner.service import Slack

    p = planner(BOTH + CHAT.replace("rate_per_s: 60", "rate_per_s: 20"))
    split = [t.kind == "replica" for t in p.templates]
    kind = p.plan("best", split, slacks={"chat": Slack(0.4, 0.4)})
    assert kind.passed
    assert kind.num_rounds > 1
    assert kind.slacks["chat"].tpot > 0.4 or kind.slacks["chat"].ttft > 0.4


def test_an_alternative_is_at_least_as_cheap_as_any_plan_that_it_allows():
    """Trimming may find for one vendor what it did not find for all."""
    p = planner(BOTH + CHAT + "default_link: 400GbE\n")
    plans, choices = {}, {choice.name: choice for choice in _choices(p)}
    for name in ("all NVIDIA", "all AMD", "unsplit mix"):
        plan = p.plan(name, choices[name].wanted, demand=choices[name].demand, simulate=False)
        plans[name] = Alternative(name, plan, ())
    few = plans["all NVIDIA"].plan
    cheap = replace(few.optimum, chosen=replace(few.optimum.chosen, usd_per_h=1.0))
    plans["all NVIDIA"] = Alternative("all NVIDIA", replace(few, optimum=cheap), ())
    known = list(plans.values())
    found = {name: _at_least(p, choices[name], own, known) for name, own in plans.items()}
    assert found["unsplit mix"].plan.usd_per_h == 1.0
    assert found["unsplit mix"].plan.name == "unsplit mix"
    assert found["all AMD"] is plans["all AMD"]
    beyond = [replace(plans["all NVIDIA"], beyond_stock=True)]
    assert _at_least(p, choices["unsplit mix"], plans["unsplit mix"], beyond) is plans["unsplit mix"]


def test_what_is_known_to_be_possible_is_only_replaced_by_less():
    p = planner(BOTH + CHAT + "default_link: 400GbE\n")
    own = p.plan("best", simulate=False)
    cheap = replace(own.optimum, chosen=replace(own.optimum.chosen, usd_per_h=own.usd_per_h - 1))
    cheaper = replace(own, optimum=cheap)
    assert p.plan("other", simulate=False, known=cheaper).optimum is cheap
    dear = replace(own.optimum, chosen=replace(own.optimum.chosen, usd_per_h=own.usd_per_h + 1))
    assert p.plan("other", simulate=False, known=replace(own, optimum=dear)).usd_per_h == own.usd_per_h


def test_a_thousand_gpus_of_six_kinds():
    """Three classes, two models, one class with N+1, a fine-tuning job: within 1% of the bound over all templates."""
    path = Path(__file__).parents[2] / "examples" / "plans" / "six-kinds.yaml"
    p = FleetPlanner(load_demand(path), path.parent, published_calibration())
    candidates = p.candidates()
    assert len(candidates) > 10_000
    problem, found = p.solve(candidates, gap=0.01, time_limit_s=20.0)
    assert found.gap_ratio <= 0.01
    gpus = sum(n * problem.usage[t].sum() for (t, _), n in found.chosen.replicas.items())
    assert 600 < gpus <= 1000
