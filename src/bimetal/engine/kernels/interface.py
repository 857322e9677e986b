"""`Kernels`: the operations that a stage's forward is made of, apart from dense products.

Two implementations: `torch_reference` (any device, the oracle of the tests) and `triton_kernels` (CUDA and ROCm;
its KV blocks hold `triton_kernels.BLOCK_TOKENS` tokens).
Shapes: T rows of a flat batch (tokens of all sequences, one after the other, never padded per sequence), B sequences.
A row whose slot is -1 is padding up to a graph's bucket: it writes no KV, is not routed to experts, and its output is
undefined. All index tensors are int32 on the compute device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from bimetal.engine.kernels.encoding import Encoding, ScaledWeight, Weight

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the rows of a flat batch belong. Sequences that decode (one row each) come first."""

    positions: Tensor
    """[T] position of each row in its sequence."""
    slots: Tensor
    """[T] block * block_tokens + offset where the row's key and value go; -1: padding."""
    query_starts: Tensor
    """[B + 1] first row of each sequence."""
    context_lens: Tensor
    """[B] tokens of each sequence in the KV cache once this step's are written."""
    block_tables: Tensor
    """[B, W] KV blocks of each sequence, in order; entries past its context are undefined."""
    num_decodes: int
    """The first `num_decodes` sequences have exactly one row each (the padded ones of a graph's bucket included)."""
    max_query_len: int
    """Host-side upper bounds, for grids and loops; constant while a graph is captured."""
    max_context_len: int


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """How to sample each of R logit rows. A field that no row needs is None.

    Randomness comes in as one uniform number a row: the token is where the cumulative probability of the filtered
    distribution, in order of token id, first exceeds `uniforms * total`.
    """

    temperatures: Tensor
    """[R] float32; 0: greedy."""
    uniforms: Tensor
    """[R] float32 in [0, 1)."""
    top_ks: Tensor | None
    """[R] int32; 0: off."""
    top_ps: Tensor | None
    """[R] float32; 1: off."""
    min_ps: Tensor | None
    """[R] float32; 0: off."""


class Kernels(Protocol):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis, accumulated in float32. x: [..., H]."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual); the sum is rounded to x's dtype before it is normalised."""

    def rotary_and_cache(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: AttentionMetadata,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Split fused rows [T, (Hq + 2 Hkv) D], normalise q and k per head where weights are given (Qwen3), rotate both
        (halves, not interleaved), write k and v to their slots, return the rotated q as [T, Hq, D].

        cos_sin: [max_position, D] float32, cosines then sines. k_cache, v_cache: [num_blocks, block_tokens, Hkv, D].
        """

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Causal attention of [T, Hq, D] queries over the paged cache, this step's keys included; returns [T, Hq * D].

        `window` w: a token sees itself and the w - 1 before it.
        """

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(first half) * second half over the last axis: [T, 2 I] -> [T, I]."""

    def experts(
        self,
        x: Tensor,
        router_logits: Tensor,
        gate_up: Weight,
        down: Weight,
        top_k: int,
        renormalise: bool,
        slots: Tensor,
    ) -> Tensor:
        """Mixture of experts: softmax over the float32 router logits [T, E], the top_k experts of each row, their weights
        scaled to sum to one if `renormalise`, sum of w * down(silu(gate) * up). gate_up: [E, 2 I, H]; down: [E, H, I].
        """

    def kept_encoding(self, stored: Encoding, dtype: torch.dtype) -> Encoding | None:
        """The encoding in which `scaled_linear` and `experts` take weights that a checkpoint stores in `stored`, for rows of
        `dtype`. None: such weights must be widened to `dtype` first."""

    def scaled_linear(self, x: Tensor, weight: ScaledWeight, bias: Tensor | None) -> Tensor:
        """x @ (payload * scale).T + bias: [T, K] -> [T, N]. Rows may be quantised on the way, each by its largest number,
        where the device multiplies FP8 by FP8."""

    def greedy(self, logits: Tensor) -> Tensor:
        """[R, V] -> [R] int32, the lowest id among equals."""

    def sample(self, logits: Tensor, sampling: SamplingTensors) -> Tensor:
        """[R, V] -> [R] int32. Order of the filters: temperature, then top_k, then top_p on what is left, then min_p
        relative to the largest probability. Ties at a boundary are all kept: a token stays if fewer than top_k tokens,
        or less than top_p of the mass, are more probable than it.
        """
