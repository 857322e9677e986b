"""Which replica serves a request: a pure decision of explicit state.

The gateway and the simulator both call this. Knows nothing of addresses, processes or clocks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def choose_replica(in_flight: NDArray[np.int64], weights: NDArray[np.float64]) -> int:
    """The replica that would be least loaded with one request more: argmin (in flight + 1) / weight.

    `weights` are relative speeds, so that a replica twice as fast gets twice the requests; 0 takes a replica out. Of
    equals the first wins.

    >>> choose_replica(np.array([3, 1]), np.array([2.0, 1.0]))
    0
    """
    with np.errstate(divide="ignore"):
        return int(np.argmin((in_flight + 1) / weights))
