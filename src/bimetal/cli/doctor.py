"""`bimetal doctor`: check every node before anything loads."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click


@click.command(name="doctor")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--model", help="Where the checkpoint's config and tokenizer are on this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(file: Path, model: str | None, as_json: bool) -> None:
    """Ask every node of FILE (a fleet.yaml or plan.yaml) for its interpreter, torch build, device, memory, kernels and
    checkpoint. Exit status 1 if anything is wrong.

    Example: bimetal doctor fleet.yaml --model /models/Llama-3.1-70B-Instruct
    """
    from bimetal.cli.placement import plan_of_file, with_model
    from bimetal.engine.doctor import diagnose

    findings = diagnose(with_model(plan_of_file(file, quiet=True), model))
    if as_json:
        click.echo(json.dumps([asdict(f) for f in findings], indent=2))
    else:
        from rich.console import Console
        from rich.markup import escape

        console = Console()
        where = ""
        for f in findings:
            if f.where != where:
                where = f.where
                console.print(f"[bold]{escape(where)}[/bold]")
            mark = "[green]ok [/green]" if f.is_ok else "[red]BAD[/red]"
            remedy = f": {f.remedy}" if f.remedy else ""
            console.print(f"  {mark} {f.what}: {escape(f.detail)}{escape(remedy)}", highlight=False)
    sys.exit(0 if all(f.is_ok for f in findings) else 1)
