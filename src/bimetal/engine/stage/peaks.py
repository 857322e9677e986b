"""What a stage's device reaches: bytes/s of a large copy, FLOP/s of a large product. MBU and MFU are measured against these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bimetal.engine.device import Device, Stopwatch
from bimetal.units import MIB

_MEASUREMENTS = 5


@torch.inference_mode()
def measure_peaks(device: Device, dtype: torch.dtype) -> tuple[float, float]:
    """(bytes/s read and written, FLOP/s in `dtype`); zeros where the device has no room left for the tensors."""
    copied_bytes, side = (512 * MIB, 8192) if device.is_gpu else (64 * MIB, 768)
    try:
        return _copy_bytes_per_s(device, copied_bytes), _product_flops_per_s(device, dtype, side)
    except torch.OutOfMemoryError:
        return 0.0, 0.0


def _copy_bytes_per_s(device: Device, num_bytes: int) -> float:
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _best_s(device, lambda: target.copy_(source))


def _product_flops_per_s(device: Device, dtype: torch.dtype, side: int) -> float:
    left, right = (torch.randn(side, side, device=device.torch_device).to(dtype) for _ in range(2))
    return 2.0 * side**3 / _best_s(device, lambda: torch.mm(left, right))


def _best_s(device: Device, work: Callable[[], Any]) -> float:
    work()
    best = float("inf")
    for _ in range(_MEASUREMENTS):
        stopwatch = Stopwatch(device.is_gpu)
        stopwatch.start()
        work()
        stopwatch.stop()
        best = min(best, stopwatch.elapsed_s())
    return best
