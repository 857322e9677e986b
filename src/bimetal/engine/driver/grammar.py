"""Token masks for constrained output: one matcher a request, over llguidance. Torch-free; runs in the driver, whose masks
follow a step to the last stage while it computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bimetal.errors import RequestError


class Grammars:
    """Compiles grammars for one tokenizer, which is read when the first constrained request comes."""

    def __init__(self, model_folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._folder = model_folder
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._tokenizer: Any = None

    @property
    def num_words(self) -> int:
        return -(-self._vocab_size // 32)

    def matcher(self, grammar: str) -> Matcher:
        from llguidance import LLMatcher, LLTokenizer

        if self._tokenizer is None:
            file = self._folder / "tokenizer.json"
            if not file.is_file():
                raise RequestError(
                    f"constrained output needs {file}, which is not there", param="response_format"
                )
            self._tokenizer = LLTokenizer(
                str(file), n_vocab=self._vocab_size, eos_token=list(self._eos) or None
            )
        matcher = LLMatcher(self._tokenizer, grammar)
        if matcher.is_error():
            raise RequestError(
                f"the grammar does not compile: {matcher.get_error()}", param="response_format"
            )
        return Matcher(matcher, self.num_words, self._eos)


class Matcher:
    """Follows one request's output through its grammar."""

    def __init__(self, matcher: Any, num_words: int, eos_token_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._num_words = num_words
        self._eos = eos_token_ids

    @property
    def is_over(self) -> bool:
        """Nothing but an end-of-sequence token may follow."""
        return bool(self._matcher.is_stopped())

    def consume(self, token: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    def mask(self) -> NDArray[np.uint32]:
        """Bit i of word i // 32: token i may come next. Once the grammar has ended, only an end-of-sequence token."""
        words = np.zeros(self._num_words, np.uint32)
        if self._matcher.is_stopped():
            return _only(words, self._eos)
        found = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        words[: len(found)] = found[: self._num_words]
        return words if words.any() else _only(words, self._eos)


def _only(words: NDArray[np.uint32], tokens: tuple[int, ...]) -> NDArray[np.uint32]:
    for token in tokens:
        words[token // 32] |= np.uint32(1 << (token % 32))
    if not tokens:
        words[:] = np.uint32(0xFFFFFFFF)
    return words
