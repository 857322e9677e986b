"""Times both ways of multiplying by FP8 weights with a scale a row: the vendor's FP8 product, and Triton's program that
widens them in registers. Prints which is faster by number of rows, as lines for `engine/kernels/data/`.

usage: PYTHONPATH=src python benchmarks/scaled_products.py [--shapes 4096x4096,...] [--rows 1,8,...]

Without a GPU it runs only with TRITON_INTERPRET=1, for which no time means anything.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch
import triton

from bimetal.engine.kernels.architecture import ARCHITECTURES
from bimetal.engine.kernels.choices import Choice, Implementation
from bimetal.engine.kernels.encoding import E4M3FN, Encoding, ScaledWeight
from bimetal.engine.kernels.registry import Launcher
from bimetal.engine.kernels.specs import SPECS
from bimetal.engine.kernels.triton_kernels import device_architecture
from bimetal.engine.kernels.triton_scaled import ScaledProducts

SHAPES = "6144x4096,4096x4096,28672x4096,4096x14336"
"""Llama-3.1-8B's, rows by columns of the weight."""
ROWS = "1,8,16,32,64,128,256,512,2048,8192"
REPEATS, CALLS = 7, 20


def time_s(run: Callable[[], Any], on_gpu: bool) -> float:
    """Median seconds of a call; on a GPU inside a graph, so that launches cost nothing."""
    run()
    if not on_gpu:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / CALLS)
    return statistics.median(times)


def measure(
    shapes: list[tuple[int, int]], rows: list[int], device: torch.device
) -> dict[int, dict[str, float]]:
    """By number of rows: seconds over all shapes, of each implementation."""
    on_gpu = device.type == "cuda"
    architecture = device_architecture(device) if on_gpu else ARCHITECTURES["sm_90"]
    ways: dict[Implementation, ScaledProducts] = {
        way: ScaledProducts(Launcher(SPECS, architecture), [Choice("scaled_linear", way, None, "forced")])
        for way in ("library", "program")
    }
    weights = []
    for shape in shapes:
        payload = torch.randn(shape, device=device).mul(100).clamp(-448, 448).to(E4M3FN)
        scale = torch.full((shape[0], 1), 1e-3, device=device)
        weights.append(ScaledWeight(payload, scale, Encoding(E4M3FN)).as_dtype(ways["library"].dtype))
    found = {}
    for number in rows:
        totals = {}
        for way, products in ways.items():
            seconds = 0.0
            for weight in weights:
                x = torch.randn(number, weight.payload.shape[1], device=device).bfloat16()
                seconds += time_s(lambda p=products, x=x, w=weight: p.linear(x, w, None), on_gpu)
            totals[way] = seconds
        found[number] = totals
        winner = min(totals, key=lambda way: totals[way])
        print(f"{number:6} rows: library {totals['library'] * 1e6:9.1f} us, program {totals['program'] * 1e6:9.1f} us: {winner}")  # fmt: skip
    return found


def choices(found: dict[int, dict[str, float]], source: str) -> list[dict[str, Any]]:
    """Neighbouring sizes that one way wins become one bucket; the last holds all that is larger."""
    listed: list[dict[str, Any]] = []
    for number, totals in sorted(found.items()):
        winner = min(totals, key=lambda way: totals[way])
        if listed and listed[-1]["implementation"] == winner:
            listed[-1]["up_to"] = number
        else:
            listed.append({"operation": "scaled_linear", "implementation": winner, "up_to": number})
    del listed[-1]["up_to"]
    return [{**each, "source": source} for each in listed]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--rows", default=ROWS)
    options = parser.parse_args()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not interpreted and not torch.cuda.is_available():
        raise SystemExit("no GPU here: run it on the machine that the data is for")
    device = torch.device("cpu" if interpreted else "cuda")
    shapes = [(int(a), int(b)) for a, b in (s.split("x") for s in options.shapes.split(","))]
    found = measure(shapes, [int(n) for n in options.rows.split(",")], device)
    name = "the interpreter" if interpreted else torch.cuda.get_device_name()
    today = datetime.now(UTC).date()
    source = f"benchmarks/scaled_products.py on {name}, torch {torch.__version__}, triton {triton.__version__}, {today}"
    print(json.dumps(choices(found, source), indent=2))


if __name__ == "__main__":
    main()
