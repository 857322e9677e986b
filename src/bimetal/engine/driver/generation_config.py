"""End-of-sequence ids: `generation_config.json` beside the weights has the last word, else the model's config."""

from __future__ import annotations

import json
from pathlib import Path


def read_eos_token_ids(folder: Path, from_config: tuple[int, ...]) -> tuple[int, ...]:
    file = folder / "generation_config.json"
    if not file.is_file():
        return from_config
    value = json.loads(file.read_text()).get("eos_token_id")
    if value is None:
        return from_config
    return tuple(value) if isinstance(value, list) else (int(value),)
