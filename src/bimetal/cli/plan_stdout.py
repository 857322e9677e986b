"""Standard output kept for the plan: HiGHS prints lines of its own there now and then, whatever its options say.

Owns the diversion of file descriptor 1. Does not know what runs meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def clean_stdout() -> Iterator[None]:
    """What libraries write to file descriptor 1 meanwhile goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what C has buffered belongs to the diversion
        os.dup2(kept, 1)
        os.close(kept)
