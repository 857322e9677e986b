"""Server-sent events to a client that may leave at any time.

An answer starts only when its first piece is there, so that what fails before it still gets a proper status.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bimetal.gateway.answers import Document
from bimetal.gateway.errors import ApiError
from bimetal.gateway.generation import Generation

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed its connection; nobody will read the answer."""


async def until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or ClientGoneError, and `work` cancelled, as soon as the client leaves."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(until_disconnected(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        await _cancel(task, watch)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


class EventStream(Response):
    """Streams a generation whose first fragments are already there."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, first: list[Document], headers: dict[str, str]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._generation = generation
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        watch = asyncio.ensure_future(until_disconnected(receive))
        try:
            await asyncio.wait((pump, watch), return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            self._generation.close()
            await _cancel(pump, watch)

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        generation, fragments = self._generation, self._first
        try:
            while True:
                if fragments:
                    await _send(send, "".join(_event(generation.chunk(part)) for part in fragments))
                if generation.done:
                    break
                fragments = await generation.fragments()
            usage = generation.last_chunk()
            ending = _event(usage) if usage is not None else ""
        except ApiError as error:
            ending = _event(json.dumps(error.document()))
        await _send(send, f"{ending}data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event(data: str) -> str:
    return f"data: {data}\n\n"


async def _send(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
