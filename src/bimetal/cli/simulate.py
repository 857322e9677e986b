"""`bimetal simulate`: a plan under a trace, on modelled time."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bimetal.cli.float_range import FloatRange

if TYPE_CHECKING:
    from bimetal.simulate.run import Simulation
    from bimetal.simulate.shapes import LinkOf


@click.command(name="simulate")
@click.argument("plan_file", type=click.Path(path_type=Path))
@click.argument("trace_file", type=click.Path(path_type=Path))
@click.option("--fleet", "fleet_file", type=click.Path(path_type=Path), help="Fleet file with the links.")
@click.option("--copies", type=click.IntRange(1, 10_000), default=1, help="Of each of the plan's replicas.")
@click.option("--compress", type=float, default=1.0, help="Play the trace so many times as fast.")
@click.option("--requests", type=click.IntRange(1), help="Only the first so many.")
@click.option("--ttft-slo", type=FloatRange(min=0, min_open=True), help="Seconds.")
@click.option("--tpot-slo", type=FloatRange(min=0, min_open=True), help="Seconds.")
@click.option(
    "--coefficients", type=click.Path(path_type=Path), help="Devices measured by `bimetal calibrate`."
)
@click.option("--max-num-batched-tokens", type=click.IntRange(1), default=2048)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write every request here (parquet).")
@click.option("--plot", type=click.Path(path_type=Path), help="Write the timeline here (png).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(
    plan_file: Path,
    trace_file: Path,
    fleet_file: Path | None,
    copies: int,
    compress: float,
    requests: int | None,
    ttft_slo: float | None,
    tpot_slo: float | None,
    coefficients: Path | None,
    max_num_batched_tokens: int,
    output: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Run the requests of TRACE_FILE through PLAN_FILE's replicas and print what clients would see.

    TRACE_FILE has the columns of Azure's, BurstGPT's or Mooncake's traces.
    """
    from bimetal.errors import ConfigError
    from bimetal.perf.calibration import published_calibration
    from bimetal.perf.device import load_devices, with_devices
    from bimetal.plan import load_plan
    from bimetal.simulate.run import Slo, class_results, simulate
    from bimetal.simulate.shapes import gpu_uses, replica_shape
    from bimetal.simulate.trace import load_trace
    from bimetal.simulate.usage import usage_by_gpu

    plan = load_plan(plan_file)
    trace = load_trace(trace_file).compressed(compress)
    if requests is not None:
        trace = trace.first(requests)
    asked, trace = trace, trace.no_longer_than(plan.max_model_len)
    if not len(trace):
        raise ConfigError(
            f"{trace_file}: all {len(asked)} requests are longer, with their answers, than the plan's max_model_len "
            f"{plan.max_model_len}: raise it there"
        )
    devices = load_devices(coefficients) if coefficients else {}
    calibration = with_devices(published_calibration(), devices)
    hops = [device.hop_s for device in devices.values() if device.hop_s is not None]
    link_of = _measured_link(hops[0]) if hops and fleet_file is None else _links(fleet_file)
    distinct = [
        replica_shape(
            plan, r, link_of, max_num_batched_tokens=max_num_batched_tokens, calibration=calibration
        )
        for r in plan.replicas
    ]
    shapes = [shape for shape in distinct for _ in range(copies)]
    uses = [gpu_uses(r) for r in plan.replicas for _ in range(copies)]
    weights = [1 / max(clock.step_s(16, 16 * 1024) for clock in shape.clocks) for shape in shapes]
    run = simulate(trace, shapes, weights)
    results = class_results(run, dict.fromkeys(trace.classes, Slo(ttft_slo, tpot_slo)))
    usage = usage_by_gpu(run, uses)
    _write(run, output, plot)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "classes": [asdict(result) for result in results],
                    "gpus": [asdict(use) for use in usage],
                    "makespan_s": run.makespan_s,
                    "num_preemptions": run.num_preemptions,
                    "num_refused": len(asked) - len(trace),
                },
                indent=1,
            )
        )
        return
    from bimetal.cli.simulate_table import print_simulation

    print_simulation(run, results, usage)
    if len(trace) < len(asked):
        click.echo(
            f"{len(asked) - len(trace)} of {len(asked)} requests left out: longer, with their answers, than max_model_len "
            f"{plan.max_model_len}, so that `bimetal serve` refuses them"
        )


def _measured_link(hop_s: float) -> LinkOf:
    """Between processes of this machine, as `bimetal calibrate` timed it."""
    from bimetal.catalog.links import LOOPBACK

    link = replace(LOOPBACK, name="measured", latency_s=hop_s)
    return lambda a, b: link


def _links(fleet_file: Path | None) -> LinkOf:
    from bimetal.catalog.fleet import load_fleet
    from bimetal.catalog.links import DEFAULT_LINK, SAME_HOST, LinkSpec
    from bimetal.errors import ConfigError

    if fleet_file is None:
        return lambda a, b: SAME_HOST if a == b else replace(DEFAULT_LINK)
    fleet = load_fleet(fleet_file)
    names = {node.name for node in fleet.nodes}

    def link_of(a: str, b: str) -> LinkSpec:
        for name in (a, b):
            if name not in names:
                raise ConfigError(
                    f"{fleet_file}: has no node {name!r}, which the plan names: give the plan's fleet"
                )
        return fleet.link_between(a, b)

    return link_of


def _write(run: Simulation, output: Path | None, plot: Path | None) -> None:
    from bimetal.errors import ConfigError
    from bimetal.simulate.files import write_requests, write_timeline

    for path, write in ((output, write_requests), (plot, write_timeline)):
        if path is None:
            continue
        try:
            write(run, path)
        except ModuleNotFoundError as error:
            raise ConfigError(f'{error.name} is not installed: pip install "bimetal[simulate]"') from error
        except OSError as error:  # pyarrow's names no file
            raise ConfigError(
                f"{path}: {error.strerror or error}: give a path in a folder that exists"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{path}: {error}: give another ending") from error
