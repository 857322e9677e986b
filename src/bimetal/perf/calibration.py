"""`Calibration`: the fitted coefficients, and predictions from them with intervals.

Owns the coefficients file and what is said of a GPU, engine or model that no row was fitted on. Needs numpy only. How the
numbers were found is `fit`'s business.

A prediction is uncertain twice: in its effects, of which the file carries joint draws, and by the noise of what is
measured. Draws are shared: two plans priced with one draw are wrong together where they rest on the same effects, so that
their difference is surer than either. An effect that was never seen is drawn from its level's width, the same for
everyone who asks. Where a model was never measured on a GPU, or the GPU never at all, an error common to all of the
pair's predictions comes on top (`intervals`), drawn alike for everyone who asks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bimetal.errors import ConfigError
from bimetal.perf.hierarchy import PRIORS, Design, Effect, build_design, level_keys
from bimetal.perf.observations import BIAS, Predictor, Query, Target
from bimetal.perf.point import ServingPoint
from bimetal.perf.work import Array

COEFFICIENTS_FILE = "coefficients.json"
DRAWS_FILE = "coefficients_draws.npy"
NUM_DRAWS = 64
STUDENT_T_90 = 2.132
"""95th percentile of Student's t with four degrees of freedom, by which the noise is distributed."""
NORMAL_90 = 1.645


@dataclass(frozen=True, slots=True)
class Prediction:
    """One number with its 90% interval, and what it rests on."""

    value: float
    low: float
    high: float
    log_sd: float
    rests_on: str


@dataclass(frozen=True)
class Calibration:
    """Coefficients as found by `fit` on `date`."""

    date: str
    num_rows: Mapping[str, int]
    """Observations per target."""
    rows_of_gpu: Mapping[str, int]
    noise: Mapping[Target, float]
    """Scale of log residuals, Student's t with four degrees of freedom."""
    interval_scale: Mapping[str, Mapping[Target, float]]
    """By vendor: what widens or narrows intervals to cover 90% of rows that were left out."""
    widths: Mapping[tuple[str, str], float]
    """Of the prior of each term and level."""
    effects: Mapping[Effect, float]
    draws: NDArray[np.float64]
    """[draws, effects]: deviations from the effects."""
    models_of_gpu: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Models with a row on each GPU."""
    doubt: Mapping[str, Mapping[Target, float]] = field(default_factory=dict)
    """Log half-width of what no row shows, by what was never measured: `pair` of GPU and model, or `gpu`."""
    measured: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Terms of devices that the user measured, by name, in place of the fitted ones."""

    @cached_property
    def _known(self) -> tuple[tuple[Effect, ...], Array]:
        return tuple(self.effects), np.array(list(self.effects.values()))

    @cached_property
    def _memo(self) -> dict[tuple[tuple[str, ...], int | None], dict[str, float]]:
        return {}

    def coefficients(self, points: Sequence[ServingPoint], draw: int | None = None) -> dict[str, Array]:
        """Each term's coefficient for each point; of draw `draw`, or the most likely ones."""
        found = []
        for point in points:
            key = (*level_keys(point), point.gpu.name, point.model.name)
            if (key, draw) not in self._memo:
                self._memo[key, draw] = self._coefficients_of(point, draw)
            found.append(self._memo[key, draw])
        return {term: np.array([c[term] for c in found]) for term in PRIORS}

    def _coefficients_of(self, point: ServingPoint, draw: int | None) -> dict[str, float]:
        known, _ = self._known
        design = build_design([point], known)
        sums = _add_up(design, self._all_effects(design)[-1 if draw is None else draw])
        found = {term: float(PRIORS[term].value(total)[0]) for term, total in sums.items()}
        unseen = self.unseen(point)
        if draw is not None and unseen:
            name = point.gpu.name if unseen == "gpu" else f"{point.gpu.name}/{point.model.name}"
            for target, half in self.doubt.get(unseen, {}).items():
                luck = _standard_draws(Effect(BIAS[target], unseen, name), len(self.draws))[draw]
                found[BIAS[target]] *= float(np.exp(half / NORMAL_90 * luck))
        return found

    def unseen(self, point: ServingPoint) -> str:
        """`gpu` if no row is of the point's GPU, `pair` if none is of its model on it, else empty."""
        if point.gpu.name not in self.models_of_gpu:
            return "gpu"
        return "" if point.model.name in self.models_of_gpu[point.gpu.name] else "pair"

    def predict(self, queries: Sequence[Query]) -> list[Prediction]:
        """In the order of `queries`; seconds or tokens per second."""
        if not queries:
            return []
        points = [q.point for q in queries]
        known, _ = self._known
        design = build_design(points, known)
        predictor = Predictor(queries)
        logs = np.array([predictor.log_predict(_add_up(design, row)) for row in self._all_effects(design)])
        centre, spread = logs[-1], np.sqrt(((logs[:-1] - logs[-1]) ** 2).mean(axis=0))
        predictions = []
        for i, query in enumerate(queries):
            noise = self.noise[query.target]
            scales = self.interval_scale.get(query.point.gpu.vendor) or {}
            doubt = self.doubt.get(self.unseen(query.point), {}).get(query.target, 0.0)
            half = scales.get(query.target, 1.0) * np.hypot(NORMAL_90 * spread[i], STUDENT_T_90 * noise)
            half = np.hypot(half, doubt)
            value = float(np.exp(centre[i]))
            predictions.append(
                Prediction(
                    value=value,
                    low=value * float(np.exp(-half)),
                    high=value * float(np.exp(half)),
                    log_sd=float(np.hypot(np.hypot(spread[i], noise), doubt / NORMAL_90)),
                    rests_on=self.rests_on(query.point),
                )
            )
        return predictions

    def rests_on(self, point: ServingPoint) -> str:
        """For people: rows of this GPU, or its datasheet alone."""
        rows = self.rows_of_gpu.get(point.gpu.name, 0)
        if rows:
            lacking = f", none with {point.model.name}" if self.unseen(point) == "pair" else ""
            return f"{rows} measurements of {point.gpu.name}{lacking}"
        doubt = " (unverified)" if point.gpu.unverified_of("memory_bytes_per_s", "bf16_flops_per_s") else ""
        return f"the datasheet of {point.gpu.name}{doubt} and measurements of other GPUs"

    def _all_effects(self, design: Design) -> Array:
        """[draws + 1, effects], the last row the most likely ones."""
        _, known = self._known
        unknown = design.effects[len(known) :]
        table = np.zeros((len(self.draws) + 1, len(design.effects)))
        table[:, : len(known)] = known
        table[:-1, : len(known)] += self.draws
        for i, effect in enumerate(unknown, start=len(known)):
            table[:-1, i] = self._width(effect) * _standard_draws(effect, len(self.draws))
        return table

    def _width(self, effect: Effect) -> float:
        return self.widths.get((effect.term, effect.level), PRIORS[effect.term].level_sd(effect.level))

    def to_json(self) -> str:
        """The coefficients file; draws go beside it."""
        tree: dict[str, dict[str, dict[str, float]]] = {}
        for effect, value in self.effects.items():
            tree.setdefault(effect.term, {}).setdefault(effect.level, {})[effect.key] = round(value, 5)
        widths: dict[str, dict[str, float]] = {}
        for (term, level), width in self.widths.items():
            widths.setdefault(term, {})[level] = round(width, 5)
        document = {
            "version": 2,
            "date": self.date,
            "num_rows": dict(self.num_rows),
            "rows_of_gpu": dict(self.rows_of_gpu),
            "noise": {target: round(noise, 5) for target, noise in self.noise.items()},
            "interval_scale": {vendor: dict(scales) for vendor, scales in self.interval_scale.items()},
            "models_of_gpu": {gpu: list(models) for gpu, models in self.models_of_gpu.items()},
            "doubt": {unseen: dict(halves) for unseen, halves in self.doubt.items()},
            "widths": widths,
            "effects": tree,
        }
        return json.dumps(document, indent=1) + "\n"


def _add_up(design: Design, effects: Array) -> dict[str, Array]:
    return {term: effects[columns].sum(axis=0) for term, columns in design.columns.items()}


def _standard_draws(effect: Effect, number: int) -> Array:
    name = f"{effect.term}|{effect.level}|{effect.key}".encode()
    seed = int.from_bytes(hashlib.sha256(name).digest()[:8], "big")
    return np.random.default_rng(seed).standard_normal(number)


def parse_calibration(text: str, draws: NDArray[np.float64], source: str) -> Calibration:
    """From the two files' contents; ConfigError says what does not fit."""
    try:
        document = json.loads(text)
        effects = {
            Effect(term, level, key): float(value)
            for term, levels in document["effects"].items()
            for level, keys in levels.items()
            for key, value in keys.items()
        }
        calibration = Calibration(
            date=document["date"],
            num_rows=document["num_rows"],
            rows_of_gpu=document["rows_of_gpu"],
            noise=document["noise"],
            interval_scale=document["interval_scale"],
            widths={(t, level): w for t, levels in document["widths"].items() for level, w in levels.items()},
            effects=effects,
            draws=draws,
            models_of_gpu=document.get("models_of_gpu", {}),
            doubt=document.get("doubt", {}),
        )
    except (json.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{source}: no coefficients file of this version: make one with `bimetal perf fit`"
        ) from error
    if draws.ndim != 2 or draws.shape[1] != len(effects):
        raise ConfigError(
            f"{source}: {len(effects)} effects, but draws of shape {draws.shape}: the two files are of different fits"
        )
    return calibration


def load_calibration(folder: Path) -> Calibration:
    """From the folder that `bimetal perf fit -o` wrote."""
    try:
        text = (folder / COEFFICIENTS_FILE).read_text(encoding="utf-8")
        draws = np.load(folder / DRAWS_FILE, allow_pickle=False).astype(np.float64)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: {error}: give a folder written by `bimetal perf fit -o`") from error
    return parse_calibration(text, draws, str(folder))


@cache
def published_calibration() -> Calibration:
    """The coefficients that bimetal carries."""
    data = resources.files("bimetal.catalog") / "data"
    draws = np.load(BytesIO((data / DRAWS_FILE).read_bytes()), allow_pickle=False).astype(np.float64)
    return parse_calibration((data / COEFFICIENTS_FILE).read_text(encoding="utf-8"), draws, COEFFICIENTS_FILE)


def save_calibration(calibration: Calibration, folder: Path) -> None:
    """Both files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / COEFFICIENTS_FILE).write_text(calibration.to_json(), encoding="utf-8")
    np.save(folder / DRAWS_FILE, calibration.draws.astype(np.float16))
