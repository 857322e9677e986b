"""`bimetal serve`: a plan, a fleet or a model path behind an OpenAI-compatible API."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bimetal.cli.placement import engine_options, placement_options, resolve_plan

if TYPE_CHECKING:
    from bimetal.engine.wire.options import EngineOptions


@click.command(name="serve")
@placement_options
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", default=8000, type=click.IntRange(0, 65535), help="0: any free one.")
@click.option(
    "--api-key", multiple=True, envvar="BIMETAL_API_KEY", help="Key that clients must send; may be repeated."
)
@click.option("--served-model-name", multiple=True, help="What clients call the model; may be repeated.")
@click.option(
    "--chat-template",
    type=click.Path(path_type=Path, exists=True),
    help="Jinja file in place of the model's.",
)
@click.option(
    "--max-queue", default=256, type=click.IntRange(0), help="Sequences that may wait; beyond, 429."
)
@click.option(
    "--max-body-bytes", default=16 << 20, type=click.IntRange(1), help="Longest request; beyond, 413."
)
@click.option("--log-level", default="warning", type=click.Choice(["debug", "info", "warning", "error"]))
def command(file: Path | None, **flags: Any) -> None:
    """Serve FILE, a plan.yaml or a fleet.yaml (which is planned first), or --model.

    Examples: bimetal serve plan.yaml --model /models/Llama-3.1-70B-Instruct; bimetal serve --model
    .demo/SmolLM2-135M-Instruct --layers 18,12
    """
    from bimetal.engine.driver.stages import check_one_device_a_stage
    from bimetal.gateway.gateway import GatewaySettings
    from bimetal.gateway.server import ServerSettings, run_server

    plan = resolve_plan(file, flags)
    options = engine_options(plan, flags)
    for replica in plan.replicas:
        check_one_device_a_stage(replica.stages)
    _check_text_files(plan.model)
    gateway = GatewaySettings(
        served_names=tuple(flags["served_model_name"]),
        api_keys=tuple(flags["api_key"]),
        max_queue=flags["max_queue"],
        max_body_bytes=flags["max_body_bytes"],
        chat_template_path=flags["chat_template"],
    )
    settings = ServerSettings(flags["host"], flags["port"], gateway, flags["log_level"])
    run_server(settings, lambda address: driver_command(address, options))


def driver_command(address: str, options: EngineOptions) -> list[str]:
    import sys

    module = "bimetal.engine.driver_process"
    return [sys.executable, "-m", module, "--connect", address, "--options", options.to_json()]


def _check_text_files(model: str) -> None:
    """Say at once, not after minutes of loading, that there is no tokenizer to serve text with."""
    from bimetal.errors import ConfigError

    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"{model} is no folder on this machine: serving needs the checkpoint's config and tokenizer here; "
            "give its folder with --model (`bimetal bench` runs catalogue models without one)"
        )
