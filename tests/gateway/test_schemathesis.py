"""Requests generated from /openapi.json: a thousand malformed ones, each refused in a documented way, and no harm done."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .servers import RunningServer, server_starter

NUM_REQUESTS = 1000
HEADERS = {"Authorization": "Bearer sesame"}
DOCUMENTED = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with server_starter(checkpoint, tmp_path_factory.mktemp("server")) as start:
        yield start(gateway={"api_keys": ["sesame"]})


def generate(server: RunningServer, *flags: str, checks: tuple[str, ...]) -> int:
    """Run schemathesis; the number of requests it sent, all of which passed."""
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.url}/openapi.json"]
    command += [
        "-H",
        f"Authorization: {HEADERS['Authorization']}",
        "--no-color",
        "--generation-deterministic",
    ]
    command += ["--checks", ",".join(checks), "--continue-on-failure", "--request-timeout", "20", *flags]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd="/tmp")
    assert ran.returncode == 0, ran.stdout[-6000:]
    generated = re.search(r"(\d+) generated, \1 passed", ran.stdout)
    assert generated, ran.stdout[-6000:]
    return int(generated[1])


def answered(server: RunningServer, status: str, *, endpoint: str = ".*") -> int:
    """Answers so far whose status and endpoint match the patterns."""
    pattern = rf'^bimetal_http_requests_total{{endpoint="{endpoint}",status="{status}"}} (\S+)$'
    found = re.findall(pattern, server.get("/metrics").text, re.MULTILINE)
    return int(sum(map(float, found)))


def test_malformed_requests_leave_the_server_serving(server: RunningServer) -> None:
    checks = ("not_a_server_error", "negative_data_rejection", *DOCUMENTED)
    only = ("--include-path-regex", "completions", "--mode", "negative", "--phases", "coverage,fuzzing")
    num_requests = generate(server, *only, "--max-examples", "20", checks=checks)
    assert num_requests >= NUM_REQUESTS
    assert answered(server, "4..") >= NUM_REQUESTS
    # 503 is what /health says while the server loads.
    assert answered(server, "5..") == answered(server, "503")
    # A few have a good body beside an odd header, and are answered. Nothing else reached the driver.
    assert len(server.told("Generate")) == answered(server, "200", endpoint="/v1/[a-z/]*completions") < 20
    good = {"model": "scripted", "prompt": "fox", "max_tokens": 50}
    assert server.post("/v1/completions", good, headers=HEADERS).json()["choices"][0]["text"] == "fox"
    assert server.get("/health").status_code == 200


def test_well_formed_requests_get_documented_answers(server: RunningServer) -> None:
    before = answered(server, "200")
    generate(server, "--mode", "positive", "--phases", "fuzzing", "--max-examples", "25", checks=DOCUMENTED)
    assert answered(server, "200") > before + 20
    # A generated deadline may be too short; nothing else is a reason for a 5xx.
    assert answered(server, "5..") == answered(server, "50[34]")
