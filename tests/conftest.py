"""Where the demo model is: BIMETAL_DEMO_MODEL, else what `make model` made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DEFAULT_DEMO_MODEL = Path(__file__).parent.parent / ".demo" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    named = os.environ.get("BIMETAL_DEMO_MODEL")
    folder = Path(named).absolute() if named else DEFAULT_DEMO_MODEL
    if not (folder / "config.json").is_file():
        if named:
            pytest.fail(f"BIMETAL_DEMO_MODEL is {folder}, which holds no model: run `make model`")
        pytest.skip("the demo model is not converted: run `make model`")
    return folder
