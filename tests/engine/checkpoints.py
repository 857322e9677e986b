"""Tiny random checkpoints of every family, and what `transformers` makes of them: the oracle of the engine's tests.

`initializer_range` is 0.2 and biases and norms are random too, so that a mistake anywhere changes the tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 512
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "LlamaConfig",
        {"rope_parameters": _LLAMA3_ROPE, "hidden_size": 96, "num_attention_heads": 6, "head_dim": 16},
    ),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": 24, "head_dim": 16}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2, "num_attention_heads": 8},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 32,
            "moe_intermediate_size": 48,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
}


def make_checkpoint(family: str, folder: Path, **changes: Any) -> Path:
    """A float32 checkpoint, the same one every time."""
    class_name, extra = FAMILIES[family]
    config = getattr(transformers, class_name)(**{**_BASE, **extra, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Reference:
    """Greedy continuation of one prompt, and how clearly each token won."""

    tokens: list[int]
    margins: list[float]


@torch.inference_mode()
def reference_greedy(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[Reference]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()
    return [greedy(model, prompt, num_tokens) for prompt in prompts]


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], num_tokens: int) -> Reference:
    """Token by token with transformers' own cache."""
    tokens: list[int] = []
    margins: list[float] = []
    inputs = torch.tensor([prompt])
    cache = None
    for _ in range(num_tokens):
        out = model(inputs, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        top = out.logits[0, -1].float().topk(2)
        margins.append(float(top.values[0] - top.values[1]))
        tokens.append(int(top.indices[0]))
        inputs = top.indices[:1].view(1, 1)
    return Reference(tokens, margins)


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def assert_same_tokens(found: list[int], reference: Reference, name: str, tolerance: float = 1e-4) -> None:
    """Equal, or forking only where the reference itself was undecided."""
    assert len(found) == len(reference.tokens), (
        f"{name}: {len(found)} tokens, the reference has {len(reference.tokens)}"
    )
    for i, (ours, theirs) in enumerate(zip(found, reference.tokens, strict=True)):
        if ours != theirs:
            margin = reference.margins[i]
            assert margin <= tolerance, (
                f"{name}: token {i} is {ours}, the reference's {theirs} won by {margin:.3g}"
            )
            return
