"""/openapi.json: bodies, answers and errors of every route, precise enough to generate tests from.

Bodies are read by the gateway itself (so that a bad one gets OpenAI's error object), hence described here by hand.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from bimetal.gateway.chat_protocol import ChatRequest
from bimetal.gateway.fields import MAX_DEADLINE_S
from bimetal.gateway.gateway import DEADLINE_HEADER, Gateway
from bimetal.gateway.protocol import CompletionRequest
from bimetal.gateway.responses import ErrorBody

Document = dict[str, Any]

_REF = "#/components/schemas/{model}"
_BODIES: tuple[type[BaseModel], ...] = (ChatRequest, CompletionRequest)
_REASONS = {
    400: "A field is wrong: `param` names it.",
    401: "The API key is missing or not known.",
    404: "No such model.",
    413: "The body is too long.",
    415: "The body is not announced as JSON.",
    429: "The queue is full: try again after `Retry-After` seconds.",
    500: "The engine could not finish the request.",
    503: "The model is still loading, or the engine has stopped.",
    504: "The request's deadline passed.",
}


def errors(*statuses: int) -> dict[int | str, Document]:
    """The error answers of a route, as FastAPI's `responses`."""
    return {status: {"model": ErrorBody, "description": _REASONS[status]} for status in statuses}


def success(
    media_type: str, schema: type[BaseModel] | Document, *, streamed: bool = False
) -> dict[int | str, Document]:
    content: Document = {} if isinstance(schema, type) else {media_type: {"schema": schema}}
    if streamed:
        content["text/event-stream"] = {}
    answer: Document = {"description": "With `stream`, one event a piece.", "content": content}
    if isinstance(schema, type):
        answer["model"] = schema
    if not streamed:
        answer["description"] = "Successful."
    return {200: answer}


def body_of(model: type[BaseModel]) -> Document:
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def parameters() -> list[Document]:
    return [
        {
            "name": DEADLINE_HEADER,
            "in": "header",
            "required": False,
            "description": "Seconds within which the answer must be complete.",
            "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DEADLINE_S},
        }
    ]


def describe(app: FastAPI, gateway: Gateway) -> Document:
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    schemas = document["components"]["schemas"]
    for model in _BODIES:
        schema = model.model_json_schema(ref_template=_REF)
        schemas.update(schema.pop("$defs", {}))
        if gateway.served_names:
            schema["properties"]["model"]["enum"] = list(gateway.served_names)
        schemas[model.__name__] = schema
    # FastAPI documents its own validation errors, which this server never sends.
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            if not gateway.settings.api_keys:
                operation.pop("security", None)
    return document
