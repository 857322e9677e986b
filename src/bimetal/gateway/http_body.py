"""Reading a JSON body that may be hostile: too long, too deep, not JSON, not what the endpoint takes."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from bimetal.gateway.errors import ApiError, bad_request, from_validation
from bimetal.gateway.sse import ClientGoneError
from bimetal.units import format_bytes

Model = TypeVar("Model", bound=BaseModel)

_DRAINED = 4
"""Times the limit that is read and thrown away before the connection is cut."""


async def read_model(request: Request, model: type[Model], max_bytes: int) -> Model:
    """The validated body; ApiError 400, 413 or 415 says what is wrong with it."""
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(
            415, f"Content-Type is {media_type!r}: send application/json", code="unsupported_media_type"
        )
    document = _parse(await _read(request, max_bytes))
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise from_validation(error, document) from error


async def _read(request: Request, max_bytes: int) -> bytes:
    """A body over the limit is still taken in for a while, unkept: most clients read no answer while they send."""
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > _DRAINED * max_bytes:
        raise _too_large(max_bytes)
    body, num_bytes = bytearray(), 0
    try:
        async for piece in request.stream():
            num_bytes += len(piece)
            if num_bytes <= max_bytes:
                body += piece
            elif num_bytes > _DRAINED * max_bytes:
                break
    except ClientDisconnect as error:
        raise ClientGoneError from error
    if num_bytes > max_bytes:
        raise _too_large(max_bytes)
    return bytes(body)


def _parse(body: bytes) -> Any:
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the body is not JSON that can be read: {error}", code="invalid_json") from error


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the body is longer than {format_bytes(max_bytes)}, the limit of this server: shorten it",
        code="body_too_large",
        headers={"Connection": "close"},
    )
