"""Which coefficients there are, and how they are shared.

Each term's coefficient, on a scale where it may take any value, is a sum of effects: one common to all, and one for each level that the term
has (the die, the engine family on that die, the model, ...). Effects are drawn towards zero as strongly as the data say
(`fit`), so that a GPU, model or version with few rows, or none, borrows from its kin. Knows no numbers but the priors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bimetal.perf.point import ServingPoint

LEVELS: dict[str, Callable[[ServingPoint], str]] = {
    "gpu": lambda p: p.gpu.name,
    "die": lambda p: p.die,
    "engine": lambda p: p.engine,
    "format": lambda p: p.weight_format,
    "model": lambda p: p.model.name,
    "cache": lambda p: f"{p.kv_bytes:g} B",
    "engine/die": lambda p: f"{p.engine}/{p.die}",
    "engine/format": lambda p: f"{p.engine}/{p.weight_format}",
    "engine/die/format": lambda p: f"{p.engine}/{p.die}/{p.weight_format}",
    "engine/model": lambda p: f"{p.engine}/{p.model.name}",
    "engine/ranks": lambda p: f"{p.engine}/{p.tensor_parallel}",
    "setting": lambda p: f"{p.setting}/{p.engine}",
    "setting/regime": lambda p: f"{p.setting}/{p.engine}/{p.regime}",
    "setting/proportion": lambda p: f"{p.setting}/{p.engine}/{_proportion(p)}",
    "version": lambda p: f"{p.setting}/{p.engine}/{p.version}",
    "version/model": lambda p: f"{p.setting}/{p.engine}/{p.version}/{p.model.name}",
}


def level_keys(point: ServingPoint) -> tuple[str, ...]:
    """Points with equal keys have equal coefficients."""
    return tuple(key(point) for key in LEVELS.values())


def _proportion(p: ServingPoint) -> str:
    """Settings tune an engine for a kind of traffic: streaming interval, chunk size, place for prefill."""
    if p.input_tokens > 4 * p.output_tokens:
        return "long prompts"
    return "long answers" if p.output_tokens > 4 * p.input_tokens else "even"


CAP = 4.0
"""How sharply a share stops at 1. Below 0.7 effects multiply it, as losses do; with 1, a logit, an effect at 0.85 would
hardly show, and the fit would rather believe in slow memory, and in a correction that undoes it."""
TYPICAL_SD = 0.15
"""Of an effect on the logarithm, before the data say more."""
SLIGHT_SD = 0.02
"""Of a correction that physics should make needless."""


@dataclass(frozen=True, slots=True)
class Prior:
    """Of one term: its typical value, how far the common effect may be from it, the levels it varies with.

    Effects add up on the term's own scale: the logarithm, or for a share one that bends to stay below 1.
    """

    typical: float
    sd: float
    levels: tuple[str, ...]
    is_share: bool = False
    wide: Mapping[str, float] = field(default_factory=dict)
    """Levels whose effects are known to differ by more than `TYPICAL_SD`."""
    slight: bool = False

    @property
    def mean(self) -> float:
        if self.is_share:
            return float(-np.log(self.typical**-CAP - 1) / CAP)
        return float(np.log(self.typical))

    def value(self, sum_of_effects: NDArray[np.float64]) -> NDArray[np.float64]:
        """From the term's scale to its coefficient."""
        if self.is_share:
            share: NDArray[np.float64] = (1 + np.exp(-CAP * sum_of_effects)) ** (-1 / CAP)
            return share
        return np.exp(sum_of_effects)

    def level_sd(self, level: str) -> float:
        """Where the fit starts; it finds its own for each level."""
        return SLIGHT_SD if self.slight else self.wide.get(level, TYPICAL_SD)


_GEMM_LEVELS = ("die", "engine/format", "engine/die/format", "engine/model", "version")
"""Matrix products are kernels, and those are written for a die and a number format: what one format reaches on a die
says little of another's there."""
PRIORS: dict[str, Prior] = {
    "weight_rate": Prior(0.85, 0.3, (*_GEMM_LEVELS, "gpu", "model"), is_share=True),
    "expert_rate": Prior(
        *(0.6, 0.4, ("die", "engine", "engine/die/format", "model", "version")),
        is_share=True,
        # weights of 4 bits are unpacked on some dies, multiplied as they are on others
        wide={"engine/die/format": 0.4},
    ),
    "decode_rate": Prior(0.6, 0.4, _GEMM_LEVELS, is_share=True),
    "cache_rate": Prior(0.7, 0.3, ("die", "cache", "engine/die", "model", "version"), is_share=True),
    "reduce_rate": Prior(0.5, 0.4, ("die", "engine"), is_share=True),
    "prefill_rate": Prior(0.5, 0.4, (*_GEMM_LEVELS, "gpu"), is_share=True),
    "attend_rate": Prior(0.3, 0.6, ("die", "engine"), is_share=True),
    "spread": Prior(0.7, 1.0, ("model",), is_share=True),
    "gain": Prior(0.2, 1.0, ()),
    "hop_s": Prior(4e-6, 0.7, ("die", "engine/die", "engine/model")),
    "step_s": Prior(5e-4, 1.0, ("engine", "engine/model")),
    "layer_s": Prior(
        *(4e-5, 0.7, ("die", "engine", "engine/model", "engine/die/format", "version")),
        # replaying a captured graph, or launching every kernel from Python: a factor of 8
        wide={"engine": 1.0},
    ),
    "router_s": Prior(
        *(2e-5, 1.0, ("engine", "model", "engine/die/format")), wide={"engine": 0.5, "engine/die/format": 0.5}
    ),
    "sequence_s": Prior(1e-5, 1.0, ("engine", "model", "version")),
    "prompt_s": Prior(2e-3, 1.0, ("engine", "model")),
    "interference": Prior(1.0, 0.3, ("engine", "engine/model", "version")),
    "first": Prior(0.5, 1.0, ("setting", "setting/proportion")),
    "steps": Prior(2.0, 1.0, ("setting", "setting/proportion")),
    "burst": Prior(0.08, 1.0, ("setting", "setting/proportion")),
    "fill": Prior(0.7, 0.4, ("engine", "setting")),
    "tpot_bias": Prior(1.0, 0.005, ("engine/model", "version", "version/model"), slight=True),
    "ttft_bias": Prior(1.0, 0.3, ("engine/model", "engine/die/format", "setting/proportion", "version")),
    "rate_bias": Prior(1.0, 0.3, ("setting/regime", "engine/model", "engine/die/format", "version")),
}
"""TPOT has no free correction: one that was common to an engine on a die, or to a number of ranks, made every other term a
third too slow and undid it, which a model or a die that was never seen does not share."""


@dataclass(frozen=True, slots=True)
class Effect:
    """One number of the model. `level` is empty for the effect common to all."""

    term: str
    level: str
    key: str


@dataclass(frozen=True, slots=True)
class Design:
    """Effects in a fixed order, and for each term the effects that a point adds up, [levels + 1, points]."""

    effects: tuple[Effect, ...]
    columns: dict[str, NDArray[np.intp]]

    @property
    def prior_means(self) -> NDArray[np.float64]:
        return np.array([0.0 if e.level else PRIORS[e.term].mean for e in self.effects])

    @property
    def first_sds(self) -> NDArray[np.float64]:
        return np.array(
            [PRIORS[e.term].level_sd(e.level) if e.level else PRIORS[e.term].sd for e in self.effects]
        )


def build_design(points: Sequence[ServingPoint], known: Sequence[Effect] = ()) -> Design:
    """A design for `points`; effects in `known` come first and keep their order."""
    index = {effect: i for i, effect in enumerate(known)}

    def place(effect: Effect) -> int:
        return index.setdefault(effect, len(index))

    keys = {level: [key(p) for p in points] for level, key in LEVELS.items()}
    columns = {}
    for term, prior in PRIORS.items():
        common = place(Effect(term, "", ""))
        rows = [[common] * len(points)]
        rows += [[place(Effect(term, level, key)) for key in keys[level]] for level in prior.levels]
        columns[term] = np.array(rows, dtype=np.intp)
    return Design(tuple(index), columns)
