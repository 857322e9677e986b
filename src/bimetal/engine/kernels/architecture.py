"""What the kernels need to know of each GPU architecture: the one place where such facts stand.

Sources: NVIDIA's CUDA programming guide, table of compute capabilities; AMD's CDNA 3 and CDNA 4 instruction set guides.
It knows no kernel and imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bimetal.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Architecture:
    name: str
    """As compilers call it; also the stem of its file in `data/`."""
    backend: Literal["cuda", "hip"]
    """Triton's name of the vendor."""
    compute_capability: int | None
    """NVIDIA's, times ten; None for AMD."""
    threads_per_wave: int
    """A warp, or a wavefront."""
    shared_bytes: int
    """Shared memory (LDS) that one program may use."""
    num_multiprocessors: int
    """Of the largest part sold."""
    fp8_e4m3: Literal["e4m3fn", "e4m3fnuz"]
    """The encoding that its matrix instructions take. fnuz: exponent bias 8, one NaN (0x80), no negative zero."""
    matrix_rows: tuple[int, ...]
    """Rows of the bf16 matrix instructions' tiles."""

    @property
    def triton_arch(self) -> int | str:
        return self.name if self.compute_capability is None else self.compute_capability


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture(
            name="sm_90",
            backend="cuda",
            compute_capability=90,
            threads_per_wave=32,
            shared_bytes=227 * 1024,
            num_multiprocessors=132,
            fp8_e4m3="e4m3fn",
            matrix_rows=(16, 64),
        ),
        Architecture(
            name="gfx942",
            backend="hip",
            compute_capability=None,
            threads_per_wave=64,
            shared_bytes=64 * 1024,
            num_multiprocessors=304,
            fp8_e4m3="e4m3fnuz",
            matrix_rows=(16, 32),
        ),
        Architecture(
            name="gfx950",
            backend="hip",
            compute_capability=None,
            threads_per_wave=64,
            shared_bytes=160 * 1024,
            num_multiprocessors=256,
            fp8_e4m3="e4m3fn",
            matrix_rows=(16, 32),
        ),
    )
}


def architecture_named(name: str) -> Architecture:
    """`name` as the driver gives it; AMD's may carry features after a colon ("gfx942:sramecc+:xnack-").

    Raises ConfigError for an architecture that no kernel was compiled and checked for.
    """
    stem = name.split(":", 1)[0]
    if stem not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f"no kernels for architecture {stem}: they are checked for {known}. Use the torch kernels on this device, or "
            f"add {stem} to engine/kernels/architecture.py with its tiles in engine/kernels/data/{stem}.json"
        )
    return ARCHITECTURES[stem]
