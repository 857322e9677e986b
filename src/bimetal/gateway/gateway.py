"""`Gateway`: the state behind the routes: the engine, the text model, the limits, and how one request is answered.

Everything of one server lives in one object; there is no global state. Knows HTTP only as requests and responses.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bimetal.engine.wire.api import Generate, Ready
from bimetal.engine.wire.step import max_biases
from bimetal.errors import EngineError
from bimetal.gateway.answers import Document
from bimetal.gateway.chat_protocol import ChatRequest
from bimetal.gateway.engine_client import EngineClient, Ticket
from bimetal.gateway.errors import ApiError, bad_request, model_not_found, shown
from bimetal.gateway.fields import MAX_DEADLINE_S
from bimetal.gateway.generation import CHAT, COMPLETION, FormatFactory, Generation
from bimetal.gateway.http_body import read_model
from bimetal.gateway.metrics import EngineView, Metrics
from bimetal.gateway.prepare import Prepared, prepare_chat, prepare_completion
from bimetal.gateway.protocol import CompletionRequest, GenerationFields
from bimetal.gateway.sampling import ModelLimits
from bimetal.gateway.sse import EventStream, unless_disconnected
from bimetal.gateway.text_model import TextModel, load_text_model
from bimetal.units import MIB

DEADLINE_HEADER = "X-Request-Deadline-S"
_SHORTEST_DEADLINE_S = 1e-3


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    served_names: tuple[str, ...] = ()
    """What clients call the model; empty: the name that the engine reports."""
    api_keys: tuple[str, ...] = ()
    """Empty: anybody may ask."""
    max_queue: int = 256
    """Sequences that may wait beyond those that run."""
    max_body_bytes: int = 16 * MIB
    chat_template_path: Path | None = None
    num_text_threads: int = 2


@dataclass(slots=True)
class Gateway:
    settings: GatewaySettings
    client: EngineClient
    clock: Callable[[], float] = time.monotonic
    metrics: Metrics = field(init=False)
    text: TextModel | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    _executor: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self._view)
        self._executor = ThreadPoolExecutor(self.settings.num_text_threads, thread_name_prefix="text")

    def _view(self) -> EngineView:
        client = self.client
        return EngineView(client.num_running, client.num_waiting, self.is_ready, client.stats)

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self.text is not None and self.client.ready is not None and self.client.failure is None

    @property
    def served_names(self) -> tuple[str, ...]:
        if self.settings.served_names:
            return self.settings.served_names
        return (self.client.ready.model,) if self.client.ready else ()

    async def load_text(self, ready: Ready) -> None:
        """ConfigError if the checkpoint's text files are not usable."""
        folder = Path(ready.model_path).expanduser()
        path = self.settings.chat_template_path
        self.text = await self._in_thread(lambda: load_text_model(folder, chat_template_path=path))

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def require_ready(self) -> tuple[TextModel, Ready]:
        client = self.client
        if client.failure is not None:
            raise ApiError(503, f"the engine stopped: {client.failure}", code="engine_error")
        if self.text is None or client.ready is None:
            raise ApiError(
                503, "the model is still loading", code="model_loading", headers={"Retry-After": "5"}
            )
        return self.text, client.ready

    def check_key(self, given: str | None) -> None:
        keys = self.settings.api_keys
        if not keys:
            return
        headers = {"WWW-Authenticate": "Bearer"}
        if given is None:
            raise ApiError(
                401,
                "no API key: send the header Authorization: Bearer KEY",
                code="missing_api_key",
                headers=headers,
            )
        # Compare with all keys, so that the time tells nothing.
        if not sum(hmac.compare_digest(given.encode(), key.encode()) for key in keys):
            raise ApiError(401, "this API key is not known here", code="invalid_api_key", headers=headers)

    def check_model(self, name: str) -> None:
        if name not in self.served_names:
            raise model_not_found(name, self.served_names)

    def model_documents(self) -> list[Document]:
        ready = self.require_ready()[1]
        return [
            {
                "id": name,
                "object": "model",
                "created": self.created,
                "owned_by": "bimetal",
                "root": ready.model,
                "parent": None,
                "max_model_len": ready.max_model_len,
                "permission": [],
            }
            for name in self.served_names
        ]

    # -- requests ---------------------------------------------------------------------------------------------------

    async def complete(self, request: Request) -> Response:
        def prepare(fields: CompletionRequest, text: TextModel, limits: ModelLimits) -> Prepared:
            return prepare_completion(fields, text, limits, request_id=f"cmpl-{secrets.token_hex(12)}")

        return await self._answer(request, CompletionRequest, prepare, COMPLETION, ("text_completion",) * 2)

    async def chat(self, request: Request) -> Response:
        def prepare(fields: ChatRequest, text: TextModel, limits: ModelLimits) -> Prepared:
            return prepare_chat(fields, text, limits, request_id=f"chatcmpl-{secrets.token_hex(12)}")

        return await self._answer(
            request, ChatRequest, prepare, CHAT, ("chat.completion", "chat.completion.chunk")
        )

    async def _answer(
        self,
        request: Request,
        body: type[Any],
        prepare: Callable[[Any, TextModel, ModelLimits], Prepared],
        form: FormatFactory,
        object_names: tuple[str, str],
    ) -> Response:
        arrival_s = self.clock()
        text, ready = self.require_ready()
        fields: GenerationFields = await read_model(request, body, self.settings.max_body_bytes)
        self.check_model(fields.model)
        deadlines_s = [s for s in (fields.deadline_s, _deadline_of_header(request)) if s is not None]
        fields.deadline_s = min(deadlines_s, default=None)
        limits = ModelLimits(ready.max_model_len, ready.vocab_size, max_biases(ready.max_num_seqs))
        prepared = await self._in_thread(lambda: prepare(fields, text, limits))
        self._admit(len(prepared.generates), ready)
        generation = Generation(
            prepared,
            self._submit(prepared, arrival_s),
            text.vocabulary,
            form,
            self.metrics,
            model=fields.model,
            object_name=object_names[prepared.stream],
            arrival_s=arrival_s,
            clock=self.clock,
        )
        headers = {"X-Request-Id": prepared.request_id}
        try:
            if not prepared.stream:
                whole = await unless_disconnected(request, _collect(generation))
                return JSONResponse(whole, headers=headers)
            first = await unless_disconnected(request, _first(generation))
            stream = EventStream(generation, first, headers)
        except BaseException:
            generation.close()
            raise
        return stream

    def _submit(self, prepared: Prepared, arrival_s: float) -> Ticket:
        """The driver counts a deadline from when it hears of a request, the client from when it sent it."""
        generates: Sequence[Generate] = prepared.generates
        deadline_s = generates[0].deadline_s
        if deadline_s is not None:
            left_s = max(deadline_s - (self.clock() - arrival_s), _SHORTEST_DEADLINE_S)
            generates = [replace(generate, deadline_s=left_s) for generate in generates]
        try:
            return self.client.submit(generates)
        except EngineError as error:
            raise ApiError(503, str(error), code="engine_error") from error

    def _admit(self, num_sequences: int, ready: Ready) -> None:
        capacity = ready.max_num_seqs + self.settings.max_queue
        if num_sequences > capacity:
            raise bad_request(
                f"n: the request asks for {num_sequences} sequences (prompts times n), but this server holds "
                f"{capacity} at most: split it",
                param="n",
            )
        client = self.client
        would_wait = client.num_in_flight + num_sequences - ready.max_num_seqs
        if client.num_waiting:
            would_wait = max(would_wait, client.num_waiting + num_sequences)
        if would_wait > self.settings.max_queue:
            raise ApiError(
                429,
                f"the queue is full: {client.num_waiting} sequences wait and {self.settings.max_queue} may: "
                "try again later",
                code="queue_full",
                headers={"Retry-After": str(client.retry_after_s(client.num_waiting))},
            )

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def _deadline_of_header(request: Request) -> float | None:
    given = request.headers.get(DEADLINE_HEADER)
    if given is None:
        return None
    try:
        deadline_s = float(given)
    except ValueError:
        deadline_s = 0.0
    if not 0 < deadline_s <= MAX_DEADLINE_S:
        raise bad_request(
            f"{DEADLINE_HEADER}: must be seconds, above 0 and up to {MAX_DEADLINE_S:.0f} (got {shown(given)})",
            param=DEADLINE_HEADER,
        )
    return deadline_s


async def _collect(generation: Generation) -> Document:
    try:
        while not generation.done:
            await generation.fragments()
        return generation.whole()
    finally:
        generation.close()


async def _first(generation: Generation) -> list[Document]:
    while not (fragments := await generation.fragments()) and not generation.done:
        pass
    return fragments
