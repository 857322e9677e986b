"""The whole study: fit, leave rows out, widen or narrow intervals until they cover, write down what was found.

Owns which rows take part and which are scored apart. Needs scipy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from bimetal.perf.calibration import NUM_DRAWS, Calibration, save_calibration
from bimetal.perf.crossval import Held, gpu_folds, gpu_model_folds, hold_out, shape_folds
from bimetal.perf.fit import Fit, FitProblem
from bimetal.perf.intervals import Doubt, IntervalScale, Unseen, doubt_of, interval_scale, to_scored
from bimetal.perf.measurements import Measurement, MeasurementSet
from bimetal.perf.observations import TARGETS, observe
from bimetal.perf.report import accuracy_report

APART = ("DeepSeek-R1",)
"""Another attention and another layout of experts: fitted on its own effects after the rest, scored for itself."""
FIT_ROUNDS = 4
SEED = 20260101
RESIDUALS_FILE = "residuals.csv"


@dataclass(frozen=True, slots=True)
class Study:
    """What a fit and its cross-validation found."""

    calibration: Calibration
    report: str
    residuals: str
    """CSV: every observation as measured, as fitted, and as predicted without its shape."""


def takes_part(m: Measurement) -> bool:
    """Split prefill is another system, and the power-capped rows differ from uncapped ones by a constant factor only."""
    return not m.disaggregated and not m.power_capped


def run_study(rows: MeasurementSet, date: str, progress: Callable[[str], None]) -> Study:
    """Minutes of computing; `progress` gets a line now and then."""
    problem = FitProblem(observe([m for m in rows.measurements if takes_part(m)]))
    apart = np.array([o.query.point.model.name in APART for o in problem.observations])
    progress(f"fitting {len(problem.design.effects)} effects to {len(problem.observations)} observations")
    main = problem.fit(~apart, rounds=FIT_ROUNDS)
    fit = problem.extend(main, np.ones(len(apart), bool), apart) if apart.any() else main
    gpu_model = hold_out(
        problem,
        _without(gpu_model_folds(problem), apart),
        fit,
        lambda text: progress(f"by GPU and model, {text}"),
        apart,
    )
    gpu = hold_out(
        problem, _without(gpu_folds(problem), apart), fit, lambda text: progress(f"by GPU, {text}"), apart
    )
    shape = hold_out(problem, shape_folds(problem), fit, lambda text: progress(f"by shape, {text}"), apart)
    scale = interval_scale([h for h in shape if h.observation.query.point.model.name not in APART])
    doubt: dict[Unseen, Doubt] = {
        "pair": doubt_of(gpu_model, scale, "pair"),
        "gpu": doubt_of(gpu, scale, "gpu"),
    }
    calibration = to_calibration(problem, fit, scale, date, doubt)
    scored = to_scored(shape, scale)
    report = accuracy_report(
        rows,
        calibration,
        [s for s in scored if s.model not in APART],
        to_scored(gpu_model, scale, "pair"),
        to_scored(gpu, scale, "gpu"),
        [s for s in scored if s.model in APART],
    )
    return Study(calibration, report, _residuals(problem, fit, shape))


def _without(folds: Sequence[int], apart: NDArray[np.bool_]) -> list[int]:
    """Folds that leave out nothing of what is scored apart."""
    return [-1 if is_apart else fold for fold, is_apart in zip(folds, apart, strict=True)]


def to_calibration(
    problem: FitProblem,
    fit: Fit,
    scale: IntervalScale,
    date: str,
    doubt: Mapping[Unseen, Doubt] | None = None,
) -> Calibration:
    """Effects that observations say something of, with joint draws from their posterior."""
    active = fit.active
    normal = np.random.default_rng(SEED).standard_normal((len(active), NUM_DRAWS))
    draws = solve_triangular(fit.precision_root, normal).T
    effects = {problem.design.effects[i]: float(fit.effects[i]) for i in active}
    column = {effect: n for n, effect in enumerate(effects)}
    nested = sorted(effects, key=lambda e: (e.term, e.level, e.key))  # the order of the file, which is a tree
    rows_of_gpu: dict[str, int] = {}
    models_of_gpu: dict[str, set[str]] = {}
    for o in problem.observations:
        name = o.query.point.gpu.name
        rows_of_gpu[name] = rows_of_gpu.get(name, 0) + 1
        models_of_gpu.setdefault(name, set()).add(o.query.point.model.name)
    return Calibration(
        date=date,
        num_rows={t: int((problem.targets == t).sum()) for t in TARGETS},
        rows_of_gpu=rows_of_gpu,
        noise={t: fit.noise[t] for t in TARGETS},
        interval_scale=scale,
        widths={
            (e.term, e.level): float(fit.sds[i]) for i, e in enumerate(problem.design.effects) if e.level
        },
        effects={effect: effects[effect] for effect in nested},
        draws=draws[:, [column[effect] for effect in nested]],
        models_of_gpu={name: sorted(models) for name, models in models_of_gpu.items()},
        doubt={unseen: dict(halves) for unseen, halves in (doubt or {}).items()},
    )


def _residuals(problem: FitProblem, fit: Fit, shape: Sequence[Held]) -> str:
    fitted = np.exp(problem.predict(fit.effects))
    held = {id(h.observation): h.predicted for h in shape}
    lines = ["row,target,measured,fitted,held_out"]
    for observation, value in zip(problem.observations, fitted, strict=True):
        out = held.get(id(observation))
        numbers = f"{observation.value:.5g},{value:.5g},{'' if out is None else f'{out:.5g}'}"
        lines.append(f"{observation.measurement.row},{observation.query.target},{numbers}")
    return "\n".join(lines) + "\n"


def save_study(study: Study, folder: Path, report: Path | None) -> None:
    """Coefficients, draws and residuals into `folder`; the report where asked."""
    save_calibration(study.calibration, folder)
    (folder / RESIDUALS_FILE).write_text(study.residuals, encoding="utf-8")
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(study.report, encoding="utf-8")
