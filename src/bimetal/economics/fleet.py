"""`FleetInputs`: all that a fleet's costs depend on, as plain amounts.

A group of like GPUs is ordered at the start of its years, works from delivery to their end, and is then sold. Replacing a
part in year n is two groups: one that ends in year n, one that starts there. Any amount may be an array of draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from bimetal.economics.cash_flow import Amount, Conventions, Flows

Terms = Literal["buy", "on-demand", "reserved"]


def column(amount: Amount) -> Flows:
    """[..., 1]: to meet an axis of years.

    >>> (column(2.0) * np.ones(3)).tolist()
    [2.0, 2.0, 2.0]
    """
    return np.asarray(amount, dtype=np.float64)[..., None]


@dataclass(frozen=True, slots=True)
class Site:
    """Power is own (PUE, price a kWh, cooling plant) or colocated (price a contracted kW), never both."""

    colocated: bool
    usd_per_kwh: Amount
    """Own: the tariff. Colocated: what is metered on top of the contract, 0 where energy is included."""
    pue_ratio: Amount
    cooling_usd_per_kw: Amount
    usd_per_kw_month: Amount
    network_ratio: Amount
    installation_ratio: Amount
    duty_ratio: Amount
    vat_ratio: Amount
    insurance_ratio: Amount
    """Of hardware, a year."""


@dataclass(frozen=True, slots=True)
class Group:
    """`num_gpus` like GPUs from order (year `start_year`) to sale (`end_year`); amounts are for one GPU."""

    gpu: str
    num_gpus: int
    terms: Terms
    start_year: int
    end_year: int
    price_usd: Amount
    """After discounts."""
    server_usd: Amount
    tdp_w: Amount
    server_w: Amount
    draw_ratio: Amount
    power_cut_ratio: Amount
    throughput_cost_ratio: Amount
    """What the power cut costs."""
    output_tokens_per_s: Amount
    """Goodput at full load."""
    support_ratio: Amount
    failure_ratio: Amount
    """Share of GPUs that fail in a year; each is replaced at its price."""
    residual_3y_ratio: Amount
    successor_drop_ratio: Amount
    successor_year: float | None
    rent_usd_per_h: Amount
    """After discounts."""
    lead_time_years: Amount
    deposit_ratio: Amount
    sla_credit_ratio: Amount = 0.0
    """Of rent or support, returned for promised and missed uptime."""

    @property
    def bought(self) -> bool:
        return self.terms == "buy"

    @property
    def system_usd_per_gpu(self) -> Amount:
        return self.price_usd + self.server_usd


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a group that has not arrived costs meanwhile."""

    cloud_usd_per_h: Amount = 0.0
    bridged_ratio: Amount = 0.0
    """Share of the missing capacity that is rented meanwhile."""
    idle_usd_per_year: Amount = 0.0
    """People who wait for the last group."""


@dataclass(frozen=True, slots=True)
class FleetInputs:
    """All that a fleet's costs depend on."""

    name: str
    groups: tuple[Group, ...]
    site: Site
    conventions: Conventions
    utilisation_ratio: Amount
    demand_tokens_per_s: Amount
    """Output tokens; infinite: all that the fleet can serve."""
    throughput_ratio: Amount
    """What the fleet reaches of the sum of its parts, when it serves models split over vendors."""
    usd_per_million_tokens: Amount
    """What is earned; 0: costs only."""
    stack_usd_per_year: Amount
    """Engineers and licences that this fleet needs beyond one software stack."""
    qualification_usd: Amount
    waiting: Waiting


def live_ratio(group: Group, num_years: int) -> Flows:
    """[..., years]: share of each year in which the group is delivered and not yet sold."""
    ends = np.arange(1, num_years + 1, dtype=np.float64)
    arrives = group.start_year + column(group.lead_time_years)
    live: Flows = np.clip(np.minimum(ends, group.end_year) - np.maximum(ends - 1, arrives), 0.0, 1.0)
    return live


def missing_ratio(group: Group, num_years: int) -> Flows:
    """[..., years]: share of each year in which the group is ordered and not yet here."""
    ends = np.arange(1, num_years + 1, dtype=np.float64)
    arrives = np.minimum(group.start_year + column(group.lead_time_years), group.end_year)
    missing: Flows = np.clip(np.minimum(ends, arrives) - np.maximum(ends - 1, group.start_year), 0.0, 1.0)
    return missing


def capacity_tokens_per_s(fleet: FleetInputs) -> Flows:
    """[..., years]: output tokens that the fleet could serve at full load, with what is rented while GPUs are missing."""
    years = fleet.conventions.horizon_years
    capacity: Flows = np.zeros(years)
    for g in fleet.groups:
        here = live_ratio(g, years) + missing_ratio(g, years) * column(fleet.waiting.bridged_ratio)
        full = g.num_gpus * g.output_tokens_per_s * (1.0 - g.throughput_cost_ratio)
        capacity = capacity + column(full) * here
    return np.asarray(capacity * column(fleet.throughput_ratio))


def used_ratio(fleet: FleetInputs) -> Flows:
    """[..., years]: share of the capacity at work: the utilisation, or less where demand is less."""
    with np.errstate(divide="ignore"):  # no capacity: demand does not limit it
        wanted = column(fleet.demand_tokens_per_s) / capacity_tokens_per_s(fleet)
    return np.asarray(np.minimum(column(fleet.utilisation_ratio), wanted))
