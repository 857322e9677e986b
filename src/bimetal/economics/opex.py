"""What is paid every year: power (own or colocated, never both), support, failures, people, rental."""

from __future__ import annotations

from bimetal.economics.cash_flow import Amount
from bimetal.units import HOURS_PER_YEAR, KILO, MONTHS_PER_YEAR


def average_draw_w(tdp_w: Amount, draw_ratio: Amount, power_cut_ratio: Amount, server_w: Amount) -> Amount:
    """Of one GPU with its share of the server; the cut is what undervolting or a lower memory clock saves.

    `draw_ratio` is the mean over all hours, idle ones included: idle power is paid.

    >>> round(average_draw_w(750, 0.4, 0.15, 500), 6)
    755.0
    """
    return tdp_w * draw_ratio * (1.0 - power_cut_ratio) + server_w


def own_power_usd(draw_w: Amount, pue_ratio: Amount, usd_per_kwh: Amount) -> Amount:
    """A year of average draw x PUE x hours x price.

    >>> round(own_power_usd(1000, 1.3, 0.10), 2)
    1138.8
    """
    return draw_w / KILO * pue_ratio * HOURS_PER_YEAR * usd_per_kwh


def colocation_usd(contracted_w: Amount, usd_per_kw_month: Amount) -> Amount:
    """A year of contracted power, drawn or not.

    >>> colocation_usd(10_000, 200)
    24000.0
    """
    return contracted_w / KILO * usd_per_kw_month * MONTHS_PER_YEAR


def rental_usd(num_gpus: Amount, usd_per_h: Amount, paid_ratio: Amount) -> Amount:
    """A year's rent; `paid_ratio` is 1 under take-or-pay, the share of hours in use on demand.

    >>> rental_usd(8, 2.0, 0.5)
    70080.0
    """
    return num_gpus * usd_per_h * HOURS_PER_YEAR * paid_ratio


def share_of_hardware_usd(hardware_usd: Amount, ratio: Amount) -> Amount:
    """Support contract, insurance, or spares for failures, as a share of hardware a year.

    >>> share_of_hardware_usd(1_000_000, 0.05)
    50000.0
    """
    return hardware_usd * ratio
