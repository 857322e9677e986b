"""Predictions beside a file of measurements.

Owns which rows are scored and how they are labelled. Does not know how a table is printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bimetal.perf.calibration import Calibration, Prediction
from bimetal.perf.measurements import Measurement, MeasurementSet, Refusal, published
from bimetal.perf.observations import Observation, observe
from bimetal.perf.scores import Scored


@dataclass(frozen=True, slots=True)
class Validation:
    """A file's rows as scored, refused and recognised."""

    scored: tuple[Scored, ...]
    refusals: tuple[Refusal, ...]
    num_duplicates: int
    num_fitted: int
    """Scored numbers that the fit has seen: their errors say nothing of new rows."""
    num_filled_in: int
    """Rows of which something had to be assumed."""


def validate(rows: MeasurementSet, calibration: Calibration) -> Validation:
    """Every number that can be predicted, predicted."""
    observations = observe(rows.measurements)
    predictions = calibration.predict([o.query for o in observations])
    fitted = {_content(o) for o in observe(published().measurements)}
    return Validation(
        scored=tuple(score(o, p) for o, p in zip(observations, predictions, strict=True)),
        refusals=rows.refusals + _unscored(rows.measurements, observations),
        num_duplicates=rows.num_duplicates,
        num_fitted=sum(_content(o) in fitted for o in observations),
        num_filled_in=sum(bool(m.filled_in) for m in rows.measurements),
    )


def score(observation: Observation, prediction: Prediction) -> Scored:
    """With the labels of the observation's point."""
    return label(observation, prediction.value, prediction.low, prediction.high)


def label(observation: Observation, predicted: float, low: float, high: float) -> Scored:
    """The same from bare numbers."""
    p = observation.query.point
    return Scored(
        row=observation.measurement.row,
        target=observation.query.target,
        gpu=p.gpu.name,
        vendor=p.gpu.vendor,
        model=p.model.name,
        engine=p.engine,
        regime=p.regime,
        shape=f"{p.weight_format} tp{p.tensor_parallel} {p.input_tokens:.0f}/{p.output_tokens:.0f}",
        measured=observation.value,
        predicted=predicted,
        low=low,
        high=high,
    )


def _unscored(
    measurements: Sequence[Measurement], observations: Sequence[Observation]
) -> tuple[Refusal, ...]:
    used = {id(o.measurement) for o in observations}
    reason = (
        "its throughput is derived from other numbers, and its latencies are of a load that is not modelled"
    )
    return tuple(
        Refusal(m.row, m.point.gpu.name, m.point.model.name, m.point.engine, reason)
        for m in measurements
        if id(m) not in used
    )


def _content(o: Observation) -> tuple[object, ...]:
    return (o.measurement.group, o.query.point.engine, o.query.point.concurrency, o.query.target, o.value)
