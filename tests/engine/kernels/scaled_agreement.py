"""Compares the Triton kernels' products with FP8 weights with the torch reference on the numbers that the weights mean.

Run as a program it does so on the GPU, or in Triton's interpreter if TRITON_INTERPRET=1, and prints the errors as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial

import torch
from kernel_agreement import error

from bimetal.engine.kernels.encoding import E4M3FN, Encoding, ScaledWeight
from bimetal.engine.kernels.interface import Kernels
from bimetal.engine.kernels.torch_reference import TorchKernels

REFERENCE = TorchKernels()
Case = Callable[[Kernels, torch.device, torch.dtype], float]


def scaled(shape: tuple[int, ...], encoding: Encoding, device: torch.device) -> ScaledWeight:
    """About as large as trained weights: products of unit rows come out near one."""
    *stack, rows, columns = shape
    groups = -(-columns // encoding.block_columns) if encoding.block_columns else 1
    payload = (torch.randn(shape) * 100).clamp(-448, 448).to(E4M3FN)
    scale = (torch.rand(*stack, -(-rows // encoding.block_rows), groups) + 0.5) / (100 * columns**0.5)
    weight = ScaledWeight(payload.to(device), scale.to(device), encoding)
    return weight


def kept(kernels: Kernels, weight: ScaledWeight, dtype: torch.dtype) -> ScaledWeight:
    encoding = kernels.kept_encoding(weight.encoding, dtype)
    assert encoding is not None
    return weight.as_dtype(encoding.dtype)


def linear(
    num_rows: int,
    shape: tuple[int, int],
    encoding: Encoding,
    has_bias: bool,
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
) -> float:
    weight = scaled(shape, encoding, device)
    x = torch.randn(num_rows, shape[1], device=device).to(dtype)
    bias = torch.randn(shape[0], device=device).to(dtype) if has_bias else None
    expected = REFERENCE.scaled_linear(x.float(), weight, None if bias is None else bias.float())
    return error(kernels.scaled_linear(x, kept(kernels, weight, dtype), bias), expected)


def experts(
    rows: int, encoding: Encoding, kernels: Kernels, device: torch.device, dtype: torch.dtype
) -> float:
    num_experts, hidden, inner, top_k = 6, 272, 144, 2
    gate_up = scaled((num_experts, 2 * inner, hidden), encoding, device)
    down = scaled((num_experts, hidden, inner), encoding, device)
    x = torch.randn(rows, hidden, device=device).to(dtype)
    logits = torch.randn(rows, num_experts, device=device)
    slots = torch.arange(rows, device=device, dtype=torch.int32)
    slots[rows // 2] = -1
    wide = (gate_up.widened(torch.float32), down.widened(torch.float32))
    expected = REFERENCE.experts(x.float(), logits, *wide, top_k, True, slots)
    narrow = (kept(kernels, gate_up, dtype), kept(kernels, down, dtype))
    out = kernels.experts(x, logits, *narrow, top_k, True, slots)
    return error(out[slots >= 0], expected[slots >= 0])


def quantised_rows(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> float:
    """Largest distance from the number meant, in steps of e4m3 there; infinite if a row's largest is not the encoding's."""
    x = torch.randn(4, 2096, device=device).to(dtype) * torch.tensor(
        [[1e-3], [1.0], [300.0], [0.0]], device=device
    )
    x = x.to(dtype)
    payload, scales = kernels._scaled.quantise_rows(x)  # type: ignore[attr-defined]
    tops = payload.float().abs().amax(1)
    if not torch.isfinite(payload.float()).all() or not (tops[:3] > 400).all() or tops[3] != 0:
        return float("inf")
    numbers = x.float() / scales
    steps = torch.exp2(torch.floor(torch.log2(numbers.abs().clamp(min=2**-6)))) / 8
    distances = (payload.float() - numbers).abs() / steps
    if os.environ.get("TRITON_INTERPRET") == "1":
        # The interpreter loses the carry of a number that rounds up to the next power of two: 1.99 becomes 1.
        nearest = numbers.to(E4M3FN).float().abs()
        distances[(nearest > numbers.abs()) & (torch.frexp(nearest).mantissa == 0.5)] = 0.0
    return distances.max().item()


BY_ROW, BY_BLOCK = Encoding(E4M3FN), Encoding(E4M3FN, 128, 128)
CASES: dict[str, Case] = {
    "quantised-rows": quantised_rows,
    "row": partial(linear, 5, (80, 272), BY_ROW, False),
    "row-many": partial(linear, 150, (144, 64), BY_ROW, True),
    "block": partial(linear, 3, (200, 400), BY_BLOCK, True),
    "block-of-a-row": partial(linear, 70, (200, 272), Encoding(E4M3FN, 1, 128), False),
    "experts-row": partial(experts, 9, BY_ROW),
    "experts-block": partial(experts, 9, BY_BLOCK),
    "experts-many": partial(experts, 60, Encoding(E4M3FN, 16, 128)),
}


def main(dtype_name: str, *names: str) -> None:
    from bimetal.engine.kernels.architecture import ARCHITECTURES
    from bimetal.engine.kernels.triton_kernels import TritonKernels, device_architecture

    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not is_interpreted and not torch.cuda.is_available():
        sys.exit("no GPU here: set TRITON_INTERPRET=1 to check the kernels in Triton's interpreter")
    device = torch.device("cpu" if is_interpreted else "cuda")
    kernels = TritonKernels(ARCHITECTURES["sm_90"] if is_interpreted else device_architecture(device))
    found = {}
    for name in names or CASES:
        torch.manual_seed(sum(name.encode()))
        found[name] = CASES[name](kernels, device, getattr(torch, dtype_name))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
