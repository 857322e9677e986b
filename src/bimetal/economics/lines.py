"""The dated cash lines of a fleet: what is bought, rented, run, staffed and sold, each with its formula.

Owns which equation of capex, opex and residual a line uses, and when it falls due. Does not add lines up (tco).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bimetal.economics import capex, opex
from bimetal.economics.cash_flow import Amount, Flows, npv
from bimetal.economics.fleet import FleetInputs, Group, column, live_ratio, missing_ratio, used_ratio
from bimetal.economics.residual import resale_usd

Level = Literal["chip", "system", "running", "resale", "revenue"]


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a report: dated payments [..., k] (income negative), the formula, and the inputs that it uses."""

    label: str
    level: Level
    formula: str
    inputs: tuple[str, ...]
    usd: Flows
    times_years: Flows
    in_use: tuple[int, int] | None = None
    """Of a purchase: the years [start, end) over which it is written off where tax is modelled."""

    def npv_usd(self, rate_ratio: Amount) -> Flows:
        return npv(self.usd, rate_ratio, self.times_years)


def rises(fleet: FleetInputs) -> tuple[str, ...]:
    """The input by which running costs rise, where they do."""
    return ("finance.inflation_ratio",) if np.any(np.asarray(fleet.conventions.inflation_ratio) != 0) else ()


def group_lines(fleet: FleetInputs, g: Group) -> list[Line]:
    """Purchase and resale, or rent; then power, support, failures, insurance."""
    c, site = fleet.conventions, fleet.site
    name, at = f"{g.num_gpus} x {g.gpu}", f"gpus.{g.gpu}"
    live = live_ratio(g, c.horizon_years)
    prices_rise = (1.0 + column(c.inflation_ratio)) ** c.operating_times
    sla = tuple(f"{at}.{x}" for x in ("sla_credit_ratio", "promised_uptime_ratio", "uptime_ratio"))
    hardware_inputs = (f"{at}.price_usd", f"{at}.server_usd")

    def yearly(label: str, formula: str, inputs: tuple[str, ...], usd: Amount) -> Line:
        flows = column(usd) * live * prices_rise
        return Line(
            f"{name}: {label}",
            "running",
            f"{formula}, a year",
            (*inputs, *rises(fleet)),
            flows,
            c.operating_times,
        )

    if not g.bought:
        rent = opex.rental_usd(g.num_gpus, g.rent_usd_per_h, 1.0) * (1.0 - g.sla_credit_ratio)
        flows = column(rent) * live  # a contract's price does not rise with inflation
        share, inputs = "1 (take-or-pay)", [f"{at}.{g.terms.replace('-', '_')}_usd_per_h", *sla]
        if g.terms == "on-demand":
            flows = flows * used_ratio(fleet)
            share = "min(utilisation, demand / capacity)"
            inputs += ["workload.utilisation_ratio", "workload.demand_output_tokens_per_s"]
        formula = f"GPUs x $/h x 8760 x {share} x (1 - SLA credit), a year"
        return [Line(f"{name}: rent, {g.terms}", "running", formula, tuple(inputs), flows, c.operating_times)]

    def once(label: str, level: Level, formula: str, inputs: tuple[str, ...], usd: Amount) -> Line:
        """A deposit with the order, the rest on delivery."""
        deposit = usd * g.deposit_ratio
        payments = np.stack(np.broadcast_arrays(deposit, usd - deposit), axis=-1)
        times = np.stack(np.broadcast_arrays(float(g.start_year), g.start_year + g.lead_time_years), axis=-1)
        in_use = (g.start_year, g.end_year)
        paid = (*inputs, f"{at}.deposit_ratio", f"{at}.lead_time_weeks")
        return Line(f"{name}: {label}", level, formula, paid, payments, times, in_use)

    chips = capex.hardware_usd(g.num_gpus, g.price_usd)
    servers = capex.hardware_usd(g.num_gpus, g.server_usd)
    hardware = chips + servers
    most_w = g.num_gpus * (g.tdp_w + g.server_w)
    draw_w = g.num_gpus * opex.average_draw_w(g.tdp_w, g.draw_ratio, g.power_cut_ratio, g.server_w)
    age: Amount = g.end_year - g.start_year - g.lead_time_years
    launched = g.successor_year is not None and g.successor_year <= g.end_year
    resale = resale_usd(hardware, age, g.residual_3y_ratio, g.successor_drop_ratio, launched)
    lines = [
        once("chips", "chip", "GPUs x price after discounts", (f"{at}.price_usd",), chips),
        once("servers", "system", "GPUs x share of a server", (f"{at}.server_usd",), servers),
    ]
    for label, ratio in (
        ("network", site.network_ratio),
        ("installation", site.installation_ratio),
        ("duty", site.duty_ratio),
        ("VAT", site.vat_ratio),
    ):
        if np.any(np.asarray(ratio) != 0):
            usd = capex.surcharge_usd(hardware, ratio)
            key = f"site.{label.lower()}_ratio"
            formula = f"(chips + servers) x {label} ratio"
            lines.append(once(label, "system", formula, (key, *hardware_inputs), usd))
    most_inputs = (f"{at}.tdp_w", f"{at}.server_w")
    power_inputs = (*most_inputs, f"{at}.draw_ratio", f"{at}.power_cut_ratio")
    if site.colocated:
        usd = opex.colocation_usd(most_w, site.usd_per_kw_month)
        formula = "GPUs x (TDP + server W) / 1000 x $/kW/month x 12"
        lines.append(yearly("colocation", formula, ("site.colocation.usd_per_kw_month", *most_inputs), usd))
        metered = opex.own_power_usd(draw_w, 1.0, site.usd_per_kwh)
        formula = "GPUs x (TDP x draw x (1 - cut) + server W) / 1000 x 8760 x $/kWh"
        if np.any(np.asarray(site.usd_per_kwh) != 0):
            lines.append(
                yearly("metered energy", formula, ("site.colocation.usd_per_kwh", *power_inputs), metered)
            )
    else:
        usd = opex.own_power_usd(draw_w, site.pue_ratio, site.usd_per_kwh)
        formula = "GPUs x (TDP x draw x (1 - cut) + server W) / 1000 x PUE x 8760 x $/kWh"
        lines.append(
            yearly("power", formula, ("site.own.usd_per_kwh", "site.own.pue_ratio", *power_inputs), usd)
        )
        usd = capex.cooling_plant_usd(most_w, site.cooling_usd_per_kw)
        formula = "GPUs x (TDP + server W) / 1000 x $/kW"
        cooled = ("site.own.cooling_usd_per_kw", *most_inputs)
        lines.append(once("cooling plant", "system", formula, cooled, usd))
    support = opex.share_of_hardware_usd(hardware, g.support_ratio) * (1.0 - g.sla_credit_ratio)
    spares = opex.share_of_hardware_usd(chips, g.failure_ratio)
    insurance = opex.share_of_hardware_usd(hardware, site.insurance_ratio)
    lines += [
        yearly(
            "support",
            "(chips + servers) x support x (1 - SLA credit)",
            (f"{at}.support_ratio", *hardware_inputs, *sla),
            support,
        ),
        yearly("failures", "chips x failures a year", (f"{at}.failure_ratio", f"{at}.price_usd"), spares),
        yearly(
            "insurance",
            "(chips + servers) x insurance",
            ("site.insurance_ratio", *hardware_inputs),
            insurance,
        ),
        Line(
            f"{name}: resale",
            "resale",
            "-(chips + servers) x residual after 3 years ^ (age / 3) x (1 - successor's drop)",
            (f"{at}.residual_3y_ratio", f"{at}.successor_drop_ratio", *hardware_inputs),
            -column(resale),
            np.array([float(g.end_year)]),
        ),
    ]
    return [line for line in lines if np.any(line.usd != 0)]


def fleet_lines(fleet: FleetInputs) -> list[Line]:
    """The second stack, and waiting."""
    c, w = fleet.conventions, fleet.waiting
    rise = (1.0 + column(c.inflation_ratio)) ** c.operating_times
    years = c.horizon_years
    at_start = np.array([0.0])
    lines = [
        Line(
            "qualify a second stack",
            "system",
            "once",
            ("qualification_usd",),
            column(fleet.qualification_usd),
            at_start,
            (0, years),
        ),
        Line(
            "second software stack",
            "running",
            "engineers and licences a year",
            ("stack_usd_per_year", *rises(fleet)),
            column(fleet.stack_usd_per_year) * rise,
            c.operating_times,
        ),
    ]
    waiting_groups = [g for g in fleet.groups if g.bought]
    if waiting_groups:
        missing = [missing_ratio(g, years) for g in waiting_groups]
        bridged = sum(
            (opex.rental_usd(g.num_gpus, 1.0, 1.0) * m for g, m in zip(waiting_groups, missing, strict=True)),
            np.zeros(years),
        )
        cloud = bridged * column(w.cloud_usd_per_h) * column(w.bridged_ratio)
        longest = missing[0]
        for m in missing[1:]:
            longest = np.maximum(longest, m)
        lines += [
            Line(
                "cloud while waiting",
                "running",
                "GPUs not here x hours x $/h x share bridged",
                ("waiting.cloud_usd_per_h", "waiting.bridged_ratio"),
                cloud,
                c.operating_times,
            ),
            Line(
                "people while waiting",
                "running",
                "$ a year x years until the last delivery",
                ("waiting.idle_usd_per_year",),
                longest * column(w.idle_usd_per_year),
                c.operating_times,
            ),
        ]
    return [line for line in lines if np.any(line.usd != 0)]


def after_tax(fleet: FleetInputs, lines: Sequence[Line]) -> tuple[Line, ...]:
    """Costs save tax when paid, purchases by an even allowance over their years in use; resale and revenue are taxed."""
    c = fleet.conventions
    if not np.any(np.asarray(c.tax_ratio) != 0):
        return tuple(lines)
    taxed = []
    for line in lines:
        level: Level = "running" if line.in_use else line.level
        formula, saved, times = "-(cost x tax rate)", -line.usd * column(c.tax_ratio), line.times_years
        if line.in_use:
            start, end = line.in_use
            allowance = saved.sum(axis=-1, keepdims=True) / (end - start)
            saved, times = np.repeat(allowance, end - start, axis=-1), c.operating_times[start:end]
            formula = f"-(cost x tax rate / {end - start} years of use)"
        inputs = ("finance.tax_ratio", *line.inputs)
        taxed.append(Line(f"{line.label}: tax", level, formula, inputs, saved, times))
    return (*lines, *taxed)
