"""`Demand`: what is to be served, and the GPUs that can be had for it.

Owns the demand file that `bimetal plan` takes beside `fleet.yaml`. Does not know what a GPU can serve (perf) nor what is
chosen (planner); a trace is a path here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from bimetal.catalog.document import Document
from bimetal.catalog.fleet import Count, Dtype, Name, Positive
from bimetal.catalog.hardware import GpuSpec, find_gpu
from bimetal.catalog.links import DEFAULT_LINK, LinkSpec, find_link
from bimetal.catalog.models import ModelSpec, load_model_spec
from bimetal.catalog.planned_models import PLANNED_MODELS, planned_model
from bimetal.errors import ConfigError
from bimetal.units import HOURS_PER_YEAR, KILO, MONTHS_PER_YEAR, WEEKS_PER_YEAR

_STRICT = ConfigDict(extra="forbid")
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Price = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
PerSecond = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Ratio = Annotated[float, Field(gt=0, le=1)]
Kind = Literal["interactive", "batch", "fine-tuning"]
Objective = Literal["cost", "goodput"]
LOWEST_POWER_RATIO = 0.5
"""Of TDP, that a GPU may be held to: what it does below is not published (`perf.power`, which is held to this by a test)."""
SECTIONS = ("stock", "demand")
"""Keys by which a demand file is told from a fleet file."""


@dataclass(frozen=True, slots=True)
class Stock:
    """GPUs of one kind: how many can be had, and on what terms."""

    __pydantic_config__ = _STRICT

    gpu: str
    count: Count
    """At most so many, those owned included."""
    per_node: Count = 8
    """GPUs are bought and rented in whole nodes of so many."""
    owned: Annotated[int, Field(ge=0)] = 0
    """Of `count`: already paid for, so that only their power costs anything."""
    price_usd_per_h: Price | None = None
    """Rental, power included. None: `purchase_usd` spread over `amortise_years`, or else the catalogue's three-year rental."""
    purchase_usd: Positive | None = None
    amortise_years: Positive = 4.0
    lead_time_months: NotNegative | None = None
    """Of what is not owned. None: the catalogue's longest for a purchase, 0 for rental."""
    power_w: Positive | None = None
    """Of one GPU with its share of the server. None: the catalogue's."""
    power_limits_w: tuple[Positive, ...] = ()
    """Of one GPU alone, that its nodes may be held to; each node runs at one of them or at none, as is best."""
    power_limit_w: Positive | None = None
    """That all of them are held to."""

    @property
    def spec(self) -> GpuSpec:
        return find_gpu(self.gpu)

    @property
    def num_buyable_nodes(self) -> int:
        return (self.count - self.owned) // self.per_node

    @property
    def label(self) -> str:
        """The GPU, and what it is held to."""
        return f"{self.spec.name} at {self.power_limit_w:g} W" if self.power_limit_w else self.spec.name

    @property
    def watts(self) -> float:
        """Of one GPU with its share of the server, which a limit of the GPU leaves as it is.

        >>> Stock("H100", 8, power_w=1000.0, power_limit_w=500.0).watts
        800.0
        """
        spec = self.spec
        free = self.power_w or spec.all_in_w or spec.tdp_w or 0.0
        if self.power_limit_w is None or spec.tdp_w is None:
            return free
        return max(0.0, free - spec.tdp_w) + min(free, spec.tdp_w, self.power_limit_w)

    @property
    def months_to_arrive(self) -> float:
        if self.lead_time_months is not None:
            return self.lead_time_months
        weeks = self.spec.lead_time_weeks if self.purchase_usd else None
        return weeks[1] / WEEKS_PER_YEAR * MONTHS_PER_YEAR if weeks else 0.0

    def usd_per_h(self, electricity_usd_per_kwh: float) -> float:
        """Of a GPU that is bought or rented; power is paid apart unless it is rented.

        >>> Stock("H100", 8, purchase_usd=35040.0, power_w=1000.0).usd_per_h(0.1)
        1.1
        """
        if self.purchase_usd is not None and self.price_usd_per_h is None:
            hourly = self.purchase_usd / (self.amortise_years * HOURS_PER_YEAR)
            return hourly + self.power_usd_per_h(electricity_usd_per_kwh)
        return self.rental_usd_per_h or 0.0

    def power_usd_per_h(self, electricity_usd_per_kwh: float) -> float:
        return self.watts / KILO * electricity_usd_per_kwh

    @property
    def rental_usd_per_h(self) -> float | None:
        """None: neither given nor in the catalogue."""
        if self.price_usd_per_h is not None:
            return self.price_usd_per_h
        spec = self.spec
        return spec.rental_usd_per_h or (spec.on_demand_usd_per_h or (None,))[0]


@dataclass(frozen=True, slots=True)
class StockLink:
    """What joins a node of one kind with a node of another, or of the same."""

    __pydantic_config__ = _STRICT

    between: tuple[str, str]
    kind: str


@dataclass(frozen=True, slots=True)
class Site:
    """Limits on the whole fleet; None: no limit."""

    __pydantic_config__ = _STRICT

    power_cap_w: Positive | None = None
    budget_usd_per_h: Positive | None = None
    months_until_needed: NotNegative | None = None
    electricity_usd_per_kwh: NotNegative = 0.0
    memory_utilization: Ratio = 0.9
    """Share of a GPU's memory for weights and KV cache."""
    max_num_seqs: Count = 256
    """Sequences that one replica decodes together at most."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model at one precision, by which all compared plans serve it."""

    __pydantic_config__ = _STRICT

    name: Annotated[str, Field(min_length=1)]
    dtype: Dtype = "bfloat16"

    @property
    def spec(self) -> ModelSpec:
        short = self.name.rsplit("/", 1)[-1].lower()
        if short in {known.lower() for known in PLANNED_MODELS}:
            return planned_model(self.name)
        return load_model_spec(self.name)

    @property
    def engine_knows(self) -> bool:
        return self.spec.name not in PLANNED_MODELS


@dataclass(frozen=True, slots=True)
class DemandClass:
    """One class of work. Which fields it needs depends on `kind`; the checks below say so."""

    __pydantic_config__ = _STRICT

    name: Name
    kind: Kind
    model: str | None = None
    trace: str | None = None
    """CSV or JSON lines, relative to the demand file: rate and lengths come from it."""
    compress: Positive = 1.0
    """Play the trace so many times as fast."""
    rate_per_s: PerSecond | None = None
    """Requests in the peak hour."""
    input_tokens: Positive | None = None
    """Mean; lengths are taken as geometric unless a trace gives them."""
    output_tokens: Positive | None = None
    ttft_p99_s: Positive | None = None
    tpot_p99_s: Positive | None = None
    requests: Positive | None = None
    """Of a batch: to be done within `deadline_h`."""
    deadline_h: Positive | None = None
    n_plus_one: bool = False
    """The class is still served when the largest replica that serves it is gone."""
    gpu_hours: Positive | None = None
    """Of fine-tuning: on the first GPU of `gpus`."""
    memory_bytes: NotNegative = 0.0
    """Of fine-tuning: over all GPUs together."""
    gpus: tuple[str, ...] = ()
    """Of fine-tuning: kinds that it may run on; empty: any."""


@dataclass(frozen=True, slots=True)
class Demand:
    """One demand file."""

    __pydantic_config__ = _STRICT

    stock: tuple[Stock, ...]
    models: tuple[ServedModel, ...]
    demand: tuple[DemandClass, ...]
    links: tuple[StockLink, ...] = ()
    default_link: str = DEFAULT_LINK.name
    site: Site = field(default_factory=Site)
    objective: Objective = "cost"
    runnable_only: bool = False
    """Only what `bimetal serve` can run today."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of arrivals and lengths where no trace gives them."""
    version: Literal[1] = 1

    def link_between(self, first: GpuSpec, second: GpuSpec) -> LinkSpec:
        wanted = {first.name, second.name}
        for link in self.links:
            if {find_gpu(end).name for end in link.between} == wanted:
                return find_link(link.kind)
        return find_link(self.default_link)


_ADAPTER = TypeAdapter(Demand)


def is_demand(document: Document) -> bool:
    """Whether the file is a demand file and not a fleet file."""
    return isinstance(document.value, dict) and any(key in document.value for key in SECTIONS)


def load_demand(path: Path) -> Demand:
    """Read and check a demand file; ConfigError names file, line, field, value and what is allowed."""
    return check_demand(Document.read(Path(path)))


def parse_demand(text: str, source: str) -> Demand:
    """The same from text; `source` stands for the file's name in errors."""
    return check_demand(Document(text, source))


def check_demand(document: Document) -> Demand:
    """From a parsed file."""
    demand = document.validate(_ADAPTER)
    for section in ("stock", "demand"):
        if not getattr(demand, section):
            raise document.error((section,), "is empty: give at least one entry")
    _check_stock(document, demand)
    _check_links(document, demand)
    _check_models(document, demand)
    names: set[str] = set()
    for i, entry in enumerate(demand.demand):
        if entry.name in names:
            raise document.error(("demand", i, "name"), f"{entry.name!r} is given twice: rename one")
        names.add(entry.name)
        _check_class(document, demand, i, entry)
    return demand


def _check_stock(document: Document, demand: Demand) -> None:
    seen: set[str] = set()
    for i, stock in enumerate(demand.stock):
        where = ("stock", i)
        try:
            name = stock.spec.name
        except ConfigError as error:
            raise document.error((*where, "gpu"), str(error)) from error
        if name in seen:
            raise document.error((*where, "gpu"), f"{name} is given twice: add the counts up")
        seen.add(name)
        if stock.price_usd_per_h is not None and stock.purchase_usd is not None:
            raise document.error(
                (*where, "purchase_usd"),
                "is given beside price_usd_per_h: GPUs are bought or rented, keep one",
            )
        if stock.owned > stock.count:
            raise document.error(
                (*where, "owned"), f"{stock.owned} is more than count {stock.count}: raise count"
            )
        if stock.owned % stock.per_node:
            raise document.error(
                (*where, "owned"),
                f"{stock.owned} is no multiple of per_node {stock.per_node}: count whole nodes, or lower per_node",
            )
        if stock.num_buyable_nodes == 0 and stock.owned == 0:
            raise document.error(
                (*where, "count"),
                f"{stock.count} is less than one node of {stock.per_node}: raise it, or lower per_node",
            )
        if stock.num_buyable_nodes and stock.purchase_usd is None and stock.rental_usd_per_h is None:
            raise document.error(
                where,
                f"the catalogue has no rental price of {name}: give price_usd_per_h or purchase_usd",
            )
        _check_power_limits(document, stock, where)
        if not stock.watts and demand.site.power_cap_w:
            raise document.error(
                where, f"the catalogue has no power of {name}: give power_w, or no power_cap_w"
            )


def _check_power_limits(document: Document, stock: Stock, where: tuple[str, int]) -> None:
    tdp = stock.spec.tdp_w
    if stock.power_limits_w and stock.power_limit_w:
        raise document.error((*where, "power_limit_w"), "is given beside power_limits_w: keep one")
    given = [("power_limits_w", limit) for limit in stock.power_limits_w]
    given += [("power_limit_w", stock.power_limit_w)] if stock.power_limit_w else []
    for name, limit in given:
        if tdp is None:
            raise document.error((*where, name), f"the catalogue has no TDP of {stock.spec.name}: remove it")
        lowest = LOWEST_POWER_RATIO * tdp
        if not lowest <= limit <= tdp:
            raise document.error(
                (*where, name),
                f"{limit:g} W must be between {lowest:g} W, below which nothing was published, and the TDP of "
                f"{stock.spec.name}, {tdp:g} W",
            )
    if len(set(stock.power_limits_w)) < len(stock.power_limits_w):
        raise document.error((*where, "power_limits_w"), "names a limit twice: keep one")


def _check_links(document: Document, demand: Demand) -> None:
    known = {stock.spec.name for stock in demand.stock}
    try:
        find_link(demand.default_link)
    except ConfigError as error:
        raise document.error(("default_link",), str(error)) from error
    seen: set[frozenset[str]] = set()
    for i, link in enumerate(demand.links):
        try:
            find_link(link.kind)
            ends = frozenset(find_gpu(end).name for end in link.between)
        except ConfigError as error:
            raise document.error(("links", i), str(error)) from error
        if not ends <= known:
            raise document.error(
                ("links", i, "between"),
                f"{', '.join(sorted(ends - known))} is not in stock: name kinds of {', '.join(sorted(known))}",
            )
        if ends in seen:
            raise document.error(("links", i, "between"), "is given twice: keep one")
        seen.add(ends)


def _check_models(document: Document, demand: Demand) -> None:
    seen: set[str] = set()
    for i, model in enumerate(demand.models):
        if model.name in seen:
            raise document.error(("models", i, "name"), f"{model.name!r} is given twice: keep one")
        seen.add(model.name)
        try:
            _ = model.spec
        except ConfigError as error:
            raise document.error(("models", i, "name"), str(error)) from error


_NEEDED = {
    "interactive": ("model", "ttft_p99_s", "tpot_p99_s"),
    "batch": ("model", "deadline_h"),
    "fine-tuning": ("gpu_hours", "deadline_h"),
}
_FOREIGN = {
    "interactive": ("requests", "deadline_h", "gpu_hours", "memory_bytes", "gpus"),
    "batch": ("ttft_p99_s", "tpot_p99_s", "rate_per_s", "gpu_hours", "memory_bytes", "gpus"),
    "fine-tuning": (
        *("model", "trace", "rate_per_s", "input_tokens", "output_tokens", "ttft_p99_s", "tpot_p99_s"),
        *("requests", "n_plus_one"),
    ),
}


def _check_class(document: Document, demand: Demand, i: int, entry: DemandClass) -> None:
    where = ("demand", i)
    for name in _NEEDED[entry.kind]:
        if getattr(entry, name) is None:
            raise document.error((*where, name), f"is missing: {entry.kind} work needs it")
    for name in _FOREIGN[entry.kind]:
        if getattr(entry, name):
            raise document.error((*where, name), f"does not go with {entry.kind} work: remove it")
    if entry.compress != 1.0 and (entry.kind != "interactive" or entry.trace is None):
        raise document.error(
            (*where, "compress"), "goes with the trace of interactive work only: remove it, or give a trace"
        )
    if entry.kind == "fine-tuning":
        known = {stock.spec.name for stock in demand.stock}
        for gpu in entry.gpus:
            try:
                name = find_gpu(gpu).name
            except ConfigError as error:
                raise document.error((*where, "gpus"), str(error)) from error
            if name not in known:
                raise document.error((*where, "gpus"), f"{name} is not in stock: add it, or remove it here")
        return
    models = [model.name for model in demand.models]
    if entry.model not in models:
        remedy = f"use one of {', '.join(models)}" if models else "add it there"
        raise document.error((*where, "model"), f"{entry.model!r} is not under `models`: {remedy}")
    if entry.trace is not None:
        for name in ("rate_per_s", "requests", "input_tokens", "output_tokens"):
            if getattr(entry, name) is not None:
                raise document.error((*where, name), "is given beside a trace, which has it: keep one")
        return
    rate = "rate_per_s" if entry.kind == "interactive" else "requests"
    for name in (rate, "input_tokens", "output_tokens"):
        if getattr(entry, name) is None:
            raise document.error((*where, name), "is missing: give it, or a trace")
    model = next(m for m in demand.models if m.name == entry.model).spec
    longest = (entry.input_tokens or 0) + (entry.output_tokens or 0)
    if longest > model.max_position:
        raise document.error(
            (*where, "input_tokens"),
            f"{longest:.0f} tokens with the answer are more than the {model.max_position} positions of {model.name}",
        )
