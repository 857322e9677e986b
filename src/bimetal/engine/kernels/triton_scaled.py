"""Products with FP8 weights as Triton programs, and through the vendor's own product where that multiplies FP8 by FP8.

The library's way, for a scale a row where the architecture's data chooses it: rows of x are quantised too, each by its
largest number, and `torch._scaled_mm` (cuBLASLt or CUTLASS, hipBLASLt) multiplies in 8 bits. The program's way, for all
else: weights are read in 8 bits and widened in registers, so that only the weights are rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bimetal.engine.kernels.choices import Choice, choose, read_choices
from bimetal.engine.kernels.encoding import E4M3FN, E4M3FNUZ, Encoding, ScaledWeight, Tensor
from bimetal.engine.kernels.registry import Launcher, Program

DEPTH_MULTIPLE = 128
"""A scale block must hold whole tiles of the depth: the largest that `data/` lists."""
_PRODUCT_MULTIPLE = 16
_WHOLE_ROW = 1 << 30
_LARGEST = {E4M3FN: 448.0, E4M3FNUZ: 240.0}


class ScaledProducts:
    """Of one GPU, launched through the registry."""

    def __init__(self, launcher: Launcher, choices: Sequence[Choice] | None = None) -> None:
        """`choices` other than the architecture's own serve measurements of what to list there."""
        self._launcher = launcher
        self._choices = read_choices(launcher.architecture) if choices is None else choices
        fp8 = launcher.architecture.fp8_e4m3
        self.dtype = E4M3FN if fp8 == "e4m3fn" else E4M3FNUZ

    def kept_encoding(self, stored: Encoding, dtype: torch.dtype) -> Encoding | None:
        if dtype not in (torch.bfloat16, torch.float16) or stored.block_columns % DEPTH_MULTIPLE:
            return None
        return Encoding(self.dtype, stored.block_rows, stored.block_columns)

    def linear(self, x: Tensor, weight: ScaledWeight, bias: Tensor | None) -> Tensor:
        wanted = choose(self._choices, "scaled_linear", x.shape[0])
        if wanted == "library" and _fits_library(x, weight):
            out = self._multiply_in_fp8(x, weight)
        else:
            out = self._multiply_widened(x, weight)
        return out if bias is None else out.add_(bias)

    def _multiply_widened(self, x: Tensor, weight: ScaledWeight) -> Tensor:
        num_rows, depth = x.shape
        num_columns = weight.payload.shape[0]
        out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
        program = self._launcher.program("scaled_linear", x.dtype, num_rows)
        tiles = -(-num_rows // program.tile["BLOCK_M"]) * -(-num_columns // program.tile["BLOCK_N"])
        program(
            (tiles, 1, 1),
            *(out, x, weight.payload, weight.scale, num_rows, num_columns, depth),
            *_blocks(weight),
            weight.scale.shape[-1],
        )
        return out

    def _multiply_in_fp8(self, x: Tensor, weight: ScaledWeight) -> Tensor:
        quantised, scales = self.quantise_rows(x)
        product: Tensor = torch._scaled_mm(
            quantised,
            weight.payload.t(),
            scale_a=scales,
            scale_b=weight.scale.t(),
            out_dtype=x.dtype,
        )
        return product

    def quantise_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(FP8 [T, K], scale of each row [T, 1] float32), whose product is x as nearly as FP8 holds it."""
        num_rows, num_columns = x.shape
        quantised = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        scales = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
        program = self._launcher.program("quantise_rows", x.dtype)
        program((num_rows, 1, 1), quantised, scales, x, num_columns, _LARGEST[self.dtype])
        return quantised, scales

    def expert_programs(self, dtype: torch.dtype, rows_per_expert: int) -> tuple[Program, Program]:
        """(gate and up, down): of one tile height."""
        first, second = (
            self._launcher.program(name, dtype, rows_per_expert) for name in ("scaled_gate_up", "scaled_down")
        )
        return first, second


def _fits_library(x: Tensor, weight: ScaledWeight) -> bool:
    """Its scales a row come with bfloat16 results only."""
    is_row_wise = weight.encoding.block_rows == 1 and weight.encoding.block_columns == 0
    is_aligned = all(size % _PRODUCT_MULTIPLE == 0 for size in weight.payload.shape)
    return is_row_wise and is_aligned and x.dtype == torch.bfloat16


def scale_arguments(weight: ScaledWeight) -> tuple[Any, ...]:
    """Of stacked matrices, as the experts' programs take them."""
    return (*_blocks(weight), *weight.scale.shape[-2:])


def _blocks(weight: ScaledWeight) -> tuple[int, int]:
    return weight.encoding.block_rows, weight.encoding.block_columns or _WHOLE_ROW
