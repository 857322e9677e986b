"""Two CPU stages of one thread each against one stage: twice the requests, and one request alone. Beside it, what the machine
itself allows: two engines of one stage, each with half of the requests, at the same time.

usage: python benchmarks/split_on_cpu.py .demo/SmolLM2-135M-Instruct [--layers 17,13] [--rounds 7]

All engines are up, those that do not run sleep, and they take turns: what else the machine does (its memory is what
CPU decoding lives on) meets both alike. Prints output tokens per second, medians over the rounds, and the median and
quartiles of the rounds' ratios. Needs two idle cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path

from bimetal.catalog.models import load_model_spec
from bimetal.engine.bench import Result, Workload, run_workload
from bimetal.engine.driver.driver import Driver
from bimetal.engine.wire.options import EngineOptions

INPUT_TOKENS, OUTPUT_TOKENS = 32, 64
PAIRS = ((4, 8), (1, 1))
"""Requests on one stage, requests on two."""


def make_driver(model: Path, layers: list[int]) -> Driver:
    stages = [
        {"node": "local", "gpu": "cpu", "start_layer": start, "end_layer": end, "num_threads": 1}
        for start, end in pairwise(accumulate(layers, initial=0))
    ]
    plan = {"model": str(model), "dtype": "float32", "replicas": [{"name": "replica-0", "stages": stages}]}
    return Driver(EngineOptions(plan={**plan, "max_model_len": 2048, "max_num_seqs": 16}))


def rate_side_by_side(drivers: list[Driver], workload: Workload, seed: int) -> float:
    """Output tokens per second of all engines together, each on this workload."""
    with ThreadPoolExecutor(len(drivers)) as threads:
        runs = [threads.submit(run_workload, driver, workload, seed) for driver in drivers]
        slowest_s = max(run.result().duration_s for run in runs)
    return len(drivers) * workload.num_requests * workload.output_tokens / slowest_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--layers", default="17,13")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    layers = [int(n) for n in options.layers.split(",")]
    drivers = [make_driver(options.model, [load_model_spec(str(options.model)).num_layers])]
    drivers.append(make_driver(options.model, layers))
    drivers.append(make_driver(options.model, [sum(layers)]))
    single, split, beside = drivers
    ceilings = []
    results: dict[tuple[int, int], list[tuple[Result, Result]]] = {pair: [] for pair in PAIRS}
    try:
        for driver in drivers:
            driver.start()
            run_workload(driver, Workload(8, INPUT_TOKENS, 8), seed=0)
        for seed in range(1, options.rounds + 1):
            for pair in PAIRS:
                one, two = (
                    run_workload(driver, Workload(n, INPUT_TOKENS, OUTPUT_TOKENS), seed)
                    for driver, n in zip((single, split), pair, strict=True)
                )
                results[pair].append((one, two))
                ratio = two.output_tokens_per_s / one.output_tokens_per_s
                print(f"round {seed}: {one.workload} and {two.workload}: {ratio:.3f}", file=sys.stderr)
            rate = rate_side_by_side(
                [single, beside], Workload(PAIRS[0][0], INPUT_TOKENS, OUTPUT_TOKENS), seed
            )
            ceilings.append(rate / results[PAIRS[0]][-1][0].output_tokens_per_s)
            print(f"round {seed}: two engines side by side: {ceilings[-1]:.3f}", file=sys.stderr)
    finally:
        for driver in drivers:
            driver.stop()
    print("requests        one stage   two stages   ratio (quartiles)      boundary a round")
    for (few, many), found in results.items():
        one_rate = statistics.median(one.output_tokens_per_s for one, _ in found)
        two_rate = statistics.median(two.output_tokens_per_s for _, two in found)
        ratios = [two.output_tokens_per_s / one.output_tokens_per_s for one, two in found]
        low, middle, high = statistics.quantiles(ratios, n=4)
        boundary = statistics.median(two.decode.boundary_s for _, two in found if two.decode) * 1e3
        print(
            f"{few} and {many:<9} {one_rate:6.1f} tok/s {two_rate:6.1f} tok/s   {middle:.2f} ({low:.2f} to {high:.2f})"
            f"   {boundary:14.2f} ms"
        )
    print(f"two engines side by side, against one alone: {statistics.median(ceilings):.2f}")


if __name__ == "__main__":
    main()
