"""Tools: how a model family writes its calls, how to force one, and how to find one in the text.

    Hermes   <tool_call>
             {"name": "f", "arguments": {...}}
             </tool_call>                            Qwen and others, and every template that knows no tools
    plain    {"name": "f", "parameters": {...}}      Llama 3.1 and later

Which one it is stands in the chat template. Pure; knows no HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bimetal.gateway.chat import ChatTemplate
from bimetal.gateway.grammar import lark_grammar, lark_json, lark_string

MAX_PARALLEL_CALLS = 8
NEWLINE = "\n"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    start: str
    end: str
    arguments_key: str

    @property
    def is_plain(self) -> bool:
        return not self.start


HERMES = ToolFormat("<tool_call>", "</tool_call>", "arguments")
PLAIN = ToolFormat("", "", "arguments")
LLAMA = ToolFormat("", "", "parameters")


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """JSON, as OpenAI's format carries it."""


def tool_format(template: ChatTemplate) -> ToolFormat:
    if HERMES.start in template.source or not template.takes_tools:
        return HERMES
    return LLAMA if '"parameters"' in template.source else PLAIN


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """A system message for templates that know no tools."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call one or more of these functions to help with the user's request. Each line describes one:\n"
        f"{lines}\n"
        "To call a function, answer with its name and arguments in this form:\n"
        f'{HERMES.start}\n{{"name": "function name", "arguments": {{"argument": "value"}}}}\n{HERMES.end}'
    )


def forced_call_grammar(
    style: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    *,
    several: bool,
    params: Sequence[str],
    or_json: str | None = None,
) -> str:
    """A grammar of one call (or `several`) of one of `tools`; `params` names each tool in errors.

    `or_json`: the right-hand side of a rule for an answer that may stand in place of a call.
    """
    rules = []
    for i, (tool, param) in enumerate(zip(tools, params, strict=True)):
        function = tool["function"]
        schema = function.get("parameters") or {
            "type": "object",
            "properties": {},
            "additionalProperties": False,
        }
        head = f'{{"name": {json.dumps(function["name"])}, "{style.arguments_key}": '
        arguments = lark_json(schema, param=f"{param}.function.parameters")
        rules += [f'tool{i}: {lark_string(head)} args{i} "}}"', f"args{i}: {arguments}"]
    any_tool = " | ".join(f"tool{i}" for i in range(len(tools)))
    calls = "calls: call"
    if not style.is_plain:
        any_tool = f"{lark_string(style.start + NEWLINE)} ({any_tool}) {lark_string(NEWLINE + style.end)}"
        if several:
            calls += f' ("\\n" call){{0,{MAX_PARALLEL_CALLS - 1}}}'
    start = ["start: calls"] if or_json is None else ["start: calls | answer", f"answer: {or_json}"]
    return lark_grammar([*start, calls, f"call: {any_tool}", *rules], param="tools")


def parse_calls(text: str, names: Sequence[str]) -> list[ToolCall] | None:
    """The calls in a run of JSON objects (alone, in a list, or one after the other); None if it is anything else."""
    decoder, calls, at = json.JSONDecoder(), list[ToolCall](), 0
    text = text.strip()
    while at < len(text):
        try:
            document, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        for item in document if isinstance(document, list) else [document]:
            call = _call(item, names)
            if call is None:
                return None
            calls.append(call)
        while at < len(text) and text[at] in " \t\r\n;,":
            at += 1
    return calls or None


def _call(item: Any, names: Sequence[str]) -> ToolCall | None:
    if not isinstance(item, dict) or item.get("name") not in names:
        return None
    arguments = item.get("arguments", item.get("parameters", {}))
    if isinstance(arguments, str):
        return ToolCall(item["name"], arguments)
    return ToolCall(item["name"], json.dumps(arguments, ensure_ascii=False))


class ToolCallStream:
    """Splits an answer into content and tool calls as its text arrives.

    A call is given out whole. Text that opens a call but turns out to be none comes out as content, unchanged.
    """

    def __init__(self, style: ToolFormat, names: Sequence[str]) -> None:
        self._style = style
        self._names = tuple(names)
        self._held = ""
        self._blanks = ""
        """White space that belongs to the content only if more content follows."""
        self._inside = False
        self._decided = not style.is_plain
        """Plain style: False until a first character tells a call from prose."""
        self.num_calls = 0

    def push(self, text: str) -> list[str | ToolCall]:
        self._held += text
        if self._style.is_plain:
            return self._push_plain()
        found: list[str | ToolCall] = []
        while True:
            if self._inside:
                body, end, rest = self._held.partition(self._style.end)
                if not end:
                    return found
                self._inside, self._held = False, rest
                found += self._calls_or_text(body, self._style.start + body + end)
            else:
                content, start, rest = self._held.partition(self._style.start)
                if start:
                    self._inside, self._held = True, rest
                    found += self._content(content)
                    continue
                hold = _partial_suffix(content, self._style.start)
                self._held = content[len(content) - hold :]
                return found + self._content(content[: len(content) - hold])

    def finish(self) -> list[str | ToolCall]:
        held, self._held = self._held, ""
        if self._style.is_plain and not self._decided:
            found = self._calls_or_text(held, held)
        elif self._inside:
            found = self._calls_or_text(held, self._style.start + held)
        else:
            found = self._content(held)
        if self._blanks and not self.num_calls:
            found.append(self._blanks)
        return found

    def _push_plain(self) -> list[str | ToolCall]:
        if not self._decided and self._held.lstrip():
            self._decided = self._held.lstrip()[0] not in "{["
        if not self._decided:
            return []
        text, self._held = self._held, ""
        return self._content(text)

    def _calls_or_text(self, body: str, whole: str) -> list[str | ToolCall]:
        calls = parse_calls(body, self._names)
        if calls is None:
            return self._content(whole)
        self._blanks = ""
        self.num_calls += len(calls)
        return list(calls)

    def _content(self, text: str) -> list[str | ToolCall]:
        text = self._blanks + text
        kept = text.rstrip()
        self._blanks = text[len(kept) :]
        return [kept] if kept else []


def _partial_suffix(text: str, marker: str) -> int:
    """Characters at the end of `text` that begin `marker` without completing it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
