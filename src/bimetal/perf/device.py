"""`MeasuredDevice`: one user's device as measured, and the fit that finds its terms.

The equations are those of every other prediction; a handful of timed steps and prompts finds the terms that a device has
of its own. Needs scipy to fit, nothing to use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bimetal.errors import ConfigError
from bimetal.perf.calibration import Calibration
from bimetal.perf.stage_clock import StageClock, clock_of
from bimetal.perf.step_time import StageShape, coefficients_of

FITTED = (
    *("weight_rate", "decode_rate", "cache_rate", "prefill_rate", "attend_rate"),
    *("step_s", "layer_s", "sequence_s", "prompt_s"),
)
FIRST_S = {"step_s": 1e-3, "layer_s": 2e-5, "sequence_s": 1e-4, "prompt_s": 2e-3}
"""For a CPU, of whose overheads nothing is known."""
PRIOR_LOG_SD = 1.5
NOISE_RATIO = 0.05
LEAST_SAMPLES = 4


@dataclass(frozen=True, slots=True)
class StepSample:
    """A stage's mean decode step of `num_seqs` sequences at `context` tokens each."""

    shape: StageShape
    num_seqs: float
    context: float
    step_s: float


@dataclass(frozen=True, slots=True)
class PromptSample:
    """Time to first token of one prompt alone, through stages in order, hops taken off."""

    shapes: tuple[StageShape, ...]
    chunks: tuple[int, ...]
    """Tokens of it in each step, as the engine cut it."""
    seconds: float


@dataclass(frozen=True, slots=True)
class MeasuredDevice:
    """Terms by name, in place of the published ones."""

    device: str
    date: str
    terms: Mapping[str, float]
    hop_s: float | None
    """One way between neighbouring stages, the driver's own time included; None: one stage alone was measured."""
    median_error_ratio: float
    """Of the samples, as fitted."""
    num_samples: int


def prompt_s(clocks: Sequence[StageClock], chunks: Sequence[int]) -> float:
    """Chunks follow each other through the stages, each stage busy with one at a time."""
    free = [0.0] * len(clocks)
    done = 0
    end = 0.0
    for number, chunk in enumerate(chunks):
        is_last = number == len(chunks) - 1
        end = 0.0
        for i, clock in enumerate(clocks):
            end = max(end, free[i]) + clock.step_s(0, 0, chunk, chunk * (done + chunk / 2), float(is_last))
            free[i] = end
        done += chunk
    return end


def fit_device(
    steps: Sequence[StepSample], prompts: Sequence[PromptSample], hop_s: float | None, date: str
) -> MeasuredDevice:
    """Least squares on logarithms, drawn weakly towards what the device's figures promise."""
    from scipy.optimize import least_squares

    if len(steps) + len(prompts) < LEAST_SAMPLES:
        raise ConfigError(
            f"{len(steps) + len(prompts)} samples are too few to calibrate: measure at least {LEAST_SAMPLES}"
        )
    shapes = list(dict.fromkeys([*(s.shape for s in steps), *(shape for p in prompts for shape in p.shapes)]))
    devices = {shape.device.name for shape in shapes}
    if len(devices) != 1:
        raise ConfigError(
            f"stages on {', '.join(sorted(devices))} were measured together: calibrate one device at a time"
        )
    base = {term: float(values[0]) for term, values in coefficients_of(shapes[:1]).items()}
    is_cpu = shapes[0].device.is_cpu
    first = np.log([FIRST_S.get(term, base[term]) if is_cpu else base[term] for term in FITTED])
    measured = np.log([*(s.step_s for s in steps), *(p.seconds for p in prompts)])

    def predict(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        terms = base | dict(zip(FITTED, np.exp(logs).tolist(), strict=True))
        clocks = {
            shape: clock_of(shape, {term: np.array([v]) for term, v in terms.items()}) for shape in shapes
        }
        values = [clocks[s.shape].step_s(s.num_seqs, s.num_seqs * s.context) for s in steps]
        values += [prompt_s([clocks[shape] for shape in p.shapes], p.chunks) for p in prompts]
        return np.log(values)

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([(predict(logs) - measured) / NOISE_RATIO, (logs - first) / PRIOR_LOG_SD])

    found = least_squares(residuals, first, loss="soft_l1").x
    errors = np.abs(np.exp(predict(found) - measured) - 1)
    return MeasuredDevice(
        device=shapes[0].device.name,
        date=date,
        terms={term: float(f"{value:.4g}") for term, value in zip(FITTED, np.exp(found), strict=True)},
        hop_s=hop_s,
        median_error_ratio=round(float(np.median(errors)), 4),
        num_samples=len(measured),
    )


def save_devices(devices: Sequence[MeasuredDevice], path: Path) -> None:
    """As JSON, for `--coefficients`."""
    document = {"version": 1, "devices": [asdict(device) for device in devices]}
    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: give a path in a folder that exists") from error


def load_devices(path: Path) -> dict[str, MeasuredDevice]:
    """By device name."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        devices = [MeasuredDevice(**entry) for entry in document["devices"]]
        for device in devices:
            if set(device.terms) - set(FITTED) or not all(v > 0 for v in device.terms.values()):
                raise ValueError("terms")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: give a file written by `bimetal calibrate`") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a file of `bimetal calibrate`: measure again") from error
    return {device.device: device for device in devices}


def with_devices(calibration: Calibration, devices: Mapping[str, MeasuredDevice]) -> Calibration:
    """The calibration with the user's own devices in it."""
    return replace(calibration, measured={name: device.terms for name, device in devices.items()})
