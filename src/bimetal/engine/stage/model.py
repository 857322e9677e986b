"""The forward pass of layers [start, end): one code path for every family, on every device.

A flat batch goes in (token ids on the first stage, hidden states elsewhere), hidden states come out, the residual folded
in, so that one tensor crosses to the next stage. No data-dependent Python control flow: it can be captured in a graph.
"""

from __future__ import annotations

import math

import torch

from bimetal.catalog.models import ModelSpec, RopeScaling
from bimetal.engine.kernels.interface import AttentionMetadata, Kernels
from bimetal.engine.stage.weights import Experts, Layer, StageWeights

Tensor = torch.Tensor


def rotary_table(spec: ModelSpec, max_position: int, device: torch.device) -> Tensor:
    """[max_position, head_dim] float32: cosines of each frequency, then sines."""
    half = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    inverse = 1.0 / (spec.rope_theta**half)
    if spec.rope_scaling is not None:
        inverse = _scale_frequencies(inverse, spec.rope_scaling)
    angles = torch.outer(torch.arange(max_position).float(), inverse)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def _scale_frequencies(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Linear: all divided by the factor. llama3: long wavelengths divided, short kept, a ramp between (Llama 3.1)."""
    if scaling.kind == "linear":
        return inverse / scaling.factor
    wavelength = 2 * math.pi / inverse
    ratio = scaling.original_max_position / wavelength
    ramp = (ratio - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = ramp.clamp(0, 1)
    return inverse * kept + inverse / scaling.factor * (1 - kept)


class KvCache:
    """Keys and values of this stage's layers: [num_blocks, block_tokens, Hkv, D] each."""

    def __init__(
        self,
        spec: ModelSpec,
        num_layers: int,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks, block_tokens, spec.num_kv_heads, spec.head_dim)
        # Zeros, not garbage: a masked-out NaN would still poison a sum.
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]


class StageModel:
    def __init__(
        self,
        spec: ModelSpec,
        start_layer: int,
        weights: StageWeights,
        kernels: Kernels,
        max_position: int,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.kernels = kernels
        """May be exchanged between steps."""
        self._start_layer = start_layer
        self._weights = weights
        self._cos_sin = rotary_table(spec, max_position, device)
        self._scale = spec.head_dim**-0.5

    @property
    def is_first(self) -> bool:
        return self._weights.embedding is not None

    @property
    def is_last(self) -> bool:
        return self._weights.head is not None

    @property
    def num_expert_layers(self) -> int:
        return sum(isinstance(layer.mlp, Experts) for layer in self._weights.layers)

    def forward(self, inputs: Tensor, meta: AttentionMetadata, cache: KvCache) -> tuple[Tensor, Tensor]:
        """(x, residual), whose sum is the hidden state. inputs: [T] ids on the first stage, else [T, H]."""
        x = (
            inputs
            if self._weights.embedding is None
            else torch.nn.functional.embedding(inputs, self._weights.embedding)
        )
        kernels, eps = self.kernels, self.spec.rms_norm_eps
        residual: Tensor | None = None
        for i, layer in enumerate(self._weights.layers):
            if residual is None:
                residual, normed = x, kernels.rms_norm(x, layer.input_norm, eps)
            else:
                normed, residual = kernels.add_rms_norm(x, residual, layer.input_norm, eps)
            attended = self._attention(i, layer, normed, meta, cache)
            normed, residual = kernels.add_rms_norm(attended, residual, layer.post_norm, eps)
            x = self._mlp(layer, normed, meta)
        assert residual is not None
        return x, residual

    def _attention(
        self, index: int, layer: Layer, normed: Tensor, meta: AttentionMetadata, cache: KvCache
    ) -> Tensor:
        keys, values = cache.keys[index], cache.values[index]
        q = self.kernels.rotary_and_cache(
            layer.qkv(normed),
            self._cos_sin,
            keys,
            values,
            meta,
            layer.q_norm,
            layer.k_norm,
            self.spec.rms_norm_eps,
        )
        window = self.spec.sliding_window(self._start_layer + index)
        return layer.output(self.kernels.attention(q, keys, values, meta, self._scale, window))

    def _mlp(self, layer: Layer, normed: Tensor, meta: AttentionMetadata) -> Tensor:
        mlp = layer.mlp
        if isinstance(mlp, Experts):
            spec = self.spec
            return self.kernels.experts(
                normed,
                mlp.router(normed),
                mlp.gate_up,
                mlp.down,
                spec.experts_per_token,
                spec.renormalise_experts,
                meta.slots,
            )
        return mlp.down(self.kernels.silu_and_mul(mlp.gate_up(normed)))

    def logits(self, x: Tensor, residual: Tensor) -> Tensor:
        """[R, H] rows of the last stage's forward -> [R, V]."""
        weights = self._weights
        assert weights.final_norm is not None and weights.head is not None
        normed, _ = self.kernels.add_rms_norm(x, residual, weights.final_norm, self.spec.rms_norm_eps)
        return weights.head(normed)
