"""The article's claims about prices, what a 50/50 mix can save, and delays, as arithmetic.

Each check is one reading of one claim. Inputs are the article's own figures where it gives them, and the catalogue's beside
them where it has better ones.
"""

from __future__ import annotations

from bimetal.catalog.hardware import find_gpu
from bimetal.economics.audit import Check, Given
from bimetal.economics.audit_inputs import assumed, catalogue, saving, stated, target
from bimetal.economics.capex import hardware_usd
from bimetal.economics.cash_flow import Amount
from bimetal.economics.procurement import average_wait_months, waiting_usd
from bimetal.units import HOURS_PER_MONTH


def price_checks() -> tuple[Check, ...]:
    return (*_prices(), *_split_savings(), *_delay())


def mixed_saving(h100_usd: Amount, mi300x_usd: Amount, replaced: Amount) -> Amount:
    """Of equal numbers of both chips against H100 alone, where one MI300X does the work of `replaced` H100s.

    >>> round(mixed_saving(30_000, 24_000, 1), 3), round(mixed_saving(30_000, 24_000, 2), 3)
    (0.1, 0.4)
    """
    return saving((1 + replaced) * h100_usd, h100_usd + mi300x_usd)


def _prices() -> tuple[Check, ...]:
    h100, mi300x = stated("C01", "usd_min"), stated("C02", "usd")
    both = {"h100_usd": h100, "mi300x_usd": mi300x}
    sourced = {
        "h100_usd": catalogue("H100", "purchase_usd"),
        "mi300x_usd": catalogue("MI300X", "purchase_usd"),
    }
    return (
        Check(
            "C01",
            "2026 price",
            "catalogue price",
            {"price_usd": catalogue("H100", "purchase_usd")},
            lambda v: v["price_usd"],
            "at least",
            target("C01", "usd_min"),
            "price_usd",
            "USD",
        ),
        Check(
            "C02",
            "its own prices",
            "1 - MI300X / H100",
            both,
            lambda v: saving(v["h100_usd"], v["mi300x_usd"]),
            "about",
            0.20,
            "mi300x_usd",
        ),
        Check(
            "C02",
            "2026 prices",
            "1 - MI300X / H100",
            sourced,
            lambda v: saving(v["h100_usd"], v["mi300x_usd"]),
            "about",
            0.20,
            "mi300x_usd",
        ),
        Check(
            "C03",
            "off the MI300X's price",
            "price x (1 - discount)",
            {"mi300x_usd": mi300x, "discount": stated("C03", "discount")},
            lambda v: v["mi300x_usd"] * (1 - v["discount"]),
            "about",
            target("C03", "usd"),
            "mi300x_usd",
            "USD",
        ),
        Check(
            "C16",
            "H100",
            "1000 x price",
            {"price_usd": h100},
            lambda v: hardware_usd(1000, v["price_usd"]),
            "about",
            target("C16", "h100_usd"),
            "price_usd",
            "USD",
        ),
        Check(
            "C16",
            "MI300X",
            "1000 x price",
            {"price_usd": mi300x},
            lambda v: hardware_usd(1000, v["price_usd"]),
            "about",
            target("C16", "mi300x_usd"),
            "price_usd",
            "USD",
        ),
        Check(
            "C27",
            "at its 12% (C26)",
            "GPUs x H100 price x discount",
            {
                "gpus": stated("C27", "gpus"),
                "h100_usd": h100,
                "discount": Given(target("C26", "cut"), 0.0, 0.20, "article, C26; up to C24"),
            },
            lambda v: v["gpus"] * v["h100_usd"] * v["discount"],
            "at least",
            target("C27", "saved_usd"),
            "discount",
            "USD",
        ),
    )


def _split_savings() -> tuple[Check, ...]:
    """What half H100, half MI300X can save at most: chip for chip, and where one MI300X replaces two H100s."""
    discounted = stated("C03", "usd")
    checks = []
    for claim, figure in (("C07", "cost_cut"), ("C08", "cost_cut"), ("C11", "cost_cut"), ("C39", "cut")):
        for reading, price, replaced in (
            ("chip for chip", stated("C02", "usd"), 1.0),
            ("chip for chip, discounted (C03)", discounted, 1.0),
            ("one MI300X for two H100", stated("C02", "usd"), 2.0),
        ):
            checks.append(
                Check(
                    claim,
                    reading,
                    "1 - (H100 + MI300X) / ((1 + replaced) x H100)",
                    {
                        "h100_usd": stated("C01", "usd_min"),
                        "mi300x_usd": price,
                        "replaced": assumed(replaced, reading),
                    },
                    lambda v: mixed_saving(v["h100_usd"], v["mi300x_usd"], v["replaced"]),
                    "at least",
                    target(claim, figure),
                    "replaced",
                )
            )
    return tuple(checks)


def _delay() -> tuple[Check, ...]:
    rent = catalogue("H100", "on_demand_usd_per_h")
    h100 = find_gpu("H100")
    value = Given(
        rent.value,
        h100.rental_usd_per_h or rent.low,
        rent.high,
        f"rent of an H100, 3 years to on demand: {rent.source}",
    )
    return (
        Check(
            "C29",
            "GPU-hours missed at their rent",
            "GPUs x months x 730 x $/h",
            {
                "gpus": stated("C29", "gpus"),
                "months_h100": stated("C29", "months_h100"),
                "months_mi300x": stated("C29", "months_mi300x"),
                "usd_per_h": value,
            },
            lambda v: waiting_usd(
                v["gpus"], v["months_h100"] - v["months_mi300x"], HOURS_PER_MONTH * v["usd_per_h"]
            ),
            "about",
            target("C29", "usd"),
            "usd_per_h",
            "USD",
            0.10,
        ),
        Check(
            "C30",
            "on demand over published TCO",
            "$/h on demand / $/h owned",
            {"on_demand": rent, "own": catalogue("H100", "own_usd_per_h")},
            lambda v: v["on_demand"] / v["own"],
            "about",
            target("C30", "multiple"),
            "on_demand",
            "times",
            0.10,
        ),
        Check(
            "C31",
            "mean wait back to the original",
            "share x months + (1 - share) x months",
            {
                "share": assumed(target("C31", "gpus_diverted") / target("C31", "gpus"), "article, C31"),
                "months_before": stated("C31", "months_before"),
                "months_after": stated("C31", "months_after"),
            },
            lambda v: average_wait_months(
                ((v["share"], v["months_after"]), (1 - v["share"], v["months_before"]))
            ),
            "at most",
            target("C31", "months_original"),
            "share",
            "months",
        ),
    )
