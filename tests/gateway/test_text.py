"""Vocabulary, chat templates, choices and log-probabilities, against the libraries that define them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from bimetal.engine.wire.api import Output, TokenLogprob
from bimetal.errors import ConfigError, RequestError
from bimetal.gateway.chat import compile_template
from bimetal.gateway.choice import ChoiceText, TextOptions
from bimetal.gateway.logprobs import LOWEST, completion_logprobs, prompt_tokens
from bimetal.gateway.text_model import load_text_model
from bimetal.gateway.vocabulary import Vocabulary, byte_alphabet, read_vocabulary

QWEN_LIKE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
    {%- if message.role == 'weird' %}{{- raise_exception('odd role') }}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if loop.index0 > 100 %}{% break %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}
    {%- endfor %}
    {%- if message.role == 'assistant' %}{% generation %}{{ ns.last }}{% endgeneration %}{% endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "<é & 'ü'>", "parameters": {"type": "object"}},
    }
]
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "<b>é 😀</b>"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "ß"}}}],
    },
    {"role": "tool", "content": "5", "tool_call_id": "1"},
]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[:2]])
def test_templates_render_as_in_transformers(tools: list | None, messages: list) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    expected, _ = render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=QWEN_LIKE,
        add_generation_prompt=True,
        bos_token="<s>",
    )
    template = compile_template(QWEN_LIKE, {"bos_token": "<s>"}, where="test")
    assert template.takes_tools
    assert template.render(messages, tools=tools) == expected[0]


def test_a_template_that_refuses_is_the_clients_error() -> None:
    template = compile_template(QWEN_LIKE, {}, where="test")
    with pytest.raises(RequestError, match="odd role"):
        template.render([{"role": "weird", "content": "x"}])
    with pytest.raises(RequestError, match="cannot render"):
        template.render([{"role": "user", "content": None}])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{% set x = messages.append(1) %}{{ messages | length - 1 or '' }}",
        "{% set ns = namespace(a=1) %}{% set ns.__class__ = 1 %}leaked",
        "{{ namespace(_a=1) and 'leaked' }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ dict.__globals__ }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(attack: str) -> None:
    template = compile_template(attack, {}, where="test")
    try:
        shown = template.render([{"role": "user", "content": "x"}])
    except RequestError:
        shown = ""
    assert shown == ""


def test_a_broken_template_names_its_line() -> None:
    with pytest.raises(ConfigError, match=r"file: line 2: .*--chat-template"):
        compile_template("x\n{% if %}", {}, where="file")


def test_homes_of_chat_templates(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    inline = [{"name": "default", "template": "inline"}, {"name": "tool_use", "template": "tools here"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": inline}))
    text = load_text_model(tmp_path)
    assert text.chat_template(with_tools=False).source == "inline"
    assert text.chat_template(with_tools=True).source == "tools here"
    (tmp_path / "chat_template.jinja").write_text("newer")
    assert load_text_model(tmp_path).chat_template(with_tools=False).source == "newer"
    (tmp_path / "given.jinja").write_text("given")
    given_one = load_text_model(tmp_path, chat_template_path=tmp_path / "given.jinja")
    assert given_one.chat_template(with_tools=True).source == "given"


def test_a_model_without_chat_template_says_so(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    with pytest.raises(RequestError, match="/v1/completions"):
        load_text_model(tmp_path).chat_template(with_tools=False)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("generation_config.json", '{"top_p": "much"}'),
    ],
)
def test_broken_files_are_named(checkpoint: Path, tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=name):
        load_text_model(tmp_path)


# -- vocabulary -----------------------------------------------------------------------------------------------------


def test_byte_alphabet_is_the_tokenizers_own() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(byte_alphabet()) == set(ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


@given(token_ids=st.lists(st.integers(0, 299), max_size=20))
def test_byte_level_text_is_the_tokenizers_own(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    vocabulary = read_vocabulary(tokenizer)
    assert vocabulary.text(token_ids) == tokenizer.decode(token_ids)


@given(text=st.text())
def test_any_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert read_vocabulary(tokenizer).text(tokenizer.encode(text).ids) == text


def sentencepiece_like() -> Tokenizer:
    pieces = ["<unk>", "▁Paris", "▁is", "é", "▁"] + [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@given(st.text("aé😀 \n", max_size=8))
def test_sentencepiece_bytes_and_spaces(text: str) -> None:
    tokenizer = sentencepiece_like()
    token_ids = [1, 2, 4, *(5 + byte for byte in text.encode())]
    assert read_vocabulary(tokenizer).text(token_ids) == " Paris is " + text
    # The library strips the first space, which belongs to a continuation.
    assert " " + tokenizer.decode(token_ids) == " Paris is " + text


def test_an_unknown_spelling_is_refused() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        read_vocabulary(tokenizer)


# -- choices --------------------------------------------------------------------------------------------------------

WORDS = Vocabulary((b"", b"ab", b"b", b" ", b"\xf0\x9f", b"\x98\x80", b"<end>"), frozenset({6}), 5)


def feed(options: TextOptions, outputs: list[Output]) -> tuple[str, list, ChoiceText]:
    choice = ChoiceText(WORDS, options)
    deltas = [choice.push(output) for output in outputs]
    return (
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.tokens],
        choice,
    )


@given(
    token_ids=st.lists(st.integers(0, 6), max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    stops=st.lists(st.text("ab ", min_size=1, max_size=3), max_size=2),
    min_tokens=st.integers(0, 3),
    with_logprobs=st.booleans(),
)
def test_text_and_scores_do_not_depend_on_how_outputs_are_cut(
    token_ids: list[int], cuts: list[int], stops: list[str], min_tokens: int, with_logprobs: bool
) -> None:
    options = TextOptions(tuple(stops), min_tokens=min_tokens, with_logprobs=with_logprobs)
    score = TokenLogprob(-1.0, 1)

    def outputs(edges: list[int]) -> list[Output]:
        parts = [
            Output("r", tuple(token_ids[a:b]), (score,) * (b - a) if with_logprobs else ())
            for a, b in pairwise(edges)
        ]
        return [*parts, Output("r", finish_reason="length")]

    one_by_one = feed(options, outputs(list(range(len(token_ids) + 1))))
    edges = [0, *sorted({min(cut, len(token_ids)) for cut in cuts}), len(token_ids)]
    in_runs = feed(options, outputs(edges))
    assert in_runs[0] == one_by_one[0]
    assert in_runs[1] == one_by_one[1]
    assert in_runs[2].finish_reason == one_by_one[2].finish_reason
    if with_logprobs and not one_by_one[2].stopped_by_string:
        assert [token.token_id for token in one_by_one[1]] == token_ids
    offsets = [token.offset for token in one_by_one[1]]
    assert offsets == sorted(offsets)


def test_scores_end_where_the_text_was_cut() -> None:
    score = TokenLogprob(-1.0, 1)
    outputs = [Output("r", (1, 3, 1, 2, 3), (score,) * 5)]
    text, tokens, choice = feed(TextOptions(("bb",), with_logprobs=True), outputs)
    assert text == "ab a"
    assert [(token.token_id, token.offset) for token in tokens] == [(1, 0), (3, 2), (1, 3)]
    assert choice.stopped_by_string


def test_special_tokens_are_hidden_unless_wanted() -> None:
    outputs = [Output("r", (1, 6, 1)), Output("r", finish_reason="stop")]
    assert feed(TextOptions(), outputs)[0] == "abab"
    assert feed(TextOptions(skip_special_tokens=False), outputs)[0] == "ab<end>ab"
    assert feed(TextOptions(visible_specials=frozenset({6})), outputs)[0] == "ab<end>ab"


def test_a_character_over_two_tokens_comes_out_whole() -> None:
    choice = ChoiceText(WORDS, TextOptions(with_logprobs=True))
    score = (TokenLogprob(-1.0, 1),)
    first = choice.push(Output("r", (4,), score))
    assert first.text == ""
    second = choice.push(Output("r", (5,), score))
    assert second.text == "😀"
    assert [token.offset for token in (*first.tokens, *second.tokens)] == [0, 0]


def test_minus_infinity_has_a_number_in_json() -> None:
    score = TokenLogprob(float("-inf"), 3, (1, 2), (-0.1, float("-inf")))
    tokens, _ = prompt_tokens([3, 3], [score], WORDS)
    document = completion_logprobs(tokens, WORDS, 2)
    assert document["token_logprobs"] == [None, LOWEST]
    assert document["top_logprobs"] == [None, {"ab": -0.1, "b": LOWEST, " ": LOWEST}]
    json.dumps(document, allow_nan=False)


@settings(max_examples=30)
@given(st.text("aé😀 ", max_size=20))
def test_prompt_offsets_are_those_of_its_text(tokenizer: Tokenizer, text: str) -> None:
    vocabulary = read_vocabulary(tokenizer)
    token_ids = tokenizer.encode(text).ids
    tokens, num_characters = prompt_tokens(token_ids, [], vocabulary)
    assert num_characters == len(text)
    for i, token in enumerate(tokens):
        assert text.startswith(vocabulary.text(token_ids[:i]).rstrip("�"))
        assert token.offset == len(vocabulary.text(token_ids[:i]).rstrip("�"))
