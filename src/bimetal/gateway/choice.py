"""One choice of an answer, from the engine's tokens to text, finish reason and log-probabilities.

Pure state; knows no sockets and no response formats.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from bimetal.engine.wire.api import FinishReason, Output, TokenLogprob
from bimetal.gateway.detokenize import StopStream, Utf8Stream
from bimetal.gateway.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class TextOptions:
    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    min_tokens: int = 0
    """Stop strings count only after this many tokens."""
    skip_special_tokens: bool = True
    visible_specials: frozenset[int] = frozenset()
    """Special tokens that are shown all the same, such as those that frame a tool call."""
    with_logprobs: bool = False
    discard_output: bool = False
    """The client asked for no tokens (it wants its prompt scored); what the engine makes is not shown."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    token_id: int
    offset: int
    """Characters of the choice's text before this token."""
    score: TokenLogprob | None
    """None: a prompt's first token, which has no distribution."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one message of the engine adds to a choice."""

    text: str = ""
    tokens: tuple[ScoredToken, ...] = ()
    """Those whose text is now out, if log-probabilities were asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the choice."""


class ChoiceText:
    """Feed it every `Output` of one request, in order; it is done once `finish_reason` is set."""

    def __init__(self, vocabulary: Vocabulary, options: TextOptions) -> None:
        self._vocabulary = vocabulary
        self._options = options
        hidden = vocabulary.special_ids - options.visible_specials
        self._hidden = hidden if options.skip_special_tokens else frozenset[int]()
        self._utf8 = Utf8Stream()
        self._stop = StopStream(options.stops, keep_stop=options.keep_stop)
        self._decoded_chars = 0
        self._pending: deque[tuple[int, ScoredToken]] = deque()
        """Scored tokens by the character at which their text ends, until it is released."""
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stopped_by_string = False

    def push(self, output: Output) -> Delta:
        if self.finish_reason is not None:
            return Delta()
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if self._options.discard_output:
            self.finish_reason = output.finish_reason
            return Delta(finish_reason=output.finish_reason)
        text = self._push_tokens(output.token_ids, output.logprobs)
        match = self._stop.match
        if match is not None:
            self.finish_reason, self.stopped_by_string = "stop", output.finish_reason is None
            kept = self._stop.num_released
            tokens = tuple(scored for end, scored in self._pending if scored.offset < kept or end <= kept)
            self._pending.clear()
            return Delta(text, tokens, "stop", match.stop)
        if output.finish_reason is None:
            return Delta(text, self._released()) if text or self._pending else Delta()
        self.finish_reason = output.finish_reason
        text += self._finish()
        tokens = tuple(scored for _, scored in self._pending)
        self._pending.clear()
        return Delta(text, tokens, output.finish_reason, output.stop_token_id)

    def _push_tokens(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> str:
        options = self._options
        if not options.with_logprobs and self.num_tokens >= options.min_tokens:
            self.num_tokens += len(token_ids)
            return self._stop.push(self._utf8.push(b"".join(map(self._piece, token_ids))))
        released = []
        for i, token_id in enumerate(token_ids):
            if self._stop.match is not None:
                break
            self.num_tokens += 1
            new = self._utf8.push(self._piece(token_id))
            if options.with_logprobs and i < len(logprobs):
                scored = ScoredToken(token_id, self._decoded_chars, logprobs[i])
                self._pending.append((self._decoded_chars + len(new), scored))
            self._decoded_chars += len(new)
            released.append(self._stop.push(new, exempt=self.num_tokens <= options.min_tokens))
        return "".join(released)

    def _finish(self) -> str:
        """The text still held: half a character, half a stop string."""
        rest = self._stop.push(self._utf8.finish())
        return rest + self._stop.finish()

    def _released(self) -> tuple[ScoredToken, ...]:
        tokens = []
        while self._pending and self._pending[0][0] <= self._stop.num_released:
            tokens.append(self._pending.popleft()[1])
        return tuple(tokens)

    def _piece(self, token_id: int) -> bytes:
        return b"" if token_id in self._hidden else self._vocabulary.piece(token_id)
