"""A device's terms are found again from what they made, and planning uses them."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("scipy")

from bimetal.catalog.hardware import cpu_spec
from bimetal.catalog.models import builtin_model
from bimetal.errors import ConfigError
from bimetal.perf.calibration import published_calibration
from bimetal.perf.device import (
    PromptSample,
    StepSample,
    fit_device,
    load_devices,
    prompt_s,
    save_devices,
    with_devices,
)
from bimetal.perf.stage_clock import stage_clock
from bimetal.perf.step_time import StageShape, decode_step
from bimetal.policy.batching import prompt_chunks

CPU = cpu_spec()
MODEL = builtin_model("Llama-3.1-8B")
STAGES = (StageShape(MODEL, 0, 20, CPU, dtype="float32"), StageShape(MODEL, 20, 32, CPU, dtype="float32"))
TRUTH = {
    "weight_rate": 0.8,
    "decode_rate": 2.5,
    "cache_rate": 0.5,
    "prefill_rate": 3.0,
    "attend_rate": 1.5,
    "step_s": 4e-3,
    "layer_s": 2e-4,
    "sequence_s": 3e-3,
    "prompt_s": 5e-3,
}


def samples(noise=0.0):
    calibration = replace(published_calibration(), measured={"cpu": TRUTH})
    rng = np.random.default_rng(0)
    clocks = [stage_clock(shape, calibration) for shape in STAGES]
    steps = [
        StepSample(shape, n, context, clock.step_s(n, n * context) * float(np.exp(rng.normal(0, noise))))
        for shape, clock in zip(STAGES, clocks, strict=True)
        for n, context in ((1, 50), (2, 50), (4, 50), (8, 50), (16, 50), (1, 4000), (8, 4000))
    ]
    prompts = [
        PromptSample(
            STAGES,
            prompt_chunks(tokens, 512, 1),
            prompt_s(clocks, prompt_chunks(tokens, 512, 1)) * float(np.exp(rng.normal(0, noise))),
        )
        for tokens in (16, 128, 1000, 4000)
    ]
    return steps, prompts


def test_steps_between_the_measured_ones_are_predicted():
    steps, prompts = samples(noise=0.02)
    device = fit_device(steps, prompts, 1e-4, "2026-01-01")
    assert device.median_error_ratio < 0.03
    truth = replace(published_calibration(), measured={"cpu": TRUTH})
    found = with_devices(published_calibration(), {"cpu": device})
    for n, context in ((3, 500), (12, 2000), (6, 100)):
        shape = StageShape(MODEL, 5, 32, CPU, dtype="float32")
        expected = decode_step(shape, n, context, truth).step_s
        assert decode_step(shape, n, context, found).step_s == pytest.approx(expected, rel=0.05)
    assert decode_step(STAGES[0], 1, 1).step_s != pytest.approx(
        decode_step(STAGES[0], 1, 1, found).step_s, rel=0.05
    )


def test_chunks_follow_each_other_through_the_stages():
    clocks = [stage_clock(shape) for shape in STAGES]
    whole = prompt_s(clocks, [1000])
    assert whole == pytest.approx(sum(c.step_s(0, 0, 1000, 1000 * 500, 1) for c in clocks))
    assert max(c.step_s(0, 0, 1000, 1000 * 500, 1) for c in clocks) < prompt_s(clocks, [250] * 4) < whole


def test_files(tmp_path):
    steps, prompts = samples()
    device = fit_device(steps, prompts, None, "2026-01-01")
    path = tmp_path / "c.json"
    save_devices([device], path)
    assert load_devices(path) == {"cpu": device}
    path.write_text('{"devices": [{"device": "cpu"}]}')
    with pytest.raises(ConfigError, match="not a file of `bimetal calibrate`"):
        load_devices(path)
    with pytest.raises(ConfigError, match="No such file"):
        load_devices(tmp_path / "none")
    with pytest.raises(ConfigError, match="a folder that exists"):
        save_devices([device], tmp_path / "no" / "c.json")


def test_too_few_samples_and_mixed_devices():
    steps, prompts = samples()
    with pytest.raises(ConfigError, match="2 samples are too few"):
        fit_device(steps[:2], [], None, "2026-01-01")
    other = replace(steps[0], shape=replace(steps[0].shape, device=replace(CPU, name="other")))
    with pytest.raises(ConfigError, match="one device at a time"):
        fit_device([*steps, other], prompts, None, "2026-01-01")
