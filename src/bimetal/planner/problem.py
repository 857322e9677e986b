"""`Problem`: the numbers of one fleet decision, apart from where they come from.

Owns the arrays that the formulation reads: what templates use and serve, what is asked, what can be had and at what price.
Knows no model, GPU or trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bimetal.catalog.demand import Demand, DemandClass, Stock
from bimetal.catalog.hardware import GpuSpec, find_gpu
from bimetal.perf.power import published_power_curve
from bimetal.planner.candidates import Candidates
from bimetal.planner.milp import Floats, Indices
from bimetal.planner.power_limits import Pool, pools, power_ratio
from bimetal.planner.traffic import Traffic

MIXED_LOSS_BATCH = 2 * 0.055
MIXED_LOSS_INTERACTIVE = 2 * 0.08
"""Of what is served beside a class's main composition. MLPerf Inference v5.1, AMD's Llama-2-70B systems of MI300X, MI325X and
MI355X together: 94 to 95% of the sum of the parts offline, 90 to 94% as server. Taken as the loss of an even mix, half of which
is not of the main kind; a small addition then costs little, which is an assumption."""


@dataclass(frozen=True)
class Problem:
    """G kinds of GPU, C classes, T templates, F fine-tuning jobs."""

    usage: Floats
    """[T, G] GPUs of one replica."""
    rate: Floats
    """[T, K, C] requests per second of class c on a replica run to the limits of class k."""
    kind: Indices
    """[T] composition: replicas of one are alike."""
    wanted: Floats
    """[C] requests per second."""
    tokens: Floats
    """[C] of an answer."""
    mixed_loss: Floats
    """[C] lost of what other compositions than a class's main one serve."""
    spare: Sequence[bool]
    """[C] whether the class must outlive its largest replica."""
    per_node: Indices
    owned: Floats
    buyable_nodes: Floats
    price_usd_per_h: Floats
    """[G] of a GPU that is bought or rented."""
    owned_usd_per_h: Floats
    watts: Floats
    power_cap_w: float
    budget_usd_per_h: float
    jobs: Floats
    """[F, G] GPUs that a job needs of a kind; infinite where it cannot run."""
    pools: tuple[Pool, ...] = ()
    """Kinds that share their stock: one GPU at several power limits."""
    objective: Literal["cost", "goodput", "headroom", "fewest"] = "cost"
    """headroom: the largest multiple of the demand, whatever it costs; fewest: the fewest GPUs, whatever they cost."""

    @property
    def num_kinds(self) -> int:
        return int(self.kind.max(initial=-1)) + 1

    @property
    def largest_fleet(self) -> Floats:
        """[G] GPUs at most."""
        most: Floats = self.owned + self.per_node * self.buyable_nodes
        return most


def build_problem(demand: Demand, candidates: Candidates, traffic: Sequence[Traffic]) -> Problem:
    """From the documents; stock that arrives too late cannot be bought."""
    compositions = {c: i for i, c in enumerate(dict.fromkeys(t.composition for t in candidates.templates))}
    site, stock = demand.site, demand.stock
    jobs = [entry for entry in demand.demand if entry.kind == "fine-tuning"]
    buyable = [float(_buyable(entry, demand)) for entry in stock]
    return Problem(
        usage=candidates.usage,
        rate=candidates.rate,
        kind=np.array([compositions[t.composition] for t in candidates.templates], dtype=np.int64),
        wanted=np.array([t.rate_per_s for t in traffic]),
        tokens=np.array([t.output_tokens for t in traffic]),
        mixed_loss=np.array([MIXED_LOSS_BATCH if t.is_batch else MIXED_LOSS_INTERACTIVE for t in traffic]),
        spare=[t.n_plus_one for t in traffic],
        per_node=np.array([entry.per_node for entry in stock]),
        owned=np.array([float(entry.owned) for entry in stock]),
        buyable_nodes=np.array(buyable),
        price_usd_per_h=np.array([entry.usd_per_h(site.electricity_usd_per_kwh) for entry in stock]),
        owned_usd_per_h=np.array([entry.power_usd_per_h(site.electricity_usd_per_kwh) for entry in stock]),
        watts=np.array([entry.watts for entry in stock]),
        power_cap_w=site.power_cap_w or np.inf,
        budget_usd_per_h=site.budget_usd_per_h or np.inf,
        jobs=np.array([[_job_gpus(job, entry, stock) for entry in stock] for job in jobs]).reshape(
            len(jobs), len(stock)
        ),
        pools=pools(stock, buyable),
        objective=demand.objective,
    )


def is_late(entry: Stock, demand: Demand) -> bool:
    """Whether what is ordered now comes after it is needed."""
    needed = demand.site.months_until_needed
    return needed is not None and entry.months_to_arrive > needed


def _buyable(entry: Stock, demand: Demand) -> int:
    return 0 if is_late(entry, demand) else entry.num_buyable_nodes


def _job_gpus(job: DemandClass, entry: Stock, stock: Sequence[Stock]) -> float:
    """GPUs that finish the job by its deadline and hold its memory; GPU-hours scale with the 16-bit rate reached."""
    allowed = [find_gpu(name).name for name in job.gpus] or [s.spec.name for s in stock]
    if entry.spec.name not in allowed:
        return np.inf
    rate = _training_rate(entry.spec) * published_power_curve().compute_rate(power_ratio(entry))
    hours = (job.gpu_hours or 0.0) * _training_rate(find_gpu(allowed[0])) / rate
    by_time = hours / (job.deadline_h or 1.0)
    return float(np.ceil(max(by_time, job.memory_bytes / entry.spec.memory_bytes, 1.0) - 1e-9))


def _training_rate(gpu: GpuSpec) -> float:
    return gpu.bf16_flops_per_s * (gpu.bf16_achieved_ratio or 1.0)
