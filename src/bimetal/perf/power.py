"""`PowerCurve`: how much slower a GPU is whose draw is held below its TDP.

Owns the form, its fit to published rows, and the file that keeps what was found. Does not know who would cap a GPU, or why.

A cap holds the draw to the ratio c of TDP by lowering the clock of the compute units; that of the memory stays. The draw grows
with clock x voltage^2, and the voltage more or less with the clock, so that work bound by computing keeps

    c ^ exponent        exponent: 1 where the voltage cannot fall, 1/3 where it falls with the clock

of its rate, and work bound by memory keeps all of it until the clock is too low to issue its reads. Where that is no row says:
below the lowest published cap nothing is claimed. For GPUs without rows, which is all but the H100, the curve is an assumption.

What there is to fit are Splitwise's rows of H100s. They name no cap; the publication's is half of TDP (the watts that its simulator
gives the server allow for 45%; half is the milder cap for the same loss, and so errs to the slow side). And they are no independent
measurements: each is its uncapped twin with TTFT times 1.3 and TPOT as it was. One number, fitted once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from math import exp, log
from pathlib import Path

import numpy as np

from bimetal.errors import ConfigError
from bimetal.perf.measurements import Measurement
from bimetal.perf.work import Array

CURVE_FILE = "power_curve.json"
PUBLISHED_CAP_RATIO = 0.5
"""Of TDP, of every capped row: see above."""
FITTED_GPU = "H100-SXM-80GB"
COMPUTE_TERMS = ("multiply_s", "prompt_token_s", "score_s")
"""Of a stage's clock (`StageClock`): what the compute units bound."""
MEMORY_TERMS = ("dense_s", "experts_s", "context_s")


@dataclass(frozen=True, slots=True)
class Fitted:
    """One kind of work."""

    exponent: float
    num_pairs: int
    median_error: float
    """|predicted - measured| / measured, of the ratio of rates."""
    worst_error: float


@dataclass(frozen=True, slots=True)
class PowerCurve:
    """As found on `date`."""

    compute: Fitted
    """From TTFT: reading prompts."""
    memory: Fitted
    """From TPOT: decoding."""
    lowest_ratio: float
    """Of TDP: below it there are no rows."""
    num_without_twin: int
    """Capped rows that no uncapped row of the same work stands beside: left out."""
    gpu: str
    date: str

    def compute_rate(self, cap_ratio: float) -> float:
        """Of the uncapped rate of work bound by computing, at a cap of so much of TDP.

        ValueError outside of [lowest_ratio, 1].
        """
        return self._rate(cap_ratio, self.compute)

    def memory_rate(self, cap_ratio: float) -> float:
        """The same of work bound by memory."""
        return self._rate(cap_ratio, self.memory)

    def _rate(self, cap_ratio: float, fitted: Fitted) -> float:
        if not self.lowest_ratio <= cap_ratio <= 1:
            raise ValueError(f"cap ratio {cap_ratio} must be within [{self.lowest_ratio}, 1]")
        return min(1.0, float(cap_ratio**fitted.exponent))

    def slowed(self, clocks: Mapping[str, Array], cap_ratio: float) -> dict[str, Array]:
        """Fields of `StageClock` of a capped GPU. Overheads, hops and what the host does stay as they are."""
        by = dict.fromkeys(COMPUTE_TERMS, self.compute_rate(cap_ratio)) | dict.fromkeys(
            MEMORY_TERMS, self.memory_rate(cap_ratio)
        )
        return {name: column / by.get(name, 1.0) for name, column in clocks.items()}


def twins(rows: Sequence[Measurement]) -> tuple[list[tuple[Measurement, Measurement]], int]:
    """Capped rows with the uncapped row of the same work, and how many capped rows have none."""
    free = {(r.group, r.point.concurrency, r.point.engine): r for r in rows if not r.power_capped}
    capped = [r for r in rows if r.power_capped]
    pairs = [
        (r, free[key]) for r in capped if (key := (r.group, r.point.concurrency, r.point.engine)) in free
    ]
    return pairs, len(capped) - len(pairs)


def fit_power_curve(rows: Sequence[Measurement], date: str) -> PowerCurve:
    """Least squares of the logarithm of rates; ConfigError without a pair of rows."""
    pairs, alone = twins(rows)
    ttft = [u.ttft_s / c.ttft_s for c, u in pairs if c.ttft_s and u.ttft_s]
    tpot = [u.tpot_s / c.tpot_s for c, u in pairs if c.tpot_s and u.tpot_s]
    if not ttft or not tpot:
        raise ConfigError(
            f"{alone} power-capped rows, and no uncapped row of the same work with TTFT and TPOT beside any: give both"
        )
    return PowerCurve(_fit(ttft), _fit(tpot), PUBLISHED_CAP_RATIO, alone, FITTED_GPU, date)


def _fit(rates: Sequence[float]) -> Fitted:
    """Of capped over uncapped rates, all at the one cap."""
    exponent = max(0.0, float(np.mean([log(rate) for rate in rates])) / log(PUBLISHED_CAP_RATIO))
    predicted = exp(exponent * log(PUBLISHED_CAP_RATIO))
    errors = [abs(predicted - rate) / rate for rate in rates]
    return Fitted(exponent, len(rates), float(np.median(errors)), max(errors))


def save_power_curve(curve: PowerCurve, path: Path) -> None:
    """As JSON."""
    path.write_text(json.dumps(asdict(curve), indent=1) + "\n", encoding="utf-8")


def load_power_curve(text: str) -> PowerCurve:
    """From JSON that `save_power_curve` wrote."""
    data = json.loads(text)
    return PowerCurve(**{**data, "compute": Fitted(**data["compute"]), "memory": Fitted(**data["memory"])})


@cache
def published_power_curve() -> PowerCurve:
    """The one that bimetal carries, made by `bimetal perf power`."""
    path = resources.files("bimetal.catalog") / "data" / CURVE_FILE
    return load_power_curve(path.read_text(encoding="utf-8"))
