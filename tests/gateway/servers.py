"""Whole servers as child processes, and what tests ask of them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

HERE = Path(__file__).parent


@dataclass
class RunningServer:
    url: str
    process: subprocess.Popen
    log_path: Path
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=20))

    def get(self, path: str, **more: object) -> httpx.Response:
        return self.client.get(self.url + path, **more)

    def post(self, path: str, body: object, **more: object) -> httpx.Response:
        return self.client.post(self.url + path, json=body, **more)

    def complete(self, prompt: object, **fields: object) -> httpx.Response:
        return self.post(
            "/v1/completions", {"model": "scripted", "prompt": prompt, "max_tokens": 100, **fields}
        )

    def chat(self, text: str, **fields: object) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return self.post("/v1/chat/completions", {"model": "scripted", "messages": messages, **fields})

    def told(self, kind: str) -> list[dict]:
        """What the driver was told, in order."""
        lines = self.log_path.read_text().splitlines() if self.log_path.exists() else []
        return [document for document in map(json.loads, lines) if document["kind"] == kind]

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").text.splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name
        )

    def wait_until_ready(self, timeout_s: float = 20) -> None:
        wait_until(lambda: self.process.poll() is not None or self.is_ready(), timeout_s)
        assert self.process.poll() is None, "the server ended"

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.get("/health").status_code == 200
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def sse_events(text: str) -> list[dict]:
    """The data of every event but the closing [DONE], whose presence is checked."""
    data = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    assert data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]]


StartServer = Callable[..., RunningServer]


@contextlib.contextmanager
def server_starter(checkpoint: Path, folder: Path) -> Iterator[StartServer]:
    started: list[RunningServer] = []

    def start(
        *, gateway: dict | None = None, command: list[str] | None = None, wait: bool = True, **script: object
    ):
        port, log_path = free_port(), folder / f"driver-{len(started)}.log"
        options = {
            "port": port,
            "gateway": gateway or {},
            "script": {"model_path": str(checkpoint), "vocab_size": 300, "log_path": str(log_path), **script},
            "command": command,
        }
        process = subprocess.Popen(
            [sys.executable, str(HERE / "serve_scripted.py"), json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(os.environ),
            text=True,
        )
        server = RunningServer(f"http://127.0.0.1:{port}", process, log_path)
        started.append(server)
        if wait:
            server.wait_until_ready()
        return server

    try:
        yield start
    finally:
        for server in started:
            if server.process.poll() is None:
                server.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.process.wait(8)
            server.process.kill()
            server.process.communicate()


def demo_model() -> Path:
    """The converted demo model; the test is skipped where nobody made it, and fails where it was promised."""
    promised = os.environ.get("BIMETAL_DEMO_MODEL")
    if promised is not None:
        path = Path(promised).resolve()
        assert (path / "config.json").is_file(), (
            f"BIMETAL_DEMO_MODEL is {promised}, which holds no config.json"
        )
        return path
    path = HERE.parent.parent / ".demo" / "SmolLM2-135M-Instruct"
    if not (path / "config.json").is_file():
        pytest.skip("the demo model is not converted: run `make model`")
    return path


@contextlib.contextmanager
def serve(*flags: str) -> Iterator[RunningServer]:
    """`bimetal serve` as a process, with one thread a stage."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "bimetal.cli.main",
        "serve",
        "--port",
        str(port),
        "--num-threads",
        "1",
        *flags,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    server = RunningServer(f"http://127.0.0.1:{port}", process, Path("/nonexistent"))
    try:
        server.wait_until_ready(240)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(8)
        finally:
            process.kill()
            process.communicate()
