"""`Vocabulary`: the bytes that each token id stands for.

Most tokenizers spell a token either in GPT-2's byte alphabet or with "▁" for space and "<0x0A>" for a single byte, so
a table from id to bytes, made once, replaces a call into the tokenizer for every token that is streamed, and gives
log-probabilities the exact bytes that OpenAI's format asks for. Knows no requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from bimetal.errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_METASPACE = "▁"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    pieces: tuple[bytes, ...]
    """By token id, special tokens spelled out; an id that the tokenizer does not name has no bytes."""
    special_ids: frozenset[int]
    """Tokens that steer the model (end of turn, padding) and are no text."""

    longest_piece: int
    """Bytes of the longest token."""

    def __len__(self) -> int:
        return len(self.pieces)

    def piece(self, token_id: int) -> bytes:
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else b""

    def text(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """A whole sequence, bytes that are no UTF-8 replaced by U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        return b"".join(self.piece(i) for i in token_ids if i not in skipped).decode("utf-8", "replace")


def read_vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    added = tokenizer.get_added_tokens_decoder()
    spelled = tokenizer.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max([*spelled.values(), *added], default=-1) + 1)
    to_bytes = _speller(tokenizer)
    for spelling, token_id in spelled.items():
        pieces[token_id] = to_bytes(spelling)
    # Added tokens are plain text, whatever the alphabet of the others.
    for token_id, token in added.items():
        pieces[token_id] = token.content.encode()
    special = frozenset(token_id for token_id, token in added.items() if token.special)
    return Vocabulary(tuple(pieces), special, max(map(len, pieces), default=0))


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: those that print stand for themselves, the rest follow U+0100.

    >>> byte_alphabet()["Ġ"], byte_alphabet()["A"]
    (32, 65)
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update((chr(0x100 + i), byte) for i, byte in enumerate(others))
    return alphabet


def _spell_byte_level(alphabet: Mapping[str, int], token: str) -> bytes:
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode()


def _spell_metaspace(token: str) -> bytes:
    single = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(single[1], 16)]) if single else token.replace(_METASPACE, " ").encode()


def _speller(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """How this tokenizer's own spelling of a token turns into bytes, judged by its decoder."""
    decoder = tokenizer.decoder
    steps = list(_steps(json.loads(decoder.__getstate__()))) if decoder is not None else []
    if any(step["type"] == "ByteLevel" for step in steps):
        return partial(_spell_byte_level, byte_alphabet())
    if any(step["type"] in ("ByteFallback", "Metaspace") for step in steps):
        return _spell_metaspace
    names = ", ".join(step["type"] for step in steps) or "none"
    raise ConfigError(
        f"tokenizer.json: the decoder ({names}) spells tokens neither byte-level nor with ▁: "
        "llama, mistral, mixtral and qwen checkpoints do one of the two"
    )


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder
