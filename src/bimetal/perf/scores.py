"""How good predictions are: errors by group, coverage of intervals. Pure arithmetic on predicted and measured."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Scored:
    """One prediction beside its measurement, with the labels that it is grouped by."""

    row: str
    target: str
    gpu: str
    vendor: str
    model: str
    engine: str
    regime: str
    shape: str
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def error_ratio(self) -> float:
        """Signed, of what was measured."""
        return self.predicted / self.measured - 1

    @property
    def is_covered(self) -> bool:
        return self.low <= self.measured <= self.high

    @property
    def width_ratio(self) -> float:
        """Of the interval, of what was predicted."""
        return (self.high - self.low) / self.predicted


@dataclass(frozen=True, slots=True)
class Summary:
    """Absolute errors as a share of what was measured."""

    num: int
    median_error_ratio: float
    mean_error_ratio: float
    bias_ratio: float
    """Median of the signed error."""
    coverage_ratio: float
    median_width_ratio: float


def summarise(scored: Sequence[Scored]) -> Summary:
    """Of at least one."""
    errors = [abs(s.error_ratio) for s in scored]
    return Summary(
        num=len(scored),
        median_error_ratio=median(errors),
        mean_error_ratio=fmean(errors),
        bias_ratio=median(s.error_ratio for s in scored),
        coverage_ratio=fmean(s.is_covered for s in scored),
        median_width_ratio=median(s.width_ratio for s in scored),
    )


def by(scored: Iterable[Scored], key: Callable[[Scored], K]) -> dict[K, list[Scored]]:
    """Groups in order of first appearance."""
    groups: dict[K, list[Scored]] = {}
    for s in scored:
        groups.setdefault(key(s), []).append(s)
    return groups
