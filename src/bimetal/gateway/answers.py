"""The choices of an answer in OpenAI's two formats, whole or piece by piece. Pure; plain documents, no models.

A formatter takes each `Delta` of its choice and gives the fragment that a streamed chunk carries; it also keeps what a
whole answer needs, so that both ways of answering come from one path.
"""

from __future__ import annotations

import secrets
from typing import Any, Protocol

from bimetal.engine.wire.api import FinishReason, TokenLogprob
from bimetal.gateway.choice import Delta, ScoredToken
from bimetal.gateway.logprobs import chat_logprobs, completion_logprobs, prompt_tokens
from bimetal.gateway.prepare import Prepared, Prompt
from bimetal.gateway.tools import ToolCall, ToolCallStream
from bimetal.gateway.vocabulary import Vocabulary

Document = dict[str, Any]


class ChoiceFormat(Protocol):
    def push(self, delta: Delta, prompt_logprobs: tuple[TokenLogprob, ...] | None = None) -> Document | None:
        """The choice as the next chunk shows it; None if there is nothing to show."""

    def whole(self) -> Document:
        """The choice of an unstreamed answer, once its last delta is in."""


class ChatFormat:
    def __init__(self, index: int, prepared: Prepared, vocabulary: Vocabulary) -> None:
        self._index = index
        self._vocabulary = vocabulary
        self._num_top = prepared.num_top_logprobs
        self._tools = (
            ToolCallStream(prepared.tools.style, prepared.tools.names) if prepared.tools is not None else None
        )
        self._opened = False
        self._content: list[str] = []
        self._calls: list[Document] = []
        self._tokens: list[ScoredToken] = []
        self._finish: Document = {}

    def push(self, delta: Delta, prompt_logprobs: tuple[TokenLogprob, ...] | None = None) -> Document | None:
        text, calls = self._split(delta)
        self._content.append(text)
        self._tokens += delta.tokens
        new_calls = [self._call_document(call) for call in calls]
        self._calls += new_calls
        finish = self._finish_reason(delta.finish_reason)
        if finish is not None:
            self._finish = {"finish_reason": finish, "stop_reason": delta.stop_reason}
        if not (text or new_calls or delta.tokens or finish):
            return None
        shown: Document = {} if self._opened else {"role": "assistant", "content": ""}
        self._opened = True
        if text:
            shown["content"] = text
        if new_calls:
            first = len(self._calls) - len(new_calls)
            shown["tool_calls"] = [{"index": first + i, **call} for i, call in enumerate(new_calls)]
        choice = {
            "index": self._index,
            "delta": shown,
            "logprobs": self._logprobs(delta.tokens) if delta.tokens else None,
            "finish_reason": finish,
        }
        if finish is not None:
            choice["stop_reason"] = delta.stop_reason
        return choice

    def whole(self) -> Document:
        message: Document = {"role": "assistant", "content": "".join(self._content), "refusal": None}
        if self._calls:
            message["tool_calls"] = self._calls
            message["content"] = message["content"] or None
        return {
            "index": self._index,
            "message": message,
            "logprobs": None if self._num_top is None else self._logprobs(self._tokens),
            **self._finish,
        }

    def _split(self, delta: Delta) -> tuple[str, list[ToolCall]]:
        if self._tools is None:
            return delta.text, []
        parts = self._tools.push(delta.text)
        if delta.finish_reason is not None:
            parts += self._tools.finish()
        text = "".join(part for part in parts if isinstance(part, str))
        return text, [part for part in parts if isinstance(part, ToolCall)]

    def _finish_reason(self, reason: FinishReason | None) -> str | None:
        if reason == "stop" and self._tools is not None and self._tools.num_calls:
            return "tool_calls"
        return reason

    def _logprobs(self, tokens: list[ScoredToken] | tuple[ScoredToken, ...]) -> Document:
        return chat_logprobs(tokens, self._vocabulary, self._num_top or 0)

    @staticmethod
    def _call_document(call: ToolCall) -> Document:
        return {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }


class CompletionFormat:
    def __init__(self, index: int, prepared: Prepared, vocabulary: Vocabulary) -> None:
        self._index = index
        self._vocabulary = vocabulary
        self._num_top = prepared.num_top_logprobs
        self._echoed: Prompt | None = (
            prepared.prompts[index // prepared.num_choices] if prepared.echo else None
        )
        self._opened = False
        self._offset = 0
        """Characters of the echoed prompt."""
        self._text: list[str] = []
        self._logprobs: list[Document] = []
        self._finish: Document = {}

    def push(self, delta: Delta, prompt_logprobs: tuple[TokenLogprob, ...] | None = None) -> Document | None:
        text, logprobs = delta.text, None
        if not self._opened:
            text, logprobs = self._echo(text, prompt_logprobs or ())
        if delta.tokens:
            logprobs = _joined(logprobs, self._document(delta.tokens, self._offset))
        finish = delta.finish_reason
        if not (text or logprobs or finish):
            return None
        self._opened = True
        self._text.append(text)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        choice = {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        if finish is not None:
            self._finish = {"finish_reason": finish, "stop_reason": delta.stop_reason}
            choice["stop_reason"] = delta.stop_reason
        return choice

    def whole(self) -> Document:
        logprobs = None
        if self._num_top is not None:
            logprobs = self._document((), 0)
            for part in self._logprobs:
                logprobs = _joined(logprobs, part)
        return {"index": self._index, "text": "".join(self._text), "logprobs": logprobs, **self._finish}

    def _echo(self, text: str, scores: tuple[TokenLogprob, ...]) -> tuple[str, Document | None]:
        if self._echoed is None:
            return text, None
        logprobs = None
        if self._num_top is not None:
            tokens, self._offset = prompt_tokens(self._echoed.token_ids, scores, self._vocabulary)
            logprobs = self._document(tokens, 0)
        return self._echoed.text + text, logprobs

    def _document(self, tokens: list[ScoredToken] | tuple[ScoredToken, ...], offset: int) -> Document:
        return completion_logprobs(tokens, self._vocabulary, self._num_top or 0, text_offset=offset)


def _joined(first: Document | None, second: Document) -> Document:
    if first is None:
        return second
    for name, values in second.items():
        first[name] += values
    return first


def usage_document(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> Document:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
