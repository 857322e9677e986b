"""Links: what carries activations between two stages, and what joins the GPUs inside one.

Knows rates and latencies. Does not know what is sent, nor when.
"""

from __future__ import annotations

from dataclasses import dataclass

from bimetal.catalog.hardware import GpuSpec, suggest
from bimetal.errors import ConfigError
from bimetal.units import GIGA, US_PER_S

BITS_PER_BYTE = 8
TCP_PAYLOAD_RATIO = 1448 / 1538
"""Of an Ethernet frame with a 1,500-byte packet and TCP timestamps, preamble and gap included."""
TCP_LATENCY_S = 30 / US_PER_S
"""Small message, one way, through two kernels and one switch. An assumption: measure your own."""
TCP_TAIL = 5.0
"""99th percentile of that latency over its median, on a network that other traffic shares. An assumption: measure your own."""


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """One direction of a connection."""

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    """Median."""
    latency_p99_s: float | None = None
    """None: unknown, so that nothing can be promised of the slowest answers."""

    def transfer_s(self, num_bytes: float) -> float:
        """Latency plus payload over rate.

        >>> LinkSpec("x", 1e9, 1e-5).transfer_s(1e6)
        0.00101
        """
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s


def _ethernet(gigabits: int) -> LinkSpec:
    rate = gigabits * GIGA / BITS_PER_BYTE * TCP_PAYLOAD_RATIO
    return LinkSpec(f"{gigabits}GbE", rate, TCP_LATENCY_S, TCP_LATENCY_S * TCP_TAIL)


NAMED_LINKS = {link.name: link for link in map(_ethernet, (1, 10, 25, 50, 100, 200, 400))}

SAME_HOST = LinkSpec("same-host", 3.9 * GIGA, 58 / US_PER_S, 58 / US_PER_S * TCP_TAIL)
"""GPU, pinned memory, loopback TCP, pinned memory, GPU; fitted to 74 us at 64 KiB and 2.2 ms at 8 MiB on a GPU server."""

LOOPBACK = LinkSpec("loopback", 1.8 * GIGA, 15 / US_PER_S)
"""Between two CPU processes: 15 us at 64 B, 597 us at 1 MiB with blocking sockets on two cores."""

DEFAULT_LINK = NAMED_LINKS["25GbE"]
"""Between two nodes that the fleet file does not join, and for which it gives no `default_link`."""


def find_link(name: str) -> LinkSpec:
    """A link by its catalogue name.

    >>> round(find_link("100GbE").bandwidth_bytes_per_s / 1e9, 1)
    11.8
    """
    known = {**NAMED_LINKS, SAME_HOST.name: SAME_HOST, LOOPBACK.name: LOOPBACK}
    for candidate, link in known.items():
        if candidate.lower() == name.strip().lower():
            return link
    raise ConfigError(f"link {name!r} is not in the catalogue: {suggest(name, tuple(known))}")


def group_bytes_per_s(gpu: GpuSpec, group_size: int) -> float | None:
    """What one GPU of a tensor-parallel group can send to the others, one direction; None: not published.

    In a mesh, a group of n uses n - 1 of the links: two MI300X share 64 GB/s of the 448 that eight have. A switch
    gives any group the full rate.
    """
    if gpu.scaleup_bytes_per_s is None or group_size <= 1:
        return None
    if gpu.is_mesh and gpu.scaleup_domain > 1:
        return gpu.scaleup_bytes_per_s * min(1.0, (group_size - 1) / (gpu.scaleup_domain - 1))
    return gpu.scaleup_bytes_per_s
