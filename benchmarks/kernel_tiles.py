"""Times candidate tiles on this machine's GPU, to choose what `engine/kernels/data/` lists.

usage: PYTHONPATH=src python benchmarks/kernel_tiles.py [--only PATTERN] [--json FILE]

Prints each workload's candidates, fastest first; what is listed after it must still pass the ahead-of-time test, which
refuses spills. Compiles in parallel first; a candidate that the compiler or the device refuses is named with its reason.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor

import torch
from kernels import DEVICE, DTYPE, Workload, attention, choice, elementwise, experts, time_s

from bimetal.engine.kernels.architecture import Architecture
from bimetal.engine.kernels.registry import Entry, Rule, Tile, compile_entry, read_rules
from bimetal.engine.kernels.specs import SPECS
from bimetal.engine.kernels.triton_kernels import TritonKernels, device_architecture

Candidate = dict[str, Rule]
"""By kernel: the rule to use instead of the listed ones."""


def rule(
    kernel: str, num_warps: int, num_stages: int, shapes: Mapping[str, int] | None = None, **tile: int
) -> Rule:
    fixed = {name: (value,) for name, value in (shapes or {}).items()}
    return Rule(kernel, (DTYPE,), fixed, None, Tile(tile, num_warps, num_stages))


def attention_rules(
    head_dim: int, block_tokens: int, is_decode: int, tiles: list[tuple[int, ...]]
) -> Iterator[Candidate]:
    shapes = {"HEAD_DIM": head_dim, "BLOCK_TOKENS": block_tokens, "IS_DECODE": is_decode}
    for block_m, block_n, warps, stages, has_descriptors in tiles:
        if block_n <= block_tokens:
            tile = {
                "BLOCK_M": block_m,
                "BLOCK_N": block_n,
                "HAS_DESCRIPTORS": has_descriptors,
                "BLOCK_SEQUENCES": 256,
            }
            yield {"paged_attention": rule("paged_attention", warps, stages, shapes, **tile)}


def expert_rules(
    block_m: int, first: list[tuple[int, ...]], second: list[tuple[int, ...]]
) -> Iterator[Candidate]:
    """Every first product with the first of the second products, then the reverse."""

    def one(kernel: str, tile: tuple[int, ...]) -> Rule:
        block_n, block_k, group_m, warps, stages, has_descriptors = tile
        return rule(kernel, warps, stages, None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=group_m, HAS_DESCRIPTORS=has_descriptors)  # fmt: skip

    pairs = [(tile, second[0]) for tile in first] + [(first[0], tile) for tile in second[1:]]
    for up, down in pairs:
        yield {"expert_gate_up": one("expert_gate_up", up), "expert_down": one("expert_down", down)}


def searches() -> Iterator[tuple[Workload, list[Candidate]]]:
    decode = [
        (16, n, warps, stages, d)
        for n, warps, stages in (
            (32, 2, 4), (32, 4, 5), (64, 2, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 4, 2), (128, 4, 3), (128, 8, 2), (128, 8, 3),
        )
        for d in (0, 1)
    ]  # fmt: skip
    prefill = [
        (m, n, warps, stages, d)
        for m, n, warps, stages in (
            (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 4, 2), (64, 128, 4, 2), (64, 64, 8, 3), (64, 32, 4, 3), (64, 32, 4, 4), (128, 32, 8, 3),
        )
        for d in (0, 1)
    ]  # fmt: skip
    for block_tokens in (64, 128):
        for name, contexts in (("decode 32 x 8192", [8192] * 32), ("decode 256 x 640", [640] * 256)):
            workload = attention(
                f"{name} /{block_tokens}", contexts, [1] * len(contexts), block_tokens=block_tokens
            )
            yield workload, list(attention_rules(128, block_tokens, 1, decode))
        for name, lengths in (("prefill 1 x 8192", [8192]), ("prefill 16 x 512", [512] * 16)):
            workload = attention(f"{name} /{block_tokens}", lengths, lengths, block_tokens=block_tokens)
            yield workload, list(attention_rules(128, block_tokens, 0, prefill))
    for head_dim, heads in ((64, 64), (256, 16)):
        workload = attention(f"decode 32 x 8192, head {head_dim}", [8192] * 32, [1] * 32, head_dim, heads)
        yield workload, list(attention_rules(head_dim, 64, 1, decode))
        workload = attention(f"prefill 1 x 8192, head {head_dim}", [8192], [8192], head_dim, heads)
        yield workload, list(attention_rules(head_dim, 64, 0, prefill))
    small = [
        (n, k, 64, warps, stages, d)
        for n, k, warps, stages in (
            (64, 128, 4, 4), (32, 128, 4, 4), (32, 256, 4, 3), (64, 64, 4, 5), (128, 64, 4, 4), (64, 128, 4, 3), (128, 64, 8, 4), (64, 256, 8, 3), (32, 128, 2, 5),
        )
        for d in (0, 1)
    ]  # fmt: skip
    for rows, blocks in ((16, (16,)), (32, (16, 32)), (64, (16, 32, 64))):
        for block_m in blocks:
            yield experts(f"experts 8x7B, {rows} rows, tiles of {block_m}", rows, 8, 2, 4096, 14336), list(expert_rules(block_m, small, small))  # fmt: skip
    yield (
        experts("experts 128, 32 rows, tiles of 16", 32, 128, 8, 2048, 768),
        list(expert_rules(16, small, small)),
    )
    middle = [
        (n, k, group, warps, stages, d)
        for n, k, group, warps, stages in (
            (64, 64, 16, 4, 4),
            (128, 64, 16, 4, 3),
            (128, 64, 16, 8, 4),
            (64, 128, 16, 4, 3),
        )
        for d in (0, 1)
    ]
    for rows in (128, 256):
        for block_m in (64, 128):
            yield experts(f"experts 8x7B, {rows} rows, tiles of {block_m}", rows, 8, 2, 4096, 14336), list(expert_rules(block_m, middle, middle))  # fmt: skip
    large = [(128, 64, 8, 8, 3, d) for d in (1, 0)] + [
        (128, 64, 16, 8, 4, 1), (128, 64, 8, 8, 4, 1), (128, 64, 4, 8, 4, 1), (128, 32, 8, 8, 5, 1), (64, 64, 8, 4, 4, 1), (64, 64, 8, 8, 4, 1), (128, 128, 8, 8, 2, 1),
    ]  # fmt: skip
    large_down = [(256, 64, 8, 8, 3, d) for d in (1, 0)] + [
        (256, 64, 16, 8, 4, 1), (256, 64, 8, 8, 4, 1), (256, 64, 4, 8, 4, 1), (128, 64, 8, 4, 4, 1), (128, 64, 8, 8, 4, 1), (128, 128, 8, 8, 3, 1), (256, 32, 8, 8, 6, 1),
    ]  # fmt: skip
    for rows in (2048, 8192):
        yield experts(f"experts 8x7B, {rows} rows, tiles of 128", rows, 8, 2, 4096, 14336), list(expert_rules(128, large, large_down))  # fmt: skip
    for rows in (512, 1024):
        for block_m, tiles in ((64, middle), (128, large)):
            yield experts(f"experts 8x7B, {rows} rows, tiles of {block_m}", rows, 8, 2, 4096, 14336), list(expert_rules(block_m, tiles, tiles))  # fmt: skip
    yield experts("experts 128, 8192 rows, tiles of 128", 8192, 128, 8, 2048, 768), list(expert_rules(128, large, large_down))  # fmt: skip
    for workload in elementwise(16384):
        if workload.name.startswith("rotary"):
            shapes = {"HEAD_DIM": 128, "BLOCK_TOKENS": 64, "HAS_NORM": 0}
            yield (
                workload,
                [
                    {"rotary_and_cache": rule("rotary_and_cache", warps, 1, shapes, BLOCK_HEADS=heads)}
                    for heads in (4, 8, 16, 32)
                    for warps in (1, 2, 4, 8)
                ],
            )
    for workload in choice(32):
        if workload.name.startswith("sample"):
            yield (
                workload,
                [
                    {"sample": rule("sample", warps, 3, None, BLOCK=block, SEGMENT=256, SEGMENTS=1024)}
                    for block, warps in ((2048, 8), (2048, 16), (4096, 8), (4096, 16), (8192, 8), (8192, 16))
                ],
            )
        else:
            yield (
                workload,
                [
                    {"greedy": rule("greedy", warps, 3, None, BLOCK=block)}
                    for block in (4096, 8192, 16384)
                    for warps in (8, 16, 32)
                ],
            )


def compiled(job: tuple[Rule, Architecture]) -> str | None:
    """Warms the compiler's cache; returns why a candidate is refused."""
    candidate, architecture = job
    shapes = {name: values[0] for name, values in candidate.shapes.items()}
    try:
        compile_entry(Entry(SPECS[candidate.kernel], DTYPE, shapes, candidate.tile), architecture)
    except Exception as refusal:
        return repr(refusal)[:200]
    return None


def label(candidate: Candidate) -> str:
    return " | ".join(
        f"{name} {list(r.tile.constants.values())} w{r.tile.num_warps} s{r.tile.num_stages}"
        for name, r in candidate.items()
    )


def timed(
    workload: Workload, candidates: list[Candidate], refusals: Mapping[str, str | None]
) -> list[tuple[float, str]]:
    """(seconds, label), fastest first."""
    architecture = device_architecture(DEVICE)
    listed = read_rules(architecture)
    inputs = workload.make()
    results = []
    for candidate in candidates:
        rules = [r for r in listed if r.kernel not in candidate] + list(candidate.values())
        try:
            if refused := [reason for r in candidate.values() if (reason := refusals[repr(r)])]:
                raise RuntimeError(refused[0])
            run = functools.partial(workload.run, TritonKernels(architecture, rules), *inputs)
            results.append((time_s(run, 5, 3), label(candidate)))
        except Exception as refusal:
            print(f"  {label(candidate)}: {str(refusal)[:160]}")
    return sorted(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="pattern of workload names")
    parser.add_argument("--json", help="also write the timings here")
    options = parser.parse_args()
    torch.manual_seed(0)
    plan = [search for search in searches() if re.search(options.only, search[0].name)]
    begin = time.monotonic()
    architecture = device_architecture(DEVICE)
    jobs = {
        repr(r): (r, architecture)
        for _, candidates in plan
        for candidate in candidates
        for r in candidate.values()
    }
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        refusals = dict(zip(jobs, pool.map(compiled, jobs.values()), strict=True))
    print(f"{len(jobs)} programs compiled in {time.monotonic() - begin:.0f} s", flush=True)
    results = []
    for workload, candidates in plan:
        times = timed(workload, candidates, refusals)
        print(f"== {workload.name}: {workload.num_bytes / 1e9:.2f} GB, {workload.num_flops / 1e12:.2f} TFLOP")
        for duration_s, name in times[:6]:
            print(
                f"  {duration_s * 1e6:8.1f}us {workload.num_bytes / duration_s / 1e12:5.2f} TB/s "
                f"{workload.num_flops / duration_s / 1e12:5.0f} TFLOP/s  {name}",
                flush=True,
            )
        results.append({"workload": workload.name, "timed": times})
        if options.json:
            with open(options.json, "w") as file:
                json.dump(results, file, indent=1)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
