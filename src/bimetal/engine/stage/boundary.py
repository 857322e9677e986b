"""Inputs of a step on their way in: ids and hidden states in host buffers, pinned where the device is a GPU, so that the
copy there runs beside the host; hidden states on their way out as bytes.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

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


class InputRing:
    """Host buffers for the inputs of steps, used in turn; one is written again once the device has read it.

    `begin` comes before the input does: what is made ready then, the device need not wait for afterwards.
    """

    def __init__(
        self, device: Device, num_buffers: int, num_rows: int, row_shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """Buffers of [num_rows, *row_shape]."""
        shape = (num_rows, *row_shape)
        self._buffers = [
            torch.empty(shape, dtype=dtype, pin_memory=device.is_gpu) for _ in range(num_buffers)
        ]
        self._memory = [rows_as_bytes(buffer) for buffer in self._buffers]
        self._read = [torch.cuda.Event() for _ in range(num_buffers)] if device.is_gpu else []
        self._row_shape = row_shape
        self._encoding = ENCODINGS.get(dtype, 0)
        self._current = 0
        self._rows = self._buffers[0]

    def begin(self, num_rows: int) -> None:
        """The next buffer's turn, for so many rows."""
        self._current = (self._current + 1) % len(self._buffers)
        if self._read:
            self._read[self._current].synchronize()
        self._rows = self._buffers[self._current][:num_rows]

    def fill(self, ids: NDArray[np.int32]) -> torch.Tensor:
        """The ids themselves, in the buffer."""
        np.frombuffer(self._memory[self._current], np.int32)[: len(ids)] = ids
        return self._rows

    def allocate(self, header: Header) -> memoryview:
        """Where a HIDDEN frame's payload goes."""
        memory = self._memory[self._current]
        if header.num_bytes > len(memory):
            raise LinkError(
                f"a {header.kind.name} frame of {header.num_bytes} bytes, the largest step has {len(memory)}"
            )
        return memory[: header.num_bytes]

    def received(self, header: Header) -> torch.Tensor:
        """[rows, hidden_size] of the frame whose payload is in the buffer."""
        rows = self._rows
        if header.flags == self._encoding and header.num_bytes == rows.nbytes:
            return rows
        dtype = _DECODINGS.get(header.flags)
        if dtype is None:
            raise StageError(
                f"hidden states in encoding {header.flags} are unknown here: install the same bimetal on both stages"
            )
        if header.num_bytes != rows.numel() * dtype.itemsize:
            raise StageError(
                f"step {header.step} needs {len(rows)} rows of {self._row_shape[0]} {dtype}, but its HIDDEN frame has "
                f"{header.num_bytes} bytes"
            )
        payload = np.frombuffer(self.allocate(header), np.uint8)
        return torch.from_numpy(payload).view(dtype).view(rows.shape)

    def mark_read(self) -> None:
        """All that reads the buffer is queued on the device."""
        if self._read:
            self._read[self._current].record()
