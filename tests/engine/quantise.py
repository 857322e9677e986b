"""FP8 checkpoints made from plain ones, each way that they are found in the wild, by nothing but the definition:
payload = round(weight / scale), scale = largest magnitude of a tensor, row or block / 448."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FP8 = torch.float8_e4m3fn
BLOCK = (16, 32)
"""Small ones, so that tiny matrices have several, some of them cut off."""
Block = tuple[int, int]
Scheme = Callable[[torch.Tensor, Block], torch.Tensor]


def tensor_scale(weight: torch.Tensor, _: Block) -> torch.Tensor:
    return weight.abs().amax().reshape(1) / 448


def row_scale(weight: torch.Tensor, _: Block) -> torch.Tensor:
    return weight.abs().amax(1, keepdim=True) / 448


def block_scale(weight: torch.Tensor, block: Block) -> torch.Tensor:
    rows, columns = block
    tops = [[part.abs().amax() for part in band.split(columns, dim=1)] for band in weight.split(rows, dim=0)]
    return torch.tensor(tops) / 448


def spread(scale: torch.Tensor, shape: torch.Size, block: Block) -> torch.Tensor:
    """A scale for every number of the matrix."""
    if scale.numel() == 1 or scale.shape == (shape[0], 1):
        return scale.reshape(-1, 1).expand(shape)
    rows, columns = block
    return scale.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]


def _compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **weights},
        "input_activations": {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


STYLES: dict[str, tuple[dict[str, Any], Scheme, str]] = {
    "compressed-tensors, tensor": (_compressed("tensor"), tensor_scale, "weight_scale"),
    "compressed-tensors, channel": (_compressed("channel"), row_scale, "weight_scale"),
    "compressed-tensors, block": (
        _compressed("block", block_structure=list(BLOCK)),
        block_scale,
        "weight_scale",
    ),
    "fbgemm_fp8": (
        {
            "quant_method": "fbgemm_fp8",
            "activation_scale_ub": 1200.0,
            "modules_to_not_convert": ["lm_head"],
        },
        row_scale,
        "weight_scale",
    ),
    "fp8, tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, tensor_scale, "weight_scale"),
    "fp8, block": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(BLOCK),
        },
        block_scale,
        "weight_scale_inv",
    ),
}
"""By name: config.json's quantization_config, how scales are shared, what their tensors are called."""


def quantise_checkpoint(plain: Path, style: str, folder: Path, block: Block = BLOCK) -> tuple[Path, Path]:
    """(FP8 checkpoint, plain checkpoint of the very numbers that the first one means)."""
    config, scheme, suffix = STYLES[style]
    config = json.loads(json.dumps(config).replace(json.dumps(list(BLOCK)), json.dumps(list(block))))
    quantised, meant = folder / "fp8", folder / "meant"
    stored: dict[str, torch.Tensor] = {}
    plainly: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith("_proj.weight") and ".experts." not in name:
            stored[name] = plainly[name] = tensor
            continue
        scale = scheme(tensor, block)
        payload = (tensor / spread(scale, tensor.shape, block)).to(FP8)
        stored[name] = payload
        stored[f"{name.removesuffix('.weight')}.{suffix}"] = scale
        if config.get("activation_scheme") == "static":
            stored[f"{name.removesuffix('.weight')}.input_scale"] = torch.ones(1)
        plainly[name] = payload.float() * spread(scale, tensor.shape, block)
    document = json.loads((plain / "config.json").read_text())
    for target, tensors, extra in (
        (quantised, stored, {"quantization_config": config}),
        (meant, plainly, {}),
    ):
        target.mkdir(parents=True)
        save_file({n: t.contiguous() for n, t in tensors.items()}, target / "model.safetensors")
        (target / "config.json").write_text(json.dumps({**document, **extra}))
    return quantised, meant
