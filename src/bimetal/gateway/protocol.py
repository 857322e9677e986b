"""The bodies that clients send: OpenAI's fields, and those that vLLM's users know beside them.

Types and single-field bounds only; what takes two fields or the model to judge is `sampling`'s and the routes'.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import Field, StringConstraints

from bimetal.gateway.fields import (
    INTEGRAL,
    MAX_CHOICES,
    MAX_INT,
    MAX_LOGPROBS,
    MAX_STOPS,
    Deadline,
    Declined,
    Ignored,
    StopString,
    StrictModel,
    TokenId,
)


class StreamOptions(StrictModel):
    include_usage: bool | None = False
    """One more chunk at the end, with the usage and no choices."""
    continuous_usage_stats: bool | None = False
    """The usage so far in every chunk."""
    include_obfuscation: Ignored = None


class TextFormat(StrictModel):
    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    type: Literal["json_object"]


class JsonSchema(StrictModel):
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
Text = Annotated[str, StringConstraints(min_length=1)]
Choices = Annotated[list[Text], Field(min_length=1, max_length=1024)]
LogitBias = Annotated[
    dict[
        Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")],
        Annotated[float, Field(ge=-100, le=100)],
    ],
    Field(json_schema_extra={"additionalProperties": False}),
]


class StructuredOutputs(StrictModel):
    """vLLM's way to say what the output must look like; exactly one of these."""

    json_: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    """Lark as llguidance reads it, or GBNF."""


class GenerationFields(StrictModel):
    """What both endpoints take."""

    model: str
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT), INTEGRAL] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT), INTEGRAL] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), INTEGRAL] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT), INTEGRAL] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), INTEGRAL] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: LogitBias | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    deadline_s: Deadline | None = None
    """Seconds from arrival within which the answer must be complete; the header X-Request-Deadline-S says the same."""
    cache_salt: Annotated[str, StringConstraints(max_length=256)] | None = None
    """Cached prompts are shared only between requests of one salt."""

    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    priority: Ignored = None
    use_beam_search: Annotated[Any, Declined("there is no beam search", (False,))] = None

    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def num_choices(self) -> int:
        return self.n or 1


class CompletionRequest(GenerationFields):
    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=2048)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=2048)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), INTEGRAL] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES), INTEGRAL] | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer's own first token (BOS) is put before text prompts; it is, unless false."""
    suffix: Annotated[Any, Declined("text is only continued, not filled in", ("",))] = None

    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        # The first element tells a prompt of token ids from a list of prompts; a list is one or the other throughout.
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(cast("list[str | list[int]]", self.prompt))
