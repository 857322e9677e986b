"""How a scenario's named inputs become `FleetInputs`: the same for medians, for draws, and for one input moved."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bimetal.economics.capex import discounted_usd
from bimetal.economics.cash_flow import Amount, Conventions
from bimetal.economics.fleet import FleetInputs, Group, Site, Terms, Waiting
from bimetal.economics.procurement import sla_credit_ratio
from bimetal.economics.scenario import Scenario, plan_rate_path
from bimetal.economics.scenario_file import GroupFields, WaitingFields
from bimetal.economics.uncertainty import Values
from bimetal.units import WEEKS_PER_YEAR


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
            groups=tuple(
                _bind_group(scenario, group, values, get(plan_rate_path(fleet.name), np.nan))
                for group in fleet.groups
            ),
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


def _bind_group(
    scenario: Scenario, group: GroupFields, values: Values, planned_tokens_per_s: Amount = np.nan
) -> Group:
    """`planned_tokens_per_s` is of one GPU, by the fleet's plan; nan: it has none, and the GPU's own rate counts."""
    fields, at = scenario.file.gpus[group.gpu], f"gpus.{group.gpu}"

    def get(name: str, default: float = 0.0) -> Amount:
        return values.get(f"{at}.{name}", default)

    def discounted(name: str, on: str) -> Amount:
        cuts = tuple(
            (get(f"discounts.{d.name}.ratio"), d.base == "list")
            for d in fields.discounts
            if d.applies_to == on
        )
        return discounted_usd(get(name), cuts)

    start, end = group.years or (0, scenario.file.finance.horizon_years)
    planned = not np.any(np.isnan(planned_tokens_per_s))
    tokens_per_s = planned_tokens_per_s if planned else get("output_tokens_per_s")
    rent = "on_demand_usd_per_h" if group.terms == "on-demand" else "reserved_usd_per_h"
    return Group(
        gpu=group.gpu,
        num_gpus=group.count,
        terms=group.terms,
        start_year=start,
        end_year=end,
        price_usd=discounted("price_usd", "price"),
        tdp_w=get("tdp_w"),
        output_tokens_per_s=tokens_per_s * get("uptime_ratio"),
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


def bind_one(scenario: Scenario, gpu: str, values: Values, terms: Terms = "buy") -> FleetInputs:
    """One GPU, in use all the time, under the scenario's site and finance: nothing that belongs to a whole fleet."""
    template = bind(scenario, values)[0]
    group = _bind_group(scenario, GroupFields(gpu=gpu, count=1, terms=terms), values)
    return replace(
        template,
        name=gpu,
        groups=(group,),
        utilisation_ratio=1.0,
        demand_tokens_per_s=np.inf,
        throughput_ratio=1.0,
        usd_per_million_tokens=0.0,
        stack_usd_per_year=0.0,
        qualification_usd=0.0,
        waiting=Waiting(),
    )
