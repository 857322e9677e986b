"""Monte Carlo, tornado and break-even over named inputs.

Every input has its own random stream, named by its path: two scenarios that name the same input share its draws, so that
their difference has its own p10, p50 and p90. Knows inputs as name -> Quantity and a model as a function of name ->
amount; not what the model computes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bimetal.economics.cash_flow import Amount
from bimetal.economics.quantity import Quantity
from bimetal.errors import ConfigError

NUM_DRAWS = 10_000
SCAN_STEPS = 1000
ZOOMS = 5
ROUNDING = 1e-12
"""Differences of ratios that sums of floats may leave where there is none."""

Values = Mapping[str, Amount]
Correlation = tuple[str, str, float]


def central_values(quantities: Mapping[str, Quantity]) -> dict[str, Amount]:
    return {name: q.central for name, q in quantities.items()}


def draw_values(
    quantities: Mapping[str, Quantity],
    correlations: Sequence[Correlation] = (),
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
) -> dict[str, Amount]:
    """Uncertain inputs of one scenario as arrays [num_draws], the others as numbers."""
    return draw_together([quantities], correlations, num_draws, seed)[0]


def draw_together(
    sets: Sequence[Mapping[str, Quantity]],
    correlations: Sequence[Correlation] = (),
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
) -> list[dict[str, Amount]]:
    """Draws of several scenarios, shared wherever they name the same input; correlations hold for all of them.

    Ranks of correlated normal draws are spread evenly over each input's distribution, so that its quantiles are exact;
    a correlation is thus one of ranks (a Gaussian copula). ConfigError where a correlation names no uncertain input, a
    pair has two, or the matrix is impossible.
    """
    uncertain = list(dict.fromkeys(name for s in sets for name, q in s.items() if q.is_uncertain))
    normals = {name: _stream(name, num_draws, seed) for name in uncertain}
    named = sorted({name for a, b, _ in correlations for name in (a, b)})
    for name in named:
        if name not in normals:
            raise ConfigError(
                f"correlations: {name!r} is not an uncertain input: use one of {', '.join(uncertain) or 'none'}"
            )
    if named:
        mixed = correlation_root(named, correlations) @ np.array([normals[name] for name in named])
        normals |= dict(zip(named, mixed, strict=True))
    shares = {name: (np.argsort(np.argsort(x)) + 0.5) / num_draws for name, x in normals.items()}
    return [
        {name: q.quantile(shares[name]) if q.is_uncertain else q.central for name, q in quantities.items()}
        for quantities in sets
    ]


def _stream(name: str, num_draws: int, seed: int) -> NDArray[np.float64]:
    return np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(num_draws)


def correlation_root(names: Sequence[str], correlations: Sequence[Correlation]) -> NDArray[np.float64]:
    """Cholesky's root of the matrix that the pairs declare, 0 elsewhere.

    >>> correlation_root(["a", "b"], [("a", "b", 0.6)]).round(3).tolist()
    [[1.0, 0.0], [0.6, 0.8]]
    """
    matrix = np.eye(len(names))
    for a, b, rho in correlations:
        i, j = names.index(a), names.index(b)
        if matrix[i, j] not in (0.0, rho):
            raise ConfigError(f"correlations: {a} and {b} have {matrix[i, j]:g} and {rho:g}: keep one")
        matrix[i, j] = matrix[j, i] = rho
    try:
        root = np.asarray(np.linalg.cholesky(matrix), dtype=np.float64)
    except np.linalg.LinAlgError as error:
        raise ConfigError(
            f"correlations between {', '.join(names)} contradict each other (the matrix is not positive definite): "
            "lower one of them"
        ) from error
    return root


@dataclass(frozen=True, slots=True)
class Spread:
    """10th, 50th and 90th percentile."""

    p10: float
    p50: float
    p90: float


def spread(results: Amount) -> Spread:
    """Of draws; of a single number, that number thrice.

    >>> spread(np.arange(101.0))
    Spread(p10=10.0, p50=50.0, p90=90.0)
    """
    with np.errstate(invalid="ignore"):  # of infinite results the percentiles are nan
        p10, p50, p90 = np.percentile(np.asarray(results, dtype=np.float64), [10, 50, 90])
    return Spread(float(p10), float(p50), float(p90))


@dataclass(frozen=True, slots=True)
class Swing:
    """The result with one input at its p10 and p90, all others at their median."""

    name: str
    input_low: float
    input_high: float
    at_low: float
    at_high: float

    @property
    def width(self) -> float:
        return abs(self.at_high - self.at_low)


def tornado(
    sets: Sequence[Mapping[str, Quantity]], model: Callable[[Sequence[Values]], Amount]
) -> tuple[Swing, ...]:
    """Widest first; inputs that change nothing are left out. An input that several sets name moves in all of them."""
    centres = [central_values(quantities) for quantities in sets]
    swings = []
    for name in dict.fromkeys(
        name for quantities in sets for name, q in quantities.items() if q.is_uncertain
    ):
        inputs, results = [], []
        for u in (0.1, 0.9):
            moved = [{name: float(q[name].quantile(np.array([u]))[0])} if name in q else {} for q in sets]
            inputs.append(next(m[name] for m in moved if m))
            results.append(float(np.asarray(model([c | m for c, m in zip(centres, moved, strict=True)]))))
        swings.append(Swing(name, inputs[0], inputs[1], results[0], results[1]))
    return tuple(sorted((s for s in swings if s.width > ROUNDING), key=lambda s: -s.width))


Difference = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def break_evens(difference: Difference, low: float, high: float) -> tuple[float, ...]:
    """Every point in [low, high] at which `difference` crosses 0, in order.

    Evaluated at SCAN_STEPS points together, then again within each step that holds a change, until it is exact. A
    stretch where the difference is 0 throughout counts with its ends; a jump across 0 counts, where it is not defined not.

    >>> [round(x, 9) for x in break_evens(lambda price: 3 * price - 6, 0, 10)]
    [2.0]
    >>> [round(x, 9) for x in break_evens(lambda x: (x - 1) * (x - 3), 0, 10)]
    [1.0, 3.0]
    """
    points = np.linspace(low, high, SCAN_STEPS + 1)
    signs = _signs(difference, points)
    found = [_zoom(difference, points[i], points[i + 1]) for i in np.nonzero(signs[:-1] * signs[1:] < 0)[0]]
    zero = np.concatenate([[False], signs == 0, [False]])
    starts, ends = np.nonzero(zero[1:-1] & ~zero[:-2])[0], np.nonzero(zero[1:-1] & ~zero[2:])[0]
    for start, end in zip(starts, ends, strict=True):
        if start == end:
            found.append(float(points[start]))
            continue
        found.append(_zoom(difference, points[start - 1], points[start]) if start > 0 else low)
        found.append(_zoom(difference, points[end], points[end + 1]) if end < SCAN_STEPS else high)
    return tuple(sorted(found))


def _zoom(difference: Difference, low: float, high: float) -> float:
    """The change of sign between two points."""
    for _ in range(ZOOMS):
        points = np.linspace(low, high, SCAN_STEPS + 1)
        signs = _signs(difference, points)
        changes = np.nonzero(signs[:-1] != signs[1:])[0]
        if not len(changes):
            break  # as exact as floats are
        low, high = float(points[changes[0]]), float(points[changes[0] + 1])
    return (low + high) / 2


def _signs(difference: Difference, points: NDArray[np.float64]) -> NDArray[np.float64]:
    """-1, 0 or 1; nan, which equals nothing, where the difference is not defined."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.asarray(difference(points), dtype=np.float64)
    return np.asarray(np.where(np.abs(found) < ROUNDING, 0.0, np.sign(found)))
