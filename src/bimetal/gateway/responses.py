"""What the gateway answers, as models: the source of /openapi.json, and what tests hold every answer to.

Answers themselves are built as plain documents, which is several times faster token by token.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ErrorDetail(_Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(_Answer):
    error: ErrorDetail


class PromptTokensDetails(_Answer):
    cached_tokens: int


class Usage(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(_Answer):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    content: list[ChatTokenLogprob]
    refusal: None = None


class FunctionCall(_Answer):
    name: str
    arguments: str


class MessageToolCall(_Answer):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(_Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[MessageToolCall] | None = None


class ChatChoice(_Answer):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it; null for the end of the text."""


class ChatCompletion(_Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class DeltaToolCall(MessageToolCall):
    index: int


class ChatDelta(_Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[DeltaToolCall] | None = None


class ChatChunkChoice(_Answer):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | None = None


class ChatCompletionChunk(_Answer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionLogprobs(_Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    """Null in all but a choice's last chunk."""
    stop_reason: str | int | None = None


class Completion(_Answer):
    """Also what each event of a streamed completion holds."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Model(_Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None = None
    max_model_len: int
    """Tokens of prompt and answer together."""
    permission: list[Any] = Field(default_factory=list)


class ModelList(_Answer):
    object: Literal["list"]
    data: list[Model]


class Health(_Answer):
    status: Literal["ok"]
