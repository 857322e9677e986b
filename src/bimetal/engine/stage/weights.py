"""A stage's weights: read from a checkpoint, this stage's tensors only, fused as the forward wants them.

Query, key and value become one matrix, gate and up another; a tensor-parallel rank takes its shard where the parts are
put together (`rows`, `_fused`). Quantised matrices stay as they are stored where the kernels take them so, and are widened
here where not. Knows checkpoint names; knows nothing of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bimetal.catalog.models import ModelSpec
from bimetal.engine.kernels.encoding import E4M3FN, Encoding, ScaledWeight, Tensor, Weight, stack_rows
from bimetal.engine.kernels.interface import Kernels
from bimetal.engine.kernels.torch_reference import TorchKernels
from bimetal.engine.stage.checkpoint import Source
from bimetal.errors import StageError

Progress = Callable[[int, int], None]


class Linear:
    """x @ weight.T + bias. The one place where a dense weight's encoding and layout are known.

    In float32 on a CPU the weight is reordered once into oneDNN's blocked layout, which reads 2 to 16 rows at nearly the
    price of one.
    """

    def __init__(self, weight: Weight, bias: Tensor | None, kernels: Kernels) -> None:
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self.bias = bias
        self._kernels = kernels
        self._packed = (
            isinstance(weight, Tensor)
            and weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and torch.backends.mkldnn.is_available()
        )
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 8) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            packed: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return packed
        if isinstance(self.weight, ScaledWeight):
            return self._kernels.scaled_linear(x, self.weight, self.bias)
        return torch.nn.functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Experts:
    router: Linear
    gate_up: Weight
    """[E, 2 I, H]"""
    down: Weight
    """[E, H, I]"""


@dataclass(frozen=True, slots=True)
class Mlp:
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    post_norm: Tensor
    mlp: Mlp | Experts


@dataclass(frozen=True, slots=True)
class StageWeights:
    layers: tuple[Layer, ...]
    embedding: Tensor | None
    """[V, H], on the first stage."""
    final_norm: Tensor | None
    head: Linear | None
    """On the last stage."""
    num_bytes: int


class _Loader:
    """Puts one stage's parts together; `rank` of `num_ranks` is the tensor-parallel seam (one rank today)."""

    def __init__(
        self,
        spec: ModelSpec,
        source: Source,
        device: torch.device,
        dtype: torch.dtype,
        kernels: Kernels,
        report: Callable[[int], None],
    ):
        self._spec = spec
        self._source = source
        self._device = device
        self._dtype = dtype
        self._kernels = kernels
        self._report = report
        self.num_bytes = 0

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._report(self.num_bytes)

    def tensor(self, name: str, *shape: int) -> Tensor:
        stored = self._source.read(name, shape)
        if stored.dtype.itemsize < torch.float16.itemsize:
            raise StageError(
                f"{name} is stored as {stored.dtype}, which only matrices of a layer and the output head may be: take a "
                "checkpoint that leaves embeddings and norms alone"
            )
        tensor = stored.to(device=self._device, dtype=self._dtype)
        self._count(tensor.nbytes)
        return tensor

    def linear(self, parts: Sequence[tuple[str, int]], columns: int, bias: bool) -> Linear:
        """Fused `parts` (name without `.weight`, rows)."""
        weight = self._fused(parts, columns)
        biases = torch.cat([self.tensor(f"{name}.bias", n) for name, n in parts]) if bias else None
        return Linear(weight, biases, self._kernels)

    def _fused(self, parts: Sequence[tuple[str, int]], columns: int) -> Weight:
        """Matrices of the same width, one below the other."""
        if self._spec.quantization is None:
            return self._filled(parts, columns)
        stored = [self._source.read_weight(name, rows, columns) for name, rows in parts]
        scaled = [part for part in stored if isinstance(part, ScaledWeight)]
        kept: Weight | None = self._kept(stack_rows(scaled)) if len(scaled) == len(stored) else None
        fused = torch.cat([self._widened(part) for part in stored]) if kept is None else kept
        self._count(fused.nbytes)
        return fused

    def _filled(self, parts: Sequence[tuple[str, int]], columns: int) -> Tensor:
        """Of an unquantised model: filled in place, so that no second copy is held."""
        fused = torch.empty(sum(n for _, n in parts), columns, device=self._device, dtype=self._dtype)
        at = 0
        for name, num_rows in parts:
            fused[at : at + num_rows] = self._source.read(f"{name}.weight", (num_rows, columns))
            at += num_rows
        self._count(fused.nbytes)
        return fused

    def _kept(self, weight: ScaledWeight | None) -> ScaledWeight | None:
        """On the device, in the encoding that the kernels take it in; None: they take it widened only."""
        if weight is None:
            return None
        encoding = self._kernels.kept_encoding(weight.encoding, self._dtype)
        if encoding is None:
            return None
        weight = weight.as_dtype(encoding.dtype)
        return ScaledWeight(weight.payload.to(self._device), weight.scale.to(self._device), weight.encoding)

    def _widened(self, weight: Weight) -> Tensor:
        if isinstance(weight, ScaledWeight):
            weight = weight.widened(self._dtype)
        return weight.to(device=self._device, dtype=self._dtype)

    def layer(self, index: int) -> Layer:
        spec, prefix = self._spec, f"model.layers.{index}"
        attention = f"{prefix}.self_attn"
        hidden = spec.hidden_size
        return Layer(
            input_norm=self.tensor(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self.linear(
                [
                    (f"{attention}.q_proj", spec.query_size),
                    (f"{attention}.k_proj", spec.kv_size),
                    (f"{attention}.v_proj", spec.kv_size),
                ],
                hidden,
                spec.qkv_bias,
            ),
            q_norm=self.tensor(f"{attention}.q_norm.weight", spec.head_dim) if spec.qk_norm else None,
            k_norm=self.tensor(f"{attention}.k_norm.weight", spec.head_dim) if spec.qk_norm else None,
            output=self.linear([(f"{attention}.o_proj", hidden)], spec.query_size, spec.output_bias),
            post_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
            mlp=self.experts(prefix) if spec.has_experts(index) else self.mlp(f"{prefix}.mlp"),
        )

    def mlp(self, prefix: str) -> Mlp:
        spec = self._spec
        parts = [
            (f"{prefix}.gate_proj", spec.intermediate_size),
            (f"{prefix}.up_proj", spec.intermediate_size),
        ]
        return Mlp(
            gate_up=self.linear(parts, spec.hidden_size, spec.mlp_bias),
            down=self.linear(
                [(f"{prefix}.down_proj", spec.hidden_size)], spec.intermediate_size, spec.mlp_bias
            ),
        )

    def experts(self, prefix: str) -> Experts:
        spec = self._spec
        width, hidden = spec.moe_intermediate_size, spec.hidden_size
        mixtral = spec.family == "mixtral"
        block = f"{prefix}.block_sparse_moe" if mixtral else f"{prefix}.mlp"
        gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        names = [f"{block}.experts.{e}" for e in range(spec.num_experts)]
        gate_up = self._stacked([[(f"{n}.{gate}", width), (f"{n}.{up}", width)] for n in names], hidden)
        downs = self._stacked([[(f"{n}.{down}", hidden)] for n in names], width)
        return Experts(self.linear([(f"{block}.gate", spec.num_experts)], hidden, False), gate_up, downs)

    def _stacked(self, experts: Sequence[Sequence[tuple[str, int]]], columns: int) -> Weight:
        """Each expert's fused parts, in one tensor that is allocated once its first expert is known."""
        stack: Weight | None = None
        for e, parts in enumerate(experts):
            weight = self._fused(parts, columns)
            if stack is None:
                stack = _empty_stack(len(experts), weight)
            _put(stack, e, weight, parts[0][0])
        assert stack is not None
        return stack


def _empty_stack(number: int, like: Weight) -> Weight:
    if isinstance(like, ScaledWeight):
        payload, scale = (t.new_empty((number, *t.shape)) for t in (like.payload, like.scale))
        return ScaledWeight(payload, scale, like.encoding)
    return like.new_empty((number, *like.shape))


def _put(stack: Weight, index: int, weight: Weight, name: str) -> None:
    if isinstance(stack, ScaledWeight) and isinstance(weight, ScaledWeight):
        if stack.encoding == weight.encoding:
            stack.payload[index] = weight.payload
            stack.scale[index] = weight.scale
            return
    elif isinstance(stack, Tensor) and isinstance(weight, Tensor):
        stack[index] = weight
        return
    raise StageError(
        f"{name} is stored in another encoding than expert 0 of its layer: take a checkpoint that quantises all experts of "
        "a layer alike"
    )


def load_stage_weights(
    spec: ModelSpec,
    source: Source,
    start_layer: int,
    end_layer: int,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    kernels: Kernels | None = None,
) -> StageWeights:
    """Layers [start_layer, end_layer), the embedding if they begin the model, norm and head if they end it.

    `kernels`: those that will compute with them; None: torch's.
    """
    kernels = kernels or TorchKernels()
    total = _expected_bytes(spec, start_layer, end_layer, dtype, kernels)
    loader = _Loader(spec, source, device, dtype, kernels, lambda done: progress(min(done, total), total))
    hidden, vocab = spec.hidden_size, spec.vocab_size
    first, last = start_layer == 0, end_layer == spec.num_layers
    embedding_name = "model.embed_tokens.weight"
    embedding = loader.tensor(embedding_name, vocab, hidden) if first else None
    layers = tuple(loader.layer(i) for i in range(start_layer, end_layer))
    final_norm = head = None
    if last:
        final_norm = loader.tensor("model.norm.weight", hidden)
        if not spec.tied_embeddings:
            head = loader.linear([("lm_head", vocab)], hidden, False)
        else:
            tied = embedding if embedding is not None else loader.tensor(embedding_name, vocab, hidden)
            head = Linear(tied, None, kernels)
    progress(total, total)
    return StageWeights(layers, embedding, final_norm, head, loader.num_bytes)


def _expected_bytes(
    spec: ModelSpec, start_layer: int, end_layer: int, dtype: torch.dtype, kernels: Kernels
) -> int:
    """For progress: exact but for scales, norms and what a quantised checkpoint leaves alone."""
    whole = spec.stage_params(start_layer, end_layer) * dtype.itemsize
    if spec.quantization is None:
        return whole
    stored = Encoding(E4M3FN, *(spec.quantization.block or (1, 0)))
    if kernels.kept_encoding(stored, dtype) is None:
        return whole
    layers = sum(spec.layer_params(i) for i in range(start_layer, end_layer))
    return int(whole - layers * (dtype.itemsize - E4M3FN.itemsize))
