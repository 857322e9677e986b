"""`Scenario`: a TCO scenario file, checked, with what it leaves out taken from the catalogue.

Owns what a file's parts must be to one another, and where an input left out is found. Every input has a path, as in
`gpus.MI300X.price_usd`; uncertainty draws inputs by path. Throughput is the user's, a Plan's, or asked of `throughput_of`,
since the performance model is not known here. Does not know what inputs mean for money (binding).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from pydantic import BaseModel, TypeAdapter

from bimetal.catalog.document import Document
from bimetal.catalog.hardware import GpuSpec, find_gpu
from bimetal.economics.quantity import Quantity, fixed
from bimetal.economics.scenario_checks import check_delivery, check_file
from bimetal.economics.scenario_file import (
    Discount,
    FleetFields,
    GroupFields,
    ScenarioFile,
    Serving,
)
from bimetal.economics.uncertainty import Correlation
from bimetal.errors import ConfigError
from bimetal.plan import load_plan

DATED = re.compile(r"20\d\d(?:-\d\d(?:-\d\d)?| Q[1-4])")


INPUT_TOKENS = "workload.input_tokens_per_output_token"
_ADAPTER = TypeAdapter(ScenarioFile)
ThroughputOf = Callable[[GpuSpec, Serving], Quantity]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A file whose GPUs have their full names and whose every input has a path and a value."""

    file: ScenarioFile
    source: str
    quantities: Mapping[str, Quantity]
    gpu_names: Mapping[str, str]
    """Name in the file to name in the catalogue."""

    @property
    def correlations(self) -> tuple[Correlation, ...]:
        return self.file.correlations


def load_scenario(path: Path, throughput_of: ThroughputOf | None = None) -> Scenario:
    """ConfigError names file, line, field, value and what is allowed."""
    return parse_scenario(Document.read(path), path.parent, throughput_of)


def parse_scenario(document: Document, folder: Path, throughput_of: ThroughputOf | None = None) -> Scenario:
    """`folder` is where plans are looked for."""
    file = document.validate(_ADAPTER)
    names = {}
    for given in file.gpus:
        try:
            names[given] = find_gpu(given).name
        except ConfigError as error:
            raise document.error(("gpus", given), str(error)) from error
    check_file(document, file)
    quantities = dict(_walk(file, ""))
    for given in file.gpus:
        tdp_w = catalogue_quantity(find_gpu(given), "tdp_w")
        if file.gpus[given].tdp_w is None and tdp_w is not None:
            quantities[f"gpus.{given}.tdp_w"] = tdp_w
    if file.serving is not None and "input_tokens_per_output_token" not in file.workload.model_fields_set:
        ratio = file.serving.input_tokens / file.serving.output_tokens
        quantities[INPUT_TOKENS] = fixed(ratio, "serving: input_tokens / output_tokens")
    for i, given in enumerate(file.rent_or_own):
        if given not in file.gpus:
            raise document.error(
                ("rent_or_own", i), f"{given!r} is not under gpus: use one of {', '.join(file.gpus)}"
            )
        for name in ("price_usd", "on_demand_usd_per_h", "reserved_usd_per_h"):
            found = catalogue_quantity(find_gpu(given), name)
            if getattr(file.gpus[given], name) is None and found is not None:
                quantities[f"gpus.{given}.{name}"] = found
        if f"gpus.{given}.price_usd" in quantities:
            _fill_in_part(document, given, quantities)
            weeks = quantities[f"gpus.{given}.lead_time_weeks"]
            check_delivery(document, given, file.finance.horizon_years, weeks)
    for i, fleet in enumerate(file.fleets):
        from_plan = _plan_rate(document, i, fleet, folder)
        if from_plan is not None:
            quantities[plan_rate_path(fleet.name)] = from_plan
        for j, group in enumerate(fleet.groups):
            where = ("fleets", i, "groups", j)
            if group.gpu not in file.gpus:
                known = ", ".join(file.gpus)
                raise document.error((*where, "gpu"), f"{group.gpu!r} is not under gpus: use one of {known}")
            start, end = group.years or (0, file.finance.horizon_years)
            if not 0 <= start < end <= file.finance.horizon_years:
                limit = f"0 <= start < end <= {file.finance.horizon_years}, the horizon"
                raise document.error(
                    (*where, "years"), f"must be [start, end) with {limit}: got [{start}, {end}]"
                )
            _fill_in_price(document, group, quantities)
            _fill_in_part(document, group.gpu, quantities)
            if from_plan is None:
                _fill_in_rate(document, file, group.gpu, quantities, throughput_of)
            if group.terms == "buy":
                weeks = quantities[f"gpus.{group.gpu}.lead_time_weeks"]
                check_delivery(document, group.gpu, end - start, weeks)
    bought = {g.gpu for fleet in file.fleets for g in fleet.groups if g.terms == "buy"}
    for i, rule in enumerate(file.placement):
        for field in ("gpu", "instead"):
            if getattr(rule, field) not in bought:
                known = ", ".join(sorted(bought)) or "none"
                message = f"{getattr(rule, field)!r} is bought for no fleet: use one of {known}"
                raise document.error(("placement", i, field), message)
            _fill_in_rate(document, file, getattr(rule, field), quantities, throughput_of)
    return Scenario(file, document.source, quantities, names)


def _walk(node: object, path: str) -> list[tuple[str, Quantity]]:
    """Every quantity under `node` by its path; parts of lists go by their name."""
    if isinstance(node, Quantity):
        return [(path, node)]
    if isinstance(node, BaseModel):
        items = [(name, getattr(node, name)) for name in type(node).model_fields]
    elif isinstance(node, dict):
        items = list(node.items())
    elif isinstance(node, tuple):
        items = [(x.name, x) for x in node if isinstance(x, FleetFields | Discount)]
    else:
        return []
    return [found for name, value in items for found in _walk(value, f"{path}.{name}".lstrip("."))]


def plan_rate_path(fleet: str) -> str:
    """Where a fleet's plan puts its output tokens per second and GPU: for this fleet alone."""
    return f"fleets.{fleet}.output_tokens_per_s"


def _fill_in_price(document: Document, group: GroupFields, quantities: dict[str, Quantity]) -> None:
    """The price that a group's terms need, from the catalogue where the file leaves it out."""
    spec, at, where = find_gpu(group.gpu), f"gpus.{group.gpu}", ("gpus", group.gpu)
    wanted = {"buy": "price_usd", "on-demand": "on_demand_usd_per_h", "reserved": "reserved_usd_per_h"}[
        group.terms
    ]
    if f"{at}.{wanted}" not in quantities:
        found = catalogue_quantity(spec, wanted)
        if found is None:
            raise document.error(
                (*where, wanted), f"no price of {spec.name} in the catalogue: give {wanted} (at least 0)"
            )
        quantities[f"{at}.{wanted}"] = found


def _fill_in_part(document: Document, gpu: str, quantities: dict[str, Quantity]) -> None:
    """Lead time and TDP that the file leaves out, from the catalogue."""
    spec, at, where = find_gpu(gpu), f"gpus.{gpu}", ("gpus", gpu)
    if f"{at}.lead_time_weeks" not in quantities:
        found = catalogue_quantity(spec, "lead_time_weeks")
        if found is None:
            raise document.error(
                (*where, "lead_time_weeks"), f"no lead time of {spec.name} in the catalogue: give weeks"
            )
        quantities[f"{at}.lead_time_weeks"] = found
    if f"{at}.tdp_w" not in quantities:
        raise document.error(
            (*where, "tdp_w"), f"no TDP of {spec.name} in the catalogue: give tdp_w in watts"
        )


def _fill_in_rate(
    document: Document,
    file: ScenarioFile,
    gpu: str,
    quantities: dict[str, Quantity],
    throughput_of: ThroughputOf | None,
) -> None:
    """Throughput of a GPU that no plan covers, from the performance model."""
    path = f"gpus.{gpu}.output_tokens_per_s"
    if path in quantities:
        return
    if file.serving is None or throughput_of is None:
        raise document.error(
            ("gpus", gpu, "output_tokens_per_s"),
            "is missing: give output tokens per second of one GPU, a plan for the fleet, or `serving` for the model",
        )
    quantities[path] = throughput_of(find_gpu(gpu), file.serving)


def catalogue_quantity(spec: GpuSpec, name: str) -> Quantity | None:
    """A price or lead time of the catalogue with its source and date; None where it has none."""
    attribute = {"reserved_usd_per_h": "rental_usd_per_h", "price_usd": "purchase_usd"}.get(name, name)
    value = getattr(spec, attribute)
    if value is None:
        return None
    source = spec.sources.get(attribute, "")
    dated = DATED.search(source)
    when = dated.group() if dated else "undated"
    doubt = " [UNVERIFIED]" if spec.unverified_of(attribute) and "UNVERIFIED" not in source else ""
    numbers = value if isinstance(value, tuple) else (value,)
    shape: tuple[str, ...] = ("low", "high") if len(numbers) == 2 else ("value",)
    if name == "on_demand_usd_per_h" and spec.on_demand_median_usd_per_h is not None:
        shape, numbers = ("low", "median", "high"), (numbers[0], spec.on_demand_median_usd_per_h, numbers[1])
    return Quantity(shape, tuple(map(float, numbers)), f"catalogue: {source}{doubt}", when)


def _plan_rate(document: Document, i: int, fleet: FleetFields, folder: Path) -> Quantity | None:
    """Output tokens per second and GPU of a fleet that consists of whole copies of its plan."""
    if fleet.plan is None:
        return None
    plan = load_plan(folder / fleet.plan)
    where = ("fleets", i, "plan")
    if plan.predicted_output_tokens_per_s is None:
        raise document.error(where, f"{fleet.plan} predicts no throughput: write it with `bimetal plan`")
    used: dict[str, int] = {}
    for stage in (s for replica in plan.replicas for s in replica.stages):
        name = find_gpu(stage.gpu).name
        used[name] = used.get(name, 0) + stage.tensor_parallel
    owned: dict[str, int] = {}
    for group in fleet.groups:
        name = find_gpu(group.gpu).name
        owned[name] = owned.get(name, 0) + group.count
    copies = {name: owned.get(name, 0) / count for name, count in used.items()}
    if set(owned) != set(used) or len(set(copies.values())) != 1:
        raise document.error(
            where, f"the plan uses {used}, the fleet has {owned}: give counts in the plan's proportions"
        )
    rate = plan.predicted_output_tokens_per_s / sum(used.values())
    return fixed(
        rate, f"plan {fleet.plan}", date.fromtimestamp((folder / fleet.plan).stat().st_mtime).isoformat()
    )


def check_comparable(scenarios: Sequence[Scenario]) -> None:
    """Fleets that serve different demand are compared per token only, and over one horizon."""
    first = scenarios[0]
    for other in scenarios[1:]:
        ours, theirs = first.file.workload, other.file.workload
        demands = [w.demand_output_tokens_per_s for w in (ours, theirs)]
        amounts = [(q.shape, q.numbers) if q else None for q in demands]
        if first.file.compare_per == "fleet" and amounts[0] != amounts[1]:
            raise ConfigError(
                f"{other.source}: workload.demand_output_tokens_per_s is {demands[1] or 'all that fits'}, in {first.source} "
                f"{demands[0] or 'all that fits'}: set compare_per to token, or give both the same demand"
            )
        if first.file.finance.horizon_years != other.file.finance.horizon_years:
            raise ConfigError(
                f"{other.source}: finance.horizon_years is {other.file.finance.horizon_years}, in {first.source} "
                f"{first.file.finance.horizon_years}: compare over one horizon"
            )
