"""How busy each kind of GPU was, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bimetal.simulate.run import Simulation
from bimetal.simulate.shapes import GpuUse
from bimetal.units import S_PER_HOUR


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """Of all GPUs of one kind, over the simulated time."""

    gpu: str
    number: int
    busy_ratio: float
    idle_s: float
    """GPU-seconds."""
    cost_usd: float | None
    """At the catalogue's three-year rental, or the low end of on-demand; None: no price."""


def usage_by_gpu(run: Simulation, uses: Sequence[Sequence[GpuUse]]) -> list[GpuUsage]:
    """`uses` is [replica][stage], as the simulation's `busy_s`."""
    kinds: dict[str, list[tuple[GpuUse, float]]] = {}
    for stages, busy in zip(uses, run.busy_s, strict=True):
        for use, seconds in zip(stages, busy, strict=True):
            kinds.setdefault(use.gpu.name, []).append((use, seconds))
    usage = []
    for name, members in kinds.items():
        number = sum(use.number for use, _ in members)
        busy_s = sum(use.number * seconds for use, seconds in members)
        gpu = members[0][0].gpu
        price = gpu.rental_usd_per_h or (gpu.on_demand_usd_per_h or (None,))[0]
        total_s = number * run.makespan_s
        cost = None if price is None else price * total_s / S_PER_HOUR
        usage.append(GpuUsage(name, number, busy_s / total_s, total_s - busy_s, cost))
    return usage
