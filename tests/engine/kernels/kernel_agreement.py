"""Compares any implementation of `Kernels` with the torch reference in float32, on random and odd shapes.

Each case returns the largest |a - b| / max |reference|; NaN where something was not written. Run as a program it checks
the Triton kernels in Triton's interpreter and prints the errors as JSON, since the interpreter must be chosen before
Triton is imported.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from functools import partial

import torch

from bimetal.engine.kernels.interface import AttentionMetadata, Kernels, SamplingTensors
from bimetal.engine.kernels.torch_reference import TorchKernels

BLOCK_TOKENS = 64
REFERENCE = TorchKernels()
Case = Callable[[Kernels, torch.device, torch.dtype], float]
TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 1e-2, torch.float32: 1e-4}


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (actual.float() - expected.float()).abs().max() / expected.float().abs().max()
    return float("nan") if not torch.isfinite(actual.float()).all() else difference.item()


def rms_norm(
    columns: int, rows: int, has_residual: bool, kernels: Kernels, device: torch.device, dtype: torch.dtype
) -> float:
    x, residual = (torch.randn(rows, columns, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(columns, device=device).to(dtype)
    if not has_residual:
        expected = REFERENCE.rms_norm(x.float(), weight.float(), 1e-5)
        return error(kernels.rms_norm(x, weight, 1e-5), expected)
    out, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    expected_total = (x + residual).float()
    expected = REFERENCE.rms_norm(expected_total, weight.float(), 1e-5)
    return max(error(out, expected), error(total, expected_total))


def silu_and_mul(columns: int, kernels: Kernels, device: torch.device, dtype: torch.dtype) -> float:
    gate_up = torch.randn(5, 2 * columns, device=device).to(dtype)
    return error(kernels.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up.float()))


def rotary_and_cache(
    heads: int,
    kv_heads: int,
    head_dim: int,
    has_norm: bool,
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
) -> float:
    """The queries, the caches at the written slots, and that no other slot changed."""
    rows, num_blocks = 7, 5
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim, device=device).to(dtype)
    angles = torch.randn(300, head_dim // 2, device=device) * 3
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    caches = [
        torch.randn(num_blocks, BLOCK_TOKENS, kv_heads, head_dim, device=device).to(dtype) for _ in range(2)
    ]
    norms = [torch.randn(head_dim, device=device).to(dtype) if has_norm else None for _ in range(2)]
    positions = torch.randint(0, 300, (rows,), device=device, dtype=torch.int32)
    slots = torch.randperm(num_blocks * BLOCK_TOKENS, device=device)[:rows].to(torch.int32)
    slots[[2, 6]] = -1
    empty = torch.empty(0, dtype=torch.int32, device=device)
    meta = AttentionMetadata(positions, slots, empty, empty, empty, 0, 0, 0)
    wide = [cache.float() for cache in caches]
    wide_norms = [None if norm is None else norm.float() for norm in norms]
    expected = REFERENCE.rotary_and_cache(qkv.float(), cos_sin, *wide, meta, *wide_norms, 1e-6)
    out = kernels.rotary_and_cache(qkv, cos_sin, *caches, meta, *norms, 1e-6)
    kept = slots >= 0
    return max(error(out[kept], expected[kept]), error(caches[0], wide[0]), error(caches[1], wide[1]))


def attention(
    group: int,
    head_dim: int,
    query_lens: list[int],
    context_lens: list[int],
    num_decodes: int,
    window: int | None,
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
) -> float:
    """Slots that no token was written to hold NaN, and tables end in blocks that do not exist."""
    kv_heads = 2
    width = math.ceil(max(context_lens) / BLOCK_TOKENS) + 2
    num_blocks = len(context_lens) * width
    tables = torch.randperm(num_blocks).view(len(context_lens), width)
    k_cache, v_cache = (
        torch.full((num_blocks, BLOCK_TOKENS, kv_heads, head_dim), float("nan")).to(dtype) for _ in range(2)
    )
    for sequence, context_len in enumerate(context_lens):
        positions = torch.arange(context_len)
        blocks = tables[sequence, positions // BLOCK_TOKENS]
        for cache in (k_cache, v_cache):
            cache[blocks, positions % BLOCK_TOKENS] = torch.randn(context_len, kv_heads, head_dim).to(dtype)
        tables[sequence, math.ceil(context_len / BLOCK_TOKENS) :] = 2**30
    q = torch.randn(sum(query_lens), kv_heads * group, head_dim).to(dtype)
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    indices = [tensor.to(device, torch.int32) for tensor in (starts, torch.tensor(context_lens), tables)]
    empty = torch.empty(0, dtype=torch.int32, device=device)
    meta = AttentionMetadata(empty, empty, *indices, num_decodes, max(query_lens), max(context_lens))
    q, k_cache, v_cache = q.to(device), k_cache.to(device), v_cache.to(device)
    scale = 1.5 / math.sqrt(head_dim)
    expected = REFERENCE.attention(q.float(), k_cache.float(), v_cache.float(), meta, scale, window)
    return error(kernels.attention(q, k_cache, v_cache, meta, scale, window), expected)


def experts(
    num_experts: int,
    top_k: int,
    rows: int,
    hidden: int,
    inner: int,
    renormalise: bool,
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
) -> float:
    x = torch.randn(rows, hidden, device=device).to(dtype)
    logits = torch.randn(rows, num_experts, device=device)
    gate_up = (torch.randn(num_experts, 2 * inner, hidden, device=device) / math.sqrt(hidden)).to(dtype)
    down = (torch.randn(num_experts, hidden, inner, device=device) / math.sqrt(inner)).to(dtype)
    slots = torch.arange(rows, device=device, dtype=torch.int32)
    slots[rows // 2] = -1 if rows > 1 else 0
    wide = (x.float(), logits, gate_up.float(), down.float())
    expected = REFERENCE.experts(*wide, top_k, renormalise, slots)
    out = kernels.experts(x, logits, gate_up, down, top_k, renormalise, slots)
    kept = slots >= 0
    return error(out[kept], expected[kept])


def greedy(vocabulary: int, kernels: Kernels, device: torch.device, dtype: torch.dtype) -> float:
    """Share of rows that differ, among them rows of equal logits."""
    logits = torch.randn(6, vocabulary, device=device).to(dtype)
    logits[0] = 1.0
    logits[1, [vocabulary // 3, vocabulary - 1]] = 9.0
    logits[2] = -torch.inf
    logits[2, -1] = -5.0
    return (kernels.greedy(logits) != REFERENCE.greedy(logits)).float().mean().item()


def sample(
    vocabulary: int,
    filters: tuple[bool, bool, bool],
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
) -> float:
    """1 if any token is not the one at its uniform number, give or take 1e-4 of the filtered mass; else 0."""
    rows = 24
    logits = (torch.randn(rows, vocabulary, device=device) * 3).to(dtype)
    logits[0, ::2] = -torch.inf
    logits[1] = 0.5
    temperatures = torch.linspace(0.3, 2.0, rows, device=device)
    temperatures[5] = 0.0
    uniforms = torch.rand(rows, device=device)
    uniforms[6], uniforms[7] = 0.0, 1 - 2**-24
    top_ks = torch.randint(1, vocabulary + 5, (rows,), device=device, dtype=torch.int32)
    top_ks[2], top_ks[3] = 0, 1
    top_ps = torch.rand(rows, device=device)
    top_ps[4], top_ps[3] = 1.0, 0.0
    min_ps = torch.rand(rows, device=device) ** 4
    chosen = [
        values if used else None for values, used in zip((top_ks, top_ps, min_ps), filters, strict=True)
    ]
    out = kernels.sample(logits, SamplingTensors(temperatures, uniforms, *chosen)).long()
    if ((out < 0) | (out >= vocabulary)).any():
        return float("inf")
    worst = 0.0
    for row in range(rows):
        if temperatures[row] == 0:
            worst = max(worst, float(out[row] != logits[row].float().argmax()))
            continue
        slack = 1e-4
        near = torch.tensor(
            [max(0.0, uniforms[row].item() - slack), min(1 - 2**-24, uniforms[row].item() + slack)]
        )
        bounds = SamplingTensors(
            temperatures[row].expand(2),
            near.to(device),
            *(None if v is None else v[row].expand(2) for v in chosen),
        )
        low, high = REFERENCE.sample(logits[row].expand(2, -1), bounds).tolist()
        if uniforms[row] + slack > 1:
            high = (
                vocabulary - 1
            )  # tokens of less mass than a float32 sum resolves may follow the reference's last
        worst = max(worst, float(not low <= out[row] <= high), float(logits[row, out[row]] == -torch.inf))
    return worst


LONG = [1, 65, 300, 700]
CASES: dict[str, Case] = {
    **{
        f"rms_norm-{columns}-{residual}": partial(rms_norm, columns, 3, residual)
        for columns in (64, 576, 1024, 4096)
        for residual in (False, True)
    },
    "silu_and_mul-48": partial(silu_and_mul, 48),
    "silu_and_mul-2064": partial(silu_and_mul, 2064),
    **{
        f"rotary-{heads}-{kv_heads}-{head_dim}-{norm}": partial(rotary_and_cache, heads, kv_heads, head_dim, norm)
        for heads, kv_heads, head_dim, norm in ((9, 3, 64, False), (32, 8, 128, True), (16, 16, 256, True), (7, 1, 128, False))
    },
    **{
        f"decode-group{group}-head{head_dim}": partial(attention, group, head_dim, [1] * 4, LONG, 4, None)
        for group, head_dim in ((1, 64), (3, 64), (4, 128), (5, 128), (6, 128), (7, 128), (8, 128), (16, 128), (8, 256))
    },
    "decode-window": partial(attention, 4, 64, [1] * 4, LONG, 4, 100),
    "decode-long": partial(attention, 2, 64, [1] * 2, [2600, 9], 2, None),
    **{
        f"prefill-group{group}-head{head_dim}": partial(
            attention, group, head_dim, [1, 70, 33], [1, 70, 33], 0, None
        )
        for group, head_dim in ((1, 64), (3, 64), (4, 128), (5, 128), (6, 128), (7, 128), (8, 128), (16, 128), (8, 256))
    },
    "mixed-chunked": partial(attention, 3, 64, [1, 1, 50, 1, 90], [77, 5, 200, 64, 90], 2, None),
    "mixed-window": partial(attention, 4, 128, [1, 150, 20], [200, 150, 300], 1, 40),
    "experts-8-2": partial(experts, 8, 2, 13, 64, 96, True),
    "experts-8-2-one": partial(experts, 8, 2, 1, 144, 80, False),
    "experts-60-4": partial(experts, 60, 4, 40, 128, 48, True),
    "experts-128-8": partial(experts, 128, 8, 21, 96, 64, True),
    "experts-4-2-many": partial(experts, 4, 2, 150, 64, 64, True),
    "greedy-320": partial(greedy, 320),
    "greedy-9001": partial(greedy, 9001),
    **{
        f"sample-{vocabulary}-{''.join(str(int(used)) for used in filters)}": partial(sample, vocabulary, filters)
        for vocabulary, filters in (
            (320, (False, False, False)),
            (5003, (True, False, False)),
            (5003, (False, True, False)),
            (320, (True, True, True)),
        )
    },
}  # fmt: skip


def errors(kernels: Kernels, device: torch.device, dtype: torch.dtype, names: list[str]) -> dict[str, float]:
    results = {}
    for name in names:
        torch.manual_seed(sum(name.encode()))
        results[name] = CASES[name](kernels, device, dtype)
    return results


def main(dtype_name: str, *names: str) -> None:
    """On the GPU where there is one, else in the interpreter."""
    from bimetal.engine.kernels.architecture import ARCHITECTURES
    from bimetal.engine.kernels.triton_kernels import TritonKernels, device_architecture

    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not is_interpreted and not torch.cuda.is_available():
        sys.exit("no GPU here: set TRITON_INTERPRET=1 to check the kernels in Triton's interpreter")
    device = torch.device("cpu" if is_interpreted else "cuda")
    kernels = TritonKernels(ARCHITECTURES["sm_90"] if is_interpreted else device_architecture(device))
    print(json.dumps(errors(kernels, device, getattr(torch, dtype_name), list(names) or list(CASES))))


if __name__ == "__main__":
    main(*sys.argv[1:])
