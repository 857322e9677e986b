"""Where the audit's inputs come from: the article's own figures, the catalogue, or an assumption that says so."""

from __future__ import annotations

from bimetal.catalog.hardware import find_gpu
from bimetal.economics.audit import Given, claims
from bimetal.economics.cash_flow import Amount


def stated(claim: str, figure: str) -> Given:
    """One of the article's own numbers."""
    value = claims()[claim].figures[figure]
    return Given(value, value, value, f"article, {claim}")


def assumed(value: float, why: str) -> Given:
    return Given(value, value, value, why)


def catalogue(gpu: str, field: str) -> Given:
    """A figure of the catalogue; of a range the median that its source names, else the middle."""
    spec = find_gpu(gpu)
    found = getattr(spec, field)
    low, high = found if isinstance(found, tuple) else (found, found)
    doubt = " [UNVERIFIED]" if spec.unverified_of(field) else ""
    middle = (low + high) / 2
    if field == "on_demand_usd_per_h" and spec.on_demand_median_usd_per_h is not None:
        middle = spec.on_demand_median_usd_per_h
    return Given(middle, low, high, f"catalogue, {spec.name} {field}: {spec.sources.get(field, '')}{doubt}")


def target(claim: str, figure: str) -> float:
    return claims()[claim].figures[figure]


def saving(before: Amount, after: Amount) -> Amount:
    """By what share the second is less.

    >>> saving(40.0, 30.0)
    0.25
    """
    return 1 - after / before
