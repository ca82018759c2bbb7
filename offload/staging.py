"""Staging: one fixed piece of host memory through which every transfer goes, given out in runs of bytes.

A grant is all or nothing and never waits: when there is no room the caller does without (a put is dropped, a load is
recomputed), so that exhausted staging can slow nothing down and lock nothing up. Page-locked when a CUDA device copies
from and to it. Used by one thread, the manager's.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.kvcache import ConfigError, KvtideError

if TYPE_CHECKING:
    import torch

# Runs start at multiples of this: what copy engines and direct I/O like, and a bound on fragments.
ALIGNMENT = 4096


def staging_bytes(num_bytes: int) -> int:
    """Bytes of staging memory that a value of so many bytes takes."""
    return -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT


class Grant(NamedTuple):
    """Bytes `[start, start + num_bytes)` of the staging memory; `held` bytes are taken for them."""

    start: int
    num_bytes: int
    held: int


class Staging:
    """`num_bytes` of memory, rounded down to whole pages of 4,096 bytes; `pinned` page-locks it (needs torch, CUDA)."""

    def __init__(self, num_bytes: int, *, pinned: bool = False) -> None:
        size = num_bytes // ALIGNMENT * ALIGNMENT
        if size < ALIGNMENT:
            raise ConfigError(f"staging_bytes {num_bytes} must be at least {ALIGNMENT}")
        self.num_bytes = size
        self.tensor: torch.Tensor | None = None
        if pinned:
            import torch

            self.tensor = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            self.memory: npt.NDArray[np.uint8] = self.tensor.numpy()
        else:
            raw = np.empty(size + ALIGNMENT, dtype=np.uint8)
            shift = -raw.ctypes.data % ALIGNMENT
            self.memory = raw[shift : shift + size]
        self.free_bytes = size
        self._starts = [0]  # of the free runs, ascending
        self._sizes = [size]

    def take(self, num_bytes: int) -> Grant | None:
        """A run of so many bytes, the first that fits; None when there is none."""
        held = staging_bytes(num_bytes)
        for at, size in enumerate(self._sizes):
            if size >= held:
                start = self._starts[at]
                if size == held:
                    del self._starts[at], self._sizes[at]
                else:
                    self._starts[at], self._sizes[at] = start + held, size - held
                self.free_bytes -= held
                return Grant(start, num_bytes, held)
        return None

    def give_back(self, grant: Grant) -> None:
        """End a grant; `KvtideError` if it has ended already."""
        at = bisect_left(self._starts, grant.start)
        before = at > 0 and self._starts[at - 1] + self._sizes[at - 1]
        after = self._starts[at] if at < len(self._starts) else self.num_bytes
        if before > grant.start or grant.start + grant.held > after:
            raise KvtideError(f"staging bytes from {grant.start} on were given back twice")
        self.free_bytes += grant.held
        joins_next = at < len(self._starts) and after == grant.start + grant.held
        if at > 0 and before == grant.start:
            self._sizes[at - 1] += grant.held
            if joins_next:
                self._sizes[at - 1] += self._sizes[at]
                del self._starts[at], self._sizes[at]
        elif joins_next:
            self._starts[at], self._sizes[at] = grant.start, self._sizes[at] + grant.held
        else:
            self._starts.insert(at, grant.start)
            self._sizes.insert(at, grant.held)

    def view(self, grant: Grant) -> memoryview:
        """The granted bytes."""
        return self.memory[grant.start : grant.start + grant.num_bytes].data
