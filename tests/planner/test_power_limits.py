"""Power limits as a choice: by hand, against brute force, and where they can be worth nothing."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from bimetal.catalog.demand import parse_demand
from bimetal.errors import ConfigError, InfeasibleError
from bimetal.perf.calibration import published_calibration
from bimetal.planner.decide import FleetPlanner
from bimetal.planner.optimise import optimise
from bimetal.planner.power_limits import Pool, power_notes
from bimetal.planner.problem import Problem

DEMAND = """\
stock: [{gpu: H100, count: 64, price_usd_per_h: 1, power_w: 700, power_limits_w: [350, 500]}]
site: {power_cap_w: 5600, budget_usd_per_h: 1000}
objective: goodput
models: [{name: Llama-3.1-70B, dtype: float8}]
demand:
  - {name: chat, kind: interactive, model: Llama-3.1-70B, rate_per_s: 400, input_tokens: 50, output_tokens: 500,
     ttft_p99_s: 4, tpot_p99_s: 0.06}
"""


def planner(text):
    return FleetPlanner(parse_demand(text, "d.yaml"), Path("."), published_calibration())


def solved(text):
    """By formulas, whole replicas of eight GPUs only."""
    p = planner(text)
    eights = [t.kind == "replica" and sum(map(t.num_gpus, range(3))) == 8 for t in p.templates]
    problem, optimum = p.solve(p.candidates().keep(eights), gap=0.0)
    return p, problem, optimum.chosen


def test_two_nodes_at_half_the_watts_serve_more_than_one():
    """5600 W are eight GPUs at 700 W or sixteen at 350 W. Decoding is bound by memory and loses little: about twice as much."""
    _, problem, chosen = solved(DEMAND)
    rate = problem.rate[:, 0, 0]
    by_kind = [rate[problem.usage[:, g] == 8].max() for g in range(3)]  # 700 W, 350 W, 500 W
    assert problem.watts.tolist() == [700.0, 350.0, 500.0]
    assert by_kind[0] >= by_kind[2] >= by_kind[1] > 0.75 * by_kind[0]
    best = max(
        by_kind[0], 2 * by_kind[1], by_kind[2]
    )  # the watts of one node at 500 W leave none for another
    assert chosen.nodes.tolist() == [0, 2, 0]
    served = chosen.served_ratio[0] * 400
    assert served == pytest.approx(best, rel=1e-4)
    _, _, without = solved(DEMAND.replace(", power_limits_w: [350, 500]", ""))
    assert without.served_ratio[0] * 400 == pytest.approx(by_kind[0], rel=1e-4)
    assert served > 1.5 * without.served_ratio[0] * 400


def test_what_is_held_is_said_with_what_it_rests_on():
    p, _, chosen = solved(DEMAND)
    (note,) = power_notes(p.demand.stock, (chosen.nodes * 8).tolist())
    assert note.startswith(
        "16 H100-SXM-80GB held to 350 W of 700: compute at 77% of its rate, memory at 100%"
    )
    assert "published for this GPU" in note
    assert note.endswith("set it with nvidia-smi -pl 350")
    amd = planner(DEMAND.replace("gpu: H100", "gpu: MI300X").replace("[350, 500]", "[400]"))
    (note,) = power_notes(amd.demand.stock, [8, 8])
    assert "an assumption: the curve of H100-SXM-80GB" in note
    assert "rocm-smi" in note


def test_no_replica_waits_for_a_slower_half_of_itself():
    p = planner(DEMAND)
    mixed = [t for t in p.templates if len(t.composition) > 1]
    assert {t.kind for t in mixed} == {"prefill/decode"}  # one limit to read, another to decode


def test_owned_gpus_save_dear_electricity():
    text = DEMAND.replace("count: 64, price_usd_per_h: 1", "count: 16, owned: 16")
    text = text.replace(
        "{power_cap_w: 5600, budget_usd_per_h: 1000}\nobjective: goodput", "{electricity_usd_per_kwh: 1}"
    )
    _, problem, _ = solved(DEMAND)
    one = problem.rate[problem.usage[:, 1] == 8].max()  # of a node at 350 W
    _, _, chosen = solved(text.replace("rate_per_s: 400", f"rate_per_s: {one * 0.95}"))
    assert chosen.owned_used.tolist() == [0, 8, 0]
    assert chosen.usd_per_h == pytest.approx(8 * 0.35)


def test_where_watts_are_free_no_limit_is_looked_at():
    free = planner(DEMAND.replace("power_cap_w: 5600, ", ""))
    assert len(free.demand.stock) == 1
    assert any("would only slow it" in reason for reason in free.candidates().excluded)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ("[300]", "300 W must be between 350 W, below which nothing was published, and the TDP"),
        ("[701]", "701 W must be between 350 W"),
        ("[0]", "power_limits_w"),
        ("[500, 500]", "names a limit twice"),
        ("[500], power_limit_w: 400", "is given beside power_limits_w"),
    ],
)
def test_limits_that_cannot_be_are_refused(limits, words):
    with pytest.raises(ConfigError, match=words):
        planner(DEMAND.replace("[350, 500]", limits))


def small(draw):
    """One GPU at three limits and another at one: 1 to 3 replicas of one GPU a node."""
    rng = np.random.default_rng(draw)
    rate = np.sort(rng.uniform(0.5, 1.0, 3))[::-1]
    watts = np.array([700.0, 500.0, 350.0, 600.0])
    return Problem(
        usage=np.eye(4),
        rate=np.array([*rate, rng.uniform(0.4, 1.2)])[:, None, None],
        kind=np.arange(4),
        wanted=np.array([rng.uniform(1.0, 4.0)]),
        tokens=np.array([100.0]),
        mixed_loss=np.zeros(1),
        spare=[False],
        per_node=np.ones(4, dtype=np.int64),
        owned=np.array([1.0, 1.0, 1.0, 0.0]) * rng.integers(0, 2),
        buyable_nodes=np.array([2.0, 2.0, 2.0, 2.0]),
        price_usd_per_h=np.array([1.0, 1.0, 1.0, 1.1]) + 0.001 * watts * rng.uniform(0, 1),
        owned_usd_per_h=0.001 * watts * rng.uniform(0, 1),
        watts=watts,
        power_cap_w=float(rng.uniform(1200, 2400)),
        budget_usd_per_h=np.inf,
        jobs=np.zeros((0, 4)),
        pools=(),
    )


def cheapest(p, owned):
    """Every number of bought and owned GPUs at every limit."""
    best = np.inf
    for bought in product(range(3), repeat=4):
        for own in product(range(int(owned) + 1), repeat=3):
            if sum(own) > owned or sum(bought[:3]) > 2:
                continue
            number = np.array(bought) + np.array([*own, 0])
            if number @ p.rate[:, 0, 0] < p.wanted[0] - 1e-9 or number @ p.watts > p.power_cap_w + 1e-9:
                continue
            usd = bought @ p.price_usd_per_h + np.array([*own, 0]) @ p.owned_usd_per_h
            best = min(best, float(usd))
    return best


@pytest.mark.parametrize("draw", range(12))
def test_the_choice_is_the_best_of_all(draw):
    p = small(draw)
    owned = p.owned[0]
    p = replace(p, pools=(Pool((0, 1, 2), float(owned), 2.0),))
    best = cheapest(p, owned)
    if np.isinf(best):
        with pytest.raises(InfeasibleError):
            optimise(p, gap=0.0)
    else:
        found = optimise(p, gap=0.0)
        assert found.objective == pytest.approx(best, abs=1e-6)
        assert found.chosen.nodes[:3].sum() <= 2
        assert found.chosen.owned_used.sum() <= owned + 1e-6
