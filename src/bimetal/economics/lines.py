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
from bimetal.economics.fleet import FleetInputs, Group, column, live_ratio, missing_ratio
from bimetal.economics.residual import resale_usd

Level = Literal["chip", "system", "running", "resale"]


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a report: dated payments [..., k] (income negative), the formula, and the inputs that it uses."""

    label: str
    level: Level
    formula: str
    inputs: tuple[str, ...]
    usd: Flows
    times_years: Flows

    def npv_usd(self, rate_ratio: Amount) -> Flows:
        return npv(self.usd, rate_ratio, self.times_years)


def group_lines(fleet: FleetInputs, g: Group) -> list[Line]:
    """Purchase and resale, or rent; then power, support, failures, insurance."""
    c, site = fleet.conventions, fleet.site
    name, at = f"{g.num_gpus} x {g.gpu}", f"gpus.{g.gpu}"
    live = live_ratio(g, c.horizon_years)
    prices_rise = (1.0 + column(c.inflation_ratio)) ** c.operating_times

    def yearly(label: str, formula: str, inputs: tuple[str, ...], usd: Amount) -> Line:
        return Line(
            f"{name}: {label}",
            "running",
            formula,
            inputs,
            column(usd) * live * prices_rise,
            c.operating_times,
        )

    if not g.bought:
        paid = 1.0 if g.terms == "reserved" else fleet.utilisation_ratio
        rent = opex.rental_usd(g.num_gpus, g.rent_usd_per_h, paid) * (1.0 - g.sla_credit_ratio)
        share = "1 (take-or-pay)" if g.terms == "reserved" else "utilisation"
        flows = column(rent) * live  # a contract's price does not rise with inflation
        formula = f"GPUs x $/h x 8760 x {share} x (1 - SLA credit)"
        return [
            Line(
                f"{name}: rent, {g.terms}",
                "running",
                formula,
                (f"{at}.rent_usd_per_h",),
                flows,
                c.operating_times,
            )
        ]

    def once(label: str, level: Level, formula: str, inputs: tuple[str, ...], usd: Amount) -> Line:
        """A deposit with the order, the rest on delivery."""
        deposit = usd * g.deposit_ratio
        payments = np.stack(np.broadcast_arrays(deposit, usd - deposit), axis=-1)
        times = np.stack(np.broadcast_arrays(float(g.start_year), g.start_year + g.lead_time_years), axis=-1)
        return Line(f"{name}: {label}", level, formula, inputs, payments, times)

    chips = capex.hardware_usd(g.num_gpus, g.price_usd)
    servers = capex.hardware_usd(g.num_gpus, g.server_usd)
    hardware = chips + servers
    most_w = g.num_gpus * (g.tdp_w + g.server_w)
    draw_w = g.num_gpus * opex.average_draw_w(g.tdp_w, g.draw_ratio, g.power_cut_ratio, g.server_w)
    age: Amount = g.end_year - g.start_year - g.lead_time_years
    launched = g.successor_year is not None and g.successor_year <= g.end_year
    resale = resale_usd(hardware, age, g.residual_3y_ratio, g.successor_drop_ratio, launched)
    lines = [
        once("chips", "chip", "GPUs x price", (f"{at}.price_usd",), chips),
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
            lines.append(once(label, "system", f"(chips + servers) x {label} ratio", (key,), usd))
    power_inputs = (f"{at}.draw_ratio", f"{at}.server_w")
    if site.colocated:
        usd = opex.colocation_usd(most_w, site.usd_per_kw_month)
        formula = "GPUs x (TDP + server W) / 1000 x $/kW/month x 12"
        lines.append(yearly("colocation", formula, ("site.colocation.usd_per_kw_month",), usd))
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
        lines.append(once("cooling plant", "system", formula, ("site.own.cooling_usd_per_kw",), usd))
    support = opex.share_of_hardware_usd(hardware, g.support_ratio) * (1.0 - g.sla_credit_ratio)
    spares = opex.share_of_hardware_usd(chips, g.failure_ratio)
    insurance = opex.share_of_hardware_usd(hardware, site.insurance_ratio)
    lines += [
        yearly(
            "support", "(chips + servers) x support x (1 - SLA credit)", (f"{at}.support_ratio",), support
        ),
        yearly("failures", "chips x failures a year", (f"{at}.failure_ratio",), spares),
        yearly("insurance", "(chips + servers) x insurance", ("site.insurance_ratio",), insurance),
        Line(
            f"{name}: resale",
            "resale",
            "-(chips + servers) x residual after 3 years ^ (age / 3) x (1 - successor's drop)",
            (f"{at}.residual_3y_ratio",),
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
        ),
        Line(
            "second software stack",
            "running",
            "engineers and licences a year",
            ("stack_usd_per_year",),
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
                ("waiting.cloud_usd_per_h",),
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
    """Costs save tax when paid, purchases by an even allowance over the horizon, resale is taxed."""
    c = fleet.conventions
    if not np.any(np.asarray(c.tax_ratio) != 0):
        return tuple(lines)
    taxed = []
    for line in lines:
        if line.level in ("running", "resale"):
            saved, times = -line.usd * column(c.tax_ratio), line.times_years
        else:
            cost = line.usd.sum(axis=-1, keepdims=True)
            saved = np.repeat(-cost * column(c.tax_ratio) / c.horizon_years, c.horizon_years, axis=-1)
            times = c.operating_times
        level: Level = "resale" if line.level == "resale" else "running"
        taxed.append(
            Line(f"{line.label}: tax", level, "-(cost x tax rate)", ("finance.tax_ratio",), saved, times)
        )
    return (*lines, *taxed)
