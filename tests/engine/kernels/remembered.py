"""Results that follow from the kernels' sources and the compilers alone, kept from one test run to the next: compiling and
interpreting every kernel takes minutes, and most runs change none. `pytest --cache-clear` forgets them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import bimetal.engine.kernels

SOURCES = (Path(bimetal.engine.kernels.__file__).parent, Path(__file__).parent)
PACKAGES = ("triton", "torch", "numpy")


def fingerprint() -> str:
    """Of every file of the kernels and of their tests, and of what runs them."""
    digest = hashlib.sha256(sys.version.encode())
    for package in PACKAGES:
        digest.update(f"{package} {version(package)}".encode())
    for folder in SOURCES:
        for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc"):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def remembered(config: pytest.Config, name: str, compute: Callable[[], Any]) -> Any:
    """What `compute` returned when the sources were last as they are now; it must be JSON. An exception is not kept."""
    cache = getattr(config, "cache", None)  # none with -p no:cacheprovider
    if cache is None:
        return compute()
    key, now = f"kernels/{name}", fingerprint()
    kept = cache.get(key, None)
    if kept is not None and kept["fingerprint"] == now:
        return kept["result"]
    result = compute()
    cache.set(key, {"fingerprint": now, "result": result})
    return result
