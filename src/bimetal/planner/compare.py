"""How sure it is that one plan is cheaper than another: both priced on the same draws of the performance model.

Owns what a fixed fleet could serve of the demand under each draw. A draw changes what all plans rest on together, so that the difference of
two plans is surer than either's price. Chooses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bimetal.planner.decide import FleetPlan, FleetPlanner
from bimetal.planner.milp import Floats, Milp
from bimetal.planner.problem import Problem

Rates = dict[tuple[int, int, int], float]
"""(template, limits, class) to requests per second."""
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
    prices = []
    for plan in plans:
        multiples = [
            servable_multiple(plan.problem, plan, rate) for rate in _drawn_rates(planner, plan, number)
        ]
        served = np.minimum(1.0, np.array(multiples) / _by_formulas(plan))  # room to spare earns nothing
        prices.append(DrawnPrices(plan.name, _per_served(plan.usd_per_million_tokens, served)))
    return prices


def _per_served(usd: float, served: Floats) -> Floats:
    """Whoever serves nothing is infinitely dear, also where the GPUs are free."""
    prices: Floats = np.full(len(served), np.inf)
    np.divide(usd, served, out=prices, where=served > 0)
    return prices


def _by_formulas(plan: FleetPlan) -> float:
    """Of the demand, what formulas say a trimmed fleet serves: simulation showed it to serve all, so that draws are held to that."""
    if not plan.formula_ratios:
        return 1.0
    problem = plan.problem
    rate = {
        (t, k, int(c)): float(problem.rate[t, k, c])
        for t, k in plan.optimum.chosen.replicas
        for c in np.flatnonzero(problem.rate[t, k])
    }
    return min(1.0, servable_multiple(problem, plan, rate))


def servable_multiple(problem: Problem, plan: FleetPlan, rate: Rates) -> float:
    """The largest multiple of what a plan serves of the demand that its replicas can serve.

    maximise m  subject to  sum_c z_tkc <= N_tk,  sum_tk rate_tkc z_tkc >= m (wanted_c served_c + lost_c)
    """
    chosen, milp = plan.optimum.chosen, Milp()
    multiple = milp.variables(1, cost=-1.0)
    share = {key: int(milp.variables(1)[0]) for key in rate}
    for (t, k), number in chosen.replicas.items():
        milp.row([([i for (a, b, _), i in share.items() if (a, b) == (t, k)], 1.0)], upper=float(number))
    served = problem.wanted * chosen.served_ratio
    for c in np.flatnonzero(served > 0):
        mine = [key for key in rate if key[2] == c]
        milp.row(
            [
                ([share[key] for key in mine], [rate[key] for key in mine]),
                (multiple, -(served[c] + chosen.lost_per_s[c])),
            ],
            lower=0.0,
        )
    solved = milp.solve(relax=True)
    return max(0.0, float(solved.values[multiple[0]])) if solved.status == "optimal" else 0.0


def _drawn_rates(planner: FleetPlanner, plan: FleetPlan, number: int) -> list[Rates]:
    """Per draw, what a replica of each template in use serves. All draws of a model are rated in one call."""
    drawn: list[Rates] = [{} for _ in range(number)]
    for name, evaluator in planner.evaluators.items():
        own = [i for i, t in enumerate(planner.traffic) if t.model == name]
        used = sorted({t for t, _ in plan.optimum.chosen.replicas if plan.templates[t].model.name == name})
        if not used:
            continue
        templates = [plan.templates[t].drawn(draw) for draw in range(number) for t in used]
        slots = tuple(dict.fromkeys(part.slot for template in templates for part in template.parts))
        tables = replace(evaluator.tables, slots=slots)
        found = replace(evaluator, tables=tables, slack=dict(plan.slacks)).rates(templates)
        found = found.reshape(number, len(used), len(own), len(own))
        for t, k in plan.optimum.chosen.replicas:
            if t in used and k in own:
                rows = found[:, used.index(t), own.index(k)]
                for draw, row in enumerate(rows):
                    drawn[draw] |= {(t, k, c): float(row[j]) for j, c in enumerate(own) if row[j] > 0}
    return drawn
