"""One HTTP request while the engine works on it: outputs of its choices in, fragments of its answer out.

Aborts what nobody needs, turns a failed choice into the right status, and observes the request's latencies. Knows the
engine client and the answer formats, not HTTP's mechanics.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from bimetal.engine.wire.api import Output
from bimetal.errors import EngineError
from bimetal.gateway.answers import ChatFormat, ChoiceFormat, CompletionFormat, Document, usage_document
from bimetal.gateway.choice import ChoiceText, Delta
from bimetal.gateway.engine_client import Ticket
from bimetal.gateway.errors import ApiError
from bimetal.gateway.metrics import Metrics
from bimetal.gateway.prepare import Prepared
from bimetal.gateway.vocabulary import Vocabulary

FormatFactory = Callable[[int, Prepared, Vocabulary], ChoiceFormat]


class _Choice:
    __slots__ = ("first_s", "form", "last_s", "text")

    def __init__(self, text: ChoiceText, form: ChoiceFormat) -> None:
        self.text = text
        self.form = form
        self.first_s: float | None = None
        self.last_s = 0.0


class Generation:
    """Iterate `fragments` until `done`, then read `whole`; `close` whatever happens."""

    def __init__(
        self,
        prepared: Prepared,
        ticket: Ticket,
        vocabulary: Vocabulary,
        form: FormatFactory,
        metrics: Metrics,
        *,
        model: str,
        object_name: str,
        arrival_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prepared = prepared
        self._ticket = ticket
        self._metrics = metrics
        self._model = model
        self._object_name = object_name
        self._arrival_s = arrival_s
        self._clock = clock
        self._created = int(time.time())
        self._first_token_seen = False
        self._closed = False
        options = prepared.text_options
        self._choices = [
            _Choice(ChoiceText(vocabulary, options), form(i, prepared, vocabulary))
            for i in range(len(prepared.generates))
        ]
        self._by_id = {
            generate.request_id: choice
            for generate, choice in zip(prepared.generates, self._choices, strict=True)
        }
        self._num_unfinished = len(self._choices)
        head = {
            "id": prepared.request_id,
            "object": object_name,
            "created": self._created,
            "model": model,
        }
        self._chunk_head = _dumps(head)[:-1]

    @property
    def done(self) -> bool:
        return self._num_unfinished == 0

    async def fragments(self) -> list[Document]:
        """Wait for the engine's next message; what it adds to the answer, possibly nothing yet.

        ApiError if a choice cannot be finished.
        """
        try:
            outputs = await self._ticket.outputs()
        except EngineError as error:
            raise ApiError(500, f"the engine stopped: {error}", code="engine_error") from error
        now_s = self._clock()
        found = []
        for output in outputs:
            choice = self._by_id[output.request_id]
            if choice.text.finish_reason is not None:
                continue
            fragment = self._take(choice, output, now_s)
            if fragment is not None:
                found.append(fragment)
        return found

    def _take(self, choice: _Choice, output: Output, now_s: float) -> Document | None:
        if output.finish_reason in ("error", "deadline", "abort"):
            self._metrics.finished.labels(output.finish_reason).inc()
            raise _unfinished(output)
        delta = choice.text.push(output)
        if output.token_ids:
            self._observe_tokens(choice, len(output.token_ids), now_s)
        if choice.text.stopped_by_string:
            self._ticket.abort(output.request_id)
        if delta.finish_reason is not None:
            self._finish(choice, delta)
        return choice.form.push(delta, output.prompt_logprobs)

    def _observe_tokens(self, choice: _Choice, num_tokens: int, now_s: float) -> None:
        self._metrics.output_tokens.inc(num_tokens)
        if not self._first_token_seen:
            self._first_token_seen = True
            self._metrics.ttft.observe(now_s - self._arrival_s)
        if choice.first_s is None:
            choice.first_s = now_s
        else:
            self._metrics.itl.observe(now_s - choice.last_s)
        choice.last_s = now_s

    def _finish(self, choice: _Choice, delta: Delta) -> None:
        self._num_unfinished -= 1
        self._metrics.finished.labels(delta.finish_reason).inc()
        if choice.first_s is not None and choice.text.num_tokens > 1:
            self._metrics.tpot.observe((choice.last_s - choice.first_s) / (choice.text.num_tokens - 1))

    def usage(self) -> Document:
        per_prompt = self._prepared.num_choices
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in self._prepared.prompts)
        # Later choices of a prompt find the first one's blocks, which is no news to the client.
        num_cached = sum(choice.text.num_cached_tokens for choice in self._choices[::per_prompt])
        num_output = sum(choice.text.num_tokens for choice in self._choices)
        return usage_document(num_prompt_tokens, num_output, num_cached)

    def whole(self) -> Document:
        return {
            "id": self._prepared.request_id,
            "object": self._object_name,
            "created": self._created,
            "model": self._model,
            "choices": [choice.form.whole() for choice in self._choices],
            "usage": self.usage(),
        }

    def chunk(self, fragment: Document) -> str:
        """One event's data."""
        usage = ""
        if self._prepared.continuous_usage:
            usage = f',"usage":{_dumps(self.usage())}'
        elif self._prepared.include_usage:
            usage = ',"usage":null'
        return f'{self._chunk_head},"choices":[{_dumps(fragment)}]{usage}}}'

    def last_chunk(self) -> str | None:
        """The event after all choices, if the client wants the usage."""
        if not self._prepared.include_usage:
            return None
        return f'{self._chunk_head},"choices":[],"usage":{_dumps(self.usage())}}}'

    def close(self) -> None:
        """Abort what is unfinished; count what was done. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._ticket.close()
        usage = self.usage()
        self._metrics.prompt_tokens.inc(usage["prompt_tokens"])
        self._metrics.cached_tokens.inc(usage["prompt_tokens_details"]["cached_tokens"])
        if self.done:
            self._metrics.e2e.observe(self._clock() - self._arrival_s)


def _unfinished(output: Output) -> ApiError:
    if output.finish_reason == "deadline":
        return ApiError(504, "the request's deadline passed before its answer was complete", code="deadline")
    why = output.message or f"the engine gave up on it ({output.finish_reason})"
    return ApiError(500, f"the engine could not finish the request: {why}", code="engine_error")


def _dumps(document: Any) -> str:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


CHAT: FormatFactory = ChatFormat
COMPLETION: FormatFactory = CompletionFormat
