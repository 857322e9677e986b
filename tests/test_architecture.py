"""ARCHITECTURE.md lists every file with what the file says of itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_tree_is_up_to_date() -> None:
    script = Path(__file__).parent.parent / "docs" / "write_architecture.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
