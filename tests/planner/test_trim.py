"""A plan is made smaller as far as its proof bears, and no further; traffic is shared over what is left as reckoned by hand."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bimetal.catalog.demand import parse_demand
from bimetal.perf.calibration import published_calibration
from bimetal.planner.decide import FleetPlanner
from bimetal.planner.formulation import Chosen
from bimetal.planner.optimise import optimise
from bimetal.planner.power_limits import Pool
from bimetal.planner.problem import Problem
from bimetal.planner.proof import NUM_SEEDS, Proof, prove
from bimetal.planner.replay import ClassReplay, Group, _share, replay
from bimetal.planner.service import Slack
from bimetal.planner.trim import MOST_FAILURES, share, trim, without_largest

FREE = [False] * 3
"""No class is held to what the formulas say."""


def problem(usage, rate, wanted, **changes):
    """Template t is run to the limits of class k and serves class c at rate[t][k][c]."""
    usage, rate = np.array(usage, float), np.array(rate, float)
    kinds, classes = usage.shape[1], rate.shape[2]
    given = Problem(
        usage=usage,
        rate=rate,
        kind=np.arange(len(usage)),
        wanted=np.array(wanted, float),
        tokens=np.full(classes, 100.0),
        mixed_loss=np.zeros(classes),
        spare=[False] * classes,
        per_node=np.ones(kinds, dtype=np.int64),
        owned=np.zeros(kinds),
        buyable_nodes=np.full(kinds, 20.0),
        price_usd_per_h=np.array([1.0, 3.0][:kinds]),
        owned_usd_per_h=np.zeros(kinds),
        watts=np.full(kinds, 500.0),
        power_cap_w=np.inf,
        budget_usd_per_h=np.inf,
        jobs=np.zeros((0, kinds)),
    )
    return replace(given, **changes)


def fleet(p, replicas, jobs=None):
    needed = sum((p.usage[t] * n for (t, _), n in replicas.items()), np.zeros(len(p.owned)))
    for job, g in (jobs or {}).items():
        needed[g] += p.jobs[job, g]
    nodes = np.ceil(np.maximum(needed - p.owned, 0) / p.per_node).astype(int)
    return Chosen(
        replicas=replicas,
        served_per_s={},
        nodes=nodes,
        owned_used=np.minimum(p.owned, needed),
        served_ratio=np.ones(len(p.wanted)),
        lost_per_s=np.zeros(len(p.wanted)),
        jobs=jobs or {},
        usd_per_h=float(
            (nodes * p.per_node * p.price_usd_per_h).sum()
            + (np.minimum(p.owned, needed) * p.owned_usd_per_h).sum()
        ),
    )


def bears(p, most):
    """As if each replica truly served `most` times what the formulas say; the calls are kept."""
    tried = []

    def prove(chosen):
        tried.append(chosen)
        load = dict.fromkeys(chosen.replicas, 0.0)
        for (t, k, c), rate in chosen.served_per_s.items():
            load[t, k] += rate * (1 + chosen.lost_per_s[c] / p.wanted[c]) / p.rate[t, k, c]
        return Proof((), {"all": (max(load[key] / n for key, n in chosen.replicas.items()) / most, 0.0)})

    return prove, tried


def test_a_node_that_the_formulas_wanted_goes_and_the_next_stays():
    p = problem([[1]], [[[1.0]]], [8.4])
    chosen = optimise(p, gap=0.0).chosen
    assert chosen.nodes.tolist() == [9]
    prove, tried = bears(p, 1.1)
    smaller, proof = trim(p, chosen, prove, [False])
    assert proof.passed
    assert smaller.chosen.nodes.tolist() == [8]  # 8.4 / 8 = 1.05 each; seven would bear 1.2
    assert smaller.chosen.usd_per_h == 8.0
    assert smaller.formula_ratio == pytest.approx(8 / 8.4)
    assert sum(smaller.chosen.served_per_s.values()) == pytest.approx(8.4)
    assert [sum(c.replicas.values()) for c in tried] == [8, 7]


def test_nothing_goes_where_the_formulas_are_right():
    p = problem([[1]], [[[1.0]]], [8.4])
    prove, tried = bears(p, 1.0)
    assert trim(p, optimise(p, gap=0.0).chosen, prove, [False]) is None
    assert len(tried) == 1


def test_the_dearest_saving_is_tried_first_and_failures_are_few():
    p = problem([[1, 0], [0, 1]], [[[1.0]], [[3.0]]], [21.5])
    prove, tried = bears(p, 1.0)
    assert trim(p, fleet(p, {(0, 0): 10, (1, 0): 4}), prove, [False]) is None
    assert [t.replicas for t in tried] == [{(0, 0): 10, (1, 0): 3}, {(0, 0): 9, (1, 0): 4}]
    many = problem(np.eye(6), np.ones((6, 1, 1)), [6.0], price_usd_per_h=np.arange(6.0) + 1)
    prove, tried = bears(many, 1.0)
    assert trim(many, fleet(many, {(t, 0): 1 for t in range(6)}), prove, [False]) is None
    assert len(tried) == MOST_FAILURES
    assert [t.usd_per_h for t in tried] == [15.0, 16.0, 17.0]


def test_whole_nodes_go_and_jobs_keep_theirs():
    p = problem([[1]], [[[1.0]]], [8.9], per_node=np.array([4]))
    prove, _ = bears(p, 1.2)
    smaller, _ = trim(p, fleet(p, {(0, 0): 9}), prove, [False])  # on three nodes; two hold eight
    assert (smaller.chosen.replicas, smaller.chosen.nodes.tolist()) == ({(0, 0): 8}, [2])
    busy = replace(p, jobs=np.array([[1.0]]))  # two nodes would hold seven beside it, which bear 1.27
    assert trim(busy, fleet(busy, {(0, 0): 9}, {0: 0}), prove, [False]) is None


def test_owned_gpus_are_left_out_where_their_power_costs():
    p = problem([[1]], [[[1.0]]], [3.2], owned=np.array([8.0]), buyable_nodes=np.zeros(1))
    prove, tried = bears(p, 1.1)
    assert trim(p, fleet(p, {(0, 0): 4}), prove, [False]) is None
    assert not tried
    p = replace(p, owned_usd_per_h=np.array([0.1]))
    smaller, _ = trim(p, fleet(p, {(0, 0): 4}), prove, [False])
    assert smaller.chosen.owned_used.tolist() == [3.0]
    assert smaller.chosen.usd_per_h == pytest.approx(0.3)


def test_traffic_over_unlike_replicas_is_shared_with_its_loss():
    """3 m of the main kind and 1 m' of the other: 3 + 1 = 4 m + 0.16 (4 m - 3), so m = 4.48 / 4.64."""
    p = problem([[1, 0], [0, 1]], [[[1.0]], [[1.0]]], [4.0], mixed_loss=np.array([0.16]))
    found = share(p, fleet(p, {(0, 0): 4, (1, 0): 1}), {(0, 0): 3, (1, 0): 1}, [False])
    assert found.formula_ratio == pytest.approx(4.48 / 4.64)
    assert found.chosen.served_per_s == pytest.approx({(0, 0, 0): 3.0, (1, 0, 0): 1.0})
    assert found.chosen.lost_per_s[0] == pytest.approx(0.16 * 1.0)


def test_classes_of_one_model_are_overloaded_alike_and_those_of_another_not_at_all():
    rate = np.zeros((2, 3, 3))
    rate[0, :2, :2] = 2.0
    rate[1, 2, 2] = 1.0
    p = problem([[1, 0], [0, 1]], rate, [3.0, 1.5, 2.0])
    chosen = fleet(p, {(0, 0): 3, (1, 2): 2})
    found = share(p, chosen, {(0, 0): 2, (1, 2): 2}, FREE)
    assert found.formula_ratio == pytest.approx(4.0 / 4.5)
    served = found.chosen.served_per_s
    assert served == pytest.approx({(0, 0, 0): 3.0, (0, 0, 1): 1.5, (1, 2, 2): 2.0})
    assert share(p, chosen, {(0, 0): 3}, FREE) is None  # nobody serves the third


def test_work_without_limits_is_not_overloaded():
    """Four replicas of 2 a second for 3 with limits and 4 without: on three, those with limits get 2 of their 3."""
    rate = np.zeros((1, 2, 2))
    rate[0, 0, :] = 2.0
    p = problem([[1]], rate, [3.0, 4.0])
    chosen = fleet(p, {(0, 0): 4})
    found = share(p, chosen, {(0, 0): 3}, [False, True])
    assert found.formula_ratios == pytest.approx((2 / 3, 1.0))
    assert found.chosen.served_per_s == pytest.approx({(0, 0, 0): 3.0, (0, 0, 1): 4.0})
    assert share(p, chosen, {(0, 0): 1}, [False, True]) is None
    assert share(p, chosen, {(0, 0): 3}, [False, False]).formula_ratios == pytest.approx((6 / 7, 6 / 7))


def test_n_plus_one_keeps_a_replica_to_lose():
    p = problem([[1]], [[[1.0]]], [1.0], spare=[True])
    chosen = optimise(p, gap=0.0).chosen
    assert chosen.nodes.tolist() == [2]
    rest = without_largest(p, chosen, 0)
    assert rest.replicas == {(0, 0): 1}
    assert rest.served_per_s == pytest.approx({(0, 0, 0): 1.0})
    assert share(p, chosen, {(0, 0): 1}, [False]) is None  # nothing would be left


TRACES = Path(__file__).parents[2] / "examples" / "traces"
TRACE = """\
stock: [{gpu: MI300X, count: 64, per_node: 1}]
models: [{name: Llama-3.1-70B, dtype: float8}]
demand:
  - {name: chat, kind: interactive, model: Llama-3.1-70B, trace: azure_llm_2023_conv.csv.gz, compress: 10,
     ttft_p99_s: 2, tpot_p99_s: 0.1}
"""


def strict(text):
    """A plan by formulas that were told to be too strict, of whole replicas on one GPU each."""
    p = FleetPlanner(parse_demand(text, "d.yaml"), TRACES, published_calibration())
    single = [t.kind == "replica" and t.num_gpus(0) == 1 for t in p.templates]
    return p, p.plan("best", single, slacks={"chat": Slack(1.4, 1.4)}, simulate=False)


def keeps(p, template, number):
    """By simulation of so many equal replicas, nothing else between."""
    traffic = p.traffic[0]
    group = Group(template, number, {"chat": traffic.rate_per_s})
    runs = [replay([group], p.evaluators, p.traffic, 0, draw)[0] for draw in range(NUM_SEEDS)]
    return [r.ttft_s[99] <= traffic.ttft_s and r.tpot_s[99] <= traffic.tpot_s for r in runs], runs


def test_simulation_says_how_few_replicas_do():
    p, plan = strict(TRACE)
    smaller = p.trimmed(plan)
    (before,), (after,) = plan.groups, smaller.groups
    assert after.number < before.number
    assert smaller.gpus == (after.number,)
    assert smaller.usd_per_h == pytest.approx(plan.usd_per_h * after.number / before.number)
    assert smaller.formula_ratio == pytest.approx(
        after.number * plan.problem.rate.max() / p.traffic[0].rate_per_s, rel=0.01
    )
    held, runs = keeps(p, after.template, after.number)
    assert all(held)
    assert smaller.replays[0].ttft_s[99] == max(r.ttft_s[99] for r in runs)
    held, _ = keeps(p, after.template, after.number - 1)
    assert not all(held)


def test_n_plus_one_is_proven_without_a_replica():
    p, plan = strict(TRACE.replace("ttft_p99_s", "n_plus_one: true, ttft_p99_s"))
    smaller = p.trimmed(plan)
    (before,), (after,) = plan.groups, smaller.groups
    assert after.number < before.number
    assert all(keeps(p, after.template, after.number - 1)[0])
    assert not all(keeps(p, after.template, after.number - 2)[0])


def test_a_plan_passes_with_every_seed_or_not_at_all(monkeypatch):
    """One seed in three breaks the limit of 2 s; the worst is what is shown, wherever one begins."""
    p, plan = strict(TRACE)
    seen = dict(enumerate((1.5, 2.1, 1.9)))
    run = []

    def one(groups, evaluators, traffic, seed, draw, lost):
        run.append(draw)
        times = dict.fromkeys((50, 95, 99), seen[draw])
        return [ClassReplay("chat", 100, times, dict.fromkeys((50, 95, 99), 0.05), 1.0, 1.0)]

    monkeypatch.setattr("bimetal.planner.proof.replay", one)
    found = prove(plan.groups, p.evaluators, p.traffic, 0)
    assert (found.passed, found.hardest, run) == (False, 1, [0, 1])
    assert found.worst["chat"] == pytest.approx((1.05, 0.5))
    run.clear()
    assert not prove(plan.groups, p.evaluators, p.traffic, 0, first=1).passed
    assert run == [1]
    seen[1] = 1.99
    found = prove(plan.groups, p.evaluators, p.traffic, 0)
    assert found.passed
    assert found.replays[0].ttft_s[99] == 1.99
    assert found.replays[0].num_requests == 300


def test_owned_gpus_at_two_power_limits_are_counted_once():
    """Four owned GPUs, two nodes of two: one node at each limit. The dearer watts go first, and no GPU comes back as another's."""
    p = problem([[1, 0], [0, 1]], [[[1.0]], [[1.0]]], [3.3], owned=np.array([4.0, 4.0]))
    p = replace(
        p,
        per_node=np.array([2, 2]),
        buyable_nodes=np.zeros(2),
        owned_usd_per_h=np.array([0.7, 0.35]),
        pools=(Pool((0, 1), 4.0, 0.0),),
    )
    chosen = fleet(p, {(0, 0): 2, (1, 0): 2})
    prove, _ = bears(p, 1.2)
    smaller, _ = trim(p, chosen, prove, [False])
    assert smaller.chosen.owned_used.tolist() == [1.0, 2.0]
    assert smaller.chosen.nodes.tolist() == [0, 0]
    assert smaller.chosen.usd_per_h == pytest.approx(0.7 + 2 * 0.35)


@pytest.mark.parametrize(("rate", "requests"), [(100, 6000), (1, 2000)])
def test_synthetic_runs_outlast_their_answers(rate, requests):
    """Answers of 150 tokens at 80 ms take 12 s: five times as long, or 2,000 requests if that is longer."""
    text = TRACE.replace("trace: azure_llm_2023_conv.csv.gz, compress: 10,", "SIZES")
    text = text.replace("SIZES", f"rate_per_s: {rate}, input_tokens: 1000, output_tokens: 150,")
    p = FleetPlanner(parse_demand(text.replace("0.1}", "0.08}"), "d.yaml"), TRACES, published_calibration())
    whole = next(t for t in p.templates if t.kind == "replica")
    by_name = {"chat": p.traffic[0]}
    trace = _share(Group(whole, 4, {"chat": float(rate)}), 4, by_name, np.random.default_rng(0), {})
    assert len(trace) == pytest.approx(requests, rel=0.05)
    again = _share(Group(whole, 4, {"chat": float(rate)}), 4, by_name, np.random.default_rng(1), {})
    assert (again.input_tokens[:2000] != trace.input_tokens[:2000]).any()
    lost = _share(
        Group(whole, 4, {"chat": float(rate)}), 4, by_name, np.random.default_rng(0), {"chat": 0.25}
    )
    assert lost.arrival_s[1999] == pytest.approx(trace.arrival_s[1999] / 1.25)
