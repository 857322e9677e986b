"""Scenario files in, with `--set` changes; page and workbook out. Errors name the path and the next step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from bimetal.catalog.document import Document
from bimetal.cli.tco_model import throughput_of
from bimetal.economics.scenario import Scenario, parse_scenario
from bimetal.errors import ConfigError

if TYPE_CHECKING:
    from bimetal.economics.analysis import Analysis

_INDEXED = re.compile(r"(?P<name>[^\[\]]+)\[(?P<index>\d+)\]")


def load(path: Path, changes: Sequence[str]) -> Scenario:
    """With each PATH=VALUE put in first."""
    document = Document.read(path)
    for change in changes:
        put(document, change)
    return parse_scenario(document, path.parent, throughput_of)


def put(document: Document, change: str) -> None:
    """Put VALUE (YAML) at PATH; parts of lists go by their name or, as in groups[0], by their place."""
    path, equals, text = change.partition("=")
    parts = [part for name in path.split(".") for part in _parts(name)]
    if not equals or not text.strip() or not all(parts):
        raise ConfigError(f"--set {change!r}: give PATH=VALUE, as in gpus.MI300X.price_usd=15000")
    node: Any = document.value
    for part in parts[:-1]:
        key = _key(node, part)
        if key is None or not isinstance(node[key], dict | list):
            raise ConfigError(
                f"--set {change!r}: {document.source} has no {part!r} there: use {_known(node)}"
            )
        node = node[key]
    key = parts[-1] if isinstance(node, dict) else _key(node, parts[-1])
    if key is None:
        raise ConfigError(
            f"--set {change!r}: {document.source} has no {parts[-1]!r} there: use {_known(node)}"
        )
    try:
        node[key] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {change!r}: {text!r} is not YAML: give a number or a mapping") from error


def _parts(name: str) -> tuple[str, ...]:
    """
    >>> _parts("groups[0]"), _parts("mixed")
    (('groups', '0'), ('mixed',))
    """
    indexed = _INDEXED.fullmatch(name)
    return (indexed["name"], indexed["index"]) if indexed else (name,)


def _key(node: Any, part: str) -> str | int | None:
    """Where `part` is in a mapping, or in a list by name or place; None: nowhere."""
    if isinstance(node, dict):
        return part if part in node else None
    if not isinstance(node, list):
        return None
    named = [i for i, x in enumerate(node) if isinstance(x, dict) and x.get("name") == part]
    return named[0] if named else int(part) if part.isdecimal() and int(part) < len(node) else None


def _known(node: Any) -> str:
    """What could be given instead."""
    if isinstance(node, dict):
        names = [str(name) for name in node]
    elif isinstance(node, list):
        names = [
            str(x["name"]) if isinstance(x, dict) and "name" in x else str(i) for i, x in enumerate(node)
        ]
    else:
        names = []
    return f"one of {', '.join(names)}" if names else "a shorter path"


def check_outputs(outputs: Mapping[str, Path | None], inputs: Sequence[Path]) -> None:
    """No output may be written over an input or another output."""
    taken = {path.resolve(): "a scenario" for path in inputs}
    for flag, path in outputs.items():
        if path is None:
            continue
        if path.resolve() in taken:
            raise ConfigError(f"{flag} {path}: is {taken[path.resolve()]} too: give another path")
        taken[path.resolve()] = flag


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """ConfigError where the path cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or error}: give a file in a folder that exists and may be written"
        ) from error


def write_html(analysis: Analysis, path: Path) -> None:
    try:
        from bimetal.economics.page import render_page
    except ModuleNotFoundError as error:
        raise _not_installed(error) from error
    text = render_page(analysis)
    with writing(path):
        path.write_text(text, encoding="utf-8")


def write_xlsx(scenario: Scenario, path: Path) -> None:
    try:
        from bimetal.economics.workbook import write_workbook
    except ModuleNotFoundError as error:
        raise _not_installed(error) from error
    with writing(path):
        write_workbook(scenario, path)


def _not_installed(error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(f'{error.name} is not installed: pip install "bimetal[report]"')
