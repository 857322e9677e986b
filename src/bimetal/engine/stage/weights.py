"""A stage's weights: read from safetensors, this stage's tensors only, fused as the forward wants them.

Query, key and value become one matrix, gate and up another; a tensor-parallel rank takes its shard where the parts are
put together (`_rows`, `_columns`). Knows checkpoint names; knows nothing of the forward pass.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open

from bimetal.catalog.models import ModelSpec
from bimetal.errors import StageError

Tensor = torch.Tensor
Progress = Callable[[int, int], None]

DUMMY_RANGE = 1e-3


class Source(Protocol):
    """Where tensors come from, by their name in the checkpoint."""

    def read(self, name: str, shape: Sequence[int]) -> Tensor: ...


class Linear:
    """x @ weight.T + bias. The one place where a weight's encoding and layout are known.

    In float32 on a CPU the weight is reordered once into oneDNN's blocked layout, which reads 2 to 16 rows at nearly the
    price of one.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self.bias = bias
        self._packed = (
            weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and torch.backends.mkldnn.is_available()
        )
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 8) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            packed: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return packed
        return torch.nn.functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Experts:
    router: Linear
    gate_up: Tensor
    """[E, 2 I, H]"""
    down: Tensor
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


class Checkpoint:
    """Tensors of a Hugging Face checkpoint folder; counts the bytes it reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bytes_read = 0
        self._files = _weight_map(folder)
        self._open: dict[str, safe_open] = {}

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        file = self._files.get(name)
        if file is None:
            raise StageError(
                f"{self.folder}: no tensor {name!r} in the checkpoint: its config.json names another model"
            )
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, framework="pt")
        tensor: Tensor = self._open[file].get_tensor(name)
        if tuple(tensor.shape) != tuple(shape):
            raise StageError(
                f"{self.folder}: {name} is {tuple(tensor.shape)}, its config.json makes it {tuple(shape)}"
            )
        self.bytes_read += tensor.nbytes
        return tensor

    def __contains__(self, name: str) -> bool:
        return name in self._files


class DummyWeights:
    """Uniform in +-1e-3, made on the device: the shape of a model without its meaning, for measuring.

    A tensor depends on its name and the seed alone, so that every split of a model has the same weights.
    """

    bytes_read = 0

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self._generator = torch.Generator(device=device)
        self._seed = seed
        self._device = device
        self._dtype = dtype

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(tuple(shape), device=self._device, dtype=self._dtype)
        self._generator.manual_seed(self._seed ^ zlib.crc32(name.encode()))
        tensor = torch.empty(tuple(shape), device=self._device, dtype=self._dtype)
        return tensor.uniform_(-DUMMY_RANGE, DUMMY_RANGE, generator=self._generator)

    def __contains__(self, name: str) -> bool:
        return True


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name to file name."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        document = json.loads(index.read_text())
        return dict(document["weight_map"])
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise StageError(
            f"{folder}: holds no .safetensors file: give the folder of a Hugging Face checkpoint"
        )
    names: dict[str, str] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names |= dict.fromkeys(opened.keys(), file.name)
    return names


def fingerprint(folder: Path) -> dict[str, str]:
    """Hashes by which nodes compare their copies: config, tokenizer, and the index (or headers) of the weights."""
    hashes = {}
    for key, name in (("config", "config.json"), ("tokenizer", "tokenizer.json")):
        file = folder / name
        hashes[key] = hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else "absent"
    weights = hashlib.sha256()
    for file in sorted([*folder.glob("*.safetensors.index.json"), *folder.glob("*.safetensors")]):
        weights.update(f"{file.name}:{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            header_bytes = (
                int.from_bytes(stream.read(8), "little") if file.suffix == ".safetensors" else 1 << 30
            )
            weights.update(stream.read(min(header_bytes, 1 << 26)))
    hashes["weights"] = weights.hexdigest()[:16]
    return hashes


class _Loader:
    """Puts one stage's parts together; `rank` of `num_ranks` is the tensor-parallel seam (one rank today)."""

    def __init__(
        self,
        spec: ModelSpec,
        source: Source,
        device: torch.device,
        dtype: torch.dtype,
        report: Callable[[int], None],
    ):
        self._spec = spec
        self._source = source
        self._device = device
        self._dtype = dtype
        self._report = report
        self.num_bytes = 0

    def tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self._source.read(name, shape).to(device=self._device, dtype=self._dtype)
        self.num_bytes += tensor.nbytes
        self._report(self.num_bytes)
        return tensor

    def rows(self, parts: Sequence[tuple[str, int]], columns: int) -> Tensor:
        """Matrices of the same width, one below the other, filled in place so that no second copy is held."""
        fused = torch.empty(sum(n for _, n in parts), columns, device=self._device, dtype=self._dtype)
        at = 0
        for name, num_rows in parts:
            fused[at : at + num_rows] = self._source.read(name, (num_rows, columns))
            at += num_rows
        self.num_bytes += fused.nbytes
        self._report(self.num_bytes)
        return fused

    def linear(self, parts: Sequence[tuple[str, int]], columns: int, bias: bool) -> Linear:
        """Fused `parts` (name without `.weight`, rows)."""
        weight = self.rows([(f"{name}.weight", n) for name, n in parts], columns)
        biases = torch.cat([self.tensor(f"{name}.bias", n) for name, n in parts]) if bias else None
        return Linear(weight, biases)

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
        gate_up = torch.empty(spec.num_experts, 2 * width, hidden, device=self._device, dtype=self._dtype)
        downs = torch.empty(spec.num_experts, hidden, width, device=self._device, dtype=self._dtype)
        for e in range(spec.num_experts):
            name = f"{block}.experts.{e}"
            gate_up[e, :width] = self._source.read(f"{name}.{gate}.weight", (width, hidden))
            gate_up[e, width:] = self._source.read(f"{name}.{up}.weight", (width, hidden))
            downs[e] = self._source.read(f"{name}.{down}.weight", (hidden, width))
            self.num_bytes += gate_up[e].nbytes + downs[e].nbytes
            self._report(self.num_bytes)
        return Experts(self.linear([(f"{block}.gate", spec.num_experts)], hidden, False), gate_up, downs)


def load_stage_weights(
    spec: ModelSpec,
    source: Checkpoint | DummyWeights,
    start_layer: int,
    end_layer: int,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
) -> StageWeights:
    """Layers [start_layer, end_layer), the embedding if they begin the model, norm and head if they end it."""
    total = spec.stage_params(start_layer, end_layer) * dtype.itemsize
    loader = _Loader(spec, source, device, dtype, lambda done: progress(min(done, total), total))
    hidden, vocab = spec.hidden_size, spec.vocab_size
    first, last = start_layer == 0, end_layer == spec.num_layers
    embedding_name = "model.embed_tokens.weight"
    embedding = loader.tensor(embedding_name, vocab, hidden) if first else None
    layers = tuple(loader.layer(i) for i in range(start_layer, end_layer))
    final_norm = head = None
    if last:
        final_norm = loader.tensor("model.norm.weight", hidden)
        if not spec.tied_embeddings:
            head = Linear(loader.tensor("lm_head.weight", vocab, hidden))
        else:
            head = Linear(
                embedding if embedding is not None else loader.tensor(embedding_name, vocab, hidden)
            )
    progress(total, total)
    return StageWeights(layers, embedding, final_norm, head, loader.num_bytes)
