"""`bimetal tco`: what fleets cost over the years, how sure that is, and what would change the decision."""

from __future__ import annotations

import json
from pathlib import Path

import click

from bimetal.errors import ConfigError

_FILE = click.Path(path_type=Path)


class _ScenarioFirst(click.Group):
    """`bimetal tco scenario.yaml` is `bimetal tco price scenario.yaml`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["price", *args]
        return super().parse_args(ctx, args)


@click.group(name="tco", cls=_ScenarioFirst)
def command() -> None:
    """Price fleets over years: `bimetal tco SCENARIO.yaml [OPTIONS]`.

    Options are listed by `bimetal tco price --help`, fields of a scenario in docs/economics.md.

    Example: bimetal tco examples/scenarios/case-study.yaml --set gpus.MI300X.price_usd=15000
    """


@command.command()
@click.argument("scenario", type=_FILE)
@click.option("--compare", "others", type=_FILE, multiple=True, help="Another scenario, on shared draws.")
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="PATH=VALUE",
    help="Change an input; see what moves: gpus.H100.price_usd=25000, fleets.mixed.groups[0].count=500.",
)
@click.option("--explain", is_flag=True, help="Every row's formula, inputs, sources and price dates.")
@click.option("--draws", type=click.IntRange(100, 100_000), default=10_000, help="Monte Carlo draws.")
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
    from bimetal.cli.tco_files import check_outputs, load, write_html, write_xlsx
    from bimetal.cli.tco_table import print_analysis, print_change
    from bimetal.economics.analysis import analyse

    if as_json and as_csv:
        raise click.UsageError("--json and --csv both print: give one of them")
    check_outputs({"--html": html, "--xlsx": xlsx}, (scenario, *others))
    scenarios = [load(path, changes) for path in (scenario, *others)]
    analysis = analyse(scenarios, draws)
    if xlsx:
        write_xlsx(scenarios[0], xlsx)
        alone = f", of {scenario} alone" if others else ""
        click.echo(f"workbook in {xlsx}{alone}", err=True)
    if html:
        write_html(analysis, html)
        click.echo(f"page in {html}", err=True)
    if as_json:
        click.echo(json.dumps(analysis_document(analysis), indent=1, allow_nan=False))
    elif as_csv:
        click.echo(analysis_csv(analysis), nl=False)
    else:
        print_analysis(analysis, explain=explain)
        if changes:
            try:
                before = [load(path, ()) for path in (scenario, *others)]
            except ConfigError as error:
                click.echo(f"no figures before the change: {error}", err=True)
                return
            print_change(analyse(before, draws), analysis, changes)


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--explain", is_flag=True, help="Every reading's formula, inputs and sources.")
@click.option("-o", "--output", type=_FILE, help="Write the audit here as Markdown.")
def audit(as_json: bool, explain: bool, output: Path | None) -> None:
    """Recompute every claim of the case for mixing vendors, and judge it.

    Example: bimetal tco audit -o docs/audit.md
    """
    from bimetal.cli.tco_audit import audit_document, audit_markdown, print_audit
    from bimetal.cli.tco_files import writing
    from bimetal.cli.tco_model import answers
    from bimetal.economics.judged import judge_claims

    judged = judge_claims(answers())
    if output:
        with writing(output):
            output.write_text(audit_markdown(judged), encoding="utf-8")
        click.echo(f"audit in {output}", err=True)
    if as_json:
        click.echo(json.dumps(audit_document(judged), indent=1, allow_nan=False))
    elif explain or not output:
        print_audit(judged, explain=explain)
