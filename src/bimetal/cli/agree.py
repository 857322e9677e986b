"""`bimetal agree`: how far two placements of a model give the same tokens and the same distributions."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from bimetal.catalog.models import ModelSpec
    from bimetal.engine.agreement import Agreement, Transcript
    from bimetal.engine.transcribe import Prompt
    from bimetal.engine.wire.options import EngineOptions, KernelChoice
    from bimetal.plan import Plan

_DTYPES = ("auto", "bfloat16", "float16", "float32")
_KERNELS = ("auto", "torch", "triton")
_MAX_NUM_SEQS = 16


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two placements."""

    plan: Plan
    kernels: KernelChoice

    def __str__(self) -> str:
        stages = self.plan.replicas[0].stages
        spans = ", ".join(f"{s.gpu} [{s.start_layer}, {s.end_layer})" for s in stages)
        chosen = "" if self.kernels == "auto" else f", {self.kernels} kernels"
        return f"{self.plan.model}, {self.plan.dtype}{chosen}: {spans}"


@click.command(name="agree")
@click.option(
    "--model", required=True, help="A checkpoint's folder, or a catalogue model with --load-format dummy."
)
@click.option("--a", "a_stages", required=True, help="DEVICE[:LAYERS] of each stage, or a plan file.")
@click.option("--b", "b_stages", required=True, help="Likewise: what A is compared with.")
@click.option("--b-model", help="B's checkpoint, such as a quantised one.  [default: --model]")
@click.option("--a-dtype", default="auto", type=click.Choice(_DTYPES))
@click.option("--b-dtype", default="auto", type=click.Choice(_DTYPES))
@click.option("--a-kernels", default="auto", type=click.Choice(_KERNELS))
@click.option("--b-kernels", default="auto", type=click.Choice(_KERNELS))
@click.option("--prompts", type=click.Path(path_type=Path), help="One prompt a line.  [default: a small set]")
@click.option(
    "--num-tokens", default=32, type=click.IntRange(1), help="Greedy tokens generated after each prompt."
)
@click.option(
    "--top", default=256, type=click.IntRange(2), help="Most probable tokens of each distribution compared."
)
@click.option(
    "--margin", type=click.FloatRange(0), help="A fork is explained up to this.  [default: by dtype]"
)
@click.option("--num-threads", type=click.IntRange(1, 1024), help="CPU threads of each stage.")
@click.option("--link", default="tcp", type=click.Choice(["tcp", "nixl"]))
@click.option("--enforce-eager", is_flag=True, help="No graph capture.")
@click.option("--load-format", default="safetensors", type=click.Choice(["safetensors", "dummy"]))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(
    model: str, a_stages: str, b_stages: str, prompts: Path | None, as_json: bool, **flags: Any
) -> None:
    """Compare two placements: greedy agreement, forks, top-1 agreement, KL of the next-token distribution.

    Each placement is DEVICE[:LAYERS] a stage, comma-separated, or a plan file. They run one after the other.

    Example: bimetal agree --model .demo/SmolLM2-135M-Instruct --a cpu:30 --b cpu:18,cpu:12 --b-dtype bfloat16
    """
    from bimetal.catalog.models import load_model_spec
    from bimetal.engine.agreement import MARGIN_BY_DTYPE, compare

    spec = load_model_spec(model)
    a = _side(model, a_stages, flags["a_dtype"], flags["a_kernels"], flags["num_threads"])
    b = _side(flags["b_model"] or model, b_stages, flags["b_dtype"], flags["b_kernels"], flags["num_threads"])
    ids, is_random = _prompts(spec, Path(model).expanduser(), prompts)
    longest = max(map(len, ids)) + flags["num_tokens"] + 1
    options = [_options(side, longest, len(ids), flags) for side in (a, b)]
    num_top = min(flags["top"], spec.vocab_size)
    by_a, by_b = _transcribe(options, ids, flags["num_tokens"], num_top)
    limit = flags["margin"]
    if limit is None:
        limit = max(MARGIN_BY_DTYPE[side.plan.dtype] for side in (a, b))
    found = compare(ids, by_a, by_b, spec.vocab_size, limit)
    if as_json:
        document = {"a": str(a), "b": str(b), "prompts_are_random": is_random, **dataclasses.asdict(found)}
        click.echo(json.dumps(document, indent=2))
    else:
        _print(a, b, is_random, found)


def _side(model: str, stages: str, dtype: str, kernels: KernelChoice, num_threads: int | None) -> _Side:
    from bimetal.cli.placement import plan_of_file
    from bimetal.errors import ConfigError

    if Path(stages).suffix in (".yaml", ".yml"):
        plan = replace(plan_of_file(Path(stages), quiet=True), model=model)
        if len(plan.replicas) != 1:
            raise ConfigError(f"{stages} has {len(plan.replicas)} replicas: give a plan with one")
    else:
        plan = plan_of_stages(model, stages, num_threads)
    return _Side(replace(plan, dtype=plan.dtype if dtype == "auto" else dtype), kernels)


def plan_of_stages(model: str, stages: str, num_threads: int | None) -> Plan:
    """`cpu:18,H200:12`: a stage each, on this machine; layers in equal parts where none are given."""
    from itertools import pairwise

    from bimetal.catalog.models import load_model_spec
    from bimetal.cli.placement import check_gpu, layer_boundaries
    from bimetal.errors import ConfigError
    from bimetal.plan import Plan, Replica, Stage

    spec = load_model_spec(model)
    parts = [part.partition(":") for part in stages.split(",")]
    layers = [count for _, _, count in parts if count]
    if not all(device for device, _, _ in parts) or len(layers) not in (0, len(parts)):
        raise ConfigError(
            f"{stages!r} is not DEVICE[:LAYERS],... with layers for all stages or none, such as cpu:{spec.num_layers}"
        )
    for device, _, _ in parts:
        check_gpu(device)
    given_as = f"the layers of {stages}"
    bounds = layer_boundaries(spec.num_layers, len(parts), ",".join(layers) or None, given_as)
    made: list[Stage] = []
    for (device, _, _), (start, end) in zip(parts, pairwise(bounds), strict=True):
        index = 0 if device == "cpu" else sum(stage.gpu != "cpu" for stage in made)
        made.append(Stage("local", device, start, end, (index,), num_threads=num_threads))
    return Plan(model, (Replica("replica-0", tuple(made)),), spec.dtype, spec.max_position)


def _prompts(spec: ModelSpec, folder: Path, file: Path | None) -> tuple[list[Prompt], bool]:
    """Token ids, and whether they are random for want of a tokenizer."""
    from bimetal.engine.transcribe import builtin_prompts, random_prompts, read_prompts, tokenize
    from bimetal.errors import ConfigError

    ids = tokenize(folder, read_prompts(file) if file else builtin_prompts())
    if ids is not None:
        return ids, False
    if file is not None:
        raise ConfigError(
            f"{folder} holds no tokenizer.json to read {file} with: copy the checkpoint's own there"
        )
    return random_prompts(spec.vocab_size, seed=0), True


def _options(side: _Side, longest: int, num_prompts: int, flags: dict[str, Any]) -> EngineOptions:
    import yaml

    from bimetal.engine.wire.options import EngineOptions
    from bimetal.plan import dump_plan

    return EngineOptions(
        plan=yaml.safe_load(dump_plan(side.plan)),
        max_model_len=longest,
        max_num_seqs=min(num_prompts, _MAX_NUM_SEQS),
        enforce_eager=flags["enforce_eager"],
        link=flags["link"],
        load_format=flags["load_format"],
        kernels=side.kernels,
    )


def _transcribe(
    options: list[EngineOptions], ids: list[Prompt], num_tokens: int, num_top: int
) -> list[list[Transcript]]:
    """A's transcripts, then B's, which scores A's continuations."""
    from bimetal.engine.driver.driver import Driver
    from bimetal.engine.transcribe import transcribe

    texts: list[Prompt] = []
    transcripts: list[list[Transcript]] = []
    for each in options:
        driver = Driver(each)
        try:
            driver.start()
            transcripts.append(transcribe(driver, ids, texts, num_tokens, num_top))
        finally:
            driver.stop()
        texts = texts or [p + t.greedy for p, t in zip(ids, transcripts[0], strict=True)]
    return transcripts


def _print(a: _Side, b: _Side, is_random: bool, found: Agreement) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"A: {a}\nB: {b}", soft_wrap=True)
    source = "prompts of random tokens (the model has no tokenizer.json)" if is_random else "prompts"
    console.print(f"{len(found.prompts)} {source}, {found.num_greedy_tokens} greedy tokens after each\n")
    forks = f"{found.num_forks} of {len(found.prompts)}"
    if found.num_forks:
        forks += f", {found.num_unexplained_forks} where A's margin exceeds {found.margin_limit:.3g}"
    rows = (
        ("greedy tokens agreed, min", f"{found.agreed_min}"),
        ("greedy tokens agreed, median", f"{found.agreed_median:g}"),
        ("forks", forks),
        ("top-1 agreement, teacher-forced", f"{found.top1_ratio:.4f} of {found.num_positions} positions"),
        ("KL(A||B) mean, nats", f"{found.kl_mean:.3g}"),
        ("KL(A||B) p99", f"{found.kl_p99:.3g}"),
        ("KL(A||B) max", f"{found.kl_max:.3g}"),
    )
    table = Table(box=None, pad_edge=False, show_header=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if found.num_forks:
        console.print(_fork_table(found))
    if not found.is_exact:
        console.print(
            f"KL is a lower bound: the {found.num_top} most probable tokens that both report, the rest as one outcome "
            f"(A's probability of it: mean {found.rest_mean:.2g}, max {found.rest_max:.2g}). A larger --top tightens it.",
            style="dim",
        )


def _fork_table(found: Agreement) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("prompt", "agreed", "A's token", "B's token", "A's margin", "B's margin", ""):
        table.add_column(name, justify="right")
    for i, prompt in enumerate(found.prompts):
        fork = prompt.fork
        if fork is not None:
            margins = (f"{fork.a_margin:.3g}", f"{fork.b_margin:.3g}")
            mark = "" if fork.is_explained else "unexplained"
            table.add_row(
                str(i), str(prompt.num_agreed), str(fork.a_token), str(fork.b_token), *margins, mark
            )
    return table
