"""What a decode step of n sequences costs, from a few measurements.

A step reads its weights once and does a little for each row, so its time is a line a + b n. Fitting the line, instead of
interpolating, keeps the noise of single measurements out of the choice of micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bimetal.policy.batching import StepTime

TIMED_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Numbers of sequences at which a stage times its decode steps before it serves."""


def fit_step_time(measured_s: Mapping[int, float]) -> StepTime:
    """Least squares of a + b n in relative error, a and b not negative. `measured_s`: seconds by number of sequences.

    >>> time_s = fit_step_time({1: 0.011, 2: 0.012, 4: 0.014})
    >>> round(time_s(8), 6)
    0.018
    """
    if not measured_s:
        raise ValueError("no measured step times: measure at least one size")
    sizes = np.array(sorted(measured_s), float)
    times = np.array([measured_s[int(n)] for n in sizes])
    weights = 1.0 / times
    if len(sizes) == 1:
        intercept, slope = float(times[0]), 0.0
    else:
        terms = np.stack([np.ones_like(sizes), sizes], axis=1) * weights[:, None]
        (intercept, slope), *_rest = np.linalg.lstsq(terms, times * weights, rcond=None)
        if slope < 0:  # noise: the best line without a slope
            intercept, slope = float(np.sum(times * weights**2) / np.sum(weights**2)), 0.0
        elif intercept < 0:
            intercept, slope = 0.0, float(np.sum(sizes * times * weights**2) / np.sum((sizes * weights) ** 2))

    def step_time_s(n: int) -> float:
        return float(intercept + slope * n)

    return step_time_s
