"""The Triton kernels, run by Triton's interpreter on the CPU, agree with the torch reference."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_agreement import CASES

PROGRAM = Path(__file__).with_name("kernel_agreement.py")
SLOW = ("prefill-", "decode-", "experts-")
"""Families of which the interpreter runs only a few in each dtype; the others run whole."""
KEPT = ("decode-group3-head64", "decode-group8-head256", "decode-window", "decode-long", "prefill-group5-head128", "experts-8-2", "experts-60-4")  # fmt: skip
NAMES = [name for name in CASES if name in KEPT or not name.startswith(SLOW)]
# The interpreter truncates to bfloat16 where GPUs round to nearest, so its errors are twice theirs.
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}


@pytest.fixture(scope="module", params=TOLERANCES)
def dtype_and_errors(request: pytest.FixtureRequest) -> tuple[str, dict[str, float]]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), request.param, *NAMES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return request.param, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_the_reference(name: str, dtype_and_errors: tuple[str, dict[str, float]]) -> None:
    dtype, errors = dtype_and_errors
    assert errors[name] <= TOLERANCES[dtype]
