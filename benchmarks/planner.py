"""How fast a fleet of a thousand GPUs is planned, and how far from the optimum: enumeration included, simulation not.

    python benchmarks/planner.py [--scales 0.25 0.5 0.75 1] [--file examples/plans/six-kinds.yaml]

Each line is a process of its own, so that nothing is warm. The demand is the file's times the scale. The gap is between the
plan and a bound that holds for all templates, as `bimetal plan` prints it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter

EXAMPLE = Path(__file__).parents[1] / "examples" / "plans" / "six-kinds.yaml"
GAP = 0.01


def measure(path: Path, scale: float) -> dict[str, object]:
    """In this process: seconds from the first import on."""
    started = perf_counter()
    from bimetal.catalog.demand import load_demand
    from bimetal.perf.calibration import published_calibration
    from bimetal.planner.decide import FleetPlanner

    demand = load_demand(path)
    classes = tuple(
        replace(
            entry,
            rate_per_s=entry.rate_per_s and entry.rate_per_s * scale,
            requests=entry.requests and entry.requests * scale,
        )
        for entry in demand.demand
    )
    planner = FleetPlanner(replace(demand, demand=classes), path.parent, published_calibration())
    candidates = planner.candidates()
    enumerated = perf_counter()
    problem, optimum = planner.solve(candidates, gap=GAP, time_limit_s=max(1.0, 9.5 - (enumerated - started)))
    gpus = sum(number * problem.usage[t].sum() for (t, _), number in optimum.chosen.replicas.items())
    return {
        "templates": len(candidates),
        "gpus": int(gpus),
        "enumerate_s": enumerated - started,
        "solve_s": optimum.seconds,
        "total_s": perf_counter() - started,
        "gap": optimum.gap_ratio,
        "core": optimum.num_core,
        "usd_per_h": optimum.chosen.usd_per_h,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scales", type=float, nargs="+", default=[0.25, 0.5, 0.75, 1.0])
    parser.add_argument("--file", type=Path, default=EXAMPLE)
    parser.add_argument("--one", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(measure(arguments.file, arguments.one)))
        return
    print(
        "| demand | GPUs in use | templates | enumerate s | solve s | total s | gap | in the program | $/h |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for scale in arguments.scales:
        command = [sys.executable, __file__, "--one", str(scale), "--file", str(arguments.file)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"| {scale:g} | {done.stderr.strip().splitlines()[-1]} |")
            continue
        r = json.loads(done.stdout)
        print(
            f"| {scale:g} | {r['gpus']} | {r['templates']} | {r['enumerate_s']:.1f} | {r['solve_s']:.1f} | "
            f"{r['total_s']:.1f} | {r['gap']:.2%} | {r['core']} | {r['usd_per_h']:.0f} |"
        )


if __name__ == "__main__":
    main()
