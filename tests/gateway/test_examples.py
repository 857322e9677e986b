"""The examples in docstrings and in docs/api.md do what they say."""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bimetal.gateway.responses import ChatCompletion, ErrorBody

from .servers import RunningServer

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "api.md"


@pytest.mark.parametrize("name", ["gateway.detokenize", "gateway.vocabulary", "cli.placement"])
def test_docstrings(name: str) -> None:
    tried = doctest.testmod(importlib.import_module(f"bimetal.{name}"))
    assert tried.attempted > 0
    assert tried.failed == 0


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


@pytest.mark.slow
def test_documented_calls(demo_server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    script = "\n".join(blocks("python")).replace("http://127.0.0.1:8000", demo_server.url)
    exec(compile(script, str(DOCUMENT), "exec"), {})
    said = capsys.readouterr().out
    assert said.startswith("The capital of France is Paris.\n")
    assert "completion_tokens" in said
    assert set(ast.literal_eval(said.splitlines()[-2])) == {"city", "river"}
    name, arguments = said.splitlines()[-1].split(" ", 1)
    assert name == "get_weather"
    assert set(json.loads(arguments)) == {"city"}
    for command in blocks("bash") if shutil.which("curl") else ():
        ran = subprocess.run(
            command.replace("http://127.0.0.1:8000", demo_server.url), shell=True, capture_output=True
        )
        assert (
            ChatCompletion.model_validate_json(ran.stdout).choices[0].message.content
            == "The capital of France is Paris."
        )


def test_documented_error() -> None:
    for block in blocks("json"):
        ErrorBody.model_validate_json(block)
