"""What an alternative lacks, as far as it is known once it is priced.

Owns the words for alternatives that the stock, the power or the budget is too small for. Solves nothing but the share that can be
served: remedies tried one by one are for the demand itself (`infeasible`), and take minutes on large stock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from bimetal.catalog.demand import Demand
from bimetal.planner.decide import FleetPlan, FleetPlanner
from bimetal.planner.infeasible import share_served
from bimetal.planner.problem import build_problem, is_late
from bimetal.units import KILO, MS_PER_S


def name_lack(
    planner: FleetPlanner,
    wanted: Sequence[bool] | None,
    demand: Demand,
    plan: FleetPlan | None,
    error: str,
) -> Iterator[str]:
    """Lines for people. `demand`: as it may be used; `plan`: priced as if more of the same could be had, None: there is none;
    `error`: what the planner said of `demand`."""
    candidates = planner.candidates() if wanted is None else planner.candidates().keep(wanted)
    for entry in demand.stock:
        if entry.count and is_late(entry, demand):
            yield f"lead time binds: {entry.label} comes after {entry.months_to_arrive:g} months, too late"
    blocked = [c for c in range(len(planner.traffic)) if not (candidates.rate[:, c, c] > 0).any()]
    for c in blocked:
        asked = planner.traffic[c]
        if asked.is_batch or not any(t.model.name == asked.model for t in candidates.templates):
            yield f"class {asked.name}: {asked.model} fits no such replica in stock"
        else:
            yield (
                f"latency of class {asked.name} binds: no such replica keeps TTFT p99 {asked.ttft_s:g} s and TPOT p99 "
                f"{asked.tpot_s * MS_PER_S:g} ms"
            )
    if blocked:
        return
    lack = [] if plan is None else list(_beyond(plan, demand))
    yield from lack or [error]
    yield from share_served(build_problem(demand, candidates, planner.traffic))


def _beyond(plan: FleetPlan, demand: Demand) -> Iterator[str]:
    """What the plan takes beyond the demand's stock, power and budget."""
    site, problem, nodes = demand.site, plan.problem, plan.optimum.chosen.nodes
    kinds: dict[str, list[int]] = {}
    for g, entry in enumerate(demand.stock):
        kinds.setdefault(entry.spec.name, []).append(g)  # at several power limits they are of one stock
    for name, same in kinds.items():
        had = max(0 if is_late(demand.stock[g], demand) else demand.stock[g].num_buyable_nodes for g in same)
        more = round(float(nodes[same].sum())) - had
        if more > 0:
            gpus = more * demand.stock[same[0]].per_node
            yield f"stock of {name} binds: the plan priced here takes {gpus} more ({more} nodes) than there are"
    watts = float(problem.watts @ (nodes * problem.per_node + plan.optimum.chosen.owned_used))
    if watts > (site.power_cap_w or np.inf):
        yield f"power cap of {(site.power_cap_w or 0) / KILO:g} kW binds: the plan priced here draws {watts / KILO:.1f} kW"
    if plan.usd_per_h > (site.budget_usd_per_h or np.inf):
        yield f"budget of ${site.budget_usd_per_h:.2f}/h binds: the plan priced here costs ${plan.usd_per_h:.2f}/h"
