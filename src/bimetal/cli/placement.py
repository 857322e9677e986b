"""What `serve` and `bench` share: the options that say which model runs where and how, and what they make of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from bimetal.engine.wire.options import EngineOptions
    from bimetal.plan import Plan

F = TypeVar("F", bound=Callable[..., Any])

# vLLM's users write these.
_DTYPES = {"auto": None, "half": "float16", "float": "float32"}
_DTYPE_CHOICES = ("auto", "bfloat16", "float16", "float32", "half", "float")

_OPTIONS = (
    click.option(
        "--model",
        help="A checkpoint's folder. With FILE: where its config and tokenizer are on this machine.",
    ),
    click.option(
        "--num-stages", type=click.IntRange(1, 64), help="With --model: layers in equal parts.  [default: 1]"
    ),
    click.option("--layers", help="With --model: layers of each stage, such as 18,12."),
    click.option("--device", default="cpu", help="With --model: `cpu`, or a GPU's catalogue name."),
    click.option("--num-threads", type=click.IntRange(1, 1024), help="CPU threads of each stage."),
    click.option("--max-model-len", type=click.IntRange(1), help="Tokens of prompt and answer together."),
    click.option("--max-num-seqs", type=click.IntRange(1), help="Sequences that run at once."),
    click.option("--max-num-batched-tokens", type=click.IntRange(1), help="Token budget of a step."),
    click.option(
        "--gpu-memory-utilization", default=0.9, type=float, help="Share of a device's memory to use."
    ),
    click.option("--kv-cache-memory-bytes", type=click.IntRange(1), help="KV cache of each stage."),
    click.option("--block-size", type=click.IntRange(1), help="Tokens of a KV block."),
    click.option(
        "--enable-prefix-caching/--no-enable-prefix-caching", default=True, help="Reuse KV of equal prefixes."
    ),
    click.option("--enforce-eager", is_flag=True, help="No graph capture."),
    click.option(
        "--dtype",
        default="auto",
        type=click.Choice(_DTYPE_CHOICES),
        help="`auto`: the plan's or the model's.",
    ),
    click.option(
        "--num-micro-batches", type=click.IntRange(1), help="In flight over the stages.  [default: chosen]"
    ),
    click.option(
        "--link", default="tcp", type=click.Choice(["tcp", "nixl"]), help="How stages exchange activations."
    ),
    click.option(
        "--step-timeout-s",
        default=300.0,
        type=click.FloatRange(0, min_open=True),
        help="After so long without an answer a stage counts as hung.",
    ),
    click.option("--load-format", default="safetensors", type=click.Choice(["safetensors", "dummy"])),
    click.option(
        "--seed", default=0, type=click.IntRange(0), help="Of dummy weights and of requests that bring none."
    ),
)


def placement_options(function: F) -> F:
    """Adds FILE and the engine's options to a command."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return click.argument("file", required=False, type=click.Path(path_type=Path))(function)


def resolve_plan(file: Path | None, flags: dict[str, Any]) -> Plan:
    """The plan in FILE, planned from the fleet in FILE, or made of --model."""
    from bimetal.errors import ConfigError

    if file is None:
        if flags["model"] is None:
            raise ConfigError("give FILE (plan.yaml or fleet.yaml), or --model with a checkpoint's folder")
        return _plan_of_model(flags)
    for name in ("num_stages", "layers"):
        if flags[name] is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} goes with --model: {file} already says how layers are split"
            )
    plan = with_model(plan_of_file(file), flags["model"])
    return _with_threads(plan, flags["num_threads"])


def with_model(plan: Plan, folder: str | None) -> Plan:
    """The plan with the checkpoint that this machine keeps in `folder`; nodes with a `model_path` of their own keep that."""
    from dataclasses import replace

    from bimetal.catalog.models import load_model_spec
    from bimetal.errors import ConfigError

    if folder is None:
        return plan
    planned, found = load_model_spec(plan.model), load_model_spec(folder)
    if found.dimensions != planned.dimensions:
        raise ConfigError(
            f"--model {folder} is another model than the plan's {plan.model}: {found.differences(planned)}; give the "
            "folder of the model that was planned"
        )
    return replace(plan, model=folder)


def plan_of_file(file: Path, quiet: bool = False) -> Plan:
    """A plan as it is; a fleet is planned first, and the plan shown unless `quiet`."""
    import yaml

    from bimetal.errors import ConfigError
    from bimetal.plan import is_decision, load_plan

    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}: give a plan.yaml or a fleet.yaml") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not YAML: {error}") from error
    if isinstance(document, dict) and "nodes" in document:
        from bimetal.catalog.fleet import load_fleet
        from bimetal.cli.plan_table import print_plan
        from bimetal.planner.fleet_plan import plan_fleet

        plan = plan_fleet(load_fleet(file))
        if not quiet:
            print_plan(plan)
        return plan
    if (isinstance(document, dict) and "replicas" in document) or is_decision(document):
        return load_plan(file)
    raise ConfigError(
        f"{file}: has neither `replicas`, as a plan does, nor `nodes`, as a fleet does: give one of them"
    )


def _plan_of_model(flags: dict[str, Any]) -> Plan:
    from itertools import pairwise

    from bimetal.catalog.models import load_model_spec
    from bimetal.plan import Plan, Replica, Stage

    spec = load_model_spec(flags["model"])
    check_gpu(flags["device"])
    boundaries = layer_boundaries(spec.num_layers, flags["num_stages"], flags["layers"])
    device = flags["device"]
    stages = tuple(
        Stage(
            node="local",
            gpu=device,
            start_layer=start,
            end_layer=end,
            device_indices=(0 if device == "cpu" else i,),
            num_threads=flags["num_threads"],
        )
        for i, (start, end) in enumerate(pairwise(boundaries))
    )
    return Plan(
        model=flags["model"],
        replicas=(Replica("replica-0", stages),),
        dtype=spec.dtype,
        max_model_len=flags["max_model_len"] or spec.max_position,
    )


def check_gpu(name: str) -> None:
    """ConfigError unless it is `cpu` or a GPU of the catalogue."""
    from bimetal.catalog.hardware import CPU, find_gpu

    if name != CPU:
        find_gpu(name)


def layer_boundaries(
    num_layers: int, num_stages: int | None, layers: str | None, given_as: str = "--layers"
) -> list[int]:
    """Where stages begin and end: [0, ..., num_layers].

    >>> layer_boundaries(30, None, "18,12"), layer_boundaries(30, 4, None)
    ([0, 18, 30], [0, 8, 15, 23, 30])
    """
    from itertools import accumulate

    from bimetal.errors import ConfigError

    if layers is None:
        count = num_stages or 1
        if count > num_layers:
            raise ConfigError(f"--num-stages is {count}, but the model has {num_layers} layers: lower it")
        return [-(-i * num_layers // count) for i in range(count + 1)]
    try:
        parts = [int(part) for part in layers.split(",")]
    except ValueError:
        parts = []
    if not parts or min(parts) < 1 or sum(parts) != num_layers or num_stages not in (None, len(parts)):
        raise ConfigError(
            f"{given_as} is {layers!r}, but must be numbers of at least 1, one a stage, that add up to the model's "
            f"{num_layers} layers, such as {num_layers - num_layers // 2},{num_layers // 2}"
        )
    return [0, *accumulate(parts)]


def _with_threads(plan: Plan, num_threads: int | None) -> Plan:
    from dataclasses import replace

    if num_threads is None:
        return plan
    replicas = tuple(
        replace(replica, stages=tuple(replace(stage, num_threads=num_threads) for stage in replica.stages))
        for replica in plan.replicas
    )
    return replace(plan, replicas=replicas)


def engine_options(plan: Plan, flags: dict[str, Any]) -> EngineOptions:
    """The flags as the driver takes them."""
    import yaml

    from bimetal.engine.wire.options import EngineOptions
    from bimetal.plan import dump_plan

    return EngineOptions(
        plan=yaml.safe_load(dump_plan(plan)),
        max_model_len=flags["max_model_len"],
        max_num_seqs=flags["max_num_seqs"],
        max_num_batched_tokens=flags["max_num_batched_tokens"],
        gpu_memory_utilization=flags["gpu_memory_utilization"],
        kv_cache_bytes=flags["kv_cache_memory_bytes"],
        block_tokens=flags["block_size"],
        enable_prefix_caching=flags["enable_prefix_caching"],
        enforce_eager=flags["enforce_eager"],
        dtype=_DTYPES.get(flags["dtype"], flags["dtype"]),
        num_micro_batches=flags["num_micro_batches"],
        link=flags["link"],
        load_format=flags["load_format"],
        step_timeout_s=flags["step_timeout_s"],
        seed=flags["seed"],
    )
