"""Tiny random checkpoints of every family, and what `transformers` makes of them: the oracle of the engine's tests.

`initializer_range` is 0.2 and biases and norms are random too, so that a mistake anywhere changes the tokens.
"""

from __future__ import annotations

import json
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


def load_reference(folder: Path) -> Any:
    """transformers' model in float32, with its plainest attention."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Token by token with transformers' own cache."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@torch.inference_mode()
def assert_greedy(
    model: Any, prompt: list[int], found: list[int], num_tokens: int, name: str, tolerance: float = 1e-4
) -> None:
    """Every found token is the reference's most likely one after the prompt and the tokens before it, which makes the whole
    its greedy continuation; another is let pass only where the reference's choice was undecided by `tolerance`."""
    assert len(found) == num_tokens, f"{name}: {len(found)} tokens, {num_tokens} were asked for"
    logits = model(torch.tensor([prompt + found[:-1]])).logits[0, len(prompt) - 1 :].float()
    for i, token in enumerate(found):
        best = int(logits[i].argmax())
        margin = float(logits[i, best] - logits[i, token])
        assert margin <= tolerance, (
            f"{name}: token {i} is {token}, the reference's {best} wins by {margin:.3g}"
        )
