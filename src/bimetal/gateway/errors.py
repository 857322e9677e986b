"""OpenAI's error object, and which failure gets which status.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

Every answer of the gateway that is not a success has this shape. Knows statuses and wording, no routes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bimetal.errors import RequestError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_MAX_SHOWN = 80


class ApiError(Exception):
    """A failure with its HTTP status; `param` names the field of the request at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def document(self) -> dict[str, Any]:
        return error_document(self.status, self.message, param=self.param, code=self.code)


def error_document(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def model_not_found(name: str, served: Sequence[str]) -> ApiError:
    return ApiError(
        404,
        f"model: {shown(name)} is not served here: use one of {', '.join(served)}",
        param="model",
        code="model_not_found",
    )


def shown(value: Any) -> str:
    """A value as an error message quotes it: JSON, cut short."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"


def from_validation(error: ValidationError, document: Any) -> ApiError:
    """The one complaint that helps most: at the deepest place, alternatives of a union joined by "or"."""
    complaints: dict[tuple[str | int, ...], list[dict[str, Any]]] = {}
    for item in error.errors(include_url=False):
        complaint = cast("dict[str, Any]", item)
        complaints.setdefault(_place(complaint, document), []).append(complaint)
    place = max(complaints, key=len)
    items = complaints[place]
    param = ".".join(str(part) for part in place) or None
    if items[0]["type"] == "extra_forbidden":
        return bad_request(f"{param}: this field is not known: remove it", param=param, code="unknown_field")
    reasons = list(dict.fromkeys(_reason(item) for item in items))
    given = "" if items[0]["type"] == "missing" else f" (got {shown(items[0]['input'])})"
    where = f"{param}: " if param else ""
    return bad_request(f"{where}{' or '.join(reasons)}{given}", param=param)


def _reason(item: Mapping[str, Any]) -> str:
    reason = str(item["msg"]).removeprefix("Value error, ")
    return (
        reason if not reason.startswith("Input should be") else "must be" + reason[len("Input should be") :]
    )


def _place(item: Mapping[str, Any], document: Any) -> tuple[str | int, ...]:
    """The path of a complaint that exists in `document`: union branches, which pydantic also names, fall out."""
    place: list[str | int] = []
    here = document
    for part in item["loc"]:
        in_object = isinstance(here, dict) and part in here
        in_list = isinstance(here, list) and isinstance(part, int) and part < len(here)
        if in_object or in_list:
            here = here[part]
            place.append(part)
    if item["type"] == "missing":
        place.append(item["loc"][-1])
    return tuple(place)


def json_error(
    status: int, document: dict[str, Any], headers: Mapping[str, str] | None = None
) -> JSONResponse:
    return JSONResponse(document, status_code=status, headers=dict(headers or {}))


async def handle_api_error(request: Request, error: Exception) -> Response:
    api_error = cast(ApiError, error)
    return json_error(api_error.status, api_error.document(), api_error.headers)


async def handle_request_error(request: Request, error: Exception) -> Response:
    wrong = cast(RequestError, error)
    return json_error(400, error_document(400, str(wrong), param=wrong.param, code=wrong.code))


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, which the router finds."""
    http_error = cast(HTTPException, error)
    status = http_error.status_code
    message, code = str(http_error.detail), None
    if status == 404:
        message, code = f"{request.url.path} is not served here: see /openapi.json for what is", "unknown_url"
    elif status == 405:
        allowed = (http_error.headers or {}).get("Allow", "another method")
        message = f"{request.method} is not allowed on {request.url.path}: use {allowed}"
        code = "method_not_allowed"
    return json_error(status, error_document(status, message, code=code), http_error.headers)


async def handle_unexpected(request: Request, error: Exception) -> Response:
    """A fault of the gateway itself; the server logs its traceback."""
    return json_error(500, error_document(500, "the gateway failed on this request", code="internal_error"))
