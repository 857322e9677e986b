"""The article's claims about chips, throughput and latency, as arithmetic.

Where a claim is about throughput, `ModelAnswers` carries the performance model's answer with its interval: this room may
not know the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from bimetal.catalog.links import NAMED_LINKS, SAME_HOST
from bimetal.catalog.models import builtin_model
from bimetal.economics.audit import Check, Given
from bimetal.economics.audit_inputs import assumed, catalogue, stated, target
from bimetal.units import MS_PER_S

BF16_BYTES = 2
SIMILAR_RATIO = 0.10
"""How far apart figures may be that are called similar or comparable."""


@dataclass(frozen=True, slots=True)
class ModelAnswers:
    """Ratios are per GPU, MI300X over H100 unless said; the range is the model's 90% interval."""

    mixtral_ratio: Given
    dense_70b_ratio: Given
    dense_70b_tpot_s: Given
    """Llama-3.1-70B in bf16 on four MI300X, 32 sequences."""
    mi355x_over_mi300x: Given


def performance_checks(model: ModelAnswers) -> tuple[Check, ...]:
    return (*_chips(), *_throughput(model), *_latency(model), *_training())


def _chips() -> tuple[Check, ...]:
    h100, mi300x = "H100", "MI300X"
    return (
        Check(
            "C04",
            "memory",
            "catalogue",
            {"bytes": catalogue(mi300x, "memory_bytes")},
            lambda v: v["bytes"] / 1e9,
            "about",
            target("C04", "memory_gb"),
            "bytes",
            "GB",
            0.01,
        ),
        Check(
            "C04",
            "peak FP16, comparable read as within 10%",
            "MI300X / H100",
            {"mi300x": catalogue(mi300x, "bf16_flops_per_s"), "h100": catalogue(h100, "bf16_flops_per_s")},
            lambda v: v["mi300x"] / v["h100"],
            "about",
            1.0,
            "mi300x",
            "times",
            SIMILAR_RATIO,
        ),
        Check(
            "C04",
            "reached FP16, within 10%",
            "MI300X x reached / (H100 x reached)",
            {
                "mi300x": catalogue(mi300x, "bf16_flops_per_s"),
                "mi300x_reached": catalogue(mi300x, "bf16_achieved_ratio"),
                "h100": catalogue(h100, "bf16_flops_per_s"),
                "h100_reached": catalogue(h100, "bf16_achieved_ratio"),
            },
            lambda v: v["mi300x"] * v["mi300x_reached"] / (v["h100"] * v["h100_reached"]),
            "about",
            1.0,
            "mi300x_reached",
            "times",
            SIMILAR_RATIO,
        ),
        Check(
            "C05",
            "peak, similar read as within 10%",
            "MI300X / H100",
            {
                "mi300x": catalogue(mi300x, "memory_bytes_per_s"),
                "h100": catalogue(h100, "memory_bytes_per_s"),
            },
            lambda v: v["mi300x"] / v["h100"],
            "about",
            1.0,
            "mi300x",
            "times",
            SIMILAR_RATIO,
        ),
        Check(
            "C36",
            "FP8 peak",
            "MI355X / MI300X",
            {
                "mi355x": catalogue("MI355X", "fp8_flops_per_s"),
                "mi300x": catalogue(mi300x, "fp8_flops_per_s"),
            },
            lambda v: v["mi355x"] / v["mi300x"],
            "about",
            target("C36", "speedup"),
            "mi355x",
            "times",
        ),
        Check(
            "C40",
            "weights of a decode step on an H100",
            "FLOP per byte = sequences x 2 / bytes a weight; at most FLOP/s / byte/s",
            {
                "sequences": Given(64, 1, 512, "decoded together, usual range"),
                "flops_per_s": catalogue(h100, "bf16_flops_per_s"),
                "bytes_per_s": catalogue(h100, "memory_bytes_per_s"),
            },
            lambda v: v["sequences"] * 2 / BF16_BYTES / (v["flops_per_s"] / v["bytes_per_s"]),
            "at most",
            1.0,
            "sequences",
            "of the ridge",
        ),
    )


def _throughput(model: ModelAnswers) -> tuple[Check, ...]:
    checks = [
        Check(
            claim,
            f"{reading}, at best",
            "(1 + MI300X / H100) / 2",
            {"mi300x_over_h100": ratio},
            lambda v: (1 + v["mi300x_over_h100"]) / 2,
            "at least",
            least,
            "mi300x_over_h100",
            "of all-H100",
            is_model=True,
        )
        for claim, reading, ratio, least in (
            (
                "C07",
                "Mixtral, layers split by speed",
                model.mixtral_ratio,
                1 - target("C07", "throughput_loss"),
            ),
            (
                "C08",
                "Mixtral, layers split by speed",
                model.mixtral_ratio,
                1 - target("C08", "throughput_loss_max"),
            ),
        )
    ]
    for name, ratio in (("Mixtral", model.mixtral_ratio), ("70B", model.dense_70b_ratio)):
        checks.append(
            Check(
                "C10",
                f"{name}, replicas on one vendor each",
                "0.6 + 0.4 x MI300X / H100",
                {"mi300x_over_h100": ratio},
                lambda v: 0.6 + 0.4 * v["mi300x_over_h100"],
                "at least",
                target("C10", "throughput_ratio"),
                "mi300x_over_h100",
                "of all-H100",
                is_model=True,
            )
        )
    checks.append(
        Check(
            "C46",
            "Llama-3.1-70B, FP8",
            "MI355X / MI300X",
            {"mi355x_over_mi300x": model.mi355x_over_mi300x},
            lambda v: v["mi355x_over_mi300x"],
            "at least",
            target("C46", "speedup"),
            "mi355x_over_mi300x",
            "times",
            is_model=True,
        )
    )
    return tuple(checks)


def _latency(model: ModelAnswers) -> tuple[Check, ...]:
    hidden = builtin_model("Llama-3.1-70B").hidden_size
    slow = NAMED_LINKS["10GbE"]
    hop = {
        "batch": stated("C09", "batch"),
        "hidden": assumed(hidden, "config of Llama-3.1-70B"),
        "bytes_per_s": Given(
            SAME_HOST.bandwidth_bytes_per_s,
            slow.bandwidth_bytes_per_s,
            25e9,
            "GPU to GPU through host memory, measured; 10GbE to PCIe 4 x16",
        ),
        "latency_s": assumed(SAME_HOST.latency_s, "measured on one host"),
    }
    hop_formula = "latency + batch x hidden x 2 / bytes a second"

    return (
        Check(
            "C09",
            "added, one crossing",
            hop_formula,
            hop,
            lambda v: (v["latency_s"] + v["batch"] * v["hidden"] * BF16_BYTES / v["bytes_per_s"]) * MS_PER_S,
            "about",
            target("C09", "added_ms"),
            "bytes_per_s",
            "ms",
            0.2,
        ),
        Check(
            "C09",
            "inside the budget",
            f"TPOT + {hop_formula}",
            {**hop, "tpot_s": model.dense_70b_tpot_s},
            lambda v: (
                (v["tpot_s"] + v["latency_s"] + v["batch"] * v["hidden"] * BF16_BYTES / v["bytes_per_s"])
                * MS_PER_S
            ),
            "at most",
            target("C09", "budget_ms"),
            "tpot_s",
            "ms",
            is_model=True,
        ),
        Check(
            "C34",
            "mean hop, too much read as 10% of the budget",
            f"({hop_formula}) / budget",
            {**hop, "budget_ms": stated("C34", "latency_ms")},
            lambda v: (
                (v["latency_s"] + v["batch"] * v["hidden"] * BF16_BYTES / v["bytes_per_s"])
                * MS_PER_S
                / v["budget_ms"]
            ),
            "at least",
            0.10,
            "bytes_per_s",
            "of the budget",
        ),
    )


def _training() -> tuple[Check, ...]:
    h100 = {
        "h100_fp8": catalogue("H100", "fp8_flops_per_s"),
        "h100_reached": catalogue("H100", "fp8_achieved_ratio"),
    }
    reached = catalogue("MI300X", "bf16_achieved_ratio")
    mi300x_reached = Given(reached.value, reached.low, 0.7, reached.source + "; up to what H100 reaches")
    weights = builtin_model("Llama-2-7B")
    return (
        *(
            Check(
                "C32",
                reading,
                "H100 FP8 x reached / (MI300X peak x reached)",
                {**h100, "mi300x": catalogue("MI300X", field), "mi300x_reached": mi300x_reached},
                lambda v: v["h100_fp8"] * v["h100_reached"] / (v["mi300x"] * v["mi300x_reached"]),
                "at least",
                target("C32", "speedup"),
                "mi300x_reached",
                "times",
            )
            for reading, field in (
                ("large GEMMs, MI300X in BF16", "bf16_flops_per_s"),
                ("large GEMMs, MI300X in FP8", "fp8_flops_per_s"),
            )
        ),
        Check(
            "C33",
            "memory left for activations",
            "(MI300X - states) / (H100 - states), batches 128 / 96",
            {
                "mi300x": catalogue("MI300X", "memory_bytes"),
                "h100": catalogue("H100", "memory_bytes"),
                "states": Given(
                    13.5e9, 13.5e9, 54e9, f"{weights.name}: adapters on BF16 weights, to 8 bytes a weight"
                ),
            },
            lambda v: (v["mi300x"] - v["states"]) / (v["h100"] - v["states"]),
            "at least",
            target("C33", "mi300x_batch") / target("C33", "h100_batch"),
            "states",
            "times",
        ),
    )
