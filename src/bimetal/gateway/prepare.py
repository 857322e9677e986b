"""From a validated body to what the driver is told and how its tokens will be read back.

Templates, tokenising and grammars: the heavy, blocking half of a request, run in a thread. Pure but for the ids of
requests, which are passed in. Knows no HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bimetal.engine.wire.api import Generate, SamplingParams
from bimetal.errors import RequestError
from bimetal.gateway.chat_protocol import AssistantMessage, ChatRequest, Content, Message, ToolChoice
from bimetal.gateway.choice import TextOptions
from bimetal.gateway.grammar import lark_json
from bimetal.gateway.protocol import CompletionRequest, GenerationFields, JsonSchemaFormat
from bimetal.gateway.sampling import (
    ModelLimits,
    build_sampling,
    check_prompt,
    check_token_budget,
    choice_seed,
    output_grammar,
)
from bimetal.gateway.text_model import TextModel
from bimetal.gateway.tools import ToolFormat, describe_tools, forced_call_grammar, tool_format

_DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ToolPlan:
    style: ToolFormat
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    text: str
    """As echoed."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """One HTTP request, ready for the driver: choice i continues prompt i // num_choices."""

    request_id: str
    prompts: tuple[Prompt, ...]
    num_choices: int
    """Of each prompt."""
    generates: tuple[Generate, ...]
    text_options: TextOptions
    num_top_logprobs: int | None
    """None: no log-probabilities in the answer."""
    echo: bool = False
    tools: ToolPlan | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


def prepare_completion(
    request: CompletionRequest, text: TextModel, limits: ModelLimits, *, request_id: str
) -> Prepared:
    _check_best_of(request)
    prompts = [_prompt(request, i, prompt, text, limits) for i, prompt in enumerate(request.prompts())]
    longest = max(len(prompt.token_ids) for prompt in prompts)
    wanted = request.max_tokens
    if wanted is None:
        wanted = min(_DEFAULT_COMPLETION_TOKENS, limits.max_model_len - longest)
    if wanted == 0 and not request.echo:
        raise RequestError(
            "max_tokens: 0 tokens leave nothing to answer, unless echo is set", param="max_tokens"
        )
    # The engine makes at least one token; a request that only wants its prompt scored does not see it.
    max_tokens = max(wanted, 1)
    check_token_budget(longest, max_tokens, limits, param="max_tokens")
    sampling = build_sampling(
        request,
        text.defaults,
        limits,
        max_tokens=max_tokens,
        logprobs=request.logprobs if wanted else None,
        prompt_logprobs=request.logprobs if request.echo else None,
        grammar=output_grammar(request, text.grammar_tokenizer),
    )
    return _assemble(
        request,
        prompts,
        sampling,
        request_id=request_id,
        num_top_logprobs=request.logprobs,
        options=replace(_text_options(request, sampling), discard_output=wanted == 0),
        echo=bool(request.echo),
    )


def prepare_chat(request: ChatRequest, text: TextModel, limits: ModelLimits, *, request_id: str) -> Prepared:
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs: there are none unless logprobs is true", param="top_logprobs")
    tools, choice = _tools(request)
    template = text.chat_template(with_tools=bool(tools))
    messages = [_plain_message(message, i) for i, message in enumerate(request.messages)]
    if tools and not template.takes_tools:
        messages = _with_system_text(messages, describe_tools(tools))
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
    rendered = template.render(messages, tools=tools or None, variables=variables)
    _check_characters(rendered, text, limits, param="messages")
    # The template writes the special tokens itself.
    token_ids = text.encode(rendered, add_special_tokens=False)
    check_prompt(token_ids, limits, param="messages")

    param = "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
    wanted = request.max_completion_tokens or request.max_tokens
    max_tokens = wanted if wanted is not None else limits.max_model_len - len(token_ids)
    check_token_budget(len(token_ids), max_tokens, limits, param=param)
    style = tool_format(template)
    sampling = build_sampling(
        request,
        text.defaults,
        limits,
        max_tokens=max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        grammar=_chat_grammar(request, text, tools, choice, style),
    )
    options = _text_options(request, sampling)
    plan = None
    if tools:
        plan = ToolPlan(style, tuple(tool["function"]["name"] for tool in tools))
        marks = {style.start.encode(), style.end.encode()}
        special = text.vocabulary.special_ids
        shown = frozenset(i for i in special if text.vocabulary.piece(i) in marks)
        options = replace(options, visible_specials=shown)
    return _assemble(
        request,
        [Prompt(tuple(token_ids), "")],
        sampling,
        request_id=request_id,
        num_top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        options=options,
        tools=plan,
    )


def _assemble(
    request: GenerationFields,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    request_id: str,
    num_top_logprobs: int | None,
    options: TextOptions,
    echo: bool = False,
    tools: ToolPlan | None = None,
) -> Prepared:
    num_choices = request.num_choices()
    generates = tuple(
        Generate(
            request_id=f"{request_id}-{i * num_choices + j}",
            prompt_token_ids=prompt.token_ids,
            sampling=replace(sampling, seed=choice_seed(sampling.seed, j)),
            deadline_s=request.deadline_s,
            cache_salt=request.cache_salt or "",
        )
        for i, prompt in enumerate(prompts)
        for j in range(num_choices)
    )
    stream_options = request.stream_options
    return Prepared(
        request_id=request_id,
        prompts=tuple(prompts),
        num_choices=num_choices,
        generates=generates,
        text_options=options,
        num_top_logprobs=num_top_logprobs,
        echo=echo,
        tools=tools,
        stream=bool(request.stream),
        include_usage=bool(stream_options and stream_options.include_usage),
        continuous_usage=bool(stream_options and stream_options.continuous_usage_stats),
    )


def _text_options(request: GenerationFields, sampling: SamplingParams) -> TextOptions:
    return TextOptions(
        stops=tuple(request.stops()),
        keep_stop=bool(request.include_stop_str_in_output),
        min_tokens=sampling.min_tokens,
        skip_special_tokens=request.skip_special_tokens is not False,
        with_logprobs=sampling.logprobs is not None,
    )


# -- completions ----------------------------------------------------------------------------------------------------


def _check_best_of(request: CompletionRequest) -> None:
    if request.best_of is not None and request.best_of != request.num_choices():
        raise RequestError(
            f"best_of: {request.best_of} is not supported beside n = {request.num_choices()}, because candidates "
            "are not ranked here: leave it out",
            param="best_of",
        )


def _prompt(
    request: CompletionRequest, index: int, prompt: str | list[int], text: TextModel, limits: ModelLimits
) -> Prompt:
    several = isinstance(request.prompt, list) and not isinstance(request.prompt[0], int)
    param = f"prompt.{index}" if several else "prompt"
    if isinstance(prompt, str):
        _check_characters(prompt, text, limits, param=param)
        token_ids = text.encode(prompt, add_special_tokens=request.add_special_tokens is not False)
        check_prompt(token_ids, limits, param=param)
        return Prompt(tuple(token_ids), prompt)
    check_prompt(prompt, limits, param=param)
    return Prompt(tuple(prompt), text.vocabulary.text(prompt) if request.echo else "")


def _check_characters(prompt: str, text: TextModel, limits: ModelLimits, *, param: str) -> None:
    """Refuse what cannot fit before spending seconds on tokenising it."""
    most = limits.max_model_len * text.vocabulary.longest_piece
    if len(prompt) > most:
        raise RequestError(
            f"{param}: the prompt has {len(prompt)} characters, more than {limits.max_model_len} tokens, "
            "the context length, can hold: shorten it",
            param=param,
            code="context_length_exceeded",
        )


# -- chat -----------------------------------------------------------------------------------------------------------


def _tools(request: ChatRequest) -> tuple[list[dict[str, Any]], str | ToolChoice]:
    """The tools that count, as plain documents, and how they are to be chosen."""
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
    choice = request.tool_choice or ("auto" if tools else "none")
    if choice == "none":
        return [], "none"
    if not tools:
        raise RequestError("tool_choice: there are no tools to choose from: give tools", param="tool_choice")
    names = [tool["function"]["name"] for tool in tools]
    doubled = next((i for i, name in enumerate(names) if name in names[:i]), None)
    if doubled is not None:
        param = f"tools.{doubled}.function.name"
        raise RequestError(
            f"{param}: {names[doubled]!r} is already taken: give each tool its own name", param=param
        )
    if isinstance(choice, ToolChoice) and choice.function.name not in names:
        raise RequestError(
            f"tool_choice.function.name: {choice.function.name!r} is not among tools ({', '.join(names)})",
            param="tool_choice.function.name",
        )
    return tools, choice


def _chat_grammar(
    request: ChatRequest,
    text: TextModel,
    tools: list[dict[str, Any]],
    choice: str | ToolChoice,
    style: ToolFormat,
) -> str | None:
    several = request.parallel_tool_calls is not False
    if isinstance(choice, ToolChoice):
        i = next(i for i, tool in enumerate(tools) if tool["function"]["name"] == choice.function.name)
        return forced_call_grammar(style, [tools[i]], several=False, params=[f"tools.{i}"])
    params = [f"tools.{i}" for i in range(len(tools))]
    if choice == "required":
        return forced_call_grammar(style, tools, several=several, params=params)
    grammar = output_grammar(request, text.grammar_tokenizer)
    if grammar is None or not tools:
        return grammar
    form = request.response_format
    if form is None or form.type == "text":
        raise RequestError(
            "tools: cannot be combined with structured output other than response_format: set tool_choice to none",
            param="tools",
        )
    schema = form.json_schema.schema_ if isinstance(form, JsonSchemaFormat) else {"type": "object"}
    answer = lark_json(schema or {}, param="response_format.json_schema.schema")
    return forced_call_grammar(style, tools, several=several, params=params, or_json=answer)


def _plain_message(message: Message, index: int) -> dict[str, Any]:
    """As templates read it: content as one string, arguments of past calls as objects."""
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    plain["content"] = _plain_content(message.content)
    if message.name is not None:
        plain["name"] = message.name
    if isinstance(message, AssistantMessage):
        if message.reasoning_content is not None:
            plain["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            plain["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _arguments(
                            call.function.arguments, f"messages.{index}.tool_calls.{i}.function.arguments"
                        ),
                    },
                }
                for i, call in enumerate(message.tool_calls)
            ]
    if message.role == "tool":
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _plain_content(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def _arguments(text: str, param: str) -> Any:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(f"{param}: must be a JSON object as a string", param=param)
    return arguments


def _with_system_text(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
