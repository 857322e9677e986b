"""What a reader must know before the figures: the conventions they follow, and what in them is doubtful.

Every report prints these lines. Does not compute.
"""

from __future__ import annotations

from collections.abc import Callable

from bimetal.catalog.hardware import find_gpu
from bimetal.economics.analysis import Analysis
from bimetal.economics.quantity import Quantity
from bimetal.economics.scenario import INPUT_TOKENS, Scenario
from bimetal.economics.scenario_file import Serving

SAME_WORK_RATIO = 0.005


def conventions(analysis: Analysis) -> list[str]:
    """The first scenario's, then those of the others that differ, under their names."""
    found: list[str] = []
    tokens = analysis.scenarios[0].quantities[INPUT_TOKENS]
    first = 0
    for label, scenario in zip(analysis.labels, analysis.scenarios, strict=True):
        lines = analysis.central[first].fleet.conventions.lines()
        found += [line if first == 0 else f"{label}: {line}" for line in lines if line not in found]
        first += len(scenario.file.fleets)
    return [*found, f"tokens are output tokens, each with {tokens} input token(s)"]


def doubts(analysis: Analysis) -> list[str]:
    """Prices that nobody checked, parts not sold yet, models for measurements, scenarios that are not alike."""
    found = []
    for scenario in analysis.scenarios:
        announced = [gpu for gpu in scenario.file.gpus if "announced" in find_gpu(gpu).notes]
        for names, what in (
            (_named(scenario, lambda q: "UNVERIFIED" in q.source), "UNVERIFIED in the catalogue"),
            (
                _named(scenario, lambda q: q.source.startswith("performance model")),
                "from the performance model, not measured",
            ),
            (announced, "announced, not shipping"),
        ):
            if names:
                found.append(f"{what}: {', '.join(names)}")
    found += _unlike(analysis)
    delivered = [float(tco.tokens.sum()) for tco in analysis.central]
    if not analysis.per_token and max(delivered) > min(delivered) * (1 + SAME_WORK_RATIO):
        found.append("compared per fleet, and the fleets do not deliver the same tokens: see those delivered")
    return list(dict.fromkeys(found))


def _served(serving: Serving | None) -> str:
    if serving is None:
        return "as given"
    lengths = f"{serving.input_tokens:g} in, {serving.output_tokens:g} out, {serving.concurrency:g} at once"
    return f"{serving.model}, {serving.weights}, {serving.tensor_parallel} GPUs, {lengths}"


def _named(scenario: Scenario, doubtful: Callable[[Quantity], bool]) -> list[str]:
    return [name for name, q in scenario.quantities.items() if doubtful(q)]


def _unlike(analysis: Analysis) -> list[str]:
    """What makes tokens or amounts of compared scenarios different things."""
    files = [s.file for s in analysis.scenarios]
    currency = files[0].currency
    compared = (
        (
            "input tokens per output token",
            [f"{s.quantities[INPUT_TOKENS].central:g}" for s in analysis.scenarios],
        ),
        ("serving", [_served(f.serving) for f in files]),
        (
            "output tokens demanded a second",
            [str(f.workload.demand_output_tokens_per_s or "all") for f in files],
        ),
    )
    found = [
        f"scenarios differ in {what}, so that their tokens are not alike: {'; '.join(values)}"
        for what, values in compared
        if len(set(values)) > 1
    ]
    if any(f.currency != currency for f in files):
        found.append(
            f"all amounts are in {currency.name} at {currency.per_usd:g}, as the first scenario has it"
        )
    return found
