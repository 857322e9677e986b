"""Which of several implementations of an operation an architecture uses, by the size at hand: measurements kept as data.

`data/<architecture>.json` lists them beside the tiles, each with where it comes from. A measurement replaces a guess by an
edit of that file alone (`benchmarks/scaled_products.py` prints the lines). Knows no kernels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Literal, get_args

from bimetal.engine.kernels.architecture import Architecture
from bimetal.errors import ConfigError

Implementation = Literal["library", "program"]
"""The vendor's library through torch, or this project's Triton program."""


@dataclass(frozen=True, slots=True)
class Choice:
    operation: str
    implementation: Implementation
    up_to: int | None
    """Rows; None: any number."""
    source: str
    """The measurement, or that there is none."""


def read_choices(architecture: Architecture) -> list[Choice]:
    """Smallest first. ConfigError names an entry that cannot be obeyed."""
    text = (resources.files(__package__) / "data" / f"{architecture.name}.json").read_text()
    found = []
    for fields in json.loads(text)["choices"]:
        if fields["implementation"] not in get_args(Implementation):
            raise ConfigError(
                f"engine/kernels/data/{architecture.name}.json: implementation {fields['implementation']!r} of "
                f"{fields['operation']} is none of {', '.join(get_args(Implementation))}"
            )
        found.append(
            Choice(fields["operation"], fields["implementation"], fields.get("up_to"), fields["source"])
        )
    return sorted(found, key=lambda c: float("inf") if c.up_to is None else c.up_to)


def choose(choices: Sequence[Choice], operation: str, size: int) -> Implementation:
    """The listed one of the smallest bucket that holds `size`; a program where nothing is listed.

    >>> listed = [Choice("f", "program", 8, "measured"), Choice("f", "library", None, "measured")]
    >>> choose(listed, "f", 8), choose(listed, "f", 9), choose(listed, "g", 9)
    ('program', 'library', 'program')
    """
    for choice in choices:
        if choice.operation == operation and (choice.up_to is None or size <= choice.up_to):
            return choice.implementation
    return "program"
