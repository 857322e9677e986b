"""Changes of a demand file that would make it servable, each tried as it would be typed in.

Owns more stock, waiting for it, and narrower weights: what changes which templates exist. They are enumerated anew, since a
template that needs more GPUs than there are was left out of the first ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bimetal.catalog.demand import Demand, Stock
from bimetal.catalog.fleet import Dtype
from bimetal.errors import InfeasibleError
from bimetal.planner.candidates import Candidates
from bimetal.planner.decide import FleetPlanner, Slacks
from bimetal.planner.optimise import Optimum, optimise
from bimetal.planner.problem import Problem, build_problem, is_late
from bimetal.planner.templates import Template
from bimetal.units import DTYPE_BYTES

MANY_NODES = 1_000_000
ENOUGH_NODES = 16
"""More of each kind, for templates that the stock is too small for."""
TIME_LIMIT_S = 3.0
GAP, ANY = 0.01, 1.0
"""Where the least is asked for, and where any plan will do."""
NARROWER: tuple[Dtype, ...] = ("float8", "float4")


@dataclass(frozen=True)
class Asked:
    """A demand that no fleet serves, and what fleets may be made of."""

    planner: FleetPlanner
    demand: Demand
    """The planner's, or one with other stock."""
    wanted: Sequence[bool] | None
    """[planner.templates]; None: all."""
    slacks: Slacks | None

    def candidates(self, demand: Demand) -> Candidates:
        """Of a demand with other stock or models, enumerated anew; no others than are wanted."""
        found = self.planner.with_demand(demand).candidates(self.slacks)
        return found.keep([self._may_be_used(t) for t in found.templates])

    def _may_be_used(self, template: Template) -> bool:
        """Alternatives leave out replicas over two kinds of GPU, or what the engine cannot run, or stock, which `demand` says."""
        if self.wanted is None or self.demand is not self.planner.demand:
            return True
        dropped = [t for t, keep in zip(self.planner.templates, self.wanted, strict=True) if not keep]
        without_split = all(len(t.composition) > 1 for t in dropped)
        without_future = all(t.not_runnable is not None for t in dropped)
        is_split, is_future = len(template.composition) > 1, template.not_runnable is not None
        return not dropped or not ((without_split and is_split) or (without_future and is_future))


def attempt(problem: Problem, gap: float = GAP) -> Optimum | None:
    """None: no plan, or none found in time."""
    try:
        return optimise(problem, gap=gap, time_limit_s=TIME_LIMIT_S)
    except InfeasibleError:
        return None


def would_do(asked: Asked, demand: Demand, candidates: Candidates | None = None) -> bool:
    """Whether the demand file with these changes can be served. `candidates`: of a larger stock."""
    found = asked.candidates(demand) if candidates is None else _within(candidates, demand.stock)
    rates = found.rate
    if not all((rates[:, c, c] > 0).any() for c in range(len(asked.planner.traffic))):
        return False
    return attempt(build_problem(demand, found, asked.planner.traffic), ANY) is not None


def _within(candidates: Candidates, stock: Sequence[Stock]) -> Candidates:
    """Those that so many GPUs are enough for."""
    counts = np.array([entry.count for entry in stock])
    return candidates.keep(np.all(candidates.usage <= counts, axis=1).tolist())


def more_stock(asked: Asked) -> list[str]:
    """The fewest nodes more of one GPU that suffice; if none does, as many more of every one as suffice."""
    demand = asked.demand
    kinds: dict[str, list[int]] = {}
    for g, entry in enumerate(demand.stock):
        if entry.count and not is_late(entry, demand):
            kinds.setdefault(entry.spec.name, []).append(g)
    growing = [g for same in kinds.values() for g in same]
    larger = asked.candidates(_with_nodes(demand, dict.fromkeys(growing, ENOUGH_NODES)))
    lines = []
    for name, same in kinds.items():
        more = _fewest_nodes(asked, larger, same)
        if more and would_do(asked, _with_nodes(demand, dict.fromkeys(same, more)), larger):
            gpus = more * demand.stock[same[0]].per_node
            lines.append(f"stock of {name} binds: {gpus} more ({more} nodes) would do")
    for more in (1, 2, 4, 8, ENOUGH_NODES) if not lines and len(kinds) > 1 else ():
        if would_do(asked, _with_nodes(demand, dict.fromkeys(growing, more)), larger):
            each = (f"{more * demand.stock[g[0]].per_node} more {name}" for name, g in kinds.items())
            return [f"stock binds: {' and '.join(each)} would do together"]
    return lines


def _with_nodes(demand: Demand, more: dict[int, int]) -> Demand:
    stock = tuple(
        replace(entry, count=entry.count + more.get(g, 0) * entry.per_node)
        for g, entry in enumerate(demand.stock)
    )
    return replace(demand, stock=stock)


def _fewest_nodes(asked: Asked, larger: Candidates, same: Sequence[int]) -> int:
    """More than there are of one GPU, which may be several entries of the stock; 0: no number does. First without limits on money:
    the fewest may be too dear."""
    traffic, most = asked.planner.traffic, np.array([float(e.count) for e in asked.demand.stock])
    most[same] = np.inf
    candidates = larger.keep(np.all(larger.usage <= most, axis=1).tolist())
    if not all((candidates.rate[:, c, c] > 0).any() for c in range(len(traffic))):
        return 0
    problem = build_problem(asked.demand, candidates, traffic)
    price, buyable = np.zeros(len(most)), problem.buyable_nodes.copy()
    price[same] = 1.0 / problem.per_node[same]
    buyable[same] = MANY_NODES
    fewest = replace(
        problem,
        buyable_nodes=buyable,
        price_usd_per_h=price,
        owned_usd_per_h=np.zeros(len(price)),
        budget_usd_per_h=np.inf,
    )
    found = attempt(fewest)
    if found is not None and np.isfinite(problem.budget_usd_per_h):
        few = buyable.copy()
        few[same] = found.chosen.nodes[same].sum()
        found = attempt(replace(problem, buyable_nodes=few)) or attempt(
            replace(problem, buyable_nodes=buyable)
        )
    had = problem.buyable_nodes[same].max()
    return 0 if found is None else max(0, int(found.chosen.nodes[same].sum() - had))


def later(asked: Asked, rounded_up: Sequence[float]) -> list[str]:
    """The least months of those given after which what has come is enough."""
    demand = asked.demand
    needed = demand.site.months_until_needed
    for months in sorted(rounded_up):
        if would_do(asked, replace(demand, site=replace(demand.site, months_until_needed=months))):
            return [f"lead time binds: months_until_needed {months:g} in place of {needed:g} would do"]
    return []


def narrower_weights(asked: Asked, models: Sequence[str]) -> list[str]:
    """The widest narrower dtype of each model that suffices."""
    lines = []
    for i, model in enumerate(asked.demand.models):
        for dtype in NARROWER if model.name in models else ():
            if DTYPE_BYTES[dtype] >= DTYPE_BYTES[model.dtype]:
                continue
            served = list(asked.demand.models)
            served[i] = replace(model, dtype=dtype)
            if would_do(asked, replace(asked.demand, models=tuple(served))):
                lines.append(f"dtype {model.dtype} of {model.name} binds: {dtype} would do")
                break
    return lines
