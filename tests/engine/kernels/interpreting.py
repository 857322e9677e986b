"""Runs a program of these tests in Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

TIMEOUT_S = 400


def interpret(program: Path, dtypes: Iterable[str], names: Iterable[str] = ()) -> dict[str, dict[str, float]]:
    """Errors by dtype and case; one process a dtype, side by side."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    running = {
        dtype: subprocess.Popen(
            [sys.executable, str(program), dtype, *names],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for dtype in dtypes
    }
    found: dict[str, dict[str, float]] = {}
    for dtype, process in running.items():
        output, complaints = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, complaints
        found[dtype] = json.loads(output.splitlines()[-1])
    return found
