"""What is paid once: chips, their share of the servers, network, installation, duties, cooling plant.

A saving on chips alone misleads: a chip is about half of what a GPU in a rack costs, so each level has its own line.
"""

from __future__ import annotations

from bimetal.economics.cash_flow import Amount
from bimetal.units import KILO


def hardware_usd(num_gpus: Amount, usd_per_gpu: Amount) -> Amount:
    """Chips, or their share of the servers.

    >>> hardware_usd(600, 30_000) + hardware_usd(400, 24_000)
    27600000
    """
    return num_gpus * usd_per_gpu


def surcharge_usd(base_usd: Amount, ratio: Amount) -> Amount:
    """Network, installation, duty or VAT as a share of chips and servers together.

    >>> surcharge_usd(40_000_000, 0.125)
    5000000.0
    """
    return base_usd * ratio


def cooling_plant_usd(contracted_w: Amount, usd_per_kw: Amount) -> Amount:
    """Of an own site: sized for the most that the machines may draw.

    >>> cooling_plant_usd(1_275_000, 2000)
    2550000.0
    """
    return contracted_w / KILO * usd_per_kw


def discounted_usd(list_usd: Amount, discounts: tuple[tuple[Amount, bool], ...]) -> Amount:
    """List price after (ratio, on_list) discounts: off the list price, or off what the earlier ones left.

    Discounts never stack silently: each says which of the two it means.

    >>> discounted_usd(100.0, ((0.2, True), (0.1, True))), discounted_usd(100.0, ((0.2, True), (0.1, False)))
    (70.0, 72.0)
    """
    price = list_usd
    for ratio, on_list in discounts:
        price = price - (list_usd if on_list else price) * ratio
    return price
