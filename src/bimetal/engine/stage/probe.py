"""What a node is, without loading a model: for `bimetal doctor`.

python -m bimetal.engine.stage.probe '{"devices": ["cuda:0"], "model": "/models/x"}'
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from bimetal.catalog.models import load_model_spec
from bimetal.engine.device import Device
from bimetal.engine.stage.checkpoint import fingerprint
from bimetal.engine.stage.session import choose_kernels
from bimetal.engine.wire.frame import WIRE_VERSION
from bimetal.errors import BimetalError


def probe(request: bytes) -> dict[str, Any]:
    """request: JSON {"devices": [names], "model": path or null}. Failures are part of the answer."""
    asked = json.loads(request or b"{}")
    model = asked.get("model")
    folder = Path(model).expanduser() if model else None
    return {
        "python": platform.python_version(),
        "wire_version": WIRE_VERSION,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "num_gpus": torch.cuda.device_count(),
        "devices": [_describe(str(name)) for name in asked.get("devices", ["cpu"])],
        "fingerprint": fingerprint(folder) if folder is not None and folder.is_dir() else None,
        "dimensions": _dimensions(folder),
    }


def _dimensions(folder: Path | None) -> dict[str, int] | None:
    """Of the checkpoint there; None where its config cannot be read."""
    if folder is None or not folder.is_dir():
        return None
    try:
        return load_model_spec(str(folder)).dimensions
    except BimetalError:
        return None


def _describe(name: str) -> dict[str, Any]:
    try:
        device = Device(name)
    except BimetalError as error:
        return {"asked": name, "error": str(error)}
    described = {"asked": name, **device.describe(), "driver": _driver_version(device.vendor)}
    try:
        described["kernels"] = type(choose_kernels(device)).__name__
    except (BimetalError, ImportError) as error:
        described["kernels"] = None
        described["kernels_error"] = str(error)
    return described


def _driver_version(vendor: str) -> str | None:
    """As the vendor's own tool or the kernel module says it; None where neither does."""
    if vendor == "nvidia":
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.decode().split("\n")[0].strip() or None
    module = Path("/sys/module/amdgpu/version")
    return module.read_text().strip() if vendor == "amd" and module.is_file() else None


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1].encode() if len(sys.argv) > 1 else b"{}")))
