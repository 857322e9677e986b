"""`Quantity`: one input as a value, a range or a distribution, with where it comes from and when it was read.

In a file: `0.08`, or a mapping with one of `value`, `low` and `high` (even between them; with `mode`, a triangle; with `median`, even on
either side of it), `mean`
and `sd` (normal), `p10` and `p90` (log-normal), and optionally `source` and `date`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import date
from functools import cache, partial
from statistics import NormalDist
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator

SHAPES = (
    ("value",),
    ("low", "high"),
    ("low", "mode", "high"),
    ("low", "median", "high"),
    ("mean", "sd"),
    ("p10", "p90"),
)
NORMAL_P90 = NormalDist().inv_cdf(0.9)
QUANTILE_STEPS = 10_001
SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
"""A number to everybody but YAML 1.1, to which 3e4 is text."""
LEAST, MOST = 1e-6, 1e15
"""Nothing on this earth costs more, and sums of such amounts stay finite; what is divided by is not 0."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """`numbers` in the order in which SHAPES names them; draws are cut off at the limits of the field."""

    shape: tuple[str, ...]
    numbers: tuple[float, ...]
    source: str = ""
    date: str = ""
    limits: tuple[float, float] = (-math.inf, math.inf)

    @property
    def is_uncertain(self) -> bool:
        return self.shape != ("value",) and len(set(self.numbers)) > (0 if "sd" in self.shape else 1)

    @property
    def central(self) -> float:
        """The median."""
        return float(self.quantile(np.array([0.5]))[0])

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        """Values below which the shares `u` lie.

        >>> Quantity(("low", "high"), (10.0, 20.0)).quantile(np.array([0.1, 0.5])).tolist()
        [11.0, 15.0]
        >>> Quantity(("p10", "p90"), (1.0, 4.0)).central
        2.0
        """
        if self.shape == ("value",):
            found = np.full_like(u, self.numbers[0])
        elif self.shape == ("low", "high"):
            low, high = self.numbers
            found = low + (high - low) * u
        elif self.shape == ("low", "median", "high"):
            found = np.interp(u, (0.0, 0.5, 1.0), self.numbers)
        elif self.shape == ("low", "mode", "high"):
            found = _triangle(self.numbers, u)
        elif self.shape == ("mean", "sd"):
            mean, sd = self.numbers
            found = mean + sd * normal_quantile(u)
        else:
            low, high = (math.log(x) for x in self.numbers)
            centre, sd = (low + high) / 2, (high - low) / (2 * NORMAL_P90)
            found = np.exp(centre + sd * normal_quantile(u))
        return np.clip(found, *self.limits)

    def __str__(self) -> str:
        if self.shape == ("value",):
            return f"{self.numbers[0]:.8g}"
        return ", ".join(f"{name} {x:.8g}" for name, x in zip(self.shape, self.numbers, strict=True))


def _triangle(numbers: tuple[float, ...], u: NDArray[np.float64]) -> NDArray[np.float64]:
    low, mode, high = numbers
    if high == low:
        return np.full_like(u, low)
    rising = low + np.sqrt(u * (high - low) * (mode - low))
    falling = high - np.sqrt((1 - u) * (high - low) * (high - mode))
    return np.where(u < (mode - low) / (high - low), rising, falling)


@cache
def _normal_table() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    u = (np.arange(QUANTILE_STEPS) + 0.5) / QUANTILE_STEPS
    return u, np.array([NormalDist().inv_cdf(float(x)) for x in u])


def normal_quantile(u: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the standard normal distribution, to about four digits, cut off at +-3.9.

    >>> normal_quantile(np.array([0.5, 0.9])).round(3).tolist()
    [0.0, 1.282]
    """
    return np.interp(u, *_normal_table())


def fixed(value: float, source: str = "", date: str = "") -> Quantity:
    return Quantity(("value",), (float(value),), source, date)


def parse_quantity(given: object, low: float, high: float) -> Quantity:
    """ValueError says what was given and what is allowed."""
    allowed = f"a number in [{low:g}, {high:g}]"
    if isinstance(given, Quantity):
        return given
    if not isinstance(given, dict):
        return Quantity(
            ("value",), (_number(given, "", low, high, allowed),), "the scenario", "", (low, high)
        )
    rest = {key: value for key, value in given.items() if key not in ("source", "date")}
    shape = next((s for s in SHAPES if set(s) == set(rest)), None)
    if shape is None:
        ways = "; ".join(" and ".join(s) for s in SHAPES)
        raise ValueError(f"give {allowed}, or a mapping with {ways} (and source, date), not {sorted(rest)}")
    numbers = tuple(
        _number(rest[key], f"{key}: ", low if key != "sd" else 0.0, high, allowed) for key in shape
    )
    if shape[0] in ("low", "p10") and list(numbers) != sorted(numbers):
        raise ValueError(f"{' <= '.join(shape)} must hold: got {', '.join(f'{n:g}' for n in numbers)}")
    if shape[0] == "p10" and numbers[0] <= 0:
        raise ValueError(f"p10 must be above 0 (log-normal): got {numbers[0]:g}")
    dated = given.get("date", "")
    when = dated.isoformat() if isinstance(dated, date) else str(dated)
    return Quantity(shape, numbers, str(given.get("source", "the scenario")), when, (low, high))


def number(value: float) -> str:
    """For people: four digits, or all before the point.

    >>> number(27_600_000.0), number(0.0775), number(-3e-17)
    ('27,600,000', '0.0775', '0')
    """
    if abs(value) < 1e-12:
        return "0"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def shorten(text: str, most: int = 60) -> str:
    """
    >>> shorten("1" * 400, 8)
    '11111111...'
    """
    return text if len(text) <= most else f"{text[:most]}..."


def _number(given: object, name: str, low: float, high: float, allowed: str) -> float:
    if isinstance(given, str) and SCIENTIFIC.fullmatch(given):
        given = float(given)
    if isinstance(given, bool) or not isinstance(given, int | float) or not low <= given <= high:
        raise ValueError(f"{name}must be {allowed}, got {shorten(repr(given))}")
    return float(given)


def _within(low: float, high: float) -> BeforeValidator:
    return BeforeValidator(partial(parse_quantity, low=low, high=high))


Ratio = Annotated[Quantity, _within(0.0, 1.0)]
SomeRatio = Annotated[Quantity, _within(LEAST, 1.0)]
"""Of what a cost per token is divided by: nothing served has no cost per token."""
PartRatio = Annotated[Quantity, _within(0.0, 0.99)]
"""Of a tax or a loss: some must be left."""
Positive = Annotated[Quantity, _within(0.0, MOST)]
Some = Annotated[Quantity, _within(LEAST, MOST)]
Pue = Annotated[Quantity, _within(1.0, 5.0)]
Rate = Annotated[Quantity, _within(-0.5, 1.0)]
"""WACC and inflation: real rates may be below 0."""
