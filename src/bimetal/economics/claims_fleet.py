"""The article's claims about power bills, running costs and what the whole fleet saves, as arithmetic."""

from __future__ import annotations

from bimetal.economics.audit import Check, Given
from bimetal.economics.audit_inputs import assumed, catalogue, saving, stated, target
from bimetal.economics.capex import hardware_usd
from bimetal.economics.opex import average_draw_w, own_power_usd

TARIFF = Given(0.10, 0.05, 0.20, "industrial tariffs, assumed range in USD a kWh")
PUE = Given(1.3, 1.1, 1.6, "assumed range")
SUPPORT = Given(0.05, 0.03, 0.07, "share of hardware a year, assumed range")
MI300X_DRAW = Given(0.41, 0.35, 0.47, "share of TDP in published MI300X inference runs")
YEARS = 3


def fleet_checks() -> tuple[Check, ...]:
    return (*_power(), *_fleet())


def _power() -> tuple[Check, ...]:
    tdp_h100, tdp_mi300x = stated("C06", "h100_w"), stated("C06", "mi300x_w")
    c14 = {
        "gpus": stated("C14", "gpus"),
        "cut": stated("C14", "cut"),
        "tdp_w": tdp_mi300x,
        "usd_per_kwh": TARIFF,
    }
    c15 = {"gpus": stated("C15", "gpus"), "cut": stated("C15", "cut"), "usd_per_kwh": TARIFF}
    node_w = assumed(1275.0, "10.2 kW node of 8 (catalogue notes on the H100)")
    return (
        Check(
            "C06",
            "H100",
            "catalogue TDP",
            {"tdp_w": catalogue("H100", "tdp_w")},
            lambda v: v["tdp_w"],
            "about",
            tdp_h100.value,
            "tdp_w",
            "W",
            0.005,
        ),
        Check(
            "C06",
            "MI300X",
            "catalogue TDP",
            {"tdp_w": catalogue("MI300X", "tdp_w")},
            lambda v: v["tdp_w"],
            "about",
            tdp_mi300x.value,
            "tdp_w",
            "W",
            0.005,
        ),
        Check(
            "C14",
            "always at TDP, chips alone",
            "GPUs x TDP x cut / 1000 x 8760 x $/kWh",
            c14,
            lambda v: own_power_usd(v["gpus"] * v["tdp_w"] * v["cut"], 1.0, v["usd_per_kwh"]),
            "about",
            target("C14", "usd_per_year"),
            "usd_per_kwh",
            "USD a year",
            0.10,
        ),
        Check(
            "C14",
            "measured draw, with PUE",
            "GPUs x TDP x draw x cut / 1000 x PUE x 8760 x $/kWh",
            {**c14, "draw": MI300X_DRAW, "pue": PUE},
            lambda v: own_power_usd(
                v["gpus"] * average_draw_w(v["tdp_w"], v["draw"], 0.0, 0.0) * v["cut"],
                v["pue"],
                v["usd_per_kwh"],
            ),
            "about",
            target("C14", "usd_per_year"),
            "usd_per_kwh",
            "USD a year",
            0.10,
        ),
        Check(
            "C15",
            "chip power",
            "GPUs x 700 W x 10% / 1000 x 8760 x $/kWh",
            {**c15, "tdp_w": tdp_h100},
            lambda v: own_power_usd(v["gpus"] * v["tdp_w"] * v["cut"], 1.0, v["usd_per_kwh"]),
            "at least",
            target("C15", "usd_per_year"),
            "usd_per_kwh",
            "USD a year",
        ),
        Check(
            "C15",
            "system power",
            "GPUs x node W / 8 x 10% / 1000 x 8760 x $/kWh",
            {**c15, "system_w": node_w},
            lambda v: own_power_usd(v["gpus"] * v["system_w"] * v["cut"], 1.0, v["usd_per_kwh"]),
            "at least",
            target("C15", "usd_per_year"),
            "usd_per_kwh",
            "USD a year",
        ),
        Check(
            "C15",
            "draws 10% less",
            "1 - MI300X TDP x draw / (H100 TDP x draw)",
            {
                "mi300x_w": tdp_mi300x,
                "h100_w": tdp_h100,
                "mi300x_draw": MI300X_DRAW,
                "h100_draw": Given(0.65, 0.35, 0.9, "not measured here, assumed range"),
            },
            lambda v: saving(v["h100_w"] * v["h100_draw"], v["mi300x_w"] * v["mi300x_draw"]),
            "at least",
            target("C15", "cut"),
            "h100_draw",
        ),
    )


def _fleet() -> tuple[Check, ...]:
    h100, mi300x = stated("C01", "usd_min"), stated("C02", "usd")
    both = {"h100_usd": h100, "mi300x_usd": mi300x}
    work = {"throughput": stated("C10", "throughput_ratio")}
    all_h100 = {"h100_fleet_usd": stated("C16", "h100_usd")}
    parts = {
        "chips_saved_usd": stated("C17", "saved_usd"),
        "opex_saved_usd": stated("C18", "usd_per_year"),
        "stack_usd": stated("C23", "cost_usd"),
        **all_h100,
    }
    system = assumed(15_625.0, "node of 8 for 300-350k USD less 8 chips at 25k (catalogue notes)")
    return (
        Check(
            "C17",
            "cost",
            "600 x H100 + 400 x MI300X",
            both,
            lambda v: hardware_usd(600, v["h100_usd"]) + hardware_usd(400, v["mi300x_usd"]),
            "about",
            target("C17", "usd"),
            "mi300x_usd",
            "USD",
            0.01,
        ),
        Check(
            "C17",
            "saved, per fleet",
            "1 - mixed / (1000 x H100)",
            both,
            lambda v: saving(1000 * v["h100_usd"], 600 * v["h100_usd"] + 400 * v["mi300x_usd"]),
            "about",
            target("C17", "saved"),
            "mi300x_usd",
        ),
        Check(
            "C17",
            "saved, per unit of work (C10)",
            "1 - (mixed / throughput) / (1000 x H100)",
            {**both, **work},
            lambda v: saving(
                1000 * v["h100_usd"], (600 * v["h100_usd"] + 400 * v["mi300x_usd"]) / v["throughput"]
            ),
            "about",
            target("C17", "saved"),
            "throughput",
        ),
        Check(
            "C18",
            "its own parts (C14 on 400, C15, C19)",
            "undervolting x 0.4 + power + maintenance",
            {
                "undervolting_usd": stated("C14", "usd_per_year"),
                "power_usd": stated("C15", "usd_per_year"),
                "maintenance_usd": stated("C19", "usd"),
            },
            lambda v: 0.4 * v["undervolting_usd"] + v["power_usd"] + v["maintenance_usd"],
            "at least",
            target("C18", "usd_per_year"),
            "power_usd",
            "USD a year",
        ),
        Check(
            "C19",
            "on 400 MI300X",
            "400 x price x support x cut",
            {"mi300x_usd": mi300x, "support": SUPPORT, "cut": stated("C19", "cut")},
            lambda v: 400 * v["mi300x_usd"] * v["support"] * v["cut"],
            "about",
            target("C19", "usd"),
            "support",
            "USD a year",
            0.10,
        ),
        *(
            Check(
                "C20",
                f"prices per {unit}",
                f"(all-NVIDIA - mixed) x tokens / {size:g}",
                {
                    "nvidia_usd": stated("C20", "nvidia_usd"),
                    "mixed_usd": stated("C20", "mixed_usd"),
                    "tokens": stated("C20", "tokens"),
                },
                lambda v, size=size: (v["nvidia_usd"] - v["mixed_usd"]) * v["tokens"] / size,  # type: ignore[misc]
                "about",
                target("C20", "difference_usd"),
                "tokens",
                "USD",
            )
            for unit, size in (("token", 1.0), ("million tokens", 1e6))
        ),
        Check(
            "C21",
            "its own parts over chips alone",
            "(chips saved + 3 x (OpEx saved - stack)) / all-H100 chips",
            parts,
            lambda v: (
                (v["chips_saved_usd"] + YEARS * (v["opex_saved_usd"] - v["stack_usd"])) / v["h100_fleet_usd"]
            ),
            "at least",
            target("C21", "cut"),
            "opex_saved_usd",
        ),
        Check(
            "C21",
            "its own parts over systems",
            "(chips saved + 3 x (OpEx saved - stack)) / all-H100 systems",
            {**parts, "server_usd": system},
            lambda v: (
                (v["chips_saved_usd"] + YEARS * (v["opex_saved_usd"] - v["stack_usd"]))
                / (v["h100_fleet_usd"] + 1000 * v["server_usd"])
            ),
            "at least",
            target("C21", "cut"),
            "opex_saved_usd",
        ),
        Check(
            "C22",
            "its own parts over chips alone",
            "(chips saved + 3 x (OpEx saved - stack)) / all-H100 chips",
            parts,
            lambda v: (
                (v["chips_saved_usd"] + YEARS * (v["opex_saved_usd"] - v["stack_usd"])) / v["h100_fleet_usd"]
            ),
            "at least",
            target("C22", "cut_low"),
            "opex_saved_usd",
        ),
        Check(
            "C23",
            "return",
            "saving / cost",
            {"saving_usd": stated("C23", "saving_usd"), "cost_usd": stated("C23", "cost_usd")},
            lambda v: v["saving_usd"] / v["cost_usd"],
            "about",
            10.0,
            "cost_usd",
            "times",
        ),
        Check(
            "C48",
            "spare capacity",
            "utilisation / (1 - loss)",
            {
                "utilisation": Given(0.6, 0.3, 1.0, "share of peak capacity in use, assumed range"),
                "loss": stated("C48", "loss"),
            },
            lambda v: v["utilisation"] / (1 - v["loss"]),
            "at most",
            1.0,
            "utilisation",
        ),
        Check(
            "C48",
            "and the saving stays",
            "1 - (1 - saved) / (1 - loss)",
            {"saved": stated("C17", "saved"), "loss": stated("C48", "loss")},
            lambda v: saving(1.0, (1 - v["saved"]) / (1 - v["loss"])),
            "at least",
            0.01,
            "loss",
        ),
    )
