"""Predictions of rows that the fit has not seen: three ways to leave rows out.

    shape       a fold leaves out whole (GPU, model, format, ranks, lengths) over all engines and versions
    gpu-model   a fold leaves out every row of one model on one GPU
    gpu         a fold leaves out every row of one GPU: datasheet and its kin only

Widths and noise are found again in every fold, so that nothing of a fold is in its own prediction. Needs scipy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from bimetal.perf.calibration import NORMAL_90, STUDENT_T_90
from bimetal.perf.fit import Fit, FitProblem
from bimetal.perf.observations import Observation
from bimetal.perf.work import Array

SHAPE_FOLDS = 20
FOLD_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Held:
    """One observation as predicted without its kin."""

    observation: Observation
    predicted: float
    half_width: float
    """Of the 90% interval, in log, before it is scaled to what was covered."""

    @property
    def error_ratio(self) -> float:
        """Signed, of the measured value."""
        return self.predicted / self.observation.value - 1

    @property
    def log_error(self) -> float:
        """Without its sign."""
        return float(abs(np.log(self.predicted / self.observation.value)))


def half_widths(problem: FitProblem, fit: Fit, jacobian: Array) -> Array:
    """Of each observation: the effects' uncertainty and the noise of its target."""
    spread = solve_triangular(fit.precision_root, jacobian[:, fit.active].T, trans="T")
    noise = np.array([fit.noise[t] for t in problem.targets])
    half: Array = np.hypot(NORMAL_90 * np.sqrt((spread**2).sum(axis=0)), STUDENT_T_90 * noise)
    return half


def hold_out(
    problem: FitProblem,
    folds: Sequence[int],
    start: Fit,
    progress: Callable[[str], None] = lambda text: None,
    apart: NDArray[np.bool_] | None = None,
) -> list[Held]:
    """Every observation predicted by a fit without its fold; fold -1 is never held out nor predicted.

    `apart`: observations that only their own effects may learn from (FitProblem.extend).
    """
    fold_of = np.array(folds)
    base = np.ones(len(fold_of), bool) if apart is None else ~apart
    held: dict[int, Held] = {}
    for fold in sorted(set(folds) - {-1}):
        left = fold_of != fold
        fit = problem.fit(left & base, rounds=FOLD_ROUNDS, start=start)
        if not base.all():
            fit = problem.extend(fit, left, ~base)
        logs, jacobian = problem.linearise(fit.effects)
        halves = half_widths(problem, fit, jacobian)
        for i in np.flatnonzero(~left):
            held[int(i)] = Held(problem.observations[i], float(np.exp(logs[i])), float(halves[i]))
        errors = [
            abs(held[int(i)].error_ratio) for i in np.flatnonzero(~left) if problem.targets[i] == "tpot"
        ]
        tpot = f", TPOT median error {np.median(errors):.1%}" if errors else ""
        progress(f"fold {fold}: {int((~left).sum())} left out{tpot}")
    return [held[i] for i in sorted(held)]


def shape_folds(problem: FitProblem, num_folds: int = SHAPE_FOLDS) -> list[int]:
    """Groups dealt out in order, so that a fold takes a few shapes of every GPU and model."""
    groups = [o.measurement.group for o in problem.observations]
    order = {group: i for i, group in enumerate(sorted(set(groups), key=str))}
    return [order[group] % num_folds for group in groups]


def gpu_model_folds(problem: FitProblem, least_rows: int = 10) -> list[int]:
    """One per GPU and model with enough TPOT rows, and with another GPU or model to learn from."""
    return _folds_by(problem, lambda o: (o.query.point.gpu.name, o.query.point.model.name), least_rows)


def gpu_folds(problem: FitProblem, least_rows: int = 30) -> list[int]:
    """One per GPU with enough TPOT rows."""
    return _folds_by(problem, lambda o: (o.query.point.gpu.name,), least_rows)


def _folds_by(
    problem: FitProblem, key: Callable[[Observation], tuple[str, ...]], least_rows: int
) -> list[int]:
    keys = [key(o) for o in problem.observations]
    counts: dict[tuple[str, ...], int] = {}
    for k, o in zip(keys, problem.observations, strict=True):
        counts[k] = counts.get(k, 0) + (o.query.target == "tpot")
    order = {k: i for i, k in enumerate(sorted(k for k, n in counts.items() if n >= least_rows))}
    return [order.get(k, -1) for k in keys]
