"""The FastAPI application: routes, error handlers, and the layers every request passes. What they do is `Gateway`'s."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Request, Response, Security
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bimetal.errors import RequestError
from bimetal.gateway.chat_protocol import ChatRequest
from bimetal.gateway.errors import (
    ApiError,
    handle_api_error,
    handle_http_exception,
    handle_request_error,
    handle_unexpected,
    model_not_found,
)
from bimetal.gateway.gateway import Gateway
from bimetal.gateway.metrics import Metrics
from bimetal.gateway.openapi import body_of, describe, errors, parameters, success
from bimetal.gateway.protocol import CompletionRequest
from bimetal.gateway.responses import ChatCompletion, Completion, Health, Model, ModelList
from bimetal.gateway.sse import ClientGoneError

_CLIENT_CLOSED_REQUEST = 499
_BEARER = HTTPBearer(auto_error=False, description="Needed if the server was started with --api-key.")


def create_app(gateway: Gateway) -> ASGIApp:
    app = FastAPI(
        title="bimetal",
        version=metadata.version("bimetal"),
        description="An OpenAI-compatible API in front of one language model split over GPUs of several vendors.",
        redoc_url=None,
    )
    for kind, handler in (
        (ApiError, handle_api_error),
        (RequestError, handle_request_error),
        (HTTPException, handle_http_exception),
        (ClientGoneError, _handle_client_gone),
        (Exception, handle_unexpected),
    ):
        app.add_exception_handler(kind, handler)
    app.include_router(_operations(gateway))
    app.include_router(_api(gateway))
    app.openapi = lambda: describe(app, gateway)  # type: ignore[method-assign]
    return _CountRequests(app, gateway.metrics)


def _operations(gateway: Gateway) -> APIRouter:
    """What machines ask: no key needed."""
    router = APIRouter(tags=["operations"])

    @router.get("/health", response_model=Health, responses=errors(503))
    async def health() -> Response:
        """200 once every stage serves, 503 before and after."""
        gateway.require_ready()
        return JSONResponse({"status": "ok"})

    @router.get("/metrics", response_class=Response, responses=success("text/plain", {"type": "string"}))
    async def metrics() -> Response:
        """Counters, gauges and histograms in Prometheus' text format."""
        return Response(gateway.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return router


def _api(gateway: Gateway) -> APIRouter:
    async def authorised(
        credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)],
    ) -> None:
        gateway.check_key(credentials.credentials if credentials else None)

    router = APIRouter(prefix="/v1", tags=["OpenAI"], dependencies=[Depends(authorised)])

    @router.get("/models", response_model=ModelList, responses=errors(401, 503))
    async def list_models() -> Response:
        return JSONResponse({"object": "list", "data": gateway.model_documents()})

    @router.get("/models/{model:path}", response_model=Model, responses=errors(401, 404, 503))
    async def retrieve_model(model: str) -> Response:
        found = next((document for document in gateway.model_documents() if document["id"] == model), None)
        if found is None:
            raise model_not_found(model, gateway.served_names)
        return JSONResponse(found)

    generating = errors(400, 401, 404, 413, 415, 429, 500, 503, 504)

    @router.post(
        "/completions",
        response_model=None,
        responses={**generating, **success("application/json", Completion, streamed=True)},
        openapi_extra={"requestBody": body_of(CompletionRequest), "parameters": parameters()},
    )
    async def create_completion(request: Request) -> Response:
        """Continue one prompt or several, given as text or as token ids."""
        return await gateway.complete(request)

    @router.post(
        "/chat/completions",
        response_model=None,
        responses={**generating, **success("application/json", ChatCompletion, streamed=True)},
        openapi_extra={"requestBody": body_of(ChatRequest), "parameters": parameters()},
    )
    async def create_chat_completion(request: Request) -> Response:
        """The assistant's next message, by the model's chat template."""
        return await gateway.chat(request)

    return router


async def _handle_client_gone(request: Request, error: Exception) -> Response:
    """Nobody reads this; the status is for logs and metrics."""
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


class _CountRequests:
    """Counts answers by route and status. A layer of its own because exceptions become answers further in."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            # Paths that are no route share one label: anybody can invent them.
            endpoint = getattr(scope.get("route"), "path", "other")
            self._metrics.http_requests.labels(endpoint, str(status)).inc()
