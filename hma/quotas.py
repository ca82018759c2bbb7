"""Quotas: how many bytes of cached, unreferenced blocks a salt may leave behind.

Blocks are counted from the moment a request of that salt lets go of them. When a salt goes over its quota, its own
least recently used blocks are dropped; other salts lose nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtide.kvcache.specs import Int64Array

from .pool import PagePool
from .rings import Ring


class Quotas:
    """`block_bytes[group]` is the size of one block. Costs nothing until a quota is set."""

    def __init__(self, pool: PagePool, block_bytes: list[int]) -> None:
        self._pool = pool
        self._block_bytes = np.array(block_bytes, dtype=np.int64)
        self._limits: dict[str, int] = {}
        self._rings: dict[str, Ring] = {}
        self._stamp: Int64Array = np.empty(0, dtype=np.int64)
        self._tick = 0

    def __bool__(self) -> bool:
        """Whether any quota is set."""
        return bool(self._limits)

    def set(self, salt: str, num_bytes: int | None) -> None:
        """Set or, with None, lift the quota of a salt."""
        if num_bytes is None:
            self._limits.pop(salt, None)
            self._rings.pop(salt, None)
            return
        if not len(self._stamp):
            self._stamp = np.zeros(len(self._pool.refs), dtype=np.int64)
        self._limits[salt] = num_bytes
        self._rings.setdefault(salt, Ring(self._is_counted))

    def overrun(self, salt: str, released: Int64Array) -> Int64Array:
        """Count what a salt has just released; returns the blocks to drop so that it keeps its quota."""
        ring = self._rings.get(salt)
        if ring is None:
            return np.empty(0, dtype=np.int64)
        idle = released[self._pool.cached[released] & (self._pool.refs[released] == 0)]
        self._tick += len(idle)
        stamps = np.arange(self._tick - len(idle), self._tick) + 1
        self._stamp[idle] = stamps
        ring.push(idle, stamps)
        counted = ring.valid()
        sizes = self._block_bytes[self._pool.owner[counted // self._pool.stride]]
        over = int(sizes.sum()) - self._limits[salt]
        if over <= 0:
            return np.empty(0, dtype=np.int64)
        dropped: Int64Array = counted[: int(np.searchsorted(np.cumsum(sizes), over)) + 1]
        return dropped

    def forget(self, ids: Int64Array) -> None:
        """Blocks have lost their content; whatever they hold next is not what was counted."""
        self._stamp[ids] = 0

    def _is_counted(self, ids: Int64Array, stamps: Int64Array) -> npt.NDArray[np.bool_]:
        counted: npt.NDArray[np.bool_] = (
            (self._stamp[ids] == stamps) & self._pool.cached[ids] & (self._pool.refs[ids] == 0)
        )
        return counted
