"""`bimetal plan`: split a model over the GPUs of a fleet file, show the split, write the plan."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command(name="plan")
@click.argument("fleet_file", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write the plan here, for `bimetal serve`."
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON instead of a table.")
@click.option(
    "--coefficients", type=click.Path(path_type=Path), help="Devices measured by `bimetal calibrate`."
)
def command(fleet_file: Path, output: Path | None, as_json: bool, coefficients: Path | None) -> None:
    """Find the split of layers with the highest decode throughput that fits.

    FLEET_FILE names the nodes, the links between them, the model and the limits; see examples/fleet.yaml.
    """
    import yaml

    from bimetal.catalog.fleet import load_fleet
    from bimetal.errors import ConfigError
    from bimetal.perf.calibration import published_calibration
    from bimetal.perf.device import load_devices, with_devices
    from bimetal.plan import dump_plan
    from bimetal.planner.fleet_plan import plan_fleet

    fleet = load_fleet(fleet_file)
    calibration = published_calibration()
    if coefficients is not None:
        calibration = with_devices(calibration, load_devices(coefficients))
    plan = plan_fleet(fleet, calibration)
    text = dump_plan(plan)
    if output is not None:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{output}: {error.strerror}: give a path in a folder that exists") from error
    if as_json:
        click.echo(json.dumps(yaml.safe_load(text), indent=2))
        return
    from bimetal.cli.plan_table import print_plan

    print_plan(plan)
    if output is not None:
        click.echo(f"written to {output}")
