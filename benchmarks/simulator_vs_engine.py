"""Hold the simulator to the engine: calibrate two CPU stages, replay a trace on both, compare percentiles.

    make model
    python benchmarks/simulator_vs_engine.py .demo/SmolLM2-135M-Instruct

Needs a machine with two idle cores; takes a few minutes. Exit status 1: a percentile is more than 15% off.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import replace

import numpy as np
import yaml

from bimetal.catalog.links import LOOPBACK, LinkSpec
from bimetal.catalog.models import load_model_spec
from bimetal.engine.calibrate import measure
from bimetal.engine.driver.driver import Driver
from bimetal.engine.wire.api import Generate, SamplingParams
from bimetal.engine.wire.options import EngineOptions
from bimetal.perf.calibration import published_calibration
from bimetal.perf.device import fit_device, with_devices
from bimetal.plan import Plan, Replica, Stage, dump_plan
from bimetal.simulate.run import simulate
from bimetal.simulate.shapes import replica_shape
from bimetal.simulate.trace import Trace

MAX_MODEL_LEN = 768
MAX_NUM_SEQS = 8
PERCENTILES = (50, 95)
TOLERANCE_RATIO = 0.15


def make_trace(num_requests: int, requests_per_s: float, seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / requests_per_s, num_requests))
    inputs = rng.integers(16, 200, num_requests)
    outputs = rng.integers(8, 48, num_requests)
    return Trace(arrivals - arrivals[0], inputs.astype(np.int64), outputs.astype(np.int64))


def replay(driver: Driver, trace: Trace, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(TTFT, TPOT) in seconds, request by request, through the real engine."""
    rng = random.Random(seed)
    size = len(trace)
    first, last = np.full(size, np.nan), np.full(size, np.nan)
    began, submitted, done = time.perf_counter(), 0, 0
    while done < size:
        now = time.perf_counter() - began
        while submitted < size and trace.arrival_s[submitted] <= now:
            prompt = tuple(
                rng.randrange(driver.spec.vocab_size) for _ in range(int(trace.input_tokens[submitted]))
            )
            sampling = SamplingParams(
                max_tokens=int(trace.output_tokens[submitted]), temperature=0.0, ignore_eos=True
            )
            driver.submit(Generate(f"replay-{submitted}", prompt, sampling))
            submitted += 1
        wait = trace.arrival_s[submitted] - now if submitted < size else 1.0
        for output in driver.poll(max(min(wait, 1.0), 0.0005)) or ():
            i = int(output.request_id.split("-")[1])
            at = time.perf_counter() - began
            if output.token_ids:
                first[i] = at if np.isnan(first[i]) else first[i]
                last[i] = at
            done += output.finish_reason is not None
    rest = np.maximum(trace.output_tokens - 1, 1)
    return first - trace.arrival_s, (last - first) / rest


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=0.8, help="requests per second")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    spec = load_model_spec(arguments.model)
    cut = spec.num_layers * 17 // 30
    stages = tuple(
        Stage(node="local", gpu="cpu", start_layer=a, end_layer=b, num_threads=1)
        for a, b in ((0, cut), (cut, spec.num_layers))
    )
    plan = Plan(arguments.model, (Replica("replica-0", stages),), "float32", MAX_MODEL_LEN, MAX_NUM_SEQS)
    options = EngineOptions(plan=yaml.safe_load(dump_plan(plan)), enable_prefix_caching=False)
    driver = Driver(options)
    try:
        driver.start()
        samples = measure(driver, lambda text: print(f"measured {text}", file=sys.stderr))
        device = fit_device(samples.steps, samples.prompts, samples.hop_s, "today")
        print(f"calibrated on {device.num_samples} samples, median error {device.median_error_ratio:.1%}")
        trace = make_trace(arguments.requests, arguments.rate, arguments.seed)
        ttft, tpot = replay(driver, trace, arguments.seed)
        budget, timed = driver.max_num_batched_tokens, tuple(driver.decode_step_s)
    finally:
        driver.stop()

    calibration = with_devices(published_calibration(), {device.device: device})
    link = LinkSpec("measured", LOOPBACK.bandwidth_bytes_per_s, device.hop_s or 0.0)
    shape = replica_shape(
        plan, plan.replicas[0], lambda a, b: link, max_num_batched_tokens=budget, calibration=calibration
    )
    run = simulate(trace, [replace(shape, max_num_seqs=MAX_NUM_SEQS, decode_step_s=timed)], [1.0])
    worst = 0.0
    for name, real, modelled in (("TTFT", ttft, run.ttft_s), ("TPOT", tpot, run.tpot_s)):
        for p in PERCENTILES:
            a, b = np.nanpercentile(real, p), np.nanpercentile(modelled, p)
            worst = max(worst, abs(b / a - 1))
            print(f"{name} p{p}: engine {a * 1e3:8.1f} ms, simulator {b * 1e3:8.1f} ms, {b / a - 1:+.1%}")
    return int(worst > TOLERANCE_RATIO)


if __name__ == "__main__":
    sys.exit(main())
