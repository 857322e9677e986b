"""The optimum is the optimum: against brute force, from a pool that lacks it, and with a bound that holds."""

from dataclasses import replace
from itertools import count, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from bimetal.errors import InfeasibleError
from bimetal.planner.formulation import formulate, read_solution
from bimetal.planner.milp import Milp, Solved
from bimetal.planner.optimise import optimise
from bimetal.planner.pricing import undominated
from bimetal.planner.problem import Problem

EXACT = 1e-6


def problem(usage, rate, kind, wanted, **changes):
    usage, rate = np.array(usage, float), np.array(rate, float)
    kinds, classes = usage.shape[1], rate.shape[2]
    given = Problem(
        usage=usage,
        rate=rate,
        kind=np.array(kind),
        wanted=np.array(wanted, float),
        tokens=np.full(classes, 100.0),
        mixed_loss=np.full(classes, 0.16),
        spare=[False] * classes,
        per_node=np.full(kinds, 2),
        owned=np.zeros(kinds),
        buyable_nodes=np.full(kinds, 2.0),
        price_usd_per_h=np.array([1.0, 1.5, 2.0][:kinds]),
        owned_usd_per_h=np.zeros(kinds),
        watts=np.full(kinds, 500.0),
        power_cap_w=np.inf,
        budget_usd_per_h=np.inf,
        jobs=np.zeros((0, kinds)),
    )
    return replace(given, **changes)


def cheapest(p):
    """Every number of every (template, limits), cheapest first; whether it serves is a small linear program."""
    T, K, C = p.rate.shape
    P = p.num_kinds
    keys = [(t, k) for t in range(T) for k in range(K) if p.rate[t, k, k] > 0]
    fleet = p.largest_fleet
    most = [int(np.min(fleet[p.usage[t] > 0] // p.usage[t][p.usage[t] > 0])) for t, _ in keys]
    plans = []
    for numbers in product(*(range(m + 1) for m in most)):
        needed = sum((n * p.usage[t] for n, (t, _) in zip(numbers, keys, strict=True)), np.zeros(len(fleet)))
        if (needed > fleet).any():
            continue
        nodes = np.ceil(np.maximum(needed - p.owned, 0) / p.per_node)
        cost = float((nodes * p.per_node * p.price_usd_per_h).sum())
        watts = float((p.watts * np.maximum(needed, nodes * p.per_node)).sum())
        if cost <= p.budget_usd_per_h + 1e-9 and watts <= p.power_cap_w + 1e-9:
            plans.append((cost, numbers))
    for cost, numbers in sorted(plans):
        running = [(n, key) for n, key in zip(numbers, keys, strict=True) if n]
        room = sum((n * p.rate[key] for n, key in running), np.zeros(len(p.wanted)))
        if (room < p.wanted - 1e-9).any():
            continue
        if any(
            serves(p, running, main, spare) for main in product(range(P), repeat=C) for spare in spares(p)
        ):
            return cost
    return None


def spares(p):
    options = []
    for c in range(len(p.wanted)):
        rates = sorted({float(r) for r in p.rate[:, :, c].ravel() if r > 0})
        options.append(rates if p.spare[c] else [0.0])
    return product(*options)


def serves(p, running, main, spare):
    shares = [
        (i, t, k, c)
        for i, (_, (t, k)) in enumerate(running)
        for c in range(len(p.wanted))
        if p.rate[t, k, c] > 0 and (not p.spare[c] or p.rate[t, k, c] <= spare[c])
    ]
    C = len(p.wanted)
    columns = len(shares) + 2 * C  # shares, alike, loss
    rows, limits = [], []
    for i, (number, _) in enumerate(running):
        rows.append([float(s[0] == i) for s in shares] + [0.0] * 2 * C)
        limits.append(float(number))
    for c in range(C):
        supply = [p.rate[t, k, c] if d == c else 0.0 for _, t, k, d in shares]
        of_main = [v if p.kind[s[1]] == main[c] else 0.0 for v, s in zip(supply, shares, strict=True)]
        alike, loss = np.eye(C)[c], np.eye(C)[c]
        rows.append([-v for v in supply] + [0.0] * C + list(loss))
        limits.append(-p.wanted[c] - spare[c])
        rows.append([-v for v in of_main] + list(alike) + [0.0] * C)
        limits.append(0.0)
        rows.append([0.0] * len(shares) + list(-p.mixed_loss[c] * alike) + list(-loss))
        limits.append(-p.mixed_loss[c] * p.wanted[c])
    bounds = [(0, None)] * len(shares) + [(0, w) for w in p.wanted] + [(0, None)] * C
    return linprog(np.zeros(columns), np.array(rows), limits, bounds=bounds).status == 0


RATES = st.sampled_from([0.0, 1.0, 1.7, 2.5, 4.0])


@st.composite
def small_problems(draw):
    """Two kinds of GPU, up to three templates, up to two classes of which the first is the stricter."""
    classes = draw(st.integers(1, 2))
    usage = draw(st.lists(st.sampled_from([(1, 0), (2, 0), (0, 1), (0, 2), (1, 1)]), min_size=2, max_size=3))
    compositions = {(True, False): 0, (False, True): 1, (True, True): 2}
    rate = np.zeros((len(usage), classes, classes))
    for t in range(len(usage)):
        for c in range(classes):
            rate[t, c, c] = draw(RATES)
        if classes == 2 and rate[t, 0, 0] > 0:
            rate[t, 0, 1] = min(rate[t, 1, 1], draw(RATES))
    return problem(
        usage,
        rate,
        [compositions[a > 0, b > 0] for a, b in usage],
        [draw(st.floats(0.5, 6.0)) for _ in range(classes)],
        spare=[draw(st.booleans()) for _ in range(classes)],
        owned=np.array([draw(st.sampled_from([0.0, 2.0])), 0.0]),
        buyable_nodes=np.array([1.0, 2.0]),
        price_usd_per_h=np.array([draw(st.floats(0.5, 3.0)), draw(st.floats(0.5, 3.0))]),
        power_cap_w=draw(st.sampled_from([np.inf, 2500.0])),
        budget_usd_per_h=draw(st.sampled_from([np.inf, 9.0])),
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(small_problems())
def test_no_gap_against_brute_force(p):
    best = cheapest(p)
    if best is None:
        with pytest.raises(InfeasibleError):
            optimise(p, gap=0.0)
    else:
        found = optimise(p, gap=0.0, time_limit_s=30.0)
        assert found.objective == pytest.approx(best, abs=EXACT)
        assert found.bound == pytest.approx(best, abs=EXACT)


def least_cost(p):
    """The same program written another way, every template whole and N+1 a binary a (template, limits, class), for another front
    end: what brute force cannot enumerate. Its solver knows nothing of levels, pricing or dominance."""
    T, K, C = p.rate.shape
    P, G = p.num_kinds, len(p.owned)
    keys = [(t, k) for t in range(T) for k in range(K) if p.rate[t, k, k] > 0]
    shares = [(t, k, c) for t, k in keys for c in range(C) if p.rate[t, k, c] > 0]
    sizes = {
        "N": len(keys),
        "z": len(shares),
        "used": len(shares),
        "nodes": G,
        "own": G,
        "main": C * P,
        "alike": C * P,
    }
    sizes |= {"loss": C, "spare": C}
    at = dict(zip(sizes, np.cumsum([0, *sizes.values()]), strict=False))
    columns = sum(sizes.values())
    rows, lower = [], []

    def add(terms, least):
        row = np.zeros(columns)
        for name, i, value in terms:
            row[at[name] + i] += value
        rows.append(row)
        lower.append(least)

    for i, key in enumerate(keys):
        add([("N", i, 1.0), *(("z", j, -1.0) for j, s in enumerate(shares) if s[:2] == key)], 0.0)
    for c in range(C):
        mine = [j for j, s in enumerate(shares) if s[2] == c]
        supply = [("z", j, p.rate[shares[j]]) for j in mine]
        add([*supply, ("loss", c, -1.0), ("spare", c, -1.0)], p.wanted[c])
        for k in range(P):
            of_kind = [("z", j, p.rate[shares[j]]) for j in mine if p.kind[shares[j][0]] == k]
            add([*of_kind, ("alike", c * P + k, -1.0)], 0.0)
            add([("main", c * P + k, p.wanted[c]), ("alike", c * P + k, -1.0)], 0.0)
        add([("main", c * P + k, -1.0) for k in range(P)], -1.0)
        alike = [("alike", c * P + k, p.mixed_loss[c]) for k in range(P)]
        add([("loss", c, 1.0), *alike], p.mixed_loss[c] * p.wanted[c])
        for j in mine if p.spare[c] else ():
            add([("used", j, 100.0), ("z", j, -1.0)], 0.0)
            add([("spare", c, 1.0), ("used", j, -p.rate[shares[j]])], 0.0)
    for g in range(G):
        used = [("N", i, -p.usage[t, g]) for i, (t, _) in enumerate(keys)]
        add([*used, ("own", g, 1.0), ("nodes", g, float(p.per_node[g]))], 0.0)
    cost, upper, whole = np.zeros(columns), np.full(columns, np.inf), np.zeros(columns)
    cost[at["nodes"] : at["nodes"] + G] = p.price_usd_per_h * p.per_node
    upper[at["nodes"] : at["nodes"] + G] = p.buyable_nodes
    upper[at["own"] : at["own"] + G] = p.owned
    upper[at["used"] : at["used"] + len(shares)] = 1.0
    for name in ("N", "used", "nodes", "main"):
        whole[at[name] : at[name] + sizes[name]] = 1
    found = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), np.array(lower)),
        bounds=Bounds(0, upper),
        integrality=whole,
        options={"mip_rel_gap": 0.0},
    )
    return found.fun if found.success else None


@st.composite
def larger_problems(draw):
    """Up to eight templates of two kinds of GPU, two classes with N+1 that may share a replica, of three compositions."""
    forms = [(1, 0), (2, 0), (4, 0), (0, 1), (0, 2), (0, 4), (1, 1), (2, 2)]
    usage = draw(st.lists(st.sampled_from(forms), min_size=5, max_size=8))
    compositions = {(True, False): 0, (False, True): 1, (True, True): 2}
    rate = np.zeros((len(usage), 2, 2))
    for t, used in enumerate(usage):
        per_gpu = draw(st.floats(0.6, 1.6))
        rate[t, 0, 0] = round(sum(used) * per_gpu, 2) * draw(st.sampled_from([0.0, 1.0, 1.0]))
        rate[t, 1, 1] = round(sum(used) * draw(st.floats(0.8, 2.0)), 2)
        rate[t, 0, 1] = round(rate[t, 1, 1] * 0.8, 2) if rate[t, 0, 0] else 0.0
    return problem(
        usage,
        rate,
        [compositions[a > 0, b > 0] for a, b in usage],
        [draw(st.floats(1.0, 12.0)), draw(st.floats(1.0, 8.0))],
        spare=[True, draw(st.booleans())],
        owned=np.array([draw(st.sampled_from([0.0, 4.0])), 0.0]),
        per_node=np.array([2, draw(st.sampled_from([1, 4]))]),
        buyable_nodes=np.array([6.0, 6.0]),
        price_usd_per_h=np.array([1.0, draw(st.floats(0.7, 1.5))]),
    )


@settings(max_examples=8, deadline=None, derandomize=True)
@given(larger_problems())
def test_no_gap_against_another_program(p):
    best = least_cost(p)
    if best is None:
        with pytest.raises(InfeasibleError):
            optimise(p, gap=0.0)
    else:
        found = optimise(p, gap=0.0, time_limit_s=30.0)
        assert found.objective == pytest.approx(best, abs=1e-5)
        assert found.bound == pytest.approx(best, abs=1e-5)
        rough = optimise(p, gap=0.05)
        assert rough.bound <= best + 1e-5 <= rough.objective + 2e-5


def test_a_faster_replica_does_not_replace_one_that_classes_share():
    """The class with N+1 is served by two replicas of the second kind and by half of one of the first, all of rate 1. Half of one
    of rate 2 would give as much more as it asks for in spare only if it were whole."""
    rate = np.zeros((3, 2, 2))
    rate[0] = [[1.0, 1.0], [0.0, 1.0]]
    rate[1] = [[2.0, 1.0], [0.0, 1.0]]
    rate[2, 0, 0] = 1.0
    p = problem(
        [[1, 0], [1, 0], [0, 1]],
        rate,
        [0, 0, 1],
        [1.5, 0.5],
        mixed_loss=np.zeros(2),
        spare=[True, False],
        per_node=np.array([1, 1]),
        buyable_nodes=np.array([9.0, 9.0]),
        price_usd_per_h=np.array([1.5, 1.0]),
    )
    assert undominated(p).all()
    assert optimise(p, gap=0.0, initial=[1, 2]).objective == pytest.approx(3.5)
    assert least_cost(p) == pytest.approx(3.5)


MANY = problem(
    usage=[[2, 0], [1, 0], [0, 2], [0, 1], [1, 1], [2, 2]],
    rate=[[[3.0]], [[1.4]], [[4.4]], [[2.0]], [[3.6]], [[8.0]]],
    kind=[0, 0, 1, 1, 2, 2],
    wanted=[23.0],
    buyable_nodes=np.array([6.0, 6.0]),
)


def test_the_optimal_template_need_not_be_in_the_initial_pool():
    best = optimise(MANY, gap=0.0)
    used = {t for t, _ in best.chosen.replicas}
    pool = [t for t in range(6) if t not in used]
    assert used and pool
    again = optimise(MANY, gap=0.0, initial=pool)
    assert again.objective == pytest.approx(best.objective)
    assert {t for t, _ in again.chosen.replicas} & used


def test_a_pool_that_serves_nothing_still_finds_the_plan():
    useless = replace(
        MANY, rate=np.concatenate([MANY.rate, [[[0.0]]]]), usage=np.vstack([MANY.usage, [[1, 0]]])
    )
    useless = replace(useless, kind=np.append(useless.kind, 0))
    assert optimise(useless, gap=0.0, initial=[6]).objective == pytest.approx(
        optimise(MANY, gap=0.0).objective
    )


def test_the_bound_is_below_every_plan_and_the_root_below_that():
    found = optimise(MANY, gap=0.0)
    assert found.bound <= found.objective
    assert found.gap_ratio <= 1e-6
    everything = formulate(MANY, list(range(6)), [])
    assert everything.milp.solve().objective == pytest.approx(found.objective)


def test_dominated_templates_are_out_and_equal_ones_are_not_both():
    p = problem([[2, 0], [1, 0], [1, 0], [0, 1]], [[[2.0]], [[1.0]], [[1.0]], [[0.5]]], [0, 0, 0, 1], [1.0])
    assert undominated(p).tolist() == [False, True, False, True]


def test_whole_nodes_are_paid():
    p = problem([[1, 0]], [[[1.0]]], [0], [3.0], per_node=np.array([8, 8]))
    found = optimise(p, gap=0.0)
    assert found.chosen.nodes.tolist() == [1, 0]
    assert found.objective == pytest.approx(8.0)


def test_owned_gpus_are_sunk():
    p = problem([[1, 0], [0, 1]], [[[1.0]], [[1.0]]], [0, 1], [2.0], owned=np.array([0.0, 2.0]))
    found = optimise(p, gap=0.0)
    assert found.objective == 0.0
    assert {t for t, _ in found.chosen.replicas} == {1}


@pytest.mark.parametrize("wanted", [1e-3, 1e-6, 1e-9, 1e-300])
def test_the_least_demand_needs_a_replica(wanted):
    p = problem([[1, 0], [0, 2]], [[[1.0]], [[4.0]]], [0, 1], [wanted])
    found = optimise(p, gap=0.0)
    assert set(found.chosen.replicas) == {(0, 0)}
    assert found.objective == pytest.approx(2.0)
    most = optimise(replace(p, objective="goodput"), gap=0.0)
    assert most.chosen.served_ratio.tolist() == pytest.approx([1.0])


def test_replicas_that_serve_nobody_are_no_part_of_a_plan():
    """GPUs that cost nothing may hold any number of replicas as far as the program is concerned."""
    free = replace(MANY, price_usd_per_h=np.zeros(2), wanted=np.array([0.5]))
    program = formulate(free, list(range(6)), [])
    values = np.zeros(program.milp.num_columns)
    values[program.columns.served] = 1.0
    values[[program.columns.run[t, 0] for t in (0, 1, 3)]] = [2.0, 1.0, 3.0]
    values[program.columns.share[1, 0, 0]] = 0.5
    chosen = read_solution(free, program, Solved("optimal", 0.0, 0.0, values, np.empty(0)))
    assert chosen.replicas == {(1, 0): 1}
    assert set(chosen.served_per_s) == {(1, 0, 0)}


def test_n_plus_one_buys_what_the_largest_replica_leaves():
    alone = problem(
        [[1, 0]], [[[1.0]]], [0], [2.0], per_node=np.array([1, 1]), buyable_nodes=np.array([9.0, 9.0])
    )
    assert sum(optimise(alone, gap=0.0).chosen.replicas.values()) == 2
    safe = replace(alone, spare=[True])
    assert sum(optimise(safe, gap=0.0).chosen.replicas.values()) == 3


def test_small_replicas_make_cheap_spares():
    p = problem(
        [[4, 0], [1, 0]],
        [[[4.4]], [[1.0]]],
        [0, 0],
        [4.0],
        per_node=np.array([1, 1]),
        buyable_nodes=np.array([99.0, 0.0]),
        spare=[True],
    )
    assert optimise(p, gap=0.0).chosen.replicas == {(1, 0): 5}


def test_power_budget_and_jobs_bind():
    base = problem([[1, 0], [0, 1]], [[[1.0]], [[1.5]]], [0, 1], [4.0], buyable_nodes=np.array([9.0, 9.0]))
    assert optimise(base, gap=0.0).objective == pytest.approx(4.0)
    hot = replace(base, watts=np.array([500.0, 300.0]), power_cap_w=1500.0)
    assert {t for t, _ in optimise(hot, gap=0.0).chosen.replicas} == {1}
    with pytest.raises(InfeasibleError):
        optimise(replace(base, budget_usd_per_h=3.9), gap=0.0)
    tuning = replace(base, jobs=np.array([[2.0, np.inf]]))
    found = optimise(tuning, gap=0.0)
    assert found.chosen.jobs == {0: 0}
    assert found.objective == pytest.approx(6.0)


def test_goodput_under_a_budget_serves_as_much_as_it_can():
    p = problem(
        [[1, 0]],
        [[[1.0]]],
        [0],
        [10.0],
        objective="goodput",
        budget_usd_per_h=3.0,
        per_node=np.array([1, 1]),
        buyable_nodes=np.array([9.0, 9.0]),
    )
    found = optimise(p, gap=0.0)
    assert found.chosen.served_ratio.tolist() == pytest.approx([0.3])
    assert found.chosen.usd_per_h == pytest.approx(3.0)


def test_an_even_mix_costs_what_was_measured_and_a_small_addition_little():
    p = problem([[1, 0], [0, 1]], [[[1.0]], [[1.0]]], [0, 1], [4.0], per_node=np.array([1, 1]))
    even = replace(p, owned=np.array([2.0, 2.0]), buyable_nodes=np.array([0.0, 1.0]))
    found = optimise(even, gap=0.0)
    assert found.chosen.nodes.tolist() == [0, 1]  # four would do, but for the loss
    assert found.chosen.lost_per_s[0] > 0
    few = replace(p, owned=np.array([5.0, 0.0]))
    assert optimise(few, gap=0.0).chosen.lost_per_s[0] == pytest.approx(0.0)


def test_free_gpus_are_not_wasted():
    """Owned ones whose power is free, and stock at no price: as few as serve the demand, and still none that costs."""
    owned = replace(
        MANY, owned=np.array([12.0, 0.0]), buyable_nodes=np.array([0.0, 6.0]), wanted=np.array([5.5])
    )
    found = optimise(owned, gap=0.0)
    assert found.objective == 0.0
    assert found.chosen.nodes.tolist() == [0, 0]
    assert found.chosen.owned_used.tolist() == [4.0, 0.0]  # two of 3.0, each on two GPUs
    gift = replace(MANY, price_usd_per_h=np.array([0.0, 1.5]), wanted=np.array([5.5]))
    found = optimise(gift, gap=0.0)
    assert found.chosen.usd_per_h == 0.0
    assert found.chosen.nodes.tolist() == [2, 0]
    most = optimise(replace(owned, objective="goodput"), gap=0.0).chosen
    assert most.owned_used.tolist() == [4.0, 0.0]
    assert most.served_ratio.tolist() == pytest.approx([1.0])


def test_the_time_limit_holds_where_nothing_is_found(monkeypatch):
    """A solver that finds nothing and proves nothing, and a clock that moves a second whenever it is read."""
    solved = Milp.solve

    def finds_nothing(self, *, relax=False, **options):
        if relax:
            return solved(self, relax=True)
        return Solved("unknown", np.inf, -np.inf, np.zeros(self.num_columns), np.empty(0))

    monkeypatch.setattr(Milp, "solve", finds_nothing)
    seconds = count()
    with pytest.raises(InfeasibleError, match="no plan was found in 20 s, nor a proof"):
        optimise(MANY, time_limit_s=20.0, clock=lambda: float(next(seconds)))
    assert next(seconds) <= 25


def test_solvers_are_given_no_more_than_is_left(monkeypatch):
    solved, given = Milp.solve, []

    def noted(self, *, relax=False, time_limit_s=60.0, **options):
        given.append(0.0 if relax else time_limit_s)
        return solved(self, relax=relax, time_limit_s=time_limit_s, **options)

    monkeypatch.setattr(Milp, "solve", noted)
    optimise(MANY, gap=0.0, time_limit_s=0.4)
    assert max(given) <= 0.4
