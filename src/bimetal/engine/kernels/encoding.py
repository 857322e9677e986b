"""How a weight's numbers stand in memory: `Encoding`, which travels with every quantised weight, and what it means.

FP8 is e4m3 (4 bits of exponent, 3 of mantissa) in two encodings: OCP's e4m3fn, and e4m3fnuz of CDNA 3, where the same bits
mean half as much (bias 8), 0x80 is the only NaN, and zero has no sign. Knows no checkpoints and no devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Tensor = torch.Tensor

E4M3FN = torch.float8_e4m3fn
E4M3FNUZ = torch.float8_e4m3fnuz
_SIGN_BIT = 0x80
_NAN_BITS = 0x7F


@dataclass(frozen=True, slots=True)
class Encoding:
    """Numbers of `dtype`, and which of them share a scale."""

    dtype: torch.dtype
    block_rows: int = 1
    block_columns: int = 0
    """0: a whole row."""


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """Matrices [..., N, K] whose numbers are `payload * scale`, each scale standing for a block of its matrix."""

    payload: Tensor
    scale: Tensor
    """[..., ceil(N / block_rows), ceil(K / block_columns)] float32."""
    encoding: Encoding

    @property
    def nbytes(self) -> int:
        return self.payload.nbytes + self.scale.nbytes

    def widened(self, dtype: torch.dtype) -> Tensor:
        """Plain numbers, multiplied in float32 and rounded once."""
        num_rows, num_columns = self.payload.shape[-2:]
        scale = self.scale.repeat_interleave(self.encoding.block_rows, dim=-2)[..., :num_rows, :]
        if self.encoding.block_columns:
            scale = scale.repeat_interleave(self.encoding.block_columns, dim=-1)[..., :num_columns]
        return (self.payload.float() * scale).to(dtype)

    def matrix(self, index: int) -> ScaledWeight:
        """One of stacked matrices."""
        return ScaledWeight(self.payload[index], self.scale[index], self.encoding)

    def by_row(self) -> ScaledWeight:
        """The same numbers with a scale of its own for every row."""
        if self.encoding.block_rows == 1:
            return self
        num_rows = self.payload.shape[-2]
        scale = self.scale.repeat_interleave(self.encoding.block_rows, dim=-2)[..., :num_rows, :]
        encoding = Encoding(self.encoding.dtype, 1, self.encoding.block_columns)
        return ScaledWeight(self.payload, scale.contiguous(), encoding)

    def as_dtype(self, dtype: torch.dtype) -> ScaledWeight:
        """The same numbers in the other FP8 encoding, if it is another."""
        if dtype == self.encoding.dtype:
            return self
        if (self.encoding.dtype, dtype) != (E4M3FN, E4M3FNUZ):
            raise ValueError(f"no way from {self.encoding.dtype} to {dtype}")
        encoding = Encoding(dtype, self.encoding.block_rows, self.encoding.block_columns)
        return ScaledWeight(fnuz_from_fn(self.payload), self.scale * 2, encoding)


Weight = Tensor | ScaledWeight


def fnuz_from_fn(payload: Tensor) -> Tensor:
    """e4m3fn to e4m3fnuz: the same bits, which then mean half as much; -0 becomes 0, and NaN stays NaN."""
    bits = payload.view(torch.uint8)
    # Minus zero's bits are fnuz's NaN, and fn's NaNs are numbers there.
    is_nan = (bits & _NAN_BITS) == _NAN_BITS
    bits = bits.masked_fill(bits == _SIGN_BIT, 0).masked_fill(is_nan, _SIGN_BIT)
    return bits.view(E4M3FNUZ)


def stack_rows(parts: Sequence[ScaledWeight]) -> ScaledWeight | None:
    """Matrices of the same width, one below the other; None if their scales stand for different numbers of columns."""
    columns = {part.encoding.block_columns for part in parts}
    if len(columns) > 1 or len({part.encoding.dtype for part in parts}) > 1:
        return None
    block_rows = {part.encoding.block_rows for part in parts}
    is_aligned = all(part.payload.shape[0] % part.encoding.block_rows == 0 for part in parts[:-1])
    if len(block_rows) > 1 or not is_aligned:
        parts = [part.by_row() for part in parts]
    # As bytes: torch moves them whatever it can compute with.
    payload = torch.cat([part.payload.view(torch.uint8) for part in parts]).view(parts[0].encoding.dtype)
    return ScaledWeight(payload, torch.cat([part.scale for part in parts]), parts[0].encoding)
