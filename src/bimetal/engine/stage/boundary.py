"""Hidden states across the boundary between two stages: rows out through host memory, rows in through a ring of
host buffers (pinned where the device is a GPU, so that both copies run beside the compute).
"""

from __future__ import annotations

import numpy as np
import torch

from bimetal.engine.device import Device
from bimetal.engine.wire.frame import Header
from bimetal.errors import LinkError, StageError

ENCODINGS: dict[torch.dtype, int] = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""How rows are encoded, in a HIDDEN frame's flags."""
_DECODINGS = {code: dtype for dtype, code in ENCODINGS.items()}


def rows_as_bytes(rows: torch.Tensor) -> memoryview:
    """A host tensor's memory; numpy has no bfloat16, so it travels as bytes."""
    flat = rows.contiguous().view(torch.uint8).flatten()
    return flat.numpy().data


class ReceiveRing:
    """Host buffers for incoming rows, used in turn; one is written again once the device has read it."""

    def __init__(self, device: Device, num_buffers: int, buffer_bytes: int) -> None:
        self._device = device
        self._buffers = [
            torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=device.is_gpu) for _ in range(num_buffers)
        ]
        self._read: list[torch.cuda.Event | None] = [None] * num_buffers
        self._next = 0

    def allocate(self, header: Header) -> memoryview:
        buffer = self._buffers[self._next]
        if header.num_bytes > len(buffer):
            raise LinkError(
                f"a {header.kind.name} frame of {header.num_bytes} bytes, the largest step has {len(buffer)}"
            )
        read = self._read[self._next]
        if read is not None:
            read.synchronize()
        return buffer.numpy().data[: header.num_bytes]

    def mark_read(self) -> None:
        """All that reads the buffer given last is queued on the device."""
        self._read[self._next] = self._device.mark()
        self._next = (self._next + 1) % len(self._buffers)


def rows_from_payload(header: Header, payload: memoryview, num_rows: int, hidden_size: int) -> torch.Tensor:
    """[num_rows, hidden_size], a view of the payload: pinned memory where the device is a GPU."""
    dtype = _DECODINGS.get(header.flags)
    if dtype is None:
        raise StageError(
            f"hidden states in encoding {header.flags} are unknown here: install the same bimetal on both stages"
        )
    if header.num_bytes != num_rows * hidden_size * dtype.itemsize:
        raise StageError(
            f"step {header.step} needs {num_rows} rows of {hidden_size} {dtype}, but its HIDDEN frame has {header.num_bytes} bytes"
        )
    array = np.frombuffer(payload, np.uint8)
    return torch.from_numpy(array).view(dtype).view(num_rows, hidden_size)
