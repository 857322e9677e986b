"""`TextModel`: what a checkpoint's folder says about text: tokenizer, chat template, sampling defaults.

Reads tokenizer.json, tokenizer_config.json, the chat template's several possible homes, and generation_config.json.
Weights are the engine's. Blocking: call it from a thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from bimetal.errors import ConfigError, RequestError
from bimetal.gateway.chat import ChatTemplate, compile_template
from bimetal.gateway.vocabulary import Vocabulary, read_vocabulary

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

_OLDER_TOKENIZERS = ("tokenizer.model", "vocab.json", "spiece.model")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request that does not say gets: the checkpoint's wish, else OpenAI's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class TextModel:
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    chat_templates: Mapping[str, ChatTemplate] = field(default_factory=dict)
    """By name: `default`, sometimes `tool_use`."""
    defaults: SamplingDefaults = SamplingDefaults()
    grammar_tokenizer: LLTokenizer | None = None
    """For checking grammars; None if there is no tokenizer.json to make it from."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # The batch call that keeps no offsets is twice as fast and leaves the interpreter to other threads meanwhile.
        encoded = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoded[0].ids)

    def chat_template(self, *, with_tools: bool) -> ChatTemplate:
        """RequestError if the checkpoint has none."""
        if with_tools and "tool_use" in self.chat_templates:
            return self.chat_templates["tool_use"]
        template = self.chat_templates.get("default")
        if template is None:
            raise RequestError(
                "messages: this model has no chat template: use /v1/completions, "
                "or start the server with --chat-template FILE",
                param="messages",
                code="no_chat_template",
            )
        return template


def load_text_model(folder: Path, *, chat_template_path: Path | None = None) -> TextModel:
    """ConfigError names the file that is missing or does not parse."""
    tokenizer = _read_tokenizer(folder)
    settings = _read_json(folder / "tokenizer_config.json") or {}
    special_tokens = _special_tokens(settings)
    sources = (
        {"default": (chat_template_path, _read_text(chat_template_path))}
        if chat_template_path is not None
        else _template_sources(folder, settings)
    )
    templates = {
        name: compile_template(source, special_tokens, where=str(path))
        for name, (path, source) in sources.items()
    }
    path = folder / "tokenizer.json"
    grammar_tokenizer = LLTokenizer(str(path)) if path.is_file() else None
    return TextModel(
        tokenizer, read_vocabulary(tokenizer), templates, _read_defaults(folder), grammar_tokenizer
    )


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _convert_tokenizer(folder)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: not a tokenizer: {error}: copy it from the checkpoint again") from error


def _convert_tokenizer(folder: Path) -> Tokenizer:
    """Older checkpoints hold only a sentencepiece model or vocabulary, which transformers knows how to convert."""
    if not any((folder / name).is_file() for name in _OLDER_TOKENIZERS):
        raise ConfigError(f"{folder}: holds no tokenizer.json: copy it from the checkpoint")
    from transformers import AutoTokenizer

    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=True).backend_tokenizer
    except Exception as error:
        raise ConfigError(
            f"{folder}: holds no tokenizer.json, and its tokenizer cannot be converted ({error}): "
            "copy tokenizer.json from the checkpoint"
        ) from error
    return tokenizer


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Tokens by name; a file spells one as a string or as {"content": ...}."""
    found = {}
    for name in _SPECIAL_NAMES:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _template_sources(folder: Path, settings: Mapping[str, Any]) -> dict[str, tuple[Path, str]]:
    """In the order in which newer checkpoints override older homes of the template."""
    sources: dict[str, tuple[Path, str]] = {}
    config_path = folder / "tokenizer_config.json"
    inline = settings.get("chat_template")
    if isinstance(inline, str):
        sources["default"] = (config_path, inline)
    elif isinstance(inline, list):
        sources.update((entry["name"], (config_path, entry["template"])) for entry in inline)
    older = folder / "chat_template.json"
    document = _read_json(older)
    if document and isinstance(document.get("chat_template"), str):
        sources["default"] = (older, document["chat_template"])
    newer = folder / "chat_template.jinja"
    if newer.is_file():
        sources["default"] = (newer, _read_text(newer))
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = (path, _read_text(path))
    return sources


def _read_defaults(folder: Path) -> SamplingDefaults:
    path = folder / "generation_config.json"
    document = _read_json(path) or {}
    values: dict[str, Any] = {}
    for name, kind in (
        ("temperature", float),
        ("top_p", float),
        ("top_k", int),
        ("min_p", float),
        ("repetition_penalty", float),
    ):
        if document.get(name) is not None:
            try:
                values[name] = kind(document[name])
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{path}: {name} is {document[name]!r}, but must be a number") from error
    return SamplingDefaults(**values)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any] | None:
    """None if there is no such file."""
    if not path.is_file():
        return None
    try:
        document = json.loads(_read_text(path))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}: copy it from the checkpoint again") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: holds {type(document).__name__}, not an object: copy it again")
    return document
