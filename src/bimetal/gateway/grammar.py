"""What a request asks its output to look like, as an llguidance grammar that the engine's sampler obeys.

Every grammar is validated here, so that a schema that cannot be followed is the client's error with the field's
name, and never reaches the driver. Blocking (milliseconds for large schemas). Knows no HTTP and no tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from bimetal.errors import RequestError

# Small models otherwise like to write blanks until their tokens run out.
_GUIDANCE = {"whitespace_pattern": r"[ \n\t]{0,32}"}


def json_object_grammar() -> str:
    return json_schema_grammar({"type": "object"}, param="response_format")


def json_schema_grammar(schema: Any, *, param: str) -> str:
    document = _plain_json(_with_guidance(schema), param)
    return _checked(lambda: LLMatcher.grammar_from_json_schema(document), param, "JSON schema")


def regex_grammar(pattern: str, *, param: str) -> str:
    return _checked(lambda: LLMatcher.grammar_from_regex(pattern), param, "regular expression")


def choice_grammar(choices: Sequence[str], *, param: str) -> str:
    """The output is one of `choices`."""
    return regex_grammar("|".join(re.escape(choice) for choice in choices), param=param)


def text_grammar(text: str, *, param: str) -> str:
    """A grammar that the client wrote: Lark as llguidance reads it, or GBNF (rules with `::=`)."""

    def convert() -> str:
        lark = gbnf_to_lark(text) if "::=" in text else text
        return str(LLMatcher.grammar_from_lark(lark))

    return _checked(convert, param, "grammar")


def check_tokens(grammar: str, tokenizer: LLTokenizer | None, *, param: str) -> str:
    """The grammar, once its special tokens and token ranges are found to exist in this model's vocabulary."""
    return grammar if tokenizer is None else _checked(lambda: grammar, param, "grammar", tokenizer)


def lark_json(schema: Any, *, param: str) -> str:
    """A JSON schema as the right-hand side of a Lark rule."""
    json_schema_grammar(schema, param=param)
    return f"%json {_plain_json(_with_guidance(schema), param)}"


def lark_grammar(rules: Sequence[str], *, param: str) -> str:
    return _checked(lambda: LLMatcher.grammar_from_lark("\n".join(rules) + "\n"), param, "grammar")


def lark_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _with_guidance(schema: Any) -> Any:
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return schema
    return {"x-guidance": _GUIDANCE, **schema}


def _plain_json(schema: Any, param: str) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except ValueError as error:
        raise RequestError(
            f"{param}: holds a number that JSON has no word for: {error}", param=param
        ) from error


def _checked(make: Callable[[], str], param: str, what: str, tokenizer: LLTokenizer | None = None) -> str:
    try:
        grammar = make()
        complaint = LLMatcher.validate_grammar(grammar, tokenizer)
    except Exception as error:
        complaint = str(error) or type(error).__name__
    except BaseException as error:
        # The library's panics derive from BaseException; anything else of that kind (Ctrl-C) passes.
        if type(error).__name__ != "PanicException":
            raise
        complaint = str(error)
    if complaint:
        first_line = " ".join(complaint.split())[:300]
        raise RequestError(f"{param}: not a {what} that output can be held to: {first_line}", param=param)
    return grammar
