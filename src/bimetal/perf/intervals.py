"""How wide an interval must be to cover 90% of rows that were left out.

Owns two corrections to what a fit claims of itself. Where a GPU and a model were measured together, its widths are scaled,
per vendor and target. Where they were not, all rows of the pair are wrong together, by an error that no row inside the fit
can show: its size is taken from folds that left out whole pairs or GPUs, and added in quadrature. Each fold counts alike,
however many rows it has. Needs scipy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Literal

import numpy as np
from scipy.stats import t as student

from bimetal.perf.calibration import NORMAL_90
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
    """By target: the half-width of the error that a fold's rows share.

    A random effect per fold: its variance is what the folds' mean squared errors exceed the fit's own variance by, on
    average over the folds. It is known from a handful of folds only, so that Student's t with as many degrees of freedom
    takes the place of the normal distribution.
    """
    found: Doubt = {}
    for target in TARGETS:
        folds: dict[str, list[Held]] = {}
        for h in held:
            if h.observation.query.target == target:
                folds.setdefault(fold_key(unseen)(h), []).append(h)
        if not folds:
            found[target] = 0.0
            continue
        excess = [
            max(0.0, fmean(h.log_error**2 - (_scaled(h, scale) / NORMAL_90) ** 2 for h in fold))
            for fold in folds.values()
        ]
        found[target] = round(
            float(student.ppf(0.5 + COVERED_RATIO / 2, len(folds)) * fmean(excess) ** 0.5), 3
        )
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
