"""How sure it is that one plan is cheaper than another: both priced on the same draws of the performance model.

Owns what a fixed fleet could serve of the demand under each draw. A draw changes what all plans rest on together, so that the difference of
two plans is surer than either's price. Chooses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bimetal.planner.decide import FleetPlan, FleetPlanner
from bimetal.planner.evaluate import Evaluator
from bimetal.planner.milp import Floats, Milp
from bimetal.planner.problem import Problem
from bimetal.planner.stage_tables import StageTables
from bimetal.planner.templates import Template

NUM_DRAWS = 64
INTERVAL = (0.05, 0.95)


@dataclass(frozen=True)
class DrawnPrices:
    """Dollars per million output tokens of one plan, of what it can serve of the demand, per draw."""

    name: str
    usd_per_million_tokens: Floats
    """[draws]; infinite where the plan can serve some class not at all."""

    @property
    def interval(self) -> tuple[float, float]:
        """90%."""
        low, high = np.quantile(self.usd_per_million_tokens, INTERVAL, method="nearest")
        return float(low), float(high)

    @property
    def median(self) -> float:
        return float(np.quantile(self.usd_per_million_tokens, 0.5, method="nearest"))

    def cheaper_than(self, other: DrawnPrices) -> float:
        """Share of draws; a tie counts half.

        >>> a, b = (DrawnPrices(n, np.array(x)) for n, x in (("a", [1.0, 2.0]), ("b", [2.0, 2.0])))
        >>> a.cheaper_than(b)
        0.75
        """
        mine, theirs = self.usd_per_million_tokens, other.usd_per_million_tokens
        return float(((mine < theirs) + 0.5 * (mine == theirs)).mean())


def draw_prices(
    planner: FleetPlanner, plans: Sequence[FleetPlan], num_draws: int = NUM_DRAWS
) -> list[DrawnPrices]:
    """Of each plan, on the same draws of the calibration."""
    number = min(num_draws, len(planner.calibration.draws))
    prices = np.empty((len(plans), number))
    for draw in range(number):
        tables = _tables(planner, plans, draw)
        for i, plan in enumerate(plans):
            multiple = servable_multiple(plan.problem, plan, _rates(planner, plan, tables))
            served = min(1.0, multiple)  # room to spare earns nothing
            prices[i, draw] = plan.usd_per_million_tokens / served if served > 0 else np.inf
    return [DrawnPrices(plan.name, prices[i]) for i, plan in enumerate(plans)]


def servable_multiple(problem: Problem, plan: FleetPlan, rate: Mapping[tuple[int, int, int], float]) -> float:
    """The largest multiple of the demand that a plan's replicas can serve.

    maximise m  subject to  sum_c z_tkc <= N_tk,  sum_tk rate_tkc z_tkc >= m (wanted_c + lost_c)
    """
    chosen, milp = plan.optimum.chosen, Milp()
    multiple = milp.variables(1, cost=-1.0)
    share = {key: int(milp.variables(1)[0]) for key in rate}
    for (t, k), number in chosen.replicas.items():
        milp.row([([i for (a, b, _), i in share.items() if (a, b) == (t, k)], 1.0)], upper=float(number))
    for c, wanted in enumerate(problem.wanted):
        kept = 1 / (1 + chosen.lost_per_s[c] / wanted)
        mine = [key for key in rate if key[2] == c]
        milp.row(
            [([share[key] for key in mine], [rate[key] for key in mine]), (multiple, -wanted / kept)],
            lower=0.0,
        )
    solved = milp.solve(relax=True)
    return float(solved.values[multiple[0]]) if solved.status == "optimal" else 0.0


def _tables(planner: FleetPlanner, plans: Sequence[FleetPlan], draw: int) -> dict[str, StageTables]:
    """By model, of the slots in use only."""
    used: dict[str, list[Template]] = {}
    for plan in plans:
        for t, _ in plan.optimum.chosen.replicas:
            used.setdefault(plan.templates[t].model.name, []).append(plan.templates[t])
    return {
        name: StageTables(
            planner.demand,
            templates[0].model,
            tuple(dict.fromkeys(part.slot for t in templates for part in t.parts)),
            planner.calibration,
            draw,
        )
        for name, templates in used.items()
    }


def _rates(
    planner: FleetPlanner, plan: FleetPlan, tables: Mapping[str, StageTables]
) -> dict[tuple[int, int, int], float]:
    """(template, limits, class) to requests per second, under one draw."""
    rates: dict[tuple[int, int, int], float] = {}
    for name, table in tables.items():
        own = [i for i, t in enumerate(planner.traffic) if t.model == name]
        used = sorted({t for t, _ in plan.optimum.chosen.replicas if plan.templates[t].model.name == name})
        if not used:
            continue
        evaluator: Evaluator = replace(planner.evaluators[name], tables=table, slack=dict(plan.slacks))
        found = evaluator.rates([plan.templates[t] for t in used])
        for t, k in plan.optimum.chosen.replicas:
            if t in used and k in own:
                row = found[used.index(t), own.index(k)]
                rates |= {(t, k, c): float(row[j]) for j, c in enumerate(own) if row[j] > 0}
    return rates
