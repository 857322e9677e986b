"""`Decision`: the chosen fleet beside what else could have been bought, and how sure the choice is.

Owns which alternatives are solved, at the same limits and from the same stock, and the words for what came out. Nothing here
prefers a mix: the cheapest plan that passed its simulation is chosen, whatever it is made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import le
from pathlib import Path

from bimetal.catalog.demand import Demand
from bimetal.errors import InfeasibleError
from bimetal.perf.calibration import Calibration
from bimetal.planner.compare import DrawnPrices, draw_prices
from bimetal.planner.decide import FleetPlan, FleetPlanner
from bimetal.planner.holdings import num_owned, paid_usd_per_h, usd_per_h_as_if_rented
from bimetal.planner.infeasible import explain
from bimetal.planner.lacking import name_lack
from bimetal.planner.sensitivity import FrontPoint, Relaxation, binding, front, relaxations
from bimetal.planner.templates import Template

SURE = 0.9
"""Chance from which one plan is called cheaper than another."""
TIE = 5e-4
"""Less of a difference than is printed."""
STOCK_MULTIPLE = 4
"""Of what there is, for the price of alternatives that it is too small for."""
BEST, UNSPLIT, RUNNABLE = "best of all", "unsplit mix", "runs on bimetal today"


@dataclass(frozen=True)
class Alternative:
    """One way of choosing: a plan, or why there is none."""

    name: str
    plan: FleetPlan | None
    reasons: tuple[str, ...]
    """Why there is none, and what would have to change."""
    prices: DrawnPrices | None = None
    beyond_stock: bool = False
    """The plan needs more GPUs than are in stock: shown for its price, never chosen."""


@dataclass(frozen=True)
class Decision:
    """`alternatives[0]` is over all templates; `chosen` is the name of the cheapest that passed."""

    planner: FleetPlanner
    alternatives: tuple[Alternative, ...]
    chosen: str
    verdict: tuple[str, ...]
    binds: tuple[str, ...]
    relaxations: tuple[Relaxation, ...]
    front: tuple[FrontPoint, ...]
    num_templates: int
    excluded: tuple[str, ...]

    @property
    def plan(self) -> FleetPlan:
        """The chosen one."""
        plan = next(a.plan for a in self.alternatives if a.name == self.chosen)
        assert plan is not None  # only plans are chosen
        return plan

    def is_chosen(self, other: Alternative) -> bool:
        """Whether an alternative is the chosen plan, perhaps under another name."""
        return other.plan is not None and other.plan.optimum is self.plan.optimum

    def goes_beyond(self, other: Alternative) -> str | None:
        """What a plan that is shown for its price only does not keep to; None: it keeps to all."""
        if not other.beyond_stock or other.plan is None:
            return None
        demand, plan = self.planner.demand, other.plan
        used: dict[str, int] = {}
        for entry, number in zip(demand.stock, plan.gpus, strict=True):
            used[entry.spec.name] = used.get(entry.spec.name, 0) + number
        has = {entry.spec.name: entry.count for entry in demand.stock}
        if all(number <= has[name] for name, number in used.items()):
            if demand.site.power_cap_w and plan.watts > demand.site.power_cap_w:
                return "above the power cap"
            if demand.site.budget_usd_per_h and plan.usd_per_h > demand.site.budget_usd_per_h:
                return "above the budget"
        return "more than there is"

    def chance_cheaper(self, other: Alternative) -> float | None:
        """That the chosen plan is cheaper than `other`, over the performance model's draws."""
        mine = next(a.prices for a in self.alternatives if a.name == self.chosen)
        if mine is None or other.prices is None or self.is_chosen(other):
            return None
        return mine.cheaper_than(other.prices)


def decide(
    demand: Demand,
    folder: Path,
    calibration: Calibration,
    *,
    simulate: bool = True,
    explore: bool = True,
) -> Decision:
    """`explore`: solve relaxations and the front too. InfeasibleError names what binds and the nearest relaxations."""
    planner = FleetPlanner(demand, folder, calibration)
    demand = planner.demand
    alternatives: list[Alternative] = []
    choices = list(_choices(planner))
    for choice in choices:
        alternatives.append(_alternative(planner, choice, alternatives, simulate))
    alternatives = [
        _at_least(planner, *pair, alternatives) for pair in zip(choices, alternatives, strict=True)
    ]
    serving = [
        a.plan for a in alternatives if a.plan is not None and a.plan.groups
    ]  # a budget may buy nothing
    eligible = [a.plan for a in alternatives if a.plan is not None and not a.beyond_stock]
    if not eligible:
        raise InfeasibleError(
            "no fleet serves this demand:\n" + "\n".join(f"- {r}" for r in alternatives[0].reasons)
        )
    drawn = {p.name: p for p in draw_prices(planner, serving)} if planner.traffic else {}
    alternatives = [replace(a, prices=drawn.get(a.name)) for a in alternatives]
    chosen = min(eligible, key=lambda plan: plan.merit)
    return Decision(
        planner=planner,
        alternatives=tuple(alternatives),
        chosen=chosen.name,
        verdict=tuple(_verdict(demand, chosen, alternatives)) + tuple(_doubts(chosen, alternatives)),
        binds=tuple(binding(planner, chosen)),
        relaxations=tuple(relaxations(planner, chosen, None)) if explore else (),
        front=tuple(front(planner, chosen))
        if explore and not all(t.is_batch for t in planner.traffic)
        else (),
        num_templates=len(planner.templates),
        excluded=tuple(planner.candidates().excluded),
    )


@dataclass(frozen=True)
class _Choice:
    """What an alternative may use."""

    name: str
    wanted: tuple[bool, ...] | None
    """[templates]; None: all."""
    demand: Demand


def _choices(planner: FleetPlanner) -> Iterator[_Choice]:
    demand, templates = planner.demand, planner.templates
    yield _Choice(BEST, None, demand)
    names = list(dict.fromkeys(entry.spec.vendor for entry in demand.stock))
    for name in names if len(names) > 1 else ():
        stock = tuple(e if e.spec.vendor == name else replace(e, count=0, owned=0) for e in demand.stock)
        yield _Choice(
            f"all {name}", tuple(t.vendors == {name} for t in templates), replace(demand, stock=stock)
        )
    yield _Choice(UNSPLIT, tuple(len(t.gpu_kinds) == 1 for t in templates), demand)
    runnable = tuple(t.not_runnable is None for t in templates)
    able = {t.model.name for t, can in zip(templates, runnable, strict=True) if can}
    if not all(runnable) and all(t.model in able for t in planner.traffic):
        yield _Choice(RUNNABLE, runnable, demand)


def _alternative(
    planner: FleetPlanner, choice: _Choice, known: Sequence[Alternative], simulate: bool
) -> Alternative:
    """A plan already found that uses only what is wanted is this one too: the optimum of a part that holds it."""
    name, wanted = choice.name, choice.wanted
    first = known[0].plan if known else None
    if first is not None and _is_one(planner, choice, first):
        return Alternative(name, replace(first, name=name), ())
    proven = _best_known(planner, choice, known) if simulate and planner.demand.objective == "cost" else None
    try:
        plan = planner.plan(name, wanted, demand=choice.demand, simulate=simulate, known=proven)
        return Alternative(name, plan, ())
    except InfeasibleError as error:
        words = str(error)
    if not known:  # the demand itself: what would do is tried, however long that takes
        found = explain(planner, wanted, demand=choice.demand)
        return Alternative(name, None, tuple(dict.fromkeys(found)) or (words,))
    priced: FleetPlan | None = None
    if planner.demand.objective == "cost":
        with suppress(InfeasibleError):  # what it would cost if more of the same could be had
            priced = planner.plan(name, wanted, demand=_more_stock(choice.demand), simulate=simulate)
    reasons = tuple(dict.fromkeys(name_lack(planner, wanted, choice.demand, priced, words)))
    return Alternative(name, priced, reasons, beyond_stock=priced is not None)


def _is_one(planner: FleetPlanner, choice: _Choice, plan: FleetPlan) -> bool:
    """Whether a plan found for another choice uses only what this one may."""
    has = [entry.count for entry in choice.demand.stock]
    if not all(map(le, plan.gpus, has)):
        return False
    if choice.wanted is None:
        return True
    allowed = {t for t, keep in zip(planner.templates, choice.wanted, strict=True) if keep}
    return all(group.template in allowed for group in plan.groups)


def _best_known(planner: FleetPlanner, choice: _Choice, known: Sequence[Alternative]) -> FleetPlan | None:
    """Of the plans that passed and that this choice may use."""
    plans = [a.plan for a in known if a.plan is not None and not a.beyond_stock and a.plan.passed]
    return min(
        (plan for plan in plans if _is_one(planner, choice, plan)),
        key=lambda plan: plan.merit,
        default=None,
    )


def _at_least(
    planner: FleetPlanner, choice: _Choice, own: Alternative, known: Sequence[Alternative]
) -> Alternative:
    """What was found for another choice, where it is one of this and better: trimming finds a good plan, not the best of all."""
    better = _best_known(planner, choice, known)
    if better is None:
        return own
    mine = None if own.plan is None or own.beyond_stock else own.plan.merit
    if mine is not None and mine <= better.merit:
        return own
    return Alternative(choice.name, replace(better, name=choice.name), ())


def _more_stock(demand: Demand) -> Demand:
    stock = tuple(replace(entry, count=entry.count * STOCK_MULTIPLE) for entry in demand.stock)
    return replace(demand, stock=stock, site=replace(demand.site, power_cap_w=None, budget_usd_per_h=None))


def vendors(templates: Sequence[Template]) -> list[str]:
    """Of the GPUs in them, by name."""
    return sorted({vendor for t in templates for vendor in t.vendors})


def _verdict(demand: Demand, chosen: FleetPlan, alternatives: Sequence[Alternative]) -> list[str]:
    """Whether mixing pays, in words."""
    lines = []
    used = vendors([group.template for group in chosen.groups])
    others = [a for a in alternatives if a.name.startswith("all ")]
    possible = [a.plan for a in others if a.plan is not None and a.plan.passed and not a.beyond_stock]
    if len(used) > 1:
        if possible:
            best = min(possible, key=lambda plan: plan.merit)
            lines.append(_compared(demand, f"mixing {' and '.join(used)}", chosen, best, best.name))
        elif others:
            lines.append(
                f"neither vendor's GPUs in stock are enough alone: only {' and '.join(used)} together serve this demand"
            )
    elif others and used:
        lines.append(
            f"mixing loses: {used[0]} alone is at least as {_good(demand)} as any mix of vendors that was found"
        )
    split = [g for g in chosen.groups if len(g.template.gpu_kinds) > 1]
    whole = next((a.plan for a in alternatives if a.name == UNSPLIT and not a.beyond_stock), None)
    if split and whole is not None and whole.passed:
        lines.append(
            _compared(demand, "spanning two kinds of GPU within a replica", chosen, whole, "the best without")
        )
    elif not split and chosen.groups and len({entry.spec.name for entry in demand.stock}) > 1:
        lines.append(
            "every replica is of one kind of GPU: none that spans two kinds makes a cheaper plan"
            if demand.objective == "cost"
            else "every replica is of one kind of GPU: none that spans two kinds makes a better plan"
        )
    if num_owned(demand.stock, chosen) and not demand.site.electricity_usd_per_kwh:
        lines.append(
            f"{num_owned(demand.stock, chosen)} owned GPUs count as free, since power is not priced: give "
            "site.electricity_usd_per_kwh"
        )
    blocked = sorted({g.template.not_runnable for g in chosen.groups if g.template.not_runnable})
    if blocked:
        lines.append(f"priced only, cannot be served by bimetal today: {'; '.join(blocked)}")
    if not chosen.passed:
        lines.append("NOT proven: its simulation broke a limit in every round; see the percentiles below")
    return lines


def _good(demand: Demand) -> str:
    return "good" if demand.objective == "goodput" else "cheap"


def _compared(demand: Demand, what: str, chosen: FleetPlan, other: FleetPlan, name: str) -> str:
    """Whether it pays, against a plan without it; what owned GPUs have to do with that."""
    if demand.objective == "goodput":
        if not chosen.output_tokens_per_s > other.output_tokens_per_s * (1 + TIE):
            return f"{what} ties with {name}: no more output tokens served"
        return f"{what} pays: {_gain(demand, chosen, other)} than {name}"
    if not chosen.usd_per_h < other.usd_per_h * (1 - TIE):
        return f"{what} ties with {name}: ${chosen.usd_per_h:.2f}/h against ${other.usd_per_h:.2f}/h"
    mine, theirs = num_owned(demand.stock, chosen), num_owned(demand.stock, other)
    if mine == theirs == 0:
        return f"{what} pays: {_gain(demand, chosen, other)} than {name}"
    return (
        f"{what} pays: ${chosen.usd_per_h:.2f}/h against ${other.usd_per_h:.2f}/h of {name}. It uses {mine} owned GPUs, "
        f"{name} {theirs}; what is rented or bought alone costs ${paid_usd_per_h(chosen):.2f}/h against "
        f"${paid_usd_per_h(other):.2f}/h, and with owned GPUs at the price of more of the same it would be "
        f"${usd_per_h_as_if_rented(chosen):.2f}/h against ${usd_per_h_as_if_rented(other):.2f}/h"
    )


def _gain(demand: Demand, chosen: FleetPlan, other: FleetPlan) -> str:
    """By how much, in what the objective counts."""
    if demand.objective == "goodput":
        if not other.output_tokens_per_s:
            return "more output tokens served"
        return f"{chosen.output_tokens_per_s / other.output_tokens_per_s - 1:.1%} more output tokens served"
    saved = 1 - chosen.usd_per_h / other.usd_per_h if other.usd_per_h else 0.0
    return f"{saved:.1%} less per hour"


def _doubts(chosen: FleetPlan, alternatives: Sequence[Alternative]) -> list[str]:
    """Alternatives that the performance model cannot tell from the chosen plan."""
    priced = [a for a in alternatives if a.prices is not None and a.plan is not None and not a.beyond_stock]
    mine = next((a.prices for a in priced if a.name == chosen.name), None)
    if mine is None:
        return []
    doubtful = {
        a.name: mine.cheaper_than(a.prices)
        for a in priced
        if a.prices is not None and a.plan is not None and a.plan.optimum is not chosen.optimum
    }
    words = [f"{chance:.0%} against {name}" for name, chance in doubtful.items() if chance < SURE]
    if not words:
        return []
    return [
        f"not certain: chance that it is cheaper per token served, performance model's draws: {', '.join(words)}"
    ]
