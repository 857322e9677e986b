"""`bimetal serve` itself: what it accepts, and that no process outlives it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from bimetal.cli.main import bimetal
from bimetal.errors import BimetalError

from .servers import demo_model, serve_demo, wait_until


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(bimetal, ["serve", *arguments])
    assert result.exit_code != 0
    return str(result.exception) if isinstance(result.exception, BimetalError) else result.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's config, with nothing behind it."""
    config = (
        '{"model_type": "llama", "num_hidden_layers": 30, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 300,'
        '"intermediate_size": 128, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "num_key_value_heads": 4}'
    )
    (tmp_path / "config.json").write_text(config)
    return tmp_path


def test_what_cannot_be_served_is_named(folder: Path, tmp_path: Path) -> None:
    model = ("--model", str(folder))
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


@pytest.mark.slow
def test_a_killed_server_leaves_no_process() -> None:
    demo_model()
    with serve_demo("--max-num-seqs", "4") as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert len(family) >= 3  # the driver and two stages
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(5)
        wait_until(
            lambda: not any(process.is_running() and process.status() != "zombie" for process in family), 5
        )


@pytest.mark.slow
def test_a_dead_stage_ends_the_server_with_a_message() -> None:
    with serve_demo("--max-num-seqs", "4") as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        stage = next(process for process in family if "bimetal.engine.stage.process" in process.cmdline())
        stage.kill()
        assert server.process.wait(10) != 0
        assert "stage 0" in server.process.stderr.read()
        wait_until(
            lambda: not any(process.is_running() and process.status() != "zombie" for process in family), 5
        )
