"""Power limits as a choice: each kind of GPU at each of its limits is a kind of its own, and all of them are of one stock.

Owns the translation of `power_limits_w` into such kinds, and the words for what has to be set. We set nothing ourselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bimetal.catalog.demand import Demand, Site, Stock
from bimetal.perf.power import FITTED_GPU, published_power_curve


@dataclass(frozen=True, slots=True)
class Pool:
    """Kinds (of the problem) that are the same GPUs at several limits."""

    kinds: tuple[int, ...]
    owned: float
    """GPUs, all kinds together."""
    nodes: float
    """That can be bought, all kinds together."""


def with_power_limits(demand: Demand) -> tuple[Demand, list[str]]:
    """The same demand, each entry followed by itself at each of its limits; and which limits are left out, since watts are free."""
    stock: list[Stock] = []
    reasons = []
    for entry in demand.stock:
        free = replace(entry, power_limits_w=())
        stock.append(free)
        limits = [limit for limit in entry.power_limits_w if limit != entry.spec.tdp_w]
        if limits and not _watts_matter(entry, demand.site):
            reasons.append(
                f"power limits of {entry.spec.name} would only slow it: no site.power_cap_w, and its rent has its power in it"
                if demand.site.electricity_usd_per_kwh
                else f"power limits of {entry.spec.name} would only slow it: no site.power_cap_w, and no electricity_usd_per_kwh"
            )
            continue
        stock += [replace(free, power_limit_w=limit) for limit in limits]
    return replace(demand, stock=tuple(stock)), reasons


def _watts_matter(entry: Stock, site: Site) -> bool:
    """Whether fewer watts of an entry can ever be worth anything."""
    paid = bool(entry.owned) or (entry.purchase_usd is not None and entry.price_usd_per_h is None)
    return bool(site.power_cap_w) or (paid and site.electricity_usd_per_kwh > 0)


def pools(stock: Sequence[Stock], buyable_nodes: Sequence[float]) -> tuple[Pool, ...]:
    """Of kinds with several entries."""
    members: dict[str, list[int]] = {}
    for g, entry in enumerate(stock):
        members.setdefault(entry.spec.name, []).append(g)
    return tuple(
        Pool(tuple(g), max(float(stock[i].owned) for i in g), max(buyable_nodes[i] for i in g))
        for g in members.values()
        if len(g) > 1
    )


def power_ratio(entry: Stock) -> float:
    """What GPUs are held to, of TDP."""
    tdp = entry.spec.tdp_w
    return entry.power_limit_w / tdp if entry.power_limit_w and tdp else 1.0


def power_notes(stock: Sequence[Stock], gpus: Sequence[int]) -> Iterator[str]:
    """What to set, for the kinds in use, and what it costs."""
    curve = published_power_curve()
    for entry, number in zip(stock, gpus, strict=True):
        if entry.power_limit_w is None or not number:
            continue
        rate = curve.compute_rate(power_ratio(entry))
        tool = "nvidia-smi -pl" if entry.spec.vendor == "NVIDIA" else "rocm-smi --setpoweroverdrive"
        basis = (
            "published for this GPU"
            if entry.spec.name == FITTED_GPU
            else f"an assumption: the curve of {FITTED_GPU}"
        )
        yield (
            f"{number} {entry.spec.name} held to {entry.power_limit_w:g} W of {entry.spec.tdp_w:g}: compute at {rate:.0%} of its "
            f"rate, memory at {curve.memory_rate(power_ratio(entry)):.0%} ({basis}); set it with {tool} {entry.power_limit_w:g}"
        )
