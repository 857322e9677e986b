"""Buying terms: what waiting costs, what a second source is worth, what an uptime promise returns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bimetal.economics.cash_flow import Amount


def sla_credit_ratio(promised_ratio: Amount, delivered_ratio: Amount, credit_ratio: Amount) -> Amount:
    """Share of a year's rent or support that comes back: all of the credit once uptime falls below the promise.

    >>> float(sla_credit_ratio(0.999, 0.998, 0.1)), float(sla_credit_ratio(0.999, 0.9995, 0.1))
    (0.1, 0.0)
    """
    return np.where(np.asarray(delivered_ratio) < promised_ratio, credit_ratio, 0.0)


def waiting_usd(num_gpus: Amount, months: Amount, usd_per_gpu_month: Amount) -> Amount:
    """Of GPUs that are not there: idle people, cloud instead of them, or revenue not earned, per GPU and month.

    >>> waiting_usd(500, 4, 750)
    1500000
    """
    return num_gpus * months * usd_per_gpu_month


def average_wait_months(parts: Sequence[tuple[Amount, Amount]]) -> Amount:
    """Mean over (share of the order, months) parts.

    >>> average_wait_months(((0.5, 9), (0.5, 3)))
    6.0
    """
    return sum((share * months for share, months in parts), 0.0)


def second_source_usd(
    late_ratio: Amount, cost_of_late_usd: Amount, divertible_ratio: Amount, cost_of_diverting_usd: Amount
) -> tuple[Amount, Amount]:
    """Expected cost without and with a second source: an option, used only where it is cheaper.

    Without: P(late) x cost. With: P(late) x ((1 - divertible) x cost + min(divertible x cost, cost of diverting)).

    >>> without, chosen = second_source_usd(0.25, 1_000_000, 0.5, 100_000)
    >>> float(without), float(chosen)
    (250000.0, 150000.0)
    """
    diverted_cost = np.minimum(divertible_ratio * cost_of_late_usd, cost_of_diverting_usd)
    kept_cost = (1.0 - divertible_ratio) * cost_of_late_usd
    return late_ratio * cost_of_late_usd, late_ratio * (kept_cost + diverted_cost)
