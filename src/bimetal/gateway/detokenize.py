"""Tokens in, text out, in whatever pieces the engine sends them: UTF-8 and stop strings across token borders.

Pure state machines; the same tokens give the same text however they are cut into calls. Knows no HTTP.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Where a stop string was found: characters [start, end) of the whole text."""

    stop: str
    start: int
    end: int


class Utf8Stream:
    """Bytes to text; a character cut in two waits for its other half.

    >>> stream = Utf8Stream()
    >>> stream.push(b"caf\\xc3"), stream.push(b"\\xa9"), stream.finish()
    ('caf', 'é', '')
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What an unfinished character leaves: U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)


class StopStream:
    """Finds the stop string that is complete first, and holds back text that may still become one.

    Of stop strings that end at the same character the one that starts first counts, so that the answer does not
    depend on how the text was cut into pushes.

    >>> stream = StopStream(["END"])
    >>> stream.push("the E"), stream.push("N"), stream.push("D of")
    ('the ', '', '')
    >>> stream.match
    StopMatch(stop='END', start=4, end=7)
    """

    def __init__(self, stops: Sequence[str], *, keep_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._keep_stop = keep_stop
        self._held = ""
        self.num_released = 0
        """Characters given out so far."""
        self.match: StopMatch | None = None

    def push(self, text: str, *, exempt: bool = False) -> str:
        """The text that is now certain. `exempt`: no stop string counts that starts in or before this text."""
        if self.match is not None:
            return ""
        if not self._stops:
            return self._release(text)
        text = self._held + text
        if exempt:
            self._held = ""
            return self._release(text)
        found = self._find(text)
        if found is not None:
            stop, start = found
            offset = self.num_released
            self.match = StopMatch(stop, offset + start, offset + start + len(stop))
            self._held = ""
            return self._release(text[: start + len(stop) * self._keep_stop])
        hold = self._partial_match(text)
        self._held = text[len(text) - hold :]
        return self._release(text[: len(text) - hold])

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return self._release(held)

    def _release(self, text: str) -> str:
        self.num_released += len(text)
        return text

    def _find(self, text: str) -> tuple[str, int] | None:
        found = [(stop, start) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found, key=lambda hit: (hit[1] + len(hit[0]), hit[1])) if found else None

    def _partial_match(self, text: str) -> int:
        """Characters at the end of `text` that begin a stop string without completing it."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
