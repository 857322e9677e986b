"""Which work goes to which GPU, as rules in the scenario: what keeping them costs, and what breaking them would.

Knows memory and cost per token. Whether a GPU meets a latency is asked of the planner and the simulator, not here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from bimetal.catalog.hardware import find_gpu
from bimetal.economics.binding import bind_one
from bimetal.economics.cash_flow import Amount
from bimetal.economics.scenario import Scenario
from bimetal.economics.scenario_file import PlacementRule
from bimetal.economics.tco import price_fleet
from bimetal.economics.uncertainty import Spread, Values, spread


@dataclass(frozen=True, slots=True)
class Batch:
    """What one GPU holds of a training step."""

    gpu: str
    samples: int
    accumulation_steps: int | None
    """None: not one sample fits."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A rule with its price; `broken_ratio` is what the other GPU costs more per token (0.1 is 10%)."""

    rule: PlacementRule
    usd_per_million: Spread
    broken_ratio: Spread
    batches: tuple[Batch, ...]


def largest_batch(memory_bytes: float, state_bytes: float, bytes_per_sample: float) -> int:
    """Samples whose activations fit beside weights, gradients and optimizer states.

    >>> largest_batch(80e9, 16e9, 1e9), largest_batch(10e9, 16e9, 1e9)
    (64, 0)
    """
    return max(0, math.floor((memory_bytes - state_bytes) / bytes_per_sample))


def accumulation_steps(global_batch: int, samples: int) -> int | None:
    """Forward and backward passes on one GPU before each update.

    >>> accumulation_steps(256, 96), accumulation_steps(256, 128), accumulation_steps(256, 0)
    (3, 2, None)
    """
    return math.ceil(global_batch / samples) if samples else None


def place(scenario: Scenario, values: Values) -> tuple[Placed, ...]:
    """Every rule of the scenario, priced with the cost per token of GPUs bought under its site and finance."""
    return tuple(_place(scenario, rule, values) for rule in scenario.file.placement)


def _place(scenario: Scenario, rule: PlacementRule, values: Values) -> Placed:
    kept, broken = (_usd_per_million(scenario, gpu, values) for gpu in (rule.gpu, rule.instead))
    batches = []
    if rule.training:
        for gpu in (rule.gpu, rule.instead):
            memory = find_gpu(gpu).memory_bytes
            samples = largest_batch(memory, rule.training.state_bytes, rule.training.bytes_per_sample)
            batches.append(Batch(gpu, samples, accumulation_steps(rule.training.global_batch, samples)))
    return Placed(rule, spread(kept), spread(np.asarray(broken) / np.asarray(kept) - 1), tuple(batches))


def _usd_per_million(scenario: Scenario, gpu: str, values: Values) -> Amount:
    """At the scenario's utilisation."""
    fleet = replace(bind_one(scenario, gpu, values), utilisation_ratio=values["workload.utilisation_ratio"])
    return price_fleet(fleet).usd_per_million_output_tokens
