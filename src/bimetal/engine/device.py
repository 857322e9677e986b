"""The compute device of a stage: CUDA, ROCm (torch's HIP build answers to the same API) or CPU, behind one small class.

Owns streams, pinned staging buffers and copies in both directions, so that the stage's loop is the same everywhere:
on a CPU a copy is a view and waiting is nothing. Knows nothing of models.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bimetal.errors import StageError
from bimetal.units import MS_PER_S

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_STAGING_SLOTS = 4


@dataclass(slots=True)
class HostCopy:
    """A tensor on its way to host memory. `wait` returns it once it is there."""

    tensor: torch.Tensor
    event: torch.cuda.Event | None

    @property
    def is_done(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> torch.Tensor:
        if self.event is not None:
            self.event.synchronize()
        return self.tensor


class Stopwatch:
    """Seconds of compute between `start` and `stop`, on the device's own clock where it has one."""

    def __init__(self, is_gpu: bool) -> None:
        self._events = (
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) if is_gpu else None
        )
        self._seconds = 0.0
        if self._events is not None:
            self._events[0].record()  # which makes it: the second time, the device waits for the host

    @property
    def is_host_clock(self) -> bool:
        """Whether what it measures is done once `stop` returns."""
        return self._events is None

    def start(self) -> None:
        if self._events is None:
            self._seconds = -time.perf_counter()
        else:
            self._events[0].record()

    def stop(self) -> None:
        if self._events is None:
            self._seconds += time.perf_counter()
        else:
            self._events[1].record()

    @property
    def is_done(self) -> bool:
        """Whether the work in between is."""
        return self._events is None or self._events[1].query()

    def elapsed_s(self) -> float:
        """Waits for the work in between."""
        if self._events is None:
            return self._seconds
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / MS_PER_S


class Device:
    """`name` is `cpu` or `cuda:N` (ROCm included)."""

    def __init__(self, name: str) -> None:
        try:
            self.torch_device = torch.device(name)
        except RuntimeError as error:
            raise StageError(f"device {name!r} is unknown to torch: use cpu or cuda:N (ROCm too)") from error
        self.is_gpu = self.torch_device.type == "cuda"
        if self.is_gpu:
            count = torch.cuda.device_count()
            index = self.torch_device.index or 0
            if index >= count:
                raise StageError(
                    f"device {name!r} is not here: torch {torch.__version__} sees {count} GPUs; install the CUDA or ROCm "
                    "build for this node, or name the interpreter that has it (python: in the fleet file)"
                )
            torch.cuda.set_device(index)
            self.torch_device = torch.device("cuda", index)
            self._download_stream = torch.cuda.Stream()
        elif self.torch_device.type != "cpu":
            raise StageError(f"device {name!r} is not supported: use cpu or cuda:N (ROCm too)")
        self._staging: list[torch.Tensor] = []
        self._staging_events: list[Any] = []
        self._next_staging = 0

    @property
    def vendor(self) -> str:
        if not self.is_gpu:
            return "cpu"
        return "amd" if torch.version.hip else "nvidia"

    def describe(self) -> dict[str, Any]:
        """For people and for the planner: what this is, and what is free."""
        described: dict[str, Any] = {"vendor": self.vendor, "torch": torch.__version__}
        if self.is_gpu:
            properties = torch.cuda.get_device_properties(self.torch_device)
            free_bytes, total_bytes = torch.cuda.mem_get_info(self.torch_device)
            architecture = getattr(properties, "gcnArchName", None) if torch.version.hip else None
            described |= {
                "name": properties.name,
                "architecture": architecture or f"sm_{properties.major}{properties.minor}",
                "free_bytes": free_bytes,
                "total_bytes": total_bytes,
            }
        else:
            page = os.sysconf("SC_PAGE_SIZE")
            described |= {
                "name": f"cpu, {torch.get_num_threads()} threads",
                "free_bytes": os.sysconf("SC_AVPHYS_PAGES") * page,
                "total_bytes": os.sysconf("SC_PHYS_PAGES") * page,
            }
        return described

    def upload(self, array: NDArray[np.int32], out: torch.Tensor | None = None) -> torch.Tensor:
        """Int32 values on the device, ordered with the work queued there. `out`: a device buffer to fill from its start."""
        if not self.is_gpu:
            if out is None:
                return torch.from_numpy(array)
            out[: len(array)].copy_(torch.from_numpy(array))
            return out
        staged = self._stage(array)
        if out is None:
            out = torch.empty(len(array), dtype=torch.int32, device=self.torch_device)
        out[: len(array)].copy_(staged, non_blocking=True)
        self._staging_events[self._next_staging - 1].record()
        return out

    def _stage(self, array: NDArray[np.int32]) -> torch.Tensor:
        """A copy in pinned memory that no earlier upload still reads."""
        if not self._staging:
            self._staging = [torch.empty(0, dtype=torch.int32)] * _STAGING_SLOTS
            self._staging_events = [torch.cuda.Event() for _ in range(_STAGING_SLOTS)]
        slot = self._next_staging % _STAGING_SLOTS
        self._next_staging = slot + 1
        self._staging_events[slot].synchronize()
        if len(self._staging[slot]) < len(array):
            self._staging[slot] = torch.empty(max(2 * len(array), 4096), dtype=torch.int32, pin_memory=True)
        staged = self._staging[slot][: len(array)]
        staged.numpy()[:] = array
        return staged

    def download(self, tensor: torch.Tensor, *, beside: bool = False) -> HostCopy:
        """Start copying to host memory: at once, so that the tensor may be overwritten by work queued later; or, where later
        work must not wait for a large copy, beside the compute stream."""
        if not self.is_gpu:
            return HostCopy(tensor, None)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        done = torch.cuda.Event()
        if not beside:
            host.copy_(tensor, non_blocking=True)
            done.record()
            return HostCopy(host, done)
        produced = torch.cuda.Event()
        produced.record()
        with torch.cuda.stream(self._download_stream):
            self._download_stream.wait_event(produced)
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._download_stream)
            done.record()
        return HostCopy(host, done)

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.torch_device)
