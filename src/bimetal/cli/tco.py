"""`bimetal tco`: what fleets cost over the years, how sure that is, and what would change the decision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from bimetal.catalog.document import Document
    from bimetal.economics.analysis import Analysis
    from bimetal.economics.scenario import Scenario

_FILE = click.Path(path_type=Path)


class _ScenarioFirst(click.Group):
    """`bimetal tco scenario.yaml` is `bimetal tco price scenario.yaml`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["price", *args]
        return super().parse_args(ctx, args)


@click.group(name="tco", cls=_ScenarioFirst)
def command() -> None:
    """Price fleets over years.

    Example: bimetal tco examples/scenarios/case-study.yaml --set gpus.MI300X.price_usd=15000
    """


@command.command()
@click.argument("scenario", type=_FILE)
@click.option("--compare", "others", type=_FILE, multiple=True, help="Another scenario, on shared draws.")
@click.option(
    "--set", "changes", multiple=True, metavar="PATH=VALUE", help="Change an input; see what moves."
)
@click.option("--explain", is_flag=True, help="Every row's formula, inputs, sources and price dates.")
@click.option("--draws", type=click.IntRange(100, 1_000_000), default=10_000, help="Monte Carlo draws.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--html", type=_FILE, help="Write a page with charts that opens without network.")
@click.option("--xlsx", type=_FILE, help="Write a workbook with live formulas (SCENARIO alone).")
@click.option("--csv", "as_csv", is_flag=True, help="Print every row as CSV.")
def price(
    scenario: Path,
    others: tuple[Path, ...],
    changes: tuple[str, ...],
    explain: bool,
    draws: int,
    as_json: bool,
    as_csv: bool,
    html: Path | None,
    xlsx: Path | None,
) -> None:
    """Price the fleets of SCENARIO and compare them with its first.

    Example: bimetal tco case-study.yaml --compare case-study-2026.yaml --explain
    """
    from bimetal.cli.tco_document import analysis_csv, analysis_document
    from bimetal.cli.tco_table import print_analysis, print_change
    from bimetal.economics.analysis import analyse

    scenarios = [_load(path, changes) for path in (scenario, *others)]
    if xlsx:
        _write_xlsx(scenarios[0], xlsx)
    analysis = analyse(scenarios, draws)
    if html:
        _write_html(analysis, html)
    if as_json:
        click.echo(json.dumps(analysis_document(analysis), indent=1))
    elif as_csv:
        click.echo(analysis_csv(analysis), nl=False)
    else:
        print_analysis(analysis, explain=explain)
        if changes:
            print_change(analyse([_load(path, ()) for path in (scenario, *others)], draws), analysis, changes)


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--explain", is_flag=True, help="Every reading's formula, inputs and sources.")
@click.option("-o", "--output", type=_FILE, help="Write the audit here as Markdown.")
def audit(as_json: bool, explain: bool, output: Path | None) -> None:
    """Recompute every claim of the case for mixing vendors, and judge it.

    Example: bimetal tco audit -o docs/audit.md
    """
    from bimetal.cli.tco_audit import audit_document, audit_markdown, print_audit
    from bimetal.cli.tco_model import answers
    from bimetal.economics.judged import judge_claims

    judged = judge_claims(answers())
    if output:
        output.write_text(audit_markdown(judged), encoding="utf-8")
        click.echo(f"audit in {output}")
    elif as_json:
        click.echo(json.dumps(audit_document(judged), indent=1))
    else:
        print_audit(judged, explain=explain)


def _load(path: Path, changes: tuple[str, ...]) -> Scenario:
    from bimetal.catalog.document import Document
    from bimetal.cli.tco_model import throughput_of
    from bimetal.economics.scenario import parse_scenario

    document = Document.read(path)
    for change in changes:
        _set(document, change)
    return parse_scenario(document, path.parent, throughput_of)


def _write_html(analysis: Analysis, path: Path) -> None:
    from bimetal.errors import ConfigError

    try:
        from bimetal.economics.page import render_page
    except ModuleNotFoundError as error:
        raise ConfigError(f'{error.name} is not installed: pip install "bimetal[report]"') from error
    path.write_text(render_page(analysis), encoding="utf-8")
    click.echo(f"page in {path}", err=True)


def _write_xlsx(scenario: Scenario, path: Path) -> None:
    from bimetal.errors import ConfigError

    try:
        from bimetal.economics.workbook import write_workbook
    except ModuleNotFoundError as error:
        raise ConfigError(f'{error.name} is not installed: pip install "bimetal[report]"') from error
    write_workbook(scenario, path)
    click.echo(f"workbook in {path}", err=True)


def _set(document: Document, change: str) -> None:
    """Put VALUE (YAML) at PATH; parts of lists go by their name."""
    import yaml

    from bimetal.errors import ConfigError

    path, equals, text = change.partition("=")
    *folders, last = path.split(".")
    if not equals or not last:
        raise ConfigError(f"--set {change!r}: give PATH=VALUE, as in gpus.MI300X.price_usd=15000")
    node = document.value
    for part in folders:
        if isinstance(node, list):
            node = next((x for x in node if isinstance(x, dict) and x.get("name") == part), None)
        else:
            node = node.get(part) if isinstance(node, dict) else None
        if not isinstance(node, dict | list):
            raise ConfigError(f"--set {change!r}: {document.source} has no {part!r} there: check the path")
    if not isinstance(node, dict):
        raise ConfigError(f"--set {change!r}: {folders[-1]!r} is a list: name one of its parts")
    try:
        node[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {change!r}: {text!r} is not YAML: give a number or a mapping") from error
