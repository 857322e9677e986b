"""`bimetal serve` itself: what it accepts, and that no process outlives it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from bimetal.cli.main import bimetal
from bimetal.errors import BimetalError
from bimetal.gateway.server import _ended_with

from .servers import serve, wait_until


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(bimetal, ["serve", *arguments])
    assert result.exit_code != 0
    return str(result.exception) if isinstance(result.exception, BimetalError) else result.output


@pytest.fixture
def tiny_model(checkpoint: Path, tmp_path: Path) -> Path:
    """The config of a small model and its tokenizer; its weights are made up when it is loaded."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 300,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
    folder = tmp_path / "tiny"
    shutil.copytree(checkpoint, folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_what_cannot_be_served_is_named(tiny_model: Path, tmp_path: Path) -> None:
    model = ("--model", str(tiny_model))
    assert "FILE" in refusal()
    assert "--layers" in refusal(*model, "--layers", "18,13")
    assert "--layers" in refusal(*model, "--layers", "18;12")
    assert "--num-stages" in refusal(*model, "--num-stages", "31")
    assert "--port" in refusal(*model, "--port", "70000")
    assert "gpu_memory_utilization" in refusal(*model, "--gpu-memory-utilization", "1.5")
    assert "nowhere" in refusal("--model", "nowhere/at/all")
    assert "bench" in refusal("--model", "Llama-3.1-8B")
    neither = tmp_path / "neither.yaml"
    neither.write_text("something: else")
    assert "replicas" in refusal(str(neither))
    assert "missing.yaml" in refusal(str(tmp_path / "missing.yaml"))
    assert "--num-stages" in refusal(str(neither), "--num-stages", "2")


def test_help_starts_at_once_and_imports_nothing_heavy() -> None:
    script = "import sys; from bimetal.cli.serve import command; print([m for m in ('torch', 'fastapi', 'yaml') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"


def test_a_driver_that_was_killed_had_no_time_for_a_message() -> None:
    assert _ended_with(-9) == "its driver was ended by signal 9 (Killed)"
    assert "its own message is above" in _ended_with(1)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["server", "stage"])
def test_no_process_outlives_another(tiny_model: Path, victim: str) -> None:
    with serve("--model", str(tiny_model), "--load-format", "dummy") as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        stages = [process for process in family if "bimetal.engine.stage.child" in process.cmdline()]
        assert len(stages) == 1
        assert len(family) >= 2  # the driver as well
        if victim == "server":
            server.process.kill()
        else:
            stages[0].kill()
        assert server.process.wait(10) != 0
        if victim == "stage":
            assert "stage 0" in server.process.stderr.read()
        wait_until(
            lambda: not any(process.is_running() and process.status() != "zombie" for process in family), 5
        )
