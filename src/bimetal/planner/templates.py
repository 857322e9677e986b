"""`Template`: one way of serving a model that can be bought any number of times.

Owns the kinds of templates, their GPUs, and whether this project's engine can run them today. Knows no times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from bimetal.catalog.demand import ServedModel, Stock
from bimetal.catalog.hardware import GpuSpec

TemplateKind = Literal["replica", "layer split", "prefill/decode", "expert split", "attention/expert split"]
ENGINE_DTYPES = ("bfloat16", "float16", "float32", "float8")


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor-parallel group of one kind of GPU: what a stage runs on."""

    stock: int
    """Index into the demand's stock."""
    gpu: GpuSpec
    tensor_parallel: int
    per_node: int
    power_limit_w: float | None = None
    """Of one GPU; None: its TDP."""
    draw: int | None = None
    """Of the calibration's joint draws, by which it is timed; None: the most likely coefficients."""

    @property
    def node_ratio(self) -> float:
        """Share of a node, and so of its network."""
        return self.tensor_parallel / self.per_node

    @property
    def label(self) -> str:
        limit = f"@{self.power_limit_w:g}W" if self.power_limit_w else ""
        return f"{self.tensor_parallel}x{self.gpu.name}{limit}"


@dataclass(frozen=True, slots=True)
class Part:
    """A stage of a chain, or a pool of equal replicas of a template that separates prefill, decode or experts."""

    slot: Slot
    start_layer: int
    end_layer: int
    copies: int = 1
    role: str = ""


@dataclass(frozen=True, slots=True)
class Template:
    """Parts that serve together."""

    kind: TemplateKind
    model: ServedModel
    parts: tuple[Part, ...]
    expert_ratio: float = 0.0
    """Of the experts, on the second part."""

    @property
    def composition(self) -> tuple[int, ...]:
        """Stock indices of the GPUs in it: replicas of one composition are alike, those of several are a mixed fleet."""
        return tuple(sorted({part.slot.stock for part in self.parts}))

    @property
    def gpu_kinds(self) -> frozenset[str]:
        """Names of the GPUs in it, whatever their power limits."""
        return frozenset(part.slot.gpu.name for part in self.parts)

    @property
    def vendors(self) -> frozenset[str]:
        return frozenset(part.slot.gpu.vendor for part in self.parts)

    def num_gpus(self, stock: int) -> int:
        return sum(p.copies * p.slot.tensor_parallel for p in self.parts if p.slot.stock == stock)

    def drawn(self, draw: int) -> Template:
        """The same, timed by a draw of the performance model."""
        parts = tuple(replace(part, slot=replace(part.slot, draw=draw)) for part in self.parts)
        return replace(self, parts=parts)

    @property
    def label(self) -> str:
        """For people.

        >>> from bimetal.catalog.hardware import find_gpu
        >>> slot = Slot(0, find_gpu("MI300X"), 2, 8)
        >>> Template("replica", ServedModel("Llama-3.1-8B"), (Part(slot, 0, 32),)).label
        'Llama-3.1-8B on 2xMI300X'
        """
        layers = self.kind == "layer split"
        parts = [
            (f"{part.copies} of " if part.copies > 1 else "")
            + part.slot.label
            + (f" [{part.start_layer}:{part.end_layer}]" if layers else f" {part.role}" if part.role else "")
            for part in self.parts
        ]
        return f"{self.model.name} on {' + '.join(parts)}"

    @property
    def not_runnable(self) -> str | None:
        """Why `bimetal serve` cannot run it today; None: it can."""
        if self.kind not in ("replica", "layer split"):
            return f"the engine has no {self.kind}"
        if not self.model.engine_knows:
            return f"the engine does not know {self.model.name}"
        if self.model.dtype not in ENGINE_DTYPES:
            return f"the engine has no {self.model.dtype} weights"
        if any(part.slot.tensor_parallel > 1 for part in self.parts):
            return "the engine runs one device a stage"
        return None


def tensor_parallel_degrees(per_node: int) -> list[int]:
    """Powers of two that divide a node, so that groups of any of them fill nodes without rest.

    >>> tensor_parallel_degrees(8), tensor_parallel_degrees(6)
    ([1, 2, 4, 8], [1, 2])
    """
    degrees = [1]
    while per_node % (degrees[-1] * 2) == 0:
        degrees.append(degrees[-1] * 2)
    return degrees


def slots_for(model: ServedModel, stock: Sequence[Stock]) -> tuple[list[Slot], list[str]]:
    """Groups on which the model's layers exist at its precision, and why others do not."""
    spec, slots, reasons = model.spec, [], []
    for index, entry in enumerate(stock):
        gpu = entry.spec
        if (model.dtype == "float8" and gpu.fp8_flops_per_s is None) or (
            model.dtype == "float4" and gpu.fp4_flops_per_s is None
        ):
            reasons.append(
                f"{model.name} at {model.dtype} on {gpu.name}: it has no units of that width; use bfloat16, or another GPU"
            )
            continue
        for ranks in tensor_parallel_degrees(entry.per_node):
            if spec.num_heads % ranks or (spec.num_kv_heads % ranks and ranks % spec.num_kv_heads):
                reasons.append(
                    f"{model.name} on {ranks}x{gpu.name}: {ranks} does not divide its {spec.num_heads} heads"
                )
                continue
            slots.append(Slot(index, gpu, ranks, entry.per_node, entry.power_limit_w))
    return slots, reasons
