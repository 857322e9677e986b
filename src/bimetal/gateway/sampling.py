"""From a request's fields, the checkpoint's defaults and the engine's limits to `SamplingParams`. Pure.

Everything that takes two fields or the model's size to judge is judged here, before the driver hears of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llguidance import LLTokenizer

from bimetal.engine.wire.api import SamplingParams
from bimetal.errors import RequestError
from bimetal.gateway.grammar import (
    check_tokens,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
    text_grammar,
)
from bimetal.gateway.protocol import GenerationFields, JsonSchemaFormat, StructuredOutputs
from bimetal.gateway.text_model import SamplingDefaults

_Make = Callable[[], str]


@dataclass(frozen=True, slots=True)
class ModelLimits:
    max_model_len: int
    vocab_size: int
    max_biases: int
    """Entries of logit_bias."""


def check_prompt(token_ids: list[int], limits: ModelLimits, *, param: str) -> None:
    """At least one token, all in the vocabulary, and room for one more."""
    if not token_ids:
        raise RequestError(f"{param}: the prompt has no tokens: give at least one", param=param)
    worst = max(token_ids)
    if worst >= limits.vocab_size:
        at = token_ids.index(worst)
        raise RequestError(
            f"{param}: token {at} is {worst}, but the vocabulary has ids 0 to {limits.vocab_size - 1}",
            param=param,
        )
    if len(token_ids) >= limits.max_model_len:
        raise RequestError(
            f"{param}: the prompt has {len(token_ids)} tokens, but the context length is {limits.max_model_len} "
            "with at least one for the answer: shorten it",
            param=param,
            code="context_length_exceeded",
        )


def check_token_budget(num_prompt_tokens: int, max_tokens: int, limits: ModelLimits, *, param: str) -> None:
    room = limits.max_model_len - num_prompt_tokens
    if max_tokens > room:
        raise RequestError(
            f"{param}: {max_tokens} tokens were asked for after a prompt of {num_prompt_tokens}, but the context "
            f"length is {limits.max_model_len}: ask for at most {room}",
            param=param,
            code="context_length_exceeded",
        )


def build_sampling(
    fields: GenerationFields,
    defaults: SamplingDefaults,
    limits: ModelLimits,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    grammar: str | None = None,
) -> SamplingParams:
    """For the first choice; `for_choice` makes the others' from it."""
    min_tokens = fields.min_tokens or 0
    if min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens: {min_tokens} is more than max_tokens, which is {max_tokens}: lower it",
            param="min_tokens",
        )
    if len(fields.logit_bias or ()) > limits.max_biases:
        raise RequestError(
            f"logit_bias: {len(fields.logit_bias or ())} entries are more than the {limits.max_biases} that this server takes",
            param="logit_bias",
        )
    bias = {int(token): value for token, value in (fields.logit_bias or {}).items()}
    for name, ids in (("logit_bias", bias), ("stop_token_ids", fields.stop_token_ids or [])):
        worst = max(ids, default=0)
        if worst >= limits.vocab_size:
            raise RequestError(
                f"{name}: {worst} is no token: the vocabulary has ids 0 to {limits.vocab_size - 1}",
                param=name,
            )
    if fields.stream_options is not None and not fields.stream:
        raise RequestError(
            "stream_options: only a streamed answer has them: set stream", param="stream_options"
        )
    top_k = defaults.top_k if fields.top_k is None else fields.top_k
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_or(fields.temperature, defaults.temperature),
        top_k=max(top_k, 0),
        top_p=_or(fields.top_p, defaults.top_p),
        min_p=_or(fields.min_p, defaults.min_p),
        seed=fields.seed,
        repetition_penalty=_or(fields.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=bias,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        grammar=grammar,
    )


def choice_seed(seed: int | None, choice: int) -> int | None:
    """Choices of one request differ, and each is repeatable."""
    return None if seed is None else (seed + choice) % 2**63


def output_grammar(fields: GenerationFields, tokenizer: LLTokenizer | None) -> str | None:
    """The one grammar that the request's several ways to ask for one amount to."""
    asked = _asked_formats(fields)
    if len(asked) > 1:
        raise RequestError(
            f"{asked[1][0]}: {asked[0][0]} already says what the output must look like: give one",
            param=asked[1][0],
        )
    if not asked:
        return None
    param, make = asked[0]
    return check_tokens(make(), tokenizer, param=param)


def _asked_formats(fields: GenerationFields) -> list[tuple[str, _Make]]:
    asked: list[tuple[str, _Make]] = []
    form = fields.response_format
    if isinstance(form, JsonSchemaFormat):
        schema = form.json_schema.schema_
        param = "response_format.json_schema.schema"
        asked.append((param, lambda: json_schema_grammar(schema if schema is not None else {}, param=param)))
    elif form is not None and form.type == "json_object":
        asked.append(("response_format", json_object_grammar))
    older = StructuredOutputs.model_construct(
        json_=fields.guided_json,
        regex=fields.guided_regex,
        choice=fields.guided_choice,
        grammar=fields.guided_grammar,
    )
    asked += _structured("guided_", older)
    if fields.structured_outputs is not None:
        asked += _structured("structured_outputs.", fields.structured_outputs)
    return asked


def _structured(prefix: str, wanted: StructuredOutputs) -> list[tuple[str, _Make]]:
    schema, regex, choice, grammar = wanted.json_, wanted.regex, wanted.choice, wanted.grammar
    asked: list[tuple[str, _Make]] = []
    if schema is not None:
        asked.append((f"{prefix}json", lambda: json_schema_grammar(schema, param=f"{prefix}json")))
    if wanted.json_object:
        asked.append((f"{prefix}json_object", json_object_grammar))
    if regex is not None:
        asked.append((f"{prefix}regex", lambda: regex_grammar(regex, param=f"{prefix}regex")))
    if choice is not None:
        asked.append((f"{prefix}choice", lambda: choice_grammar(choice, param=f"{prefix}choice")))
    if grammar is not None:
        asked.append((f"{prefix}grammar", lambda: text_grammar(grammar, param=f"{prefix}grammar")))
    return asked


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
