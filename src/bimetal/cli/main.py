"""`bimetal`: one command = load, call one function, print.

Commands live in modules beside this one and are imported only when called, so that `--help` starts at once and a
machine without torch can plan.
"""

from __future__ import annotations

import importlib
import sys

import click

from bimetal.errors import BimetalError, EngineError

COMMANDS = {
    "serve": "Serve a plan or a fleet behind one OpenAI-compatible API.",
    "plan": "Split a model over given GPUs, or plan a whole fleet for a demand.",
    "doctor": "Check every node of a fleet before anything loads.",
    "bench": "Measure throughput and latency of a placement, offline.",
    "agree": "Compare two placements of a model, token by token.",
    "calibrate": "Measure a device through the engine, for plans to use.",
    "perf": "Fit the performance model, and hold it to measurements.",
    "tco": "Price fleets over years, with ranges and break-evens.",
    "simulate": "Run a trace through a plan on modelled time.",
    "stage": "Run one stage by hand on this host and wait for a driver.",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"bimetal.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="bimetal")
def bimetal() -> None:
    """Serve, plan and price one language model over NVIDIA and AMD GPUs at once.

    Example: bimetal plan fleet.yaml -o plan.yaml && bimetal serve plan.yaml
    """


def main() -> None:
    """Entry point: errors meant for people print without a traceback. Exit status 1: serving broke; 2: the input is wrong."""
    try:
        bimetal()
    except BimetalError as error:
        print(f"bimetal: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, EngineError) else 2)


if __name__ == "__main__":
    main()
