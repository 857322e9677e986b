"""`FleetPlanner`: from a demand file to the cheapest fleet whose simulation keeps every limit.

Owns the loop between optimiser and simulator: what fails its proof is tightened and solved again, what passes with room to
spare is loosened, a bounded number of times; the cheapest plan that passed is kept, and trimmed. Compares nothing (`compare`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from bimetal.catalog.demand import Demand
from bimetal.errors import InfeasibleError
from bimetal.perf.calibration import Calibration
from bimetal.planner.candidates import Candidates, enumerate_templates
from bimetal.planner.evaluate import Evaluator
from bimetal.planner.formulation import Chosen
from bimetal.planner.machines import EngineLimits
from bimetal.planner.optimise import DEFAULT_GAP, Optimum, optimise
from bimetal.planner.power_limits import with_power_limits
from bimetal.planner.problem import Problem, build_problem
from bimetal.planner.proof import Proof, prove
from bimetal.planner.replay import ClassReplay, Group
from bimetal.planner.service import Slack
from bimetal.planner.stage_tables import StageTables
from bimetal.planner.templates import Template, slots_for
from bimetal.planner.traffic import Traffic, read_traffic
from bimetal.planner.trim import trim, without_largest
from bimetal.units import MEGA, S_PER_HOUR

MOST_ROUNDS = 5
"""Of solving and simulating, for one plan."""
ROOM_TO_SPARE = 0.92
"""Simulated over allowed: below it in every class, the formulas were too strict."""
LOOSEN = 0.6
"""Power of that ratio by which they are loosened: not all the way, since a plan that fails is worth nothing."""
OVERSHOOT = 1.06
"""On top of what a failed limit asks for."""
SAME_RATE = 6
"""Digits of requests per second by which one fleet is another that was simulated already."""
STUCK = 4.0
"""Power of all that when the last tightening left the plan as it was: another limit bound the formulas."""
Slacks = Mapping[str, Slack]


@dataclass(frozen=True)
class FleetPlan:
    """One plan with what it was solved under and what its simulation showed."""

    name: str
    problem: Problem
    templates: tuple[Template, ...]
    optimum: Optimum
    slacks: Slacks
    groups: tuple[Group, ...]
    replays: tuple[ClassReplay, ...]
    """Empty: not simulated."""
    passed: bool
    """Every limit held in simulation, or nothing was simulated."""
    num_rounds: int
    untrimmed_usd_per_h: float
    """Of the plan by the formulas, before nodes were taken away whose absence the simulation bore."""
    formula_ratios: tuple[float, ...] = ()
    """[classes] of the demand, what the formulas say that the trimmed fleet serves: the rest is proven by simulation only.
    Empty: nothing was trimmed."""

    @property
    def formula_ratio(self) -> float:
        """Of the class that lacks most."""
        return min(self.formula_ratios, default=1.0)

    @property
    def usd_per_h(self) -> float:
        return self.optimum.chosen.usd_per_h

    @property
    def merit(self) -> tuple[bool, float, float]:
        """Smaller is better: plans that kept their limits, then goodput if that is asked for, then cost."""
        goodput = self.output_tokens_per_s if self.problem.objective == "goodput" else 0.0
        return not self.passed, -round(goodput, 3), round(self.usd_per_h, 6)

    @property
    def gpus(self) -> tuple[int, ...]:
        """[stock] bought or rented, and owned ones in use."""
        chosen, problem = self.optimum.chosen, self.problem
        needed = np.zeros(len(problem.owned))
        for (t, _), number in chosen.replicas.items():
            needed += problem.usage[t] * number
        for job, g in chosen.jobs.items():
            needed[g] += problem.jobs[job, g]
        bought = chosen.nodes * problem.per_node
        return tuple(int(b + max(0.0, round(n - b))) for b, n in zip(bought, needed, strict=True))

    @property
    def watts(self) -> float:
        return float(np.array(self.gpus) @ self.problem.watts)

    @property
    def output_tokens_per_s(self) -> float:
        """Asked for, as far as it is served."""
        p = self.problem
        return float((p.wanted * p.tokens * self.optimum.chosen.served_ratio).sum())

    @property
    def usd_per_million_tokens(self) -> float:
        """Of output, at the demand given."""
        tokens = self.output_tokens_per_s * S_PER_HOUR / MEGA
        return self.usd_per_h / tokens if tokens else float("nan")


class FleetPlanner:
    """Templates of a demand, enumerated once, and plans from them."""

    def __init__(self, demand: Demand, folder: Path, calibration: Calibration) -> None:
        self.demand, reasons = with_power_limits(demand)
        self.traffic = read_traffic(demand, folder)
        self.calibration = calibration
        self.engine = EngineLimits(max_num_seqs=demand.site.max_num_seqs)
        self._reasons = reasons
        self._rated: dict[frozenset[tuple[str, Slack]], Candidates] = {}
        self._proofs: dict[Hashable, Proof] = {}
        self._hardest_draw = 0
        """Of the fleet simulated last: with it first, the next one that fails fails soonest."""

    def with_demand(self, demand: Demand) -> FleetPlanner:
        """For the same traffic and other stock or models, whose templates are enumerated anew."""
        other = copy(self)
        for enumerated in ("evaluators", "templates"):
            other.__dict__.pop(enumerated, None)
        other.demand, other._reasons, other._rated, other._proofs = demand, [], {}, {}
        return other

    def of_model(self, name: str) -> tuple[Traffic, ...]:
        return tuple(t for t in self.traffic if t.model == name)

    @cached_property
    def evaluators(self) -> dict[str, Evaluator]:
        """By model."""
        found = {}
        for model in self.demand.models:
            classes = self.of_model(model.name)
            slots, reasons = slots_for(model, self.demand.stock)
            self._reasons += reasons
            if classes and slots:
                tables = StageTables(self.demand, model, tuple(slots), self.calibration)
                found[model.name] = Evaluator(tables, classes, self.engine)
        return found

    @cached_property
    def templates(self) -> tuple[Template, ...]:
        templates: list[Template] = []
        for evaluator in self.evaluators.values():
            found, reasons = enumerate_templates(evaluator)
            templates += found
            self._reasons += reasons
        if self.demand.runnable_only:
            before = len(templates)
            templates = [t for t in templates if t.not_runnable is None]
            self._reasons.append(
                f"{before - len(templates)} templates cannot be run by the engine today (runnable_only)"
            )
        return tuple(templates)

    def candidates(
        self, slacks: Slacks | None = None, traffic: Sequence[Traffic] | None = None
    ) -> Candidates:
        """All templates with what they serve; `traffic` in place of the demand's own where limits are to change."""
        if traffic is not None:
            return self._rate(slacks or {}, tuple(traffic))
        key = frozenset(item for item in (slacks or {}).items() if item[1] != Slack())
        if key not in self._rated:
            self._rated[key] = self._rate(slacks or {}, self.traffic)
        return self._rated[key]

    def _rate(self, slacks: Slacks, traffic: tuple[Traffic, ...]) -> Candidates:
        size, templates = len(traffic), self.templates
        rate = np.zeros((len(templates), size, size))
        for name, evaluator in self.evaluators.items():
            own = [i for i, t in enumerate(traffic) if t.model == name]
            mine = [i for i, t in enumerate(templates) if t.model.name == name]
            asked = replace(evaluator, traffic=tuple(traffic[i] for i in own), slack=dict(slacks))
            if mine:
                rate[np.ix_(mine, own, own)] = asked.rates([templates[i] for i in mine])
        stock = range(len(self.demand.stock))
        usage = np.array([[float(t.num_gpus(g)) for g in stock] for t in templates])
        return Candidates(templates, usage.reshape(len(templates), len(stock)), rate, tuple(self._reasons))

    def solve(
        self,
        candidates: Candidates,
        *,
        demand: Demand | None = None,
        traffic: Sequence[Traffic] | None = None,
        gap: float = DEFAULT_GAP,
        time_limit_s: float = 8.0,
    ) -> tuple[Problem, Optimum]:
        """InfeasibleError if nothing serves what is asked."""
        traffic = self.traffic if traffic is None else traffic
        for c, entry in enumerate(traffic):
            if not (candidates.rate[:, c, c] > 0).any():
                raise InfeasibleError(
                    f"class {entry.name}: no way of serving {entry.model} from this stock keeps TTFT p99 within "
                    f"{entry.ttft_s:g} s and TPOT p99 within {entry.tpot_s:g} s"
                )
        problem = build_problem(demand or self.demand, candidates, traffic)
        return problem, optimise(problem, gap=gap, time_limit_s=time_limit_s)

    def groups(self, templates: Sequence[Template], chosen: Chosen) -> tuple[Group, ...]:
        """The chosen replicas with what each class gives them: rooms are shrunk to the demand in proportion."""
        room = np.zeros(len(self.traffic))
        for (_, _, c), rate in chosen.served_per_s.items():
            room[c] += rate
        asked = np.array([t.rate_per_s for t in self.traffic]) * chosen.served_ratio
        shrink = np.minimum(1.0, asked / np.maximum(room, 1e-12))
        groups = []
        for (t, k), number in chosen.replicas.items():
            served = {
                self.traffic[c].name: rate * shrink[c]
                for (t2, k2, c), rate in chosen.served_per_s.items()
                if (t2, k2) == (t, k)
            }
            groups.append(Group(templates[t], number, served))
        return tuple(groups)

    def prove(self, templates: Sequence[Template], chosen: Chosen) -> Proof:
        """By simulation, under what the demand asks for and what routing between unlike replicas loses."""
        asked = np.array([t.rate_per_s for t in self.traffic]) * chosen.served_ratio
        lost = chosen.lost_per_s / np.maximum(asked, 1e-12)
        named = {t.name: round(float(part), SAME_RATE) for t, part in zip(self.traffic, lost, strict=True)}
        groups = self.groups(templates, chosen)
        key = (
            frozenset(named.items()),
            tuple(
                (
                    g.template,
                    g.number,
                    tuple((c, round(rate, SAME_RATE)) for c, rate in g.served_per_s.items()),
                )
                for g in groups
            ),
        )
        if key not in self._proofs:
            proof = prove(groups, self.evaluators, self.traffic, self.demand.seed, named, self._hardest_draw)
            self._hardest_draw = proof.hardest
            self._proofs[key] = proof
        return self._proofs[key]

    def trimmed(self, plan: FleetPlan) -> FleetPlan:
        """With as many nodes less as its simulation bears; a class with N+1 also without its largest replica."""
        problem = plan.problem

        def prove_with_spare(chosen: Chosen) -> Proof:
            proof = self.prove(plan.templates, chosen)
            for c in np.flatnonzero(problem.spare):
                if not proof.passed:
                    break
                name, left = self.traffic[c].name, without_largest(problem, chosen, int(c))
                alone = self.prove(plan.templates, left) if left else None
                if alone is None or not alone.keeps(name):
                    proof = replace(proof, worst={**proof.worst, name: (np.inf, np.inf)})
            return proof

        held = [t.is_batch for t in self.traffic]
        found = trim(problem, plan.optimum.chosen, prove_with_spare, held)
        if found is None:
            return plan
        smaller, proof = found
        return replace(
            plan,
            optimum=replace(plan.optimum, chosen=smaller.chosen),
            groups=self.groups(plan.templates, smaller.chosen),
            replays=proof.replays,
            formula_ratios=smaller.formula_ratios,
        )

    def plan(
        self,
        name: str,
        wanted: Sequence[bool] | None = None,
        *,
        demand: Demand | None = None,
        slacks: Slacks | None = None,
        simulate: bool = True,
        known: FleetPlan | None = None,
    ) -> FleetPlan:
        """The best plan that passes its simulation; if none of the rounds did, the one that came nearest.

        `wanted` [templates]: which may be used; None: all. `demand`: with other stock or limits of the site. `known`: a plan
        that may be used and passed, so that only cheaper ones are simulated. InfeasibleError if no fleet serves the demand at
        all.
        """
        now: dict[str, Slack] = {t.name: Slack() for t in self.traffic} | dict(slacks or {})
        best: tuple[tuple[bool, float, float], FleetPlan] | None = None
        if known is not None:
            best = known.merit, replace(known, name=name)
        number = 0
        previous: dict[tuple[int, int], int] | None = None
        for number in range(1, (MOST_ROUNDS if simulate else 1) + 1):
            try:
                candidates = self.candidates(now)
                if wanted is not None:
                    candidates = candidates.keep(wanted)
                problem, optimum = self.solve(candidates, demand=demand)
            except InfeasibleError:
                if best is None:
                    raise
                break
            by_cost = self.demand.objective == "cost"
            if by_cost and best and best[1].passed and optimum.chosen.usd_per_h >= best[1].usd_per_h:
                break  # looser limits bought nothing, or tighter ones more than is needed
            groups = self.groups(candidates.templates, optimum.chosen)
            proof = self.prove(candidates.templates, optimum.chosen) if simulate else Proof((), {})
            worst, passed = proof.worst, proof.passed
            found = FleetPlan(
                name,
                *(problem, candidates.templates, optimum, dict(now), groups, proof.replays),
                passed,
                number,
                optimum.chosen.usd_per_h,
            )
            excess = max((max(ratios) for ratios in worst.values()), default=0.0)
            key = found.merit if passed else (True, excess, 0.0)
            cheaper = best is None or key < best[0]
            if best is None or cheaper:
                best = key, found
            elif passed and not best[0][0]:
                break  # looser limits bought nothing
            again = previous == found.optimum.chosen.replicas
            previous = found.optimum.chosen.replicas
            adjusted = {
                name: _adjust(slack, worst.get(name), STUCK if again else 1.0) for name, slack in now.items()
            }
            if adjusted == now:
                break
            now = adjusted
        assert best is not None  # the first round returns or raises
        if known is not None and best[1].optimum is known.optimum:
            return best[1]
        plan = replace(best[1], num_rounds=number)
        return self.trimmed(plan) if simulate and plan.passed and by_cost else plan


def _adjust(slack: Slack, ratios: tuple[float, float] | None, power: float) -> Slack:
    """Tighter where a limit was broken, by a power of what it was broken by; looser where both have room to spare."""
    if ratios is None:
        return slack
    ttft, tpot = ratios
    if max(ratios) > 1:
        return Slack(
            slack.ttft * ((ttft * OVERSHOOT) ** power if ttft > 1 else 1.0),
            slack.tpot * ((tpot * OVERSHOOT) ** power if tpot > 1 else 1.0),
        )
    if max(ratios) < ROOM_TO_SPARE:
        by = max(ratios) ** LOOSEN
        return Slack(slack.ttft * by, slack.tpot * by)
    return slack
