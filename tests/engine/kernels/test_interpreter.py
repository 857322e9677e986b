"""The Triton kernels, run by Triton's interpreter on the CPU, agree with the torch reference."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_agreement import CASES
from remembered import remembered

PROGRAM = Path(__file__).with_name("kernel_agreement.py")
SLOW = ("prefill-", "decode-", "experts-")
"""Families of which the interpreter runs only a few in each dtype; the others run whole."""
KEPT = (
"decode-group3-head64", "decode-group8-head256", "decode-window", "decode-long", "prefill-group5-head128", "experts-8-2", "experts-60-4", "experts-8-2-one")  # fmt: skip
NAMES = [name for name in CASES if name in KEPT or not name.startswith(SLOW)]
# The interpreter truncates to bfloat16 where GPUs round to nearest, so its errors are twice theirs.
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> dict[str, dict[str, float]]:
    """By dtype and case."""
    found: dict[str, dict[str, float]] = remembered(request.config, "interpreter", interpret)
    return found


def interpret() -> dict[str, dict[str, float]]:
    """One interpreting process a dtype, side by side."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    running = {
        dtype: subprocess.Popen(
            [sys.executable, str(PROGRAM), dtype, *NAMES],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for dtype in TOLERANCES
    }
    results = {}
    for dtype, process in running.items():
        output, complaints = process.communicate(timeout=400)
        assert process.returncode == 0, complaints
        results[dtype] = json.loads(output.splitlines()[-1])
    return results


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_the_reference(name: str, dtype: str, errors: dict[str, dict[str, float]]) -> None:
    assert errors[dtype][name] <= TOLERANCES[dtype]
