"""Log-probabilities in the two formats of OpenAI's API. Pure.

Minus infinity, which JSON lacks, is given as -9999.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bimetal.engine.wire.api import TokenLogprob
from bimetal.gateway.choice import ScoredToken
from bimetal.gateway.detokenize import Utf8Stream
from bimetal.gateway.vocabulary import Vocabulary

LOWEST = -9999.0


def chat_logprobs(tokens: Sequence[ScoredToken], vocabulary: Vocabulary, num_top: int) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""
    content = []
    for token in tokens:
        score = token.score
        if score is None:
            continue
        top = list(zip(score.top_ids, score.top_logprobs, strict=True))[:num_top]
        content.append(
            {
                **_named(token.token_id, score.logprob, vocabulary),
                "top_logprobs": [_named(token_id, logprob, vocabulary) for token_id, logprob in top],
            }
        )
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokens: Sequence[ScoredToken], vocabulary: Vocabulary, num_top: int, *, text_offset: int = 0
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion; the chosen token is among its alternatives even if it ranks below them.

    `text_offset` is added to every offset: the characters of an echoed prompt.
    """
    return {
        "tokens": [_text(token.token_id, vocabulary) for token in tokens],
        "token_logprobs": [None if token.score is None else _finite(token.score.logprob) for token in tokens],
        "top_logprobs": [
            None if token.score is None else _alternatives(token.token_id, token.score, vocabulary, num_top)
            for token in tokens
        ],
        "text_offset": [text_offset + token.offset for token in tokens],
    }


def prompt_tokens(
    token_ids: Sequence[int], scores: Sequence[TokenLogprob], vocabulary: Vocabulary
) -> tuple[list[ScoredToken], int]:
    """An echoed prompt's tokens with their offsets, and the characters of its text."""
    scored, offset, stream = [], 0, Utf8Stream()
    for i, token_id in enumerate(token_ids):
        scored.append(ScoredToken(token_id, offset, scores[i - 1] if 0 < i <= len(scores) else None))
        if token_id not in vocabulary.special_ids:
            offset += len(stream.push(vocabulary.piece(token_id)))
    return scored, offset + len(stream.finish())


def _alternatives(
    token_id: int, score: TokenLogprob, vocabulary: Vocabulary, num_top: int
) -> dict[str, float]:
    top = dict(list(zip(score.top_ids, score.top_logprobs, strict=True))[:num_top])
    top.setdefault(token_id, score.logprob)
    found: dict[str, float] = {}
    for other_id, logprob in top.items():
        # Two tokens of one spelling (halves of characters): the likelier one stays.
        found.setdefault(_text(other_id, vocabulary), _finite(logprob))
    return found


def _named(token_id: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    piece = vocabulary.piece(token_id)
    return {
        "token": piece.decode("utf-8", "replace"),
        "logprob": _finite(logprob),
        "bytes": list(piece),
    }


def _text(token_id: int, vocabulary: Vocabulary) -> str:
    return vocabulary.piece(token_id).decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST
