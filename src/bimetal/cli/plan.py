"""`bimetal plan`: one replica over the GPUs of a fleet file, or a whole fleet for the demand of a demand file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from bimetal.catalog.document import Document
    from bimetal.perf.calibration import Calibration


@click.command(name="plan")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write the plan here, for `bimetal serve`."
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON instead of tables.")
@click.option(
    "--coefficients", type=click.Path(path_type=Path), help="Devices measured by `bimetal calibrate`."
)
@click.option(
    "--quick", is_flag=True, help="Demand file: no simulation, no relaxations, no cost-latency front."
)
@click.option(
    "--html", type=click.Path(path_type=Path), help="Demand file: write a page with the front here."
)
def command(
    file: Path,
    output: Path | None,
    as_json: bool,
    coefficients: Path | None,
    quick: bool,
    html: Path | None,
) -> None:
    """Find the best split of one model, or the best fleet for a demand.

    FILE with `nodes` (examples/fleet.yaml): the split of layers over these nodes with the highest decode throughput. FILE with
    `stock` and `demand` (examples/plans): which GPUs to take, which splits, which traffic where, at the lowest cost.
    """
    from bimetal.catalog.demand import is_demand
    from bimetal.catalog.document import Document
    from bimetal.errors import ConfigError
    from bimetal.perf.calibration import published_calibration
    from bimetal.perf.device import load_devices, with_devices

    for path in (output, html):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{path}: No such folder: give a path in a folder that exists")
        if path is not None and path.is_dir():
            raise ConfigError(f"{path}: is a folder: give the path of a file in it")
        if path is not None and path.exists() and file.exists() and path.samefile(file):
            raise ConfigError(f"{path}: is the file to be planned and would be lost: give another path")
    if output is not None and html is not None and output.absolute() == html.absolute():
        raise ConfigError(f"{output}: is given for the plan and for the page: give two paths")
    document = Document.read(file)
    calibration = published_calibration()
    if coefficients is not None:
        calibration = with_devices(calibration, load_devices(coefficients))
    try:
        if is_demand(document):
            _plan_demand(document, file.parent, calibration, output, as_json, quick, html)
        else:
            if html is not None or quick:
                raise ConfigError("--html and --quick go with a demand file, one with `stock` and `demand`")
            _plan_replica(document, calibration, output, as_json)
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}: give a path in a folder that may be written to"
        ) from error


def _plan_replica(document: Document, calibration: Calibration, output: Path | None, as_json: bool) -> None:
    import yaml

    from bimetal.catalog.fleet import check_fleet
    from bimetal.plan import dump_plan
    from bimetal.planner.fleet_plan import plan_fleet

    plan = plan_fleet(check_fleet(document), calibration)
    text = dump_plan(plan)
    if output is not None:
        output.write_text(text, encoding="utf-8")
    if as_json:
        click.echo(json.dumps(yaml.safe_load(text), indent=2))
        return
    from bimetal.cli.plan_table import print_plan

    print_plan(plan)
    if output is not None:
        click.echo(f"written to {output}")


def _plan_demand(
    document: Document,
    folder: Path,
    calibration: Calibration,
    output: Path | None,
    as_json: bool,
    quick: bool,
    html: Path | None,
) -> None:
    import yaml

    from bimetal.catalog.demand import check_demand
    from bimetal.cli.plan_document import decision_document, write_plans
    from bimetal.cli.plan_stdout import clean_stdout
    from bimetal.errors import ConfigError
    from bimetal.planner.decision import decide

    try:
        with clean_stdout():
            decision = decide(
                check_demand(document), folder, calibration, simulate=not quick, explore=not quick
            )
    except ModuleNotFoundError as error:
        raise ConfigError(f'{error.name} is not installed: pip install "bimetal[plan]"') from error
    written = [] if output is None else write_plans(decision, output, document.source)
    data = decision_document(decision, written)
    if output is not None:
        output.write_text(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), encoding="utf-8")
    if html is not None:
        try:
            from bimetal.cli.plan_page import render_page
        except ModuleNotFoundError as error:
            raise ConfigError(f'{error.name} is not installed: pip install "bimetal[report]"') from error

        html.write_text(render_page(decision, date.today()), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(data, indent=2))
        return
    from bimetal.cli.plan_fleet_table import print_decision

    print_decision(decision)
    for path in [*([output] if output else []), *written, *([html] if html else [])]:
        click.echo(f"written to {path}")
    if output is not None:
        click.echo(_what_to_serve(output, written))


def _what_to_serve(output: Path, written: Sequence[Path]) -> str:
    if not written:
        return f"{output} is for programs; no plan of this demand can be run by the engine, so that there is none to serve"
    today = [path for path in written if path.name.startswith(f"{output.stem}-today-")]
    rest = (
        ""
        if len(today) < len(written)
        else ", of the plan `runs on bimetal today`, since the engine cannot run the chosen one"
    )
    part = (
        f"; {today[0].name} and so on are the plan `runs on bimetal today`, since the engine runs only a part of the chosen one"
        if today and not rest
        else ""
    )
    return f"{output} is for programs; serve one replica with `bimetal serve {written[0]}`{rest}{part}"
