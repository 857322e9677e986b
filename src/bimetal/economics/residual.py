"""What a GPU is still worth: by age, and by whether its successor can be bought."""

from __future__ import annotations

from bimetal.economics.cash_flow import Amount

REFERENCE_AGE_YEARS = 3
"""Markets quote what is left after three years."""


def straight_line_ratio(age_years: float, life_years: float, final_ratio: Amount = 0.0) -> Amount:
    """Falls by the same amount every year, to `final_ratio` at the end of its life.

    >>> straight_line_ratio(3, 4), straight_line_ratio(2, 4, 0.2), straight_line_ratio(9, 4, 0.5)
    (0.25, 0.6, 0.5)
    """
    return 1.0 - (1.0 - final_ratio) * min(age_years / life_years, 1.0)


def declining_ratio(age_years: Amount, ratio_after_3_years: Amount) -> Amount:
    """Falls by the same share every year, through what is quoted for three: r^(age / 3).

    >>> round(declining_ratio(3, 0.3), 10), round(declining_ratio(1.5, 0.25), 10)
    (0.3, 0.5)
    """
    ratio: Amount = ratio_after_3_years ** (age_years / REFERENCE_AGE_YEARS)
    return ratio


def resale_usd(
    price_usd: Amount,
    age_years: Amount,
    ratio_after_3_years: Amount,
    successor_drop_ratio: Amount = 0.0,
    successor_launched: bool = False,
) -> Amount:
    """Price x declining ratio, less the drop on the successor's launch if that came before the sale.

    >>> round(resale_usd(30_000, 3, 0.3)), round(resale_usd(30_000, 3, 0.3, 0.2, successor_launched=True))
    (9000, 7200)
    """
    ratio = declining_ratio(age_years, ratio_after_3_years)
    return price_usd * ratio * (1.0 - successor_drop_ratio * successor_launched)
