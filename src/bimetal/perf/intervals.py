"""How wide an interval must be to cover 90% of rows that were left out.

Owns two corrections to what a fit claims of itself. Where a GPU and a model were measured together, its widths are scaled,
per vendor and target. Where they were not, all rows of the pair are wrong together, by an error that no row inside the fit
can show: its half-width is taken from folds that left out whole pairs or GPUs, and added in quadrature. Each fold counts
alike, however many rows it has. Knows no model of the error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from bimetal.perf.crossval import Held
from bimetal.perf.observations import TARGETS, Target
from bimetal.perf.scores import Scored
from bimetal.perf.validate import label

COVERED_RATIO = 0.9
IntervalScale = dict[str, dict[Target, float]]
Unseen = Literal["pair", "gpu"]
"""What was never measured: the model on this GPU, or the GPU at all."""
Doubt = dict[Target, float]
"""Half-width of a 90% interval, in log."""


def interval_scale(held: Sequence[Held]) -> IntervalScale:
    """By vendor and target: the factor with which the intervals cover 90% of what was held out."""
    ratios: dict[tuple[str, Target], list[float]] = {}
    for h in held:
        query = h.observation.query
        ratios.setdefault((query.point.gpu.vendor, query.target), []).append(h.log_error / h.half_width)
    scale: IntervalScale = {}
    for (vendor, target), values in ratios.items():
        scale.setdefault(vendor, {})[target] = round(float(np.quantile(values, COVERED_RATIO)), 3)
    return scale


def fold_key(unseen: Unseen) -> Callable[[Held], str]:
    """What a fold leaves out."""
    if unseen == "gpu":
        return lambda h: h.observation.query.point.gpu.name
    return lambda h: f"{h.observation.query.point.gpu.name}/{h.observation.query.point.model.name}"


def doubt_of(held: Sequence[Held], scale: IntervalScale, unseen: Unseen) -> Doubt:
    """By target: what must be added in quadrature to cover 90% of the folds' rows."""
    found: Doubt = {}
    for target in TARGETS:
        folds: dict[str, list[Held]] = {}
        for h in held:
            if h.observation.query.target == target:
                folds.setdefault(fold_key(unseen)(h), []).append(h)
        missing = [
            (max(h.log_error**2 - _scaled(h, scale) ** 2, 0.0) ** 0.5, 1 / len(fold))
            for fold in folds.values()
            for h in fold
        ]
        found[target] = round(_weighted_quantile(missing, COVERED_RATIO), 3)
    return found


def to_scored(held: Sequence[Held], scale: IntervalScale, unseen: Unseen | None = None) -> list[Scored]:
    """With the intervals that a user would have been given: a fold's doubt is that of the other folds."""
    doubts: dict[str, Doubt] = {}
    if unseen is not None:
        key = fold_key(unseen)
        for name in {key(h) for h in held}:
            doubts[name] = doubt_of([h for h in held if key(h) != name], scale, unseen)
    scored = []
    for h in held:
        added = doubts[key(h)][h.observation.query.target] if unseen is not None else 0.0
        half = float(np.hypot(_scaled(h, scale), added))
        low, high = h.predicted * np.exp(-half), h.predicted * np.exp(half)
        scored.append(label(h.observation, h.predicted, float(low), float(high)))
    return scored


def _scaled(h: Held, scale: IntervalScale) -> float:
    query = h.observation.query
    return h.half_width * scale.get(query.point.gpu.vendor, {}).get(query.target, 1.0)


def _weighted_quantile(values: Sequence[tuple[float, float]], ratio: float) -> float:
    """The least value that at least `ratio` of the weight does not exceed; 0 of nothing. `values`: (value, weight)."""
    if not values:
        return 0.0
    size, weight = np.array(sorted(values)).T
    reached = np.cumsum(weight) / weight.sum()
    return float(size[min(int(np.searchsorted(reached, ratio - 1e-9)), len(size) - 1)])
