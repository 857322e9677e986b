"""The body of a chat request: messages, tools, and what only chat has.

Messages take the fields that OpenAI's own client puts into the history it sends back, empty ones included.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from bimetal.gateway.fields import (
    INTEGRAL,
    MAX_INT,
    MAX_LOGPROBS,
    Declined,
    Ignored,
    StrictModel,
)
from bimetal.gateway.protocol import GenerationFields

FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(min_length=1)]


class SystemMessage(StrictModel):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(StrictModel):
    role: Literal["user"]
    content: Content
    name: str | None = None


class CalledFunction(StrictModel):
    name: FunctionName
    arguments: str
    """A JSON object."""


class AssistantToolCall(StrictModel):
    id: str
    type: Literal["function"]
    function: CalledFunction
    index: Ignored = None


class AssistantMessage(StrictModel):
    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[list[AssistantToolCall], Field(max_length=128)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: Ignored = None
    annotations: Ignored = None
    audio: Annotated[Any, Declined("this model takes text only")] = None
    function_call: Annotated[Any, Declined("this is the form before `tool_calls`")] = None


class ToolMessage(StrictModel):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(StrictModel):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object."""
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: Function


class ChosenFunction(StrictModel):
    name: FunctionName


class ToolChoice(StrictModel):
    type: Literal["function"]
    function: ChosenFunction


class ChatRequest(GenerationFields):
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT), INTEGRAL] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT), INTEGRAL] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), INTEGRAL] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, such as enable_thinking."""
    reasoning_effort: str | None = None
    """Passed to the chat template, for models that read it."""

    audio: Annotated[Any, Declined("this model gives text only")] = None
    modalities: Annotated[Any, Declined("this model gives text only", (["text"],))] = None
    functions: Annotated[Any, Declined("this is the form before `tools`")] = None
    function_call: Annotated[
        Any,
        Declined(
            "this is the form before `tool_choice`",
            (
                "none",
                "auto",
            ),
        ),
    ] = None
    prediction: Annotated[Any, Declined("there is no predicted output")] = None
    web_search_options: Annotated[Any, Declined("there is no web search")] = None
    moderation: Annotated[Any, Declined("there is no moderation")] = None
    verbosity: Annotated[Any, Declined("the model cannot be told", ("medium",))] = None
    add_generation_prompt: Annotated[Any, Declined("the assistant's turn is always opened", (True,))] = None
    continue_final_message: Annotated[Any, Declined("the assistant's turn always starts anew", (False,))] = (
        None
    )
