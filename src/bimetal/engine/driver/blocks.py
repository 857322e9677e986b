"""KV blocks: who holds which, and which of them hold a prefix that another request can share.

A block is a number; the same number means the same tokens on every stage, each of which keeps its own layers' keys and
values under it. Blocks are reference counted. A full block is named by a hash of everything before it, and stays findable
after its last holder is gone until it is needed for something else (least recently released first).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def root_hash(revision: str, salt: str) -> bytes:
    """Parent of a sequence's first block: prefixes are shared within one model revision and one salt."""
    return hashlib.blake2b(f"{revision}\0{salt}".encode(), digest_size=16).digest()


def block_hash(parent: bytes, token_ids: NDArray[np.int32]) -> bytes:
    return hashlib.blake2b(parent + token_ids.tobytes(), digest_size=16).digest()


class BlockPool:
    """`num_blocks` blocks, all free and unnamed at first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._name_of: dict[int, bytes] = {}
        self._named: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def used_ratio(self) -> float:
        return 1.0 - len(self._free) / self.num_blocks

    def take(self, num_blocks: int) -> list[int] | None:
        """New blocks with undefined contents, or None if there are not that many."""
        if num_blocks > len(self._free):
            return None
        taken = []
        for _ in range(num_blocks):
            block, _none = self._free.popitem(last=False)
            name = self._name_of.pop(block, None)
            if name is not None:
                del self._named[name]
            self._references[block] = 1
            taken.append(block)
        return taken

    def share(self, block: int) -> None:
        """One more holder of a block that `find` returned."""
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder fewer. The last blocks of a sequence are reused first: they are the least likely shared."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._name_of:
                    self._free.move_to_end(block, last=False)

    def find(self, name: bytes) -> int | None:
        return self._named.get(name)

    def name(self, block: int, name: bytes) -> None:
        """Make a full block findable. The first block of a name keeps it."""
        if name not in self._named and block not in self._name_of:
            self._named[name] = block
            self._name_of[block] = name

    def num_free_of(self, blocks: Sequence[int]) -> int:
        """How many of these have no holder, and would leave the free ones if shared."""
        return sum(1 for block in blocks if self._references[block] == 0)
