"""`Document`: a YAML file whose every value knows its line, so that an error can point at it.

Owns the wording of "this value in this file is wrong". Knows nothing of what the file means.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from bimetal.errors import ConfigError

T = TypeVar("T")
Location = Sequence[int | str]
MAX_ERRORS_SHOWN = 5


class Document:
    """A parsed file: `value` is plain Python, `error` words a complaint about one place in it."""

    def __init__(self, text: str, source: str) -> None:
        self.source = source
        try:
            self._root = yaml.compose(text, Loader=yaml.SafeLoader)
            self.value: object = yaml.safe_load(text)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f":{mark.line + 1}" if mark else ""
            problem = getattr(error, "problem", None) or str(error)
            raise ConfigError(f"{source}{line}: not YAML: {problem}") from error
        except RecursionError as error:
            raise ConfigError(f"{source}: nested too deeply: write it flatter") from error
        self._refuse_doubled_keys(self._root, set())

    @classmethod
    def read(cls, path: Path) -> Document:
        try:
            return cls(path.read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}: give the path of a YAML file") from error
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path}: not text (byte {error.start}): give the path of a YAML file"
            ) from error

    def validate(self, adapter: TypeAdapter[T]) -> T:
        """The document as the adapter's type, or a ConfigError with a line per fault."""
        try:
            read = adapter.validate_python(self.value)
        except ValidationError as error:
            faults = error.errors()
        else:
            for location, given in _lost_booleans(self.value, read):
                word = str(given).lower()
                raise self.error(location, f"must be a number, or text in quotes (got the boolean {word})")
            return read
        lines = [str(self.error(fault["loc"], _describe(fault))) for fault in faults[:MAX_ERRORS_SHOWN]]
        if len(faults) > MAX_ERRORS_SHOWN:
            lines.append(f"{self.source}: and {len(faults) - MAX_ERRORS_SHOWN} more")
        raise ConfigError("\n".join(lines))

    def error(self, location: Location, message: str) -> ConfigError:
        """`message` with file, line and field in front."""
        field = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in location).lstrip(".")
        return ConfigError(f"{self.source}:{self.line_of(location)}: {field or 'document'}: {message}")

    def line_of(self, location: Location) -> int:
        """Line of the deepest part of `location` that the file has, counted from 1."""
        node = self._root
        line = node.start_mark.line if node is not None else 0
        for part in location:
            if isinstance(node, yaml.MappingNode):
                pairs = [(key, value) for key, value in node.value if key.value == str(part)]
                if not pairs:
                    break
                key, node = pairs[0]
                line = key.start_mark.line
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line
            else:
                break
        return int(line) + 1

    def _refuse_doubled_keys(self, node: yaml.Node | None, visited: set[int]) -> None:
        """Each node once: aliases may name one many times, or hold themselves."""
        if id(node) in visited:
            return
        visited.add(id(node))
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                name = str(key.value)
                if name in seen:
                    raise ConfigError(
                        f"{self.source}:{key.start_mark.line + 1}: {name!r} is given twice: keep one"
                    )
                seen.add(name)
                self._refuse_doubled_keys(value, visited)
        elif isinstance(node, yaml.SequenceNode):
            for item in node.value:
                self._refuse_doubled_keys(item, visited)


def _lost_booleans(given: object, read: object, location: Location = ()) -> Iterator[tuple[Location, bool]]:
    """Booleans of the file that were read as something else: pydantic takes `true` for 1 wherever a number may stand."""
    if isinstance(given, bool):
        if not isinstance(read, bool):
            yield location, given
    elif isinstance(given, dict):
        for key, value in given.items():
            known = read.get(key, value) if isinstance(read, Mapping) else getattr(read, str(key), value)
            yield from _lost_booleans(value, known, (*location, key))
    elif isinstance(given, list) and isinstance(read, list | tuple) and len(given) == len(read):
        for i, (value, known) in enumerate(zip(given, read, strict=True)):
            yield from _lost_booleans(value, known, (*location, i))


def _describe(fault: ErrorDetails) -> str:
    """What pydantic found, with the value given and what is allowed."""
    kind, given = fault["type"], fault["input"]
    if kind == "missing":
        return "is missing: it has no default"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return "is not a field here: remove it, or check its spelling"
    said = fault["msg"].removeprefix("Value error, ")
    if kind == "model_type":
        said = "must be a mapping of fields"
    if kind == "too_short" and not given:
        said = "must not be empty"
    return said if kind == "value_error" and "got " in said else f"{said} (got {_short(repr(given))})"


def _short(text: str, most: int = 200) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
