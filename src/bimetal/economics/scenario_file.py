"""The fields of a TCO scenario file and their allowed ranges.

Knows the file alone. What it leaves out is `scenario`'s business.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bimetal.economics.fleet import Terms
from bimetal.economics.quantity import PartRatio, Positive, Pue, Rate, Ratio, Some, SomeRatio, fixed

ZERO, ONE = fixed(0, "default"), fixed(1, "default")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Currency(_Strict):
    """Reports are printed in it; inputs stay in USD."""

    name: str = Field("USD", pattern="^[A-Z]{3}$")
    per_usd: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _needs_a_rate(self) -> Currency:
        if self.name != "USD" and "per_usd" not in self.model_fields_set:
            raise ValueError(f"{self.name} needs per_usd, its rate: how many {self.name} one USD buys")
        if self.name == "USD" and self.per_usd != 1:
            raise ValueError(f"one USD buys 1 USD, not {self.per_usd:g}: give the other currency's name")
        return self


class Finance(_Strict):
    horizon_years: int = Field(ge=1, le=30, strict=True)
    wacc_ratio: Rate
    flows: Literal["end-year", "mid-year"] = "end-year"
    terms: Literal["nominal", "real"] = "nominal"
    inflation_ratio: Rate = ZERO
    tax_ratio: PartRatio = ZERO

    @model_validator(mode="after")
    def _real_has_no_inflation(self) -> Finance:
        if self.terms == "real" and self.inflation_ratio.numbers != (0.0,):
            raise ValueError(
                "real terms leave inflation out: remove inflation_ratio, or set terms to nominal"
            )
        return self


class OwnPower(_Strict):
    usd_per_kwh: Positive
    pue_ratio: Pue
    cooling_usd_per_kw: Positive = ZERO


class Colocation(_Strict):
    usd_per_kw_month: Positive
    energy_included: bool
    usd_per_kwh: Positive = ZERO

    @model_validator(mode="after")
    def _energy_is_paid_once(self) -> Colocation:
        if self.energy_included == ("usd_per_kwh" in self.model_fields_set):
            raise ValueError("give usd_per_kwh exactly when energy_included is false: energy is paid once")
        return self


class SiteFields(_Strict):
    own: OwnPower | None = None
    colocation: Colocation | None = None
    network_ratio: Ratio = ZERO
    installation_ratio: Ratio = ZERO
    duty_ratio: Ratio = ZERO
    vat_ratio: Ratio = ZERO
    insurance_ratio: Ratio = ZERO

    @model_validator(mode="after")
    def _one_kind_of_power(self) -> SiteFields:
        if (self.own is None) == (self.colocation is None):
            raise ValueError("give either own or colocation: power is paid once")
        return self


class Workload(_Strict):
    utilisation_ratio: SomeRatio
    demand_output_tokens_per_s: Some | None = None
    """None: all that the fleet can serve."""
    input_tokens_per_output_token: Positive = ONE
    """Stated with results; capacity must have been measured at it."""
    revenue_usd_per_million_output_tokens: Positive = ZERO


class Discount(_Strict):
    """Off the list price, or off what the discounts before it left. (`on` would be a boolean in YAML.)"""

    name: str = Field(min_length=1)
    ratio: Ratio
    applies_to: Literal["price", "on-demand", "reserved"] = "price"
    base: Literal["list", "remaining"]


class GpuFields(_Strict):
    """Amounts for one GPU; what is None comes from the catalogue."""

    price_usd: Positive | None = None
    on_demand_usd_per_h: Positive | None = None
    reserved_usd_per_h: Positive | None = None
    output_tokens_per_s: Some | None = None
    server_usd: Positive = ZERO
    server_w: Positive = ZERO
    tdp_w: Positive | None = None
    draw_ratio: Ratio = ONE
    power_cut_ratio: Ratio = ZERO
    throughput_cost_ratio: PartRatio = ZERO
    support_ratio: Ratio = ZERO
    failure_ratio: Ratio = ZERO
    residual_3y_ratio: Ratio = ZERO
    successor_year: float | None = Field(None, ge=0)
    successor_drop_ratio: Ratio = ZERO
    lead_time_weeks: Positive | Literal["catalogue"] = ZERO
    deposit_ratio: Ratio = ZERO
    uptime_ratio: SomeRatio = ONE
    promised_uptime_ratio: Ratio = ZERO
    sla_credit_ratio: Ratio = ZERO
    discounts: tuple[Discount, ...] = ()


class GroupFields(_Strict):
    gpu: str
    count: int = Field(ge=1, le=10_000_000, strict=True)
    terms: Terms = "buy"
    years: tuple[int, int] | None = None
    """Half-open; None: the whole horizon."""


class FleetFields(_Strict):
    name: str = Field(min_length=1)
    groups: tuple[GroupFields, ...] = Field(min_length=1)
    plan: Path | None = None
    """Gives output tokens per second for GPUs in the plan's proportions."""
    throughput_ratio: Some = ONE
    stack_usd_per_year: Positive = ZERO
    qualification_usd: Positive = ZERO


class WaitingFields(_Strict):
    cloud_usd_per_h: Positive = ZERO
    bridged_ratio: Ratio = ZERO
    idle_usd_per_year: Positive = ZERO


class SecondSource(_Strict):
    """A second supplier as an option on a late order."""

    late_ratio: Ratio
    """Chance that the first supplier is late."""
    cost_of_late_usd: Positive
    divertible_ratio: Ratio
    """Share of the order that the second could deliver instead."""
    cost_of_diverting_usd: Positive


class Training(_Strict):
    """Memory of one fine-tuning step, on one GPU."""

    state_bytes: float = Field(gt=0)
    """Weights, gradients and optimizer states."""
    bytes_per_sample: float = Field(gt=0)
    global_batch: int = Field(ge=1)


class PlacementRule(_Strict):
    """`work` goes to `gpu`; `instead` is where it would go if the rule were broken."""

    work: Literal["pre-training", "fine-tuning", "real-time", "batch"]
    gpu: str
    instead: str
    latency_limit_s: float | None = Field(None, gt=0)
    """The promise for which the rule stands."""
    training: Training | None = None
    """For the two kinds of training, and only for them."""

    @model_validator(mode="after")
    def _training_says_its_memory(self) -> PlacementRule:
        if (self.training is None) == (self.work in ("pre-training", "fine-tuning")):
            raise ValueError("give training (memory and batch) exactly for pre-training and fine-tuning")
        return self


class Serving(_Strict):
    """What the performance model is asked for GPUs without output_tokens_per_s."""

    model: str
    weights: Literal["bfloat16", "float8", "float4"] = "float8"
    tensor_parallel: int = Field(8, ge=1)
    input_tokens: float = Field(ge=1)
    output_tokens: float = Field(ge=2)
    concurrency: float = Field(ge=1)


class ScenarioFile(_Strict):
    name: str = Field(min_length=1)
    about: str = ""
    currency: Currency = Currency()
    finance: Finance
    site: SiteFields
    workload: Workload
    serving: Serving | None = None
    gpus: dict[str, GpuFields]
    fleets: tuple[FleetFields, ...] = Field(min_length=1)
    waiting: WaitingFields = WaitingFields()
    second_source: SecondSource | None = None
    placement: tuple[PlacementRule, ...] = ()
    correlations: tuple[tuple[str, str, float], ...] = ()
    rent_or_own: tuple[str, ...] = ()
    """GPUs whose break-even utilisation against on-demand rental is printed."""
    compare_per: Literal["token", "fleet"] = "token"
    seed: int = Field(0, ge=0, strict=True)
