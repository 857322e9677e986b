"""What a node is, without loading a model: for `bimetal doctor`."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch

import bimetal
from bimetal.engine.device import Device
from bimetal.engine.stage.weights import fingerprint
from bimetal.engine.wire.frame import WIRE_VERSION
from bimetal.errors import BimetalError


def probe(request: bytes) -> dict[str, Any]:
    """request: JSON {"devices": [names], "model": path or null}. Failures are part of the answer."""
    asked = json.loads(request or b"{}")
    devices = []
    for name in asked.get("devices", ["cpu"]):
        try:
            devices.append({"asked": name, **Device(name).describe()})
        except BimetalError as error:
            devices.append({"asked": name, "error": str(error)})
    model = asked.get("model")
    folder = Path(model).expanduser() if model else None
    return {
        "python": platform.python_version(),
        "bimetal_file": str(Path(bimetal.__file__ or "").parent),
        "wire_version": WIRE_VERSION,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "num_gpus": torch.cuda.device_count(),
        "devices": devices,
        "fingerprint": fingerprint(folder) if folder is not None and folder.is_dir() else None,
    }
