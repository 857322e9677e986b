"""`Scenario`: a TCO scenario file, checked, with what it leaves out taken from the catalogue.

Owns the file's fields, their allowed ranges, and how named inputs become `FleetInputs`. Every input has a path, as in
`gpus.MI300X.price_usd`; uncertainty draws inputs by path. Throughput is the user's, a Plan's, or asked of `throughput_of`,
since the performance model is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np
from pydantic import BaseModel, TypeAdapter

from bimetal.catalog.document import Document
from bimetal.catalog.hardware import GpuSpec, find_gpu
from bimetal.economics.capex import discounted_usd
from bimetal.economics.cash_flow import Amount, Conventions
from bimetal.economics.fleet import FleetInputs, Group, Site, Waiting
from bimetal.economics.procurement import sla_credit_ratio
from bimetal.economics.quantity import Quantity, fixed
from bimetal.economics.scenario_file import (
    Discount,
    FleetFields,
    GroupFields,
    ScenarioFile,
    Serving,
    WaitingFields,
)
from bimetal.economics.uncertainty import Correlation, Values
from bimetal.errors import ConfigError
from bimetal.plan import load_plan
from bimetal.units import WEEKS_PER_YEAR

DATED = re.compile(r"20\d\d(?:-\d\d(?:-\d\d)?| Q[1-4])")


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
    quantities = dict(_walk(file, ""))
    for i, given in enumerate(file.rent_or_own):
        if given not in file.gpus:
            raise document.error(
                ("rent_or_own", i), f"{given!r} is not under gpus: use one of {', '.join(file.gpus)}"
            )
        for name in ("price_usd", "on_demand_usd_per_h", "reserved_usd_per_h"):
            found = catalogue_quantity(find_gpu(given), name)
            if getattr(file.gpus[given], name) is None and found is not None:
                quantities[f"gpus.{given}.{name}"] = found
    _check_correlations(document, file)
    for i, fleet in enumerate(file.fleets):
        from_plan = _plan_rate(document, i, fleet, folder)
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
            _fill_in(document, file, group, quantities, throughput_of, from_plan)
    bought = {g.gpu for fleet in file.fleets for g in fleet.groups if g.terms == "buy"}
    for i, rule in enumerate(file.placement):
        for field in ("gpu", "instead"):
            if getattr(rule, field) not in bought:
                known = ", ".join(sorted(bought)) or "none"
                message = f"{getattr(rule, field)!r} is bought for no fleet: use one of {known}"
                raise document.error(("placement", i, field), message)
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


def _check_correlations(document: Document, file: ScenarioFile) -> None:
    for i, (_, _, rho) in enumerate(file.correlations):
        if not -1 < rho < 1:
            raise document.error(("correlations", i), f"must be between -1 and 1, got {rho:g}")


def _fill_in(
    document: Document,
    file: ScenarioFile,
    group: GroupFields,
    quantities: dict[str, Quantity],
    throughput_of: ThroughputOf | None,
    from_plan: Quantity | None,
) -> None:
    """What the file leaves out for one GPU, from catalogue, plan or performance model."""
    fields, spec, at = file.gpus[group.gpu], find_gpu(group.gpu), f"gpus.{group.gpu}"
    where = ("gpus", group.gpu)
    wanted = {"buy": "price_usd", "on-demand": "on_demand_usd_per_h", "reserved": "reserved_usd_per_h"}[
        group.terms
    ]
    if getattr(fields, wanted) is None:
        found = catalogue_quantity(spec, wanted)
        if found is None:
            raise document.error(
                (*where, wanted), f"no price of {spec.name} in the catalogue: give {wanted} (at least 0)"
            )
        quantities[f"{at}.{wanted}"] = found
    if fields.lead_time_weeks == "catalogue":
        found = catalogue_quantity(spec, "lead_time_weeks")
        if found is None:
            raise document.error(
                (*where, "lead_time_weeks"), f"no lead time of {spec.name} in the catalogue: give weeks"
            )
        quantities[f"{at}.lead_time_weeks"] = found
    if fields.tdp_w is None and spec.tdp_w is None:
        raise document.error(
            (*where, "tdp_w"), f"no TDP of {spec.name} in the catalogue: give tdp_w in watts"
        )
    if fields.output_tokens_per_s is None:
        if from_plan is not None:
            quantities[f"{at}.output_tokens_per_s"] = from_plan
        elif file.serving is not None and throughput_of is not None:
            quantities[f"{at}.output_tokens_per_s"] = throughput_of(spec, file.serving)
        else:
            raise document.error(
                (*where, "output_tokens_per_s"),
                "is missing: give output tokens per second of one GPU, a plan for the fleet, or `serving` for the model",
            )


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
    shape = ("low", "high") if len(numbers) == 2 else ("value",)
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


def bind(scenario: Scenario, values: Values) -> tuple[FleetInputs, ...]:
    """The fleets with these amounts for the scenario's inputs."""
    file = scenario.file
    finance = file.finance
    conventions = Conventions(
        finance.horizon_years,
        values["finance.wacc_ratio"],
        finance.flows,
        finance.terms,
        values["finance.inflation_ratio"],
        values["finance.tax_ratio"],
    )

    def get(path: str, default: float = 0.0) -> Amount:
        return values.get(path, default)

    power = "own" if file.site.own else "colocation"
    site = Site(
        colocated=file.site.own is None,
        usd_per_kwh=get(f"site.{power}.usd_per_kwh"),
        pue_ratio=get("site.own.pue_ratio", 1.0),
        cooling_usd_per_kw=get("site.own.cooling_usd_per_kw"),
        usd_per_kw_month=get("site.colocation.usd_per_kw_month"),
        **{
            name: get(f"site.{name}")
            for name in ("network_ratio", "installation_ratio", "duty_ratio", "vat_ratio", "insurance_ratio")
        },
    )
    waiting = Waiting(**{name: get(f"waiting.{name}") for name in WaitingFields.model_fields})
    return tuple(
        FleetInputs(
            name=fleet.name,
            groups=tuple(_bind_group(scenario, group, values) for group in fleet.groups),
            site=site,
            conventions=conventions,
            utilisation_ratio=values["workload.utilisation_ratio"],
            demand_tokens_per_s=get("workload.demand_output_tokens_per_s", np.inf),
            throughput_ratio=values[f"fleets.{fleet.name}.throughput_ratio"],
            usd_per_million_tokens=values["workload.revenue_usd_per_million_output_tokens"],
            stack_usd_per_year=values[f"fleets.{fleet.name}.stack_usd_per_year"],
            qualification_usd=values[f"fleets.{fleet.name}.qualification_usd"],
            waiting=waiting,
        )
        for fleet in file.fleets
    )


def _bind_group(scenario: Scenario, group: GroupFields, values: Values) -> Group:
    fields, at = scenario.file.gpus[group.gpu], f"gpus.{group.gpu}"

    def get(name: str, default: float = 0.0) -> Amount:
        return values.get(f"{at}.{name}", default)

    def discounted(name: str, on: str) -> Amount:
        cuts = tuple(
            (get(f"discounts.{d.name}.ratio"), d.base == "list") for d in fields.discounts if d.on == on
        )
        return discounted_usd(get(name), cuts)

    start, end = group.years or (0, scenario.file.finance.horizon_years)
    rent = "on_demand_usd_per_h" if group.terms == "on-demand" else "reserved_usd_per_h"
    return Group(
        gpu=group.gpu,
        num_gpus=group.count,
        terms=group.terms,
        start_year=start,
        end_year=end,
        price_usd=discounted("price_usd", "price"),
        tdp_w=get("tdp_w", find_gpu(group.gpu).tdp_w or 0.0),
        output_tokens_per_s=get("output_tokens_per_s") * get("uptime_ratio"),
        rent_usd_per_h=discounted(rent, group.terms),
        lead_time_years=get("lead_time_weeks") / WEEKS_PER_YEAR if group.terms == "buy" else 0.0,
        successor_year=fields.successor_year,
        sla_credit_ratio=sla_credit_ratio(
            get("promised_uptime_ratio"), get("uptime_ratio"), get("sla_credit_ratio")
        ),
        **{
            name: get(name)
            for name in (
                *("server_usd", "server_w", "draw_ratio", "power_cut_ratio", "throughput_cost_ratio"),
                *(
                    "support_ratio",
                    "failure_ratio",
                    "residual_3y_ratio",
                    "successor_drop_ratio",
                    "deposit_ratio",
                ),
            )
        },
    )


def bind_one(scenario: Scenario, gpu: str, values: Values) -> FleetInputs:
    """One bought GPU under the scenario's site and finance, for what owning it costs."""
    template = bind(scenario, values)[0]
    group = _bind_group(scenario, GroupFields(gpu=gpu, count=1), values)
    return replace(template, name=gpu, groups=(group,), stack_usd_per_year=0.0, qualification_usd=0.0)


def check_comparable(scenarios: Sequence[Scenario]) -> None:
    """Fleets that serve different demand are compared per token only, and over one horizon."""
    first = scenarios[0]
    for other in scenarios[1:]:
        ours, theirs = first.file.workload, other.file.workload
        demands = [w.demand_output_tokens_per_s for w in (ours, theirs)]
        if first.file.compare_per == "fleet" and str(demands[0]) != str(demands[1]):
            raise ConfigError(
                f"{other.source}: workload.demand_output_tokens_per_s is {demands[1] or 'all that fits'}, in {first.source} "
                f"{demands[0] or 'all that fits'}: set compare_per to token, or give both the same demand"
            )
        if first.file.finance.horizon_years != other.file.finance.horizon_years:
            raise ConfigError(
                f"{other.source}: finance.horizon_years is {other.file.finance.horizon_years}, in {first.source} "
                f"{first.file.finance.horizon_years}: compare over one horizon"
            )
