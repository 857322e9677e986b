"""Tool calls in text, and grammars that force them, checked with the matcher that the engine samples by."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from bimetal.errors import RequestError
from bimetal.gateway.chat import compile_template
from bimetal.gateway.grammar import (
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_json,
    regex_grammar,
    text_grammar,
)
from bimetal.gateway.tools import (
    HERMES,
    LLAMA,
    PLAIN,
    ToolCall,
    ToolCallStream,
    ToolFormat,
    forced_call_grammar,
    parse_calls,
    tool_format,
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"type": "string"}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'

Accepts = Callable[[str, str], bool]


@pytest.fixture(scope="module")
def accepts(checkpoint: Path) -> Accepts:
    tokenizer = LLTokenizer((checkpoint / "tokenizer.json").read_text())

    def check(grammar: str, text: str) -> bool:
        matcher = LLMatcher(tokenizer, grammar)
        assert not matcher.get_error()
        token_ids = tokenizer.tokenize_str(text)
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    return check


def force(style: ToolFormat, *tools: dict, several: bool = True, **more: str) -> str:
    return forced_call_grammar(
        style, tools, several=several, params=[f"tools.{i}" for i in range(len(tools))], **more
    )


def test_a_forced_call_is_one_of_the_tools(accepts: Accepts) -> None:
    grammar = force(HERMES, WEATHER, NOW)
    assert accepts(grammar, PARIS)
    assert accepts(grammar, f"{TIME}\n{PARIS}")
    assert not accepts(grammar, "Sure, Paris it is.")
    assert not accepts(grammar, PARIS.replace("get_weather", "get_money"))
    assert not accepts(grammar, PARIS.replace('"Paris"', "5"))
    assert not accepts(force(HERMES, WEATHER, NOW, several=False), f"{TIME}\n{PARIS}")
    assert not accepts(force(HERMES, NOW), PARIS)


def test_plain_styles_have_their_own_key(accepts: Accepts) -> None:
    call = '{"name": "get_weather", "%s": {"city": "Paris"}}'
    assert accepts(force(LLAMA, WEATHER), call % "parameters")
    assert accepts(force(PLAIN, WEATHER), call % "arguments")
    assert not accepts(force(PLAIN, WEATHER), call % "parameters")


def test_an_answer_in_json_may_stand_in_place_of_a_call(accepts: Accepts) -> None:
    answer = lark_json(
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, param="x"
    )
    grammar = force(HERMES, NOW, or_json=answer)
    assert accepts(grammar, TIME)
    assert accepts(grammar, '{"a": 5}')
    assert not accepts(grammar, '{"b": 5}')


def test_what_is_forced_is_what_is_parsed(accepts: Accepts) -> None:
    stream = ToolCallStream(HERMES, ["get_weather", "now"])
    parts = stream.push(f"{PARIS}\n{TIME}") + stream.finish()
    assert parts == [ToolCall("get_weather", '{"city": "Paris"}'), ToolCall("now", "{}")]


def test_structured_outputs(accepts: Accepts) -> None:
    assert accepts(json_object_grammar(), '{"a": [1, 2]}')
    assert not accepts(json_object_grammar(), "[1]")
    assert accepts(json_schema_grammar({"enum": ["x", 5]}, param="s"), "5")
    assert accepts(regex_grammar("a/b+", param="r"), "a/bb")
    choice = choice_grammar(["a/b", "é|(x)"], param="c")
    assert accepts(choice, "é|(x)")
    assert not accepts(choice, "x")
    assert accepts(text_grammar('root ::= "yes" | "no"', param="g"), "no")
    assert accepts(text_grammar('start: "yes" | "no"', param="g"), "yes")


@pytest.mark.parametrize(
    "make",
    [
        lambda: json_schema_grammar({"type": "zebra"}, param="here"),
        lambda: json_schema_grammar({"$ref": "#/nowhere"}, param="here"),
        lambda: json_schema_grammar({"not": {"type": "string"}}, param="here"),
        lambda: json_schema_grammar({"minimum": float("inf")}, param="here"),
        lambda: json_schema_grammar(False, param="here"),
        lambda: regex_grammar("(?=a)b", param="here"),
        lambda: text_grammar("start: nothing", param="here"),
        lambda: text_grammar("", param="here"),
    ],
)
def test_what_cannot_be_followed_is_named(make: Callable[[], str]) -> None:
    with pytest.raises(RequestError, match=r"^here: ") as caught:
        make()
    assert caught.value.param == "here"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.text()
                | st.sampled_from(["type", "properties", "items", "pattern", "enum", "anyOf", "$ref"]),
                inner,
            )
        ),
        max_leaves=8,
    )
)
def test_any_document_as_a_schema_is_a_grammar_or_the_clients_error(schema: object) -> None:
    with contextlib.suppress(RequestError):
        assert json_schema_grammar(schema, param="schema")


def test_the_style_stands_in_the_template() -> None:
    def style(source: str) -> ToolFormat:
        return tool_format(compile_template(source, {}, where="test"))

    assert style("{{ tools }}<tool_call>") == HERMES
    assert style("{{ messages }}") == HERMES
    assert style('{{ tools }} {"name": function name, "parameters": ...}') == LLAMA
    assert style("{{ tools }}") == PLAIN


@pytest.mark.parametrize(
    ("style", "text", "content", "num_calls"),
    [
        (HERMES, "Hello.", "Hello.", 0),
        (HERMES, "Let me see. \n" + PARIS, "Let me see.", 1),
        (HERMES, f"{PARIS}\n{TIME}\n", "", 2),
        (HERMES, PARIS.removesuffix("</tool_call>"), "", 1),
        (HERMES, "<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", 0),
        (HERMES, PARIS.replace("get_weather", "unknown"), PARIS.replace("get_weather", "unknown"), 0),
        (HERMES, "a < b <tool", "a < b <tool", 0),
        (HERMES, "trailing \n", "trailing \n", 0),
        (PLAIN, '{"name": "now", "arguments": {}}', "", 1),
        (PLAIN, '[{"name": "now"}, {"name": "now"}]', "", 2),
        (PLAIN, '{"name": "now"}; {"name": "now"}', "", 2),
        (PLAIN, '{"answer": 5}', '{"answer": 5}', 0),
        (PLAIN, '{"name": "now"} and more', '{"name": "now"} and more', 0),
        (PLAIN, 'I say {"name": "now"}', 'I say {"name": "now"}', 0),
        (PLAIN, "  ", "  ", 0),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_found_however_the_text_is_cut(
    style: ToolFormat, text: str, content: str, num_calls: int, size: int
) -> None:
    stream = ToolCallStream(style, ["get_weather", "now"])
    parts = [part for at in range(0, len(text), size) for part in stream.push(text[at : at + size])]
    parts += stream.finish()
    assert "".join(part for part in parts if isinstance(part, str)) == content
    assert stream.num_calls == sum(isinstance(part, ToolCall) for part in parts) == num_calls


@given(
    st.lists(
        st.sampled_from([PARIS, TIME, "<tool_call>", "</tool_call>", "text ", "\n", '{"name"']), max_size=6
    ),
    st.lists(st.integers(0, 300), max_size=6),
    st.sampled_from([HERMES, PLAIN]),
)
def test_any_cut_finds_the_same(pieces: list[str], places: list[int], style: ToolFormat) -> None:
    text = "".join(pieces)

    def split(edges: list[int]) -> tuple[str, list[ToolCall]]:
        stream = ToolCallStream(style, ["get_weather", "now"])
        parts = [part for a, b in pairwise(edges) for part in stream.push(text[a:b])] + stream.finish()
        return (
            "".join(part for part in parts if isinstance(part, str)),
            [part for part in parts if isinstance(part, ToolCall)],
        )

    edges = [0, *sorted({min(place, len(text)) for place in places}), len(text)]
    assert split(edges) == split([0, len(text)])


@given(st.text())
def test_parsing_never_fails(text: str) -> None:
    for call in parse_calls(text, ["f"]) or []:
        json.loads(call.arguments)


def test_arguments_that_are_already_text_stay() -> None:
    assert parse_calls('{"name": "f", "arguments": "{\\"a\\": 1}"}', ["f"]) == [ToolCall("f", '{"a": 1}')]
