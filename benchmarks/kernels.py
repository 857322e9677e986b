"""Times every kernel on this machine's GPU at the shapes that serving meets, and compares it with the torch reference.

usage: PYTHONPATH=src python benchmarks/kernels.py [--only PATTERN] [--json FILE]

One line a workload: time (median of graph replays, so launches cost nothing), bytes that must move or operations that
must be done, the share of what a large copy or a large matrix product reaches on the same machine, and the largest
|a - b| / max |reference in float32|.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bimetal.engine.kernels.interface import AttentionMetadata, Kernels, SamplingTensors
from bimetal.engine.kernels.torch_reference import TorchKernels
from bimetal.engine.kernels.triton_kernels import BLOCK_TOKENS, TritonKernels, device_architecture

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Workload:
    name: str
    make: Callable[[], tuple[Any, ...]]
    """The inputs."""
    run: Callable[..., torch.Tensor]
    """run(kernels, *inputs)"""
    num_bytes: float
    num_flops: float
    is_compared: bool = True


def attention(
    name: str, contexts: list[int], queries: list[int], head_dim: int = 128, heads: int = 32, kv_heads: int = 8,
    block_tokens: int = BLOCK_TOKENS,
) -> Workload:  # fmt: skip
    """Sequences of which the last `queries` tokens of each are computed; queries of 1 decode."""
    num_decodes = sum(query == 1 for query in queries)

    def make() -> tuple[Any, ...]:
        width = math.ceil(max(contexts) / block_tokens)
        tables = torch.randperm(len(contexts) * width, device=DEVICE).view(len(contexts), width).int()
        caches = [
            torch.randn(tables.numel(), block_tokens, kv_heads, head_dim, device=DEVICE, dtype=DTYPE)
            for _ in range(2)
        ]
        q = torch.randn(sum(queries), heads, head_dim, device=DEVICE, dtype=DTYPE)
        starts = torch.tensor([0, *queries], device=DEVICE).cumsum(0).int()
        lens = torch.tensor(contexts, device=DEVICE, dtype=torch.int32)
        empty = torch.empty(0, dtype=torch.int32, device=DEVICE)
        meta = AttentionMetadata(empty, empty, starts, lens, tables, num_decodes, max(queries), max(contexts))
        return q, *caches, meta

    def run(kernels: Kernels, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: Any) -> torch.Tensor:
        return kernels.attention(q, k, v, meta, 1 / math.sqrt(head_dim), None)

    kv_bytes = sum(contexts) * kv_heads * head_dim * 2 * 2
    seen = sum(
        query * context - query * (query - 1) / 2 for query, context in zip(queries, contexts, strict=True)
    )
    return Workload(
        name, make, run, kv_bytes + 2 * sum(queries) * heads * head_dim * 2, 4 * seen * heads * head_dim
    )


def experts(name: str, rows: int, num_experts: int, top_k: int, hidden: int, inner: int) -> Workload:
    def make() -> tuple[Any, ...]:
        x = torch.randn(rows, hidden, device=DEVICE, dtype=DTYPE)
        logits = torch.randn(rows, num_experts, device=DEVICE)
        turns = torch.arange(rows * top_k, device=DEVICE).view(rows, top_k) % num_experts
        logits.scatter_add_(1, turns, torch.full(turns.shape, 10.0, device=DEVICE))
        gate_up = torch.randn(num_experts, 2 * inner, hidden, device=DEVICE, dtype=DTYPE) / math.sqrt(hidden)
        down = torch.randn(num_experts, hidden, inner, device=DEVICE, dtype=DTYPE) / math.sqrt(inner)
        return x, logits, gate_up, down, torch.arange(rows, device=DEVICE, dtype=torch.int32)

    def run(kernels: Kernels, x: torch.Tensor, logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:  # fmt: skip
        return kernels.experts(x, logits, gate_up, down, top_k, True, slots)

    # Rows prefer experts in turn, so that every expert that can be hit is, and the bytes are known.
    hit = min(num_experts, rows * top_k)
    num_bytes = 2 * (hit * 3 * hidden * inner + 2 * rows * hidden)
    return Workload(name, make, run, num_bytes, 6 * rows * top_k * hidden * inner)


def elementwise(rows: int) -> Iterator[Workload]:
    hidden, inner, heads, kv_heads, head_dim = 4096, 14336, 32, 8, 128

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=DTYPE)

    def rotary_inputs() -> tuple[Any, ...]:
        num_blocks = rows // BLOCK_TOKENS + 1
        caches = [normal(num_blocks, BLOCK_TOKENS, kv_heads, head_dim) for _ in range(2)]
        positions = torch.randint(0, 8192, (rows,), device=DEVICE, dtype=torch.int32)
        slots = torch.randperm(num_blocks * BLOCK_TOKENS, device=DEVICE)[:rows].int()
        empty = torch.empty(0, dtype=torch.int32, device=DEVICE)
        meta = AttentionMetadata(positions, slots, empty, empty, empty, 0, 0, 0)
        angles = torch.rand(8192, head_dim // 2, device=DEVICE) * 6
        table = torch.cat((angles.cos(), angles.sin()), dim=1)
        return normal(rows, (heads + 2 * kv_heads) * head_dim), table, *caches, meta

    yield Workload(
        f"rms_norm {rows}x{hidden}",
        lambda: (normal(rows, hidden), normal(hidden)),
        lambda kernels, x, weight: kernels.rms_norm(x, weight, 1e-5),
        2 * rows * hidden * 2,
        0,
    )
    yield Workload(
        f"add_rms_norm {rows}x{hidden}",
        lambda: (normal(rows, hidden), normal(rows, hidden), normal(hidden)),
        lambda kernels, x, residual, weight: kernels.add_rms_norm(x, residual, weight, 1e-5)[0],
        4 * rows * hidden * 2,
        0,
    )
    yield Workload(
        f"silu_and_mul {rows}x{inner}",
        lambda: (normal(rows, 2 * inner),),
        lambda kernels, gate_up: kernels.silu_and_mul(gate_up),
        3 * rows * inner * 2,
        0,
    )
    yield Workload(
        f"rotary_and_cache {rows}",
        rotary_inputs,
        lambda kernels, qkv, table, k, v, meta: kernels.rotary_and_cache(
            qkv, table, k, v, meta, None, None, 0.0
        ),
        2 * rows * (heads + 2 * kv_heads) * head_dim * 2,
        0,
    )


def choice(rows: int, vocabulary: int = 128256) -> Iterator[Workload]:
    def logits() -> torch.Tensor:
        return (torch.randn(rows, vocabulary, device=DEVICE) * 2.5).to(DTYPE)

    def inputs(top_k: int | None, top_p: float | None) -> tuple[Any, ...]:
        tensors = SamplingTensors(
            torch.ones(rows, device=DEVICE),
            torch.rand(rows, device=DEVICE),
            None if top_k is None else torch.full((rows,), top_k, device=DEVICE, dtype=torch.int32),
            None if top_p is None else torch.full((rows,), top_p, device=DEVICE),
            None,
        )
        return logits(), tensors

    num_bytes = rows * vocabulary * 2
    yield Workload(f"greedy {rows}", lambda: (logits(),), lambda kernels, x: kernels.greedy(x), num_bytes, 0)
    for top_k, top_p in ((None, None), (50, None), (None, 0.9), (50, 0.9)):
        yield Workload(
            f"sample {rows} top_k={top_k} top_p={top_p}",
            lambda top_k=top_k, top_p=top_p: inputs(top_k, top_p),  # type: ignore[misc]
            lambda kernels, x, tensors: kernels.sample(x, tensors),
            num_bytes,
            0,
            is_compared=False,
        )


def workloads() -> Iterator[Workload]:
    yield attention("decode 32 x 8192", [8192] * 32, [1] * 32)
    yield attention("decode 256 x 640", [640] * 256, [1] * 256)
    yield attention("decode 256 x 128..1152", [128 + 4 * i for i in range(256)], [1] * 256)
    yield attention("decode 32 x 256", [256] * 32, [1] * 32)
    yield attention("decode 1 x 1024", [1024], [1])
    yield attention("decode 1 x 65536", [65536], [1])
    yield attention("decode 32 x 8192, 64 heads of 64", [8192] * 32, [1] * 32, 64, 64)
    yield attention("decode 32 x 4096, heads of 256", [4096] * 32, [1] * 32, 256, 16)
    yield attention("prefill 1 x 8192", [8192], [8192])
    yield attention("prefill 16 x 512", [512] * 16, [512] * 16)
    yield attention("prefill 2048 of 16384", [16384], [2048])
    yield attention("prefill 1 x 8192, 64 heads of 64", [8192], [8192], 64, 64)
    yield attention("prefill 1 x 8192, 16 heads of 256", [8192], [8192], 256, 16)
    yield attention("mixed 64 x 1024 + 512", [1024] * 64 + [512], [1] * 64 + [512])
    for rows in (16, 32, 64, 256, 2048, 8192):
        yield experts(f"experts 8x7B, {rows} rows", rows, 8, 2, 4096, 14336)
    for rows in (1, 32, 256, 8192):
        yield experts(f"experts 128 of 2048x768, {rows} rows", rows, 128, 8, 2048, 768)
    yield from elementwise(16384)
    yield from elementwise(32)
    yield from choice(32)
    yield from choice(256)


def time_s(run: Callable[[], Any], calls: int = 10, replays: int = 5) -> float:
    """Median time of one call, `calls` of them captured in a graph that is replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times)


def ceilings() -> tuple[float, float]:
    """(bytes/s of a large elementwise pass, counting reads and writes; FLOP/s of a large bf16 product), random data."""
    source = torch.randn(2**30, device=DEVICE, dtype=DTYPE)
    target = torch.empty_like(source)
    bytes_per_s = 4 * source.numel() / time_s(lambda: torch.neg(source, out=target))
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=DTYPE) for _ in range(2))
    return bytes_per_s, 2 * 8192**3 / time_s(lambda: a @ b)


def difference(workload: Workload, actual: torch.Tensor, inputs: tuple[Any, ...]) -> float:
    wide = tuple(x.float() if isinstance(x, torch.Tensor) and x.dtype is DTYPE else x for x in inputs)
    expected = workload.run(TorchKernels(), *wide)
    if not actual.is_floating_point():
        return (actual != expected).float().mean().item()
    return ((actual.float() - expected).abs().max() / expected.abs().max()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="pattern of workload names")
    parser.add_argument("--json", help="also write the table here")
    options = parser.parse_args()
    torch.manual_seed(0)
    kernels = TritonKernels(device_architecture(DEVICE))
    bytes_per_s, flops_per_s = ceilings()
    print(
        f"{torch.cuda.get_device_name()}: copy {bytes_per_s / 1e12:.2f} TB/s, product {flops_per_s / 1e12:.0f} TFLOP/s"
    )
    print(f"{'workload':42} {'time':>10} {'TB/s':>6} {'TFLOP/s':>8} {'of ceiling':>10} {'error':>8}")
    table = []
    for workload in workloads():
        if not re.search(options.only, workload.name):
            continue
        inputs = workload.make()
        actual = workload.run(kernels, *inputs)
        worst = difference(workload, actual, inputs) if workload.is_compared else math.nan
        duration_s = time_s(lambda workload=workload, inputs=inputs: workload.run(kernels, *inputs))
        floor_s = max(workload.num_bytes / bytes_per_s, workload.num_flops / flops_per_s)
        row = {
            "workload": workload.name,
            "time_s": duration_s,
            "bytes_per_s": workload.num_bytes / duration_s,
            "flops_per_s": workload.num_flops / duration_s,
            "ceiling_ratio": floor_s / duration_s,
            "error_ratio": worst,
        }
        table.append(row)
        print(
            f"{workload.name:42} {duration_s * 1e6:8.1f}us {row['bytes_per_s'] / 1e12:6.2f} "
            f"{row['flops_per_s'] / 1e12:8.0f} {row['ceiling_ratio']:10.2f} {worst:8.1e}",
            flush=True,
        )
        del inputs, actual
        torch.cuda.empty_cache()
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"bytes_per_s": bytes_per_s, "flops_per_s": flops_per_s, "rows": table}, file, indent=1)


if __name__ == "__main__":
    main()
