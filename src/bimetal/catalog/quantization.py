"""`Quantization`: what a checkpoint's `quantization_config` says of its weights, and which schemes can be read.

Read are 8-bit floating-point weights (e4m3) with a scale a tensor, a row or a block. Which matrices are stored so, the
weights themselves say: a matrix of another dtype is read as it is. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bimetal.errors import ConfigError

Block = tuple[int, int]

_REMEDY = (
    "bimetal reads FP8 weights (e4m3 with a scale a tensor, row or block) and plain 16 and 32 bit ones: take the model's FP8 "
    "or unquantised checkpoint, or make an FP8 one from the unquantised (llm-compressor's scheme FP8_DYNAMIC)"
)
_STRATEGIES = ("tensor", "channel", "block")


@dataclass(frozen=True, slots=True)
class Quantization:
    """FP8 weights. `weight * scale` is the number meant, whatever the scale's tensor is called."""

    method: str
    block: Block | None = None
    """Rows and columns that share a scale; None: a scale a tensor or a row."""


def parse_quantization(config: Mapping[str, Any], name: str) -> Quantization | None:
    """Of a model's config; None: not quantised. ConfigError names a scheme that cannot be read.

    >>> parse_quantization({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "m")
    Quantization(method='fp8', block=(128, 128))
    """
    document = config.get("quantization_config")
    if not document:
        return None
    method = document.get("quant_method")
    if method == "fp8":
        return Quantization(method, _fp8_block(document, name))
    if method == "compressed-tensors":
        return Quantization(method, _compressed_tensors_block(document, name))
    if method == "fbgemm_fp8":
        return Quantization(method)
    if method == "modelopt" and document.get("quant_algo") == "FP8":
        return Quantization(method)
    if method == "quark" and _quark_weight(document).get("dtype") == "fp8_e4m3":
        return Quantization(method)
    told = [str(document[key]) for key in ("quant_algo", "format", "bits") if document.get(key) is not None]
    raise _refused(name, " ".join([str(method), *told]))


def _fp8_block(document: Mapping[str, Any], name: str) -> Block | None:
    encoding = document.get("fmt", "e4m3")
    if encoding != "e4m3":
        raise _refused(name, f"fp8 {encoding}")
    return _block(document.get("weight_block_size"), name)


def _compressed_tensors_block(document: Mapping[str, Any], name: str) -> Block | None:
    """The one block that all groups of layers share; groups without weights (a KV cache's) do not matter."""
    weights = [group.get("weights") for group in (document.get("config_groups") or {}).values()]
    blocks = set()
    for each in weights:
        if each is None:
            continue
        strategy = each.get("strategy")
        if each.get("num_bits") != 8 or each.get("type") != "float" or strategy not in _STRATEGIES:
            told = f"{document.get('format')}, {each.get('num_bits')} bit {each.get('type')} a {strategy}"
            raise _refused(name, f"compressed-tensors ({told})")
        if strategy == "block":
            blocks.add(_block(each.get("block_structure"), name))
    if len(blocks) > 1:
        raise _refused(name, f"compressed-tensors with blocks of {sorted(map(str, blocks))}")
    return blocks.pop() if blocks else None


def _quark_weight(document: Mapping[str, Any]) -> Mapping[str, Any]:
    weight: Mapping[str, Any] = (document.get("global_quant_config") or {}).get("weight") or {}
    return weight


def _block(value: Any, name: str) -> Block | None:
    if value is None:
        return None
    if (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(isinstance(n, int) and n > 0 for n in value)
    ):
        return int(value[0]), int(value[1])
    raise ConfigError(
        f"{name}: its quantization_config gives blocks as {value!r}, not as two numbers: correct it"
    )


def _refused(name: str, scheme: str) -> ConfigError:
    return ConfigError(f"{name}: weights quantised by {scheme} are not supported: {_REMEDY}")
