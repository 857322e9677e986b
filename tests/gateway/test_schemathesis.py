"""A thousand malformed requests, generated from /openapi.json: each refused in the documented way, and no harm done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, assume, given, settings
from schemathesis import GenerationMode
from schemathesis.core.parameters import ParameterLocation

from bimetal.gateway.responses import ErrorBody

from .servers import RunningServer, server_starter

NUM_REQUESTS = 1000
HEADERS = {"Authorization": "Bearer sesame"}


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with server_starter(checkpoint, tmp_path_factory.mktemp("server")) as start:
        yield start(gateway={"api_keys": ["sesame"]})


def test_malformed_requests_leave_the_server_serving(server: RunningServer) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    statuses: Counter[int] = Counter()
    for path in ("/v1/completions", "/v1/chat/completions"):

        @settings(
            max_examples=NUM_REQUESTS // 2,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=schema[path]["POST"].as_strategy(generation_mode=GenerationMode.NEGATIVE))
        def send(case: schemathesis.Case) -> None:
            # A malformed header beside a good body may be none of this server's business.
            body = case.meta.components.get(ParameterLocation.BODY)
            assume(body is not None and body.mode is GenerationMode.NEGATIVE)
            response = case.call(headers=HEADERS, timeout=20)
            statuses[response.status_code] += 1
            assert 400 <= response.status_code < 500, (case.as_curl_command(), response.text)
            assert response.status_code in (400, 401, 404, 405, 413, 415), response.text
            ErrorBody.model_validate(response.json())

        send()
    assert statuses.total() >= NUM_REQUESTS
    assert statuses[400] > NUM_REQUESTS // 2, statuses
    # Nothing of it reached the driver, and the next good request is served.
    assert server.told("Generate") == []
    good = {"model": "scripted", "prompt": "fox", "max_tokens": 50}
    answer = server.post("/v1/completions", good, headers=HEADERS)
    assert answer.json()["choices"][0]["text"] == "fox"
    assert server.get("/health").status_code == 200


def test_documented_answers_are_the_given_ones(server: RunningServer) -> None:
    """Well-formed requests: whatever is answered, status, media type and body are documented ones."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    answered: Counter[int] = Counter()
    names = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
    checks = [schemathesis.checks.CHECKS.get_one(name) for name in names]
    for path, method in (
        ("/v1/completions", "POST"),
        ("/v1/chat/completions", "POST"),
        ("/v1/models", "GET"),
        ("/v1/models/{model}", "GET"),
        ("/health", "GET"),
        ("/metrics", "GET"),
    ):

        @settings(
            max_examples=40 if method == "POST" else 5,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=schema[path][method].as_strategy(generation_mode=GenerationMode.POSITIVE))
        def send(case: schemathesis.Case) -> None:
            case.headers.pop("X-Request-Deadline-S", None)
            if isinstance(case.body, dict):
                case.body["deadline_s"] = None
            response = case.call(headers=HEADERS, timeout=20)
            answered[response.status_code] += 1
            assert response.status_code < 500, (case.as_curl_command(), response.text)
            case.validate_response(response, checks=checks)

        send()
    assert answered[200] > 20, answered
