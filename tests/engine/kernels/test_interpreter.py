"""The Triton kernels, run by Triton's interpreter on the CPU, agree with the torch reference."""

from pathlib import Path

import pytest
from interpreting import interpret
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
    found: dict[str, dict[str, float]] = remembered(
        request.config, "interpreter", lambda: interpret(PROGRAM, TOLERANCES, NAMES)
    )
    return found


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_the_reference(name: str, dtype: str, errors: dict[str, dict[str, float]]) -> None:
    assert errors[dtype][name] <= TOLERANCES[dtype]
