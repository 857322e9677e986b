"""Where a stage's tensors come from: a Hugging Face checkpoint folder in safetensors, or dummy weights of its shape.

Knows file formats and how quantised matrices are stored; knows nothing of layers.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open

from bimetal.catalog.quantization import Quantization
from bimetal.engine.kernels.encoding import E4M3FN, Encoding, ScaledWeight, Tensor, Weight
from bimetal.errors import StageError

DUMMY_RANGE = 1e-3
_FP8_LARGEST = 448.0
_SCALE_SUFFIXES = ("weight_scale_inv", "weight_scale")
"""Both are factors: weight * scale is meant."""
_UNQUANTISED_BYTES = 2


class Source(Protocol):
    """Tensors by their name in the checkpoint."""

    bytes_read: int

    def read(self, name: str, shape: Sequence[int]) -> Tensor: ...

    def read_weight(self, name: str, rows: int, columns: int) -> Weight:
        """The matrix `name`.weight as it is stored, with its scale if it has one."""


class Checkpoint:
    """Tensors of a Hugging Face checkpoint folder; counts the bytes it reads."""

    def __init__(self, folder: Path, quantization: Quantization | None = None) -> None:
        self.folder = folder
        self.bytes_read = 0
        self._quantization = quantization
        self._files = _weight_map(folder)
        self._open: dict[str, safe_open] = {}

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        tensor = self._read(name)
        if tuple(tensor.shape) != tuple(shape):
            raise StageError(
                f"{self.folder}: {name} is {tuple(tensor.shape)}, its config.json makes it {tuple(shape)}"
            )
        return tensor

    def read_weight(self, name: str, rows: int, columns: int) -> Weight:
        payload = self.read(f"{name}.weight", (rows, columns))
        if payload.dtype.itemsize >= _UNQUANTISED_BYTES:
            return payload
        if payload.dtype != E4M3FN:
            raise StageError(
                f"{self.folder}: {name}.weight is stored as {payload.dtype}, but 8-bit weights are read as {E4M3FN} only: "
                "take an FP8 (e4m3) or unquantised checkpoint"
            )
        return self._scaled(name, payload)

    def _scaled(self, name: str, payload: Tensor) -> ScaledWeight:
        found = [s for s in _SCALE_SUFFIXES if f"{name}.{s}" in self._files]
        if not found:
            raise StageError(
                f"{self.folder}: {name}.weight is FP8, but there is no {name}.{' or '.join(_SCALE_SUFFIXES)}: the "
                "checkpoint is incomplete, copy it again"
            )
        scale = self._read(f"{name}.{found[0]}").float()
        rows, columns = payload.shape
        if scale.numel() == 1:
            return ScaledWeight(payload, scale.reshape(1, 1).repeat(rows, 1), Encoding(E4M3FN))
        if tuple(scale.shape) in ((rows,), (rows, 1)):
            return ScaledWeight(payload, scale.reshape(rows, 1).contiguous(), Encoding(E4M3FN))
        block = None if self._quantization is None else self._quantization.block
        if block is not None and tuple(scale.shape) == (-(-rows // block[0]), -(-columns // block[1])):
            return ScaledWeight(payload, scale.contiguous(), Encoding(E4M3FN, *block))
        blocks = "none" if block is None else f"{block[0]} by {block[1]}"
        raise StageError(
            f"{self.folder}: {name}.{found[0]} is {tuple(scale.shape)}, which is a scale neither a tensor, nor a row, nor a "
            f"block (of config.json's quantization_config: {blocks}) of {rows} by {columns}: take the config.json that came "
            "with the weights"
        )

    def _read(self, name: str) -> Tensor:
        file = self._files.get(name)
        if file is None:
            raise StageError(
                f"{self.folder}: no tensor {name!r} in the checkpoint: its config.json names another model"
            )
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, framework="pt")
        tensor: Tensor = self._open[file].get_tensor(name)
        self.bytes_read += tensor.nbytes
        return tensor


class DummyWeights:
    """Uniform in +-1e-3, made on the device: the shape of a model without its meaning, for measuring.

    A tensor depends on its name and the seed alone, so that every split of a model has the same weights. Of a quantised
    model the projections are FP8, with scales as its config says.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, seed: int, quantization: Quantization | None = None
    ) -> None:
        self.bytes_read = 0
        self._generator = torch.Generator(device=device)
        self._seed = seed
        self._device = device
        self._dtype = dtype
        self._quantization = quantization

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(tuple(shape), device=self._device, dtype=self._dtype)
        return self._uniform(name, shape, DUMMY_RANGE)

    def read_weight(self, name: str, rows: int, columns: int) -> Weight:
        is_projection = name.endswith("_proj") or ".experts." in name
        if self._quantization is None or not is_projection:
            return self.read(f"{name}.weight", (rows, columns))
        payload = self._uniform(f"{name}.weight", (rows, columns), _FP8_LARGEST).to(E4M3FN)
        encoding = Encoding(E4M3FN, *(self._quantization.block or (1, 0)))
        groups = -(-columns // encoding.block_columns) if encoding.block_columns else 1
        shape = (-(-rows // encoding.block_rows), groups)
        scale = torch.full(shape, DUMMY_RANGE / _FP8_LARGEST, dtype=torch.float32, device=self._device)
        return ScaledWeight(payload, scale, encoding)

    def _uniform(self, name: str, shape: Sequence[int], limit: float) -> Tensor:
        self._generator.manual_seed(self._seed ^ zlib.crc32(name.encode()))
        tensor = torch.empty(tuple(shape), device=self._device, dtype=self._dtype)
        return tensor.uniform_(-limit, limit, generator=self._generator)


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
