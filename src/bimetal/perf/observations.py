"""Measured numbers beside the equation that predicts each, as arrays.

Owns which equation answers for TPOT, TTFT and throughput under each load. Does not know how coefficients are found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bimetal.perf.equations import closed_loop, offline, static_batch
from bimetal.perf.hierarchy import PRIORS
from bimetal.perf.measurements import Measurement
from bimetal.perf.point import ServingPoint
from bimetal.perf.work import Array, Work, count_work

Target = Literal["tpot", "ttft", "rate"]
TARGETS: tuple[Target, ...] = ("tpot", "ttft", "rate")
BIAS: dict[Target, str] = {"tpot": "tpot_bias", "ttft": "ttft_bias", "rate": "rate_bias"}
LATENCY_REGIMES = ("closed-loop", "static-batch")


@dataclass(frozen=True, slots=True)
class Query:
    """One number to predict."""

    point: ServingPoint
    target: Target
    includes_prefill: bool = False
    """TPOT is end-to-end over output tokens."""


class Predictor:
    """Log predictions of many queries as a function of each term's sum of effects."""

    def __init__(self, queries: Sequence[Query]) -> None:
        self.queries = tuple(queries)
        work = count_work([q.point for q in queries])
        regimes = np.array([q.point.regime for q in queries])
        targets = np.array([q.target for q in queries])
        with_prefill = np.array([q.includes_prefill for q in queries], dtype=bool)
        self._parts: list[
            tuple[NDArray[np.intp], Work, str, dict[Target, NDArray[np.bool_]], NDArray[np.bool_]]
        ] = []
        for kind, members in (
            ("closed", regimes == "closed-loop"),
            ("batch", regimes == "static-batch"),
            ("offline", ~np.isin(regimes, LATENCY_REGIMES)),
        ):
            index = np.flatnonzero(members)
            if len(index):
                masks = {t: targets[index] == t for t in TARGETS}
                self._parts.append((index, work.take(index), kind, masks, with_prefill[index]))

    def log_predict(self, sums: Mapping[str, Array]) -> Array:
        """[queries], from [queries] per term."""
        out = np.zeros(len(self.queries))
        for index, work, kind, masks, with_prefill in self._parts:
            c = {term: PRIORS[term].value(values[index]) for term, values in sums.items()}
            serving = _EQUATIONS[kind](work, c)
            tpot = serving.tpot_s
            if kind == "batch":
                tpot = np.where(with_prefill, work.concurrency / serving.output_tokens_per_s, tpot)
            values: dict[Target, Array] = {
                "tpot": tpot,
                "ttft": serving.ttft_s,
                "rate": serving.output_tokens_per_s,
            }
            out[index] = sum(np.where(masks[t], np.log(values[t] * c[BIAS[t]]), 0.0) for t in TARGETS)
        return out

    def sensitivities(self, sums: Mapping[str, Array]) -> tuple[Array, dict[str, Array]]:
        """Log predictions, and their derivative by each term's sum of effects, by differences."""
        base = self.log_predict(sums)
        step = 1e-4
        slopes = {}
        for term in sums:
            moved = dict(sums)
            moved[term] = sums[term] + step
            slopes[term] = (self.log_predict(moved) - base) / step
        return base, slopes


_EQUATIONS = {"closed": closed_loop, "batch": static_batch, "offline": offline}


@dataclass(frozen=True, slots=True)
class Observation:
    """A query and what was measured, in seconds or tokens per second of one replica."""

    measurement: Measurement
    query: Query
    value: float


def observe(measurements: Sequence[Measurement]) -> list[Observation]:
    """Every number that is a measurement of its own: derived throughputs are left out, and so are those of rows whose
    TPOT says the same."""
    found = []
    for m in measurements:
        regime = m.point.regime
        if regime in LATENCY_REGIMES:
            if m.tpot_s:
                found.append(Observation(m, Query(m.point, "tpot", m.tpot_includes_prefill), m.tpot_s))
            if m.ttft_s:
                found.append(Observation(m, Query(m.point, "ttft"), m.ttft_s))
        repeats = regime == "static-batch" and m.tpot_s is not None
        if m.output_tokens_per_s and not m.throughput_is_derived and not repeats:
            found.append(Observation(m, Query(m.point, "rate"), m.output_tokens_per_s / m.replicas))
    return found
