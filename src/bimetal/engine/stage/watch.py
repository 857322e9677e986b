"""What a stage observes of itself when it is asked to: which experts its decode steps hit, how long each kernel family
takes. Costs nothing while nothing is asked. Knows no steps' meaning and no sockets.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bimetal.engine.device import Device
from bimetal.engine.kernels.interface import Kernels, Tensor
from bimetal.engine.stage.model import StageModel
from bimetal.engine.stage.peaks import measure_peaks
from bimetal.engine.stage.runner import Runner
from bimetal.engine.wire.control import AskStats, StageStats
from bimetal.engine.wire.step import Step
from bimetal.units import US_PER_S

_FAMILY_OF_OPERATION = {
    "rms_norm": "norms",
    "add_rms_norm": "norms",
    "rotary_and_cache": "rotary and KV write",
    "attention": "attention",
    "silu_and_mul": "activation",
    "experts": "experts",
    "greedy": "sampling",
    "sample": "sampling",
}
_RANGE = "bimetal::"
_FAMILY_OF_NAME = (
    (r"rms_norm", "norms"),
    (r"rotary_and_cache", "rotary and KV write"),
    (r"paged_attention|fmha|flash|scaled_dot_product", "attention"),
    (r"silu_and_mul", "activation"),
    (r"^(route|place|expert_gate_up|expert_down|scaled_gate_up|scaled_down|weighted_sum)_kernel", "experts"),
    (r"^(greedy|sample)_kernel|argmax|topk|softmax|searchsorted|cumsum", "sampling"),
    # cuBLAS and hipBLASLt, and what a CPU calls them.
    (
        r"quantise_rows|scaled_linear|gemm|gemv|cutlass|nvjet|splitk|Cijk_|linear|\bmm\b|addmm|_mm\b|matmul",
        "dense products",
    ),
    (r"memcpy|memset|copy|aten::to$", "copies"),
)


def family_of(name: str) -> str:
    """Of a kernel's or an operator's name, as a profiler gives it.

    >>> family_of("paged_attention_kernel"), family_of("nvjet_tst_128x8_64x12"), family_of("aten::embedding")
    ('attention', 'dense products', 'other')
    """
    for pattern, family in _FAMILY_OF_NAME:
        if re.search(pattern, name, re.IGNORECASE):
            return family
    return "other"


class StageWatch:
    """Of one stage."""

    def __init__(self, model: StageModel, runner: Runner, device: Device, dtype: torch.dtype) -> None:
        self._model = model
        self._runner = runner
        self._device = device
        self._dtype = dtype
        self._kernels = model.kernels
        self._tally: _ExpertTally | None = None
        self._profile: profile | None = None

    def switch(self, ask: AskStats, stats: StageStats) -> StageStats:
        """`stats` with what was watched until now; watch from now on what `ask` names."""
        if self._tally is not None:
            rows, distinct = self._tally.found()
            stats = replace(stats, num_expert_rows=rows, distinct_experts=distinct)
        if self._profile is not None:
            self._device.synchronize()
            self._profile.stop()
            stats = replace(stats, kernel_s=_seconds_by_family(self._profile, self._device.is_gpu))
        self._tally = self._profile = None
        self._model.kernels = self._kernels
        if ask.measure_peaks:
            bytes_per_s, flops_per_s = measure_peaks(self._device, self._dtype)
            stats = replace(stats, peak_bytes_per_s=bytes_per_s, peak_flops_per_s=flops_per_s)
        if ask.watch_experts:
            self._tally = _ExpertTally(self._kernels, self._model.num_expert_layers)
            self._model.kernels = cast(Kernels, self._tally)
        self._runner.before_eager_step = None if self._tally is None else self._tally.begin
        if ask.profile:
            # A CPU's operators are named by what they do, not by what for: ranges say that.
            if not self._device.is_gpu:
                self._model.kernels = cast(Kernels, _Ranges(self._model.kernels))
            activity = ProfilerActivity.CUDA if self._device.is_gpu else ProfilerActivity.CPU
            self._profile = profile(activities=[activity], acc_events=True)
            self._profile.start()
        return stats


class _ExpertTally:
    """`Kernels` that also counts how many experts each layer's routing hits. Nothing here waits for the device."""

    def __init__(self, kernels: Kernels, num_layers: int) -> None:
        self._inner = kernels
        self._num_layers = num_layers
        self._layer = 0
        self._num_rows = 0
        self._sums: dict[int, tuple[int, list[Tensor]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin(self, step: Step) -> None:
        """Only steps that do nothing but decode count: prompts hit every expert."""
        self._layer = 0
        self._num_rows = step.num_decodes if step.num_decodes == step.num_tokens else 0
        if self._num_rows:
            num_steps, sums = self._sums.get(self._num_rows, (0, []))
            self._sums[self._num_rows] = (num_steps + 1, sums)

    def experts(
        self,
        x: Tensor,
        router_logits: Tensor,
        gate_up: Any,
        down: Any,
        top_k: int,
        renormalise: bool,
        slots: Tensor,
    ) -> Tensor:
        if self._num_rows:
            self._count(router_logits, top_k, slots)
        return self._inner.experts(x, router_logits, gate_up, down, top_k, renormalise, slots)

    def _count(self, router_logits: Tensor, top_k: int, slots: Tensor) -> None:
        num_experts = router_logits.shape[1]
        chosen = router_logits.topk(top_k, dim=-1).indices.masked_fill((slots < 0).unsqueeze(1), num_experts)
        hit = torch.zeros(num_experts + 1, device=chosen.device).scatter_(0, chosen.flatten(), 1.0)
        sums = self._sums[self._num_rows][1]
        if self._layer == len(sums):
            sums.append(torch.zeros((), device=chosen.device))
        sums[self._layer] += hit[:num_experts].sum()
        self._layer += 1

    def found(self) -> tuple[int, tuple[float, ...]]:
        """(rows of the largest decode steps, mean number of experts that each layer hit in them)."""
        if not self._sums:
            return 0, ()
        num_rows = max(self._sums)
        num_steps, sums = self._sums[num_rows]
        return num_rows, tuple(float(total) / num_steps for total in sums)


class _Ranges:
    """`Kernels` whose every call is a named range of the profile."""

    def __init__(self, kernels: Kernels) -> None:
        for name in _FAMILY_OF_OPERATION:
            setattr(self, name, _named(name, getattr(kernels, name)))


def _named(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with record_function(_RANGE + name):
            return operation(*arguments)

    return call


def _seconds_by_family(found: profile, is_gpu: bool) -> dict[str, float]:
    totals: dict[str, float] = {}
    for event in found.events() or ():
        if is_gpu:
            if event.device_type.name != "CUDA" or event.is_user_annotation:
                continue
            family, microseconds = family_of(event.name), event.time_range.elapsed_us()
        else:
            family, microseconds = _family_of_event(event), event.self_cpu_time_total
        totals[family] = totals.get(family, 0.0) + microseconds / US_PER_S
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _family_of_event(event: Any) -> str:
    """By the range that it lies in, else by its own name or that of the outermost operator around it."""
    while True:
        if event.name.startswith(_RANGE):
            return _FAMILY_OF_OPERATION[event.name.removeprefix(_RANGE)]
        if event.cpu_parent is None:
            return family_of(event.name)
        event = event.cpu_parent
