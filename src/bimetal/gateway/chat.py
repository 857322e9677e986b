"""Chat messages to one prompt, by the Jinja template that comes with a checkpoint.

Renders as `transformers` does (a test compares the two) without importing it, since it brings torch into a process
that only handles text. A template is data from a third party: it runs in Jinja's sandbox. Knows no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from bimetal.errors import ConfigError, RequestError


class _GenerationBlock(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here its body stands for itself."""

    tags = {"generation"}  # noqa: RUF012 - jinja reads a class attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """A namespace that takes no underscored names, through which a template could reach Python's internals."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a chat template may not set the attribute {name!r}")
        super().__setitem__(name, value)


def _make_namespace(*values: Any, **named: Any) -> _PlainNamespace:
    namespace = _PlainNamespace()
    for name, value in dict(*values, **named).items():
        namespace[name] = value
    return namespace


def _make_dict(*values: Any, **named: Any) -> dict[str, Any]:
    return dict(*values, **named)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which a prompt must not."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        namespace=_make_namespace,
        dict=_make_dict,
    )
    return environment


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    source: str
    takes_tools: bool
    """False: the template never looks at `tools`."""
    template: jinja2.Template
    special_tokens: Mapping[str, str]
    """`bos_token`, `eos_token`, ...: templates spell them by these names."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt up to where the assistant's turn begins; RequestError if the template refuses the messages."""
        known = {"messages": list(messages), "tools": tools, "documents": None, "add_generation_prompt": True}
        try:
            return self.template.render({**self.special_tokens, **(variables or {}), **known})
        except jinja2.exceptions.TemplateError as error:
            raise RequestError(
                f"messages: the model's chat template refuses them: {error}", param="messages"
            ) from error
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise RequestError(
                f"messages: the model's chat template cannot render them ({type(error).__name__}: {error})",
                param="messages",
            ) from error


def compile_template(source: str, special_tokens: Mapping[str, str], *, where: str) -> ChatTemplate:
    environment = _environment()
    try:
        takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        template = environment.from_string(source)
    except jinja2.exceptions.TemplateSyntaxError as error:
        raise ConfigError(
            f"{where}: line {error.lineno}: {error.message}: give another with --chat-template"
        ) from error
    return ChatTemplate(source, takes_tools, template, dict(special_tokens))
