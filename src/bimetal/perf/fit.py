"""Finding the coefficients: maximum a posteriori with the strength of sharing taken from the data.

Effects have normal priors; residuals of logarithms follow Student's t, so that a few wrong rows do not bend the rest.
Gauss-Newton steps with Levenberg's damping find the effects, and between rounds the width of each level's prior and
the noise of each target are set to what the posterior says (empirical Bayes). Needs scipy; estimating does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, cholesky, solve_triangular
from scipy.sparse import csr_array

from bimetal.perf.hierarchy import Design, build_design
from bimetal.perf.observations import TARGETS, Observation, Predictor
from bimetal.perf.work import Array

DEGREES_OF_FREEDOM = 4.0
FIRST_NOISE = {"tpot": 0.06, "ttft": 0.2, "rate": 0.1}
PRIOR_EFFECTS = 6.0
PRIOR_SD_RATIO = 1 / 3
"""A level's width is estimated as if six more effects, a third of where it started, had been seen."""
LEAST_SD = 0.005
MOST_SD = 1.5


@dataclass(frozen=True, slots=True)
class Fit:
    """Effects, and how sure they are."""

    design: Design
    effects: Array
    sds: Array
    """Width of each effect's prior, as found."""
    noise: dict[str, float]
    """Scale of log residuals per target."""
    active: NDArray[np.intp]
    """Effects that the observations say something of."""
    precision_root: Array
    """Of the active effects: upper triangle R with R^T R = the posterior's inverse covariance."""
    num_rounds: int


class FitProblem:
    """Observations arranged for fitting; folds are masks over them."""

    def __init__(self, observations: Sequence[Observation]) -> None:
        self.observations = tuple(observations)
        self.design = build_design([o.query.point for o in observations])
        self.predictor = Predictor([o.query for o in observations])
        self.log_values = np.log([o.value for o in observations])
        self.targets = np.array([o.query.target for o in observations])
        self._groups = self._level_groups()
        _, jacobian = self.linearise(self.design.prior_means)
        self._active = np.flatnonzero(np.abs(jacobian).max(axis=0) > 0)
        """Effects that any observation depends on; the rest stay at their prior mean."""

    def _level_groups(self) -> list[NDArray[np.intp]]:
        """Effects that share one prior width."""
        by_level: dict[tuple[str, str], list[int]] = {}
        for i, effect in enumerate(self.design.effects):
            if effect.level:
                by_level.setdefault((effect.term, effect.level), []).append(i)
        return [np.array(members) for members in by_level.values()]

    def sums(self, effects: Array) -> dict[str, Array]:
        return {term: effects[columns].sum(axis=0) for term, columns in self.design.columns.items()}

    def predict(self, effects: Array) -> Array:
        """Log predictions of all observations."""
        return self.predictor.log_predict(self.sums(effects))

    def linearise(self, effects: Array) -> tuple[Array, Array]:
        """Log predictions and their Jacobian [observations, effects]."""
        base, slopes = self.predictor.sensitivities(self.sums(effects))
        jacobian = np.zeros((len(base), len(effects)))
        rows = np.arange(len(base))
        for term, columns in self.design.columns.items():
            for column in columns:
                jacobian[rows, column] += slopes[term]
        return base, jacobian

    def fit(
        self,
        mask: NDArray[np.bool_] | None = None,
        *,
        rounds: int = 4,
        start: Fit | None = None,
        max_steps: int = 12,
    ) -> Fit:
        """Effects from the observations in `mask`. `start` only shortens the way: widths and noise begin afresh."""
        use = np.ones(len(self.log_values), bool) if mask is None else mask
        means = self.design.prior_means
        sds, noise = self.design.first_sds, dict(FIRST_NOISE)
        effects = means.copy() if start is None else start.effects.copy()
        for round_number in range(rounds + 1):
            effects = self._ascend(effects, means, sds, noise, use, max_steps)
            base, jacobian = self.linearise(effects)
            jacobian = jacobian[:, self._active]
            root = cholesky(self._precision(jacobian, self._weights(base, noise, use), sds))
            if round_number < rounds:
                inverse_root = solve_triangular(root, np.eye(len(self._active)))
                variances = sds**2
                variances[self._active] = (inverse_root**2).sum(axis=1)
                sds = self._widths(effects, variances, sds, jacobian[use])
                noise = self._noise(base, jacobian @ inverse_root, noise, use)
        return Fit(self.design, effects, sds, noise, self._active, root, rounds)

    def extend(self, fit: Fit, mask: NDArray[np.bool_], apart: NDArray[np.bool_]) -> Fit:
        """The effects that only observations `apart` depend on, from those of them in `mask`; all others stay.

        For a model that is scored apart: it learns from the rest, and the rest learns nothing from it. `mask` is what
        `fit` was made of, and the observations apart that may be used.
        """
        _, jacobian = self.linearise(fit.effects)
        shared = np.abs(jacobian[~apart]).max(axis=0) > 0
        own = self._active[~shared[self._active]]
        everything, self._active = self._active, own
        try:
            effects = self._ascend(
                fit.effects, self.design.prior_means, fit.sds, fit.noise, mask & apart, max_steps=12
            )
        finally:
            self._active = everything
        base, jacobian = self.linearise(effects)
        jacobian[np.ix_(apart, np.flatnonzero(shared))] = 0.0
        weights = self._weights(base, fit.noise, mask)
        root = cholesky(self._precision(jacobian[:, self._active], weights, fit.sds))
        return Fit(self.design, effects, fit.sds, fit.noise, self._active, root, fit.num_rounds)

    def _precision(self, jacobian: Array, weights: Array, sds: Array) -> Array:
        """Of the active effects."""
        rows = csr_array(jacobian)  # each touches only the few effects that its terms add up
        weighted = rows.multiply(weights[:, None])
        precision: Array = (rows.T @ weighted).toarray()
        precision[np.diag_indices_from(precision)] += 1 / sds[self._active] ** 2
        return precision

    def _weights(self, base: Array, noise: dict[str, float], use: NDArray[np.bool_]) -> Array:
        """Student's t as reweighted least squares."""
        scale = np.array([noise[t] for t in self.targets])
        z = (self.log_values - base) / scale
        weights: Array = np.where(use, (DEGREES_OF_FREEDOM + 1) / (DEGREES_OF_FREEDOM + z**2), 0) / scale**2
        return weights

    def _loss(
        self, effects: Array, means: Array, sds: Array, noise: dict[str, float], use: NDArray[np.bool_]
    ) -> float:
        scale = np.array([noise[t] for t in self.targets])
        z = ((self.log_values - self.predict(effects)) / scale)[use]
        likelihood = (DEGREES_OF_FREEDOM + 1) * np.log1p(z**2 / DEGREES_OF_FREEDOM).sum()
        return float(likelihood + (((effects - means) / sds) ** 2).sum())

    def _ascend(
        self,
        effects: Array,
        means: Array,
        sds: Array,
        noise: dict[str, float],
        use: NDArray[np.bool_],
        max_steps: int,
    ) -> Array:
        damping = 1e-3
        loss = self._loss(effects, means, sds, noise, use)
        for _ in range(max_steps):
            base, jacobian = self.linearise(effects)
            weights = self._weights(base, noise, use)
            active = self._active
            jacobian = jacobian[:, active]
            precision = self._precision(jacobian, weights, sds)
            gradient = (
                jacobian.T @ (weights * (self.log_values - base)) - ((effects - means) / sds**2)[active]
            )
            gained = 0.0
            for _ in range(6):
                damped = precision + damping * np.diag(np.diag(precision))
                moved = effects.copy()
                moved[active] += cho_solve(cho_factor(damped), gradient)
                new_loss = self._loss(moved, means, sds, noise, use)
                if new_loss < loss:
                    gained, effects, loss = loss - new_loss, moved, new_loss
                    damping = max(damping / 5, 1e-6)
                    break
                damping *= 6
            if gained < 1e-4 * max(1.0, abs(loss)):
                break
        return effects

    def _widths(self, effects: Array, variances: Array, sds: Array, jacobian: Array) -> Array:
        seen = np.zeros(len(effects), bool)
        seen[self._active] = np.abs(jacobian).max(axis=0) > 0
        widths = sds.copy()
        for members in self._groups:
            present = members[seen[members]]
            expected = PRIOR_SD_RATIO * self.design.first_sds[members[0]]
            total = (effects[present] ** 2 + variances[present]).sum() + PRIOR_EFFECTS * expected**2
            widths[members] = np.clip(np.sqrt(total / (len(present) + PRIOR_EFFECTS)), LEAST_SD, MOST_SD)
        return widths

    def _noise(
        self, base: Array, spread: Array, noise: dict[str, float], use: NDArray[np.bool_]
    ) -> dict[str, float]:
        updated = dict(noise)
        residuals = self.log_values - base
        leverage = (spread**2).sum(axis=1)
        for target in TARGETS:
            members = (self.targets == target) & use
            if members.any():
                r, scale = residuals[members], noise[target]
                trust = (DEGREES_OF_FREEDOM + 1) / (DEGREES_OF_FREEDOM + (r / scale) ** 2)
                updated[target] = float(np.sqrt((trust * (r**2 + leverage[members])).mean()))
        return updated
