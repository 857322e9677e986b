"""`Trace`: requests by arrival time, from files or from a random process.

Reads the columns of Azure's, BurstGPT's and Mooncake's traces. Knows nothing of who serves them.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bimetal.errors import ConfigError
from bimetal.units import MS_PER_S

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

COLUMNS = (
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ("Timestamp", "Request tokens", "Response tokens"),
    ("timestamp", "input_length", "output_length"),
)
"""Azure's, BurstGPT's, Mooncake's (JSON lines, milliseconds)."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Request i arrives at `arrival_s[i]`, counted from the first; times never go backwards."""

    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    classes: tuple[str, ...] = ("all",)
    class_index: Ints | None = None
    """Into `classes`; None: all are of the first."""

    def __len__(self) -> int:
        return len(self.arrival_s)

    def compressed(self, factor: float) -> Trace:
        """The same requests `factor` times as fast."""
        if not 0 < factor < float("inf"):
            raise ConfigError(
                f"compression {factor} must be positive and finite: 50 makes an hour 72 seconds"
            )
        return Trace(
            self.arrival_s / factor, self.input_tokens, self.output_tokens, self.classes, self.class_index
        )

    def first(self, number: int) -> Trace:
        """The first `number` requests."""
        index = None if self.class_index is None else self.class_index[:number]
        return Trace(
            self.arrival_s[:number],
            self.input_tokens[:number],
            self.output_tokens[:number],
            self.classes,
            index,
        )

    def no_longer_than(self, max_tokens: int) -> Trace:
        """Without requests of more tokens, prompt and answer together. Times count from what was the first."""
        kept = self.input_tokens + self.output_tokens <= max_tokens
        index = None if self.class_index is None else self.class_index[kept]
        return Trace(
            self.arrival_s[kept], self.input_tokens[kept], self.output_tokens[kept], self.classes, index
        )


def load_trace(path: Path) -> Trace:
    """CSV or JSON lines, plain or as .gz; ConfigError names file, line, column and value."""
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: {reason}: give a trace as CSV or JSON lines, plain or .gz") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not text (byte {error.start}): give a trace as CSV or JSON lines"
        ) from error
    is_json = text.lstrip().startswith("{")
    rows = _json_rows(text, path) if is_json else _csv_rows(text, path)
    if not rows:
        raise ConfigError(f"{path}: has no requests: give a line for each, after the names of the columns")
    (_, first), *_ = rows
    names = next((names for names in COLUMNS if all(name in first for name in names)), None)
    if names is None:
        known = " or ".join(", ".join(names) for names in COLUMNS)
        raise ConfigError(f"{path}: has the columns {', '.join(map(str, first))}, but needs {known}")
    arrivals, inputs, outputs = [], [], []
    for line, row in rows:
        where = f"{path}:{line}"
        missing = [name for name in names if row.get(name) is None]
        if missing:
            raise ConfigError(f"{where}: {missing[0]} is missing: every request has {', '.join(names)}")
        arrivals.append(_seconds(row[names[0]], where, names[0], milliseconds=is_json))
        inputs.append(_tokens(row[names[1]], where, names[1]))
        outputs.append(_tokens(row[names[2]], where, names[2]))
        if len(arrivals) > 1 and arrivals[-1] < arrivals[-2]:
            raise ConfigError(
                f"{where}: {names[0]} {row[names[0]]!r} is earlier than the request before: sort the trace"
            )
    start = np.array(arrivals) - arrivals[0]
    return Trace(start, np.array(inputs, dtype=np.int64), np.array(outputs, dtype=np.int64))


def poisson_trace(
    num_requests: int,
    requests_per_s: float,
    mean_input_tokens: float,
    mean_output_tokens: float,
    seed: int,
    name: str = "all",
) -> Trace:
    """Independent arrivals, geometric lengths."""
    given = {
        "num_requests": num_requests,
        "requests_per_s": requests_per_s,
        "mean_input_tokens": mean_input_tokens,
        "mean_output_tokens": mean_output_tokens,
    }
    for field, value in given.items():
        if not 0 < value < float("inf"):
            raise ConfigError(f"{field} {value} must be positive and finite")
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / requests_per_s, num_requests))
    inputs = rng.geometric(1 / max(1.0, mean_input_tokens), num_requests)
    outputs = rng.geometric(1 / max(1.0, mean_output_tokens), num_requests)
    return Trace(arrivals - arrivals[0], inputs.astype(np.int64), outputs.astype(np.int64), (name,))


def merge(traces: Sequence[Trace]) -> Trace:
    """All requests in order of arrival, each keeping its class."""
    names = tuple(dict.fromkeys(name for trace in traces for name in trace.classes))
    index = []
    for trace in traces:
        own = np.zeros(len(trace), dtype=np.int64) if trace.class_index is None else trace.class_index
        index.append(np.array([names.index(name) for name in trace.classes])[own])
    arrival = np.concatenate([trace.arrival_s for trace in traces])
    order = np.argsort(arrival, kind="stable")
    return Trace(
        arrival[order],
        np.concatenate([trace.input_tokens for trace in traces])[order],
        np.concatenate([trace.output_tokens for trace in traces])[order],
        names,
        np.concatenate(index)[order],
    )


def _csv_rows(text: str, path: Path) -> list[tuple[int, dict[str, object]]]:
    """With their lines."""
    reader = csv.DictReader(StringIO(text, newline=""))
    try:
        return [(reader.line_num, dict(row)) for row in reader]
    except csv.Error as error:
        raise ConfigError(f"{path}: not CSV: {error}: give one request a line") from error


def _json_rows(text: str, path: Path) -> list[tuple[int, dict[str, object]]]:
    """With their lines."""
    rows = []
    for line, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        try:
            row = json.loads(content)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{line}: not JSON: {error.msg}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{line}: expected an object, got {type(row).__name__}")
        rows.append((line, row))
    return rows


def _seconds(value: object, where: str, name: str, *, milliseconds: bool) -> float:
    text = str(value).strip()
    try:
        number = float(text) / (MS_PER_S if milliseconds else 1)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text)
            number = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()  # no summer time
        except ValueError:
            raise ConfigError(f"{where}: {name} {value!r} is neither seconds nor a date and time") from None
    if not abs(number) < float("inf"):
        raise ConfigError(f"{where}: {name} {value!r} is not finite")
    return number


def _tokens(value: object, where: str, name: str) -> int:
    try:
        number = float(str(value))
    except ValueError:
        raise ConfigError(f"{where}: {name} {value!r} is not a number") from None
    if not 0 <= number < 1e9:
        raise ConfigError(f"{where}: {name} {value!r} must be between 0 and 1e9")
    return max(1, int(number))
