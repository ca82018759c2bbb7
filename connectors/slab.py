"""One piece of host memory, cut into units and lent out by extents; the memory of `HostConnector`.

A value need not be contiguous here, since it is copied out anyway: it gets one free run that fits best, or else the
longest runs until it has enough. So no byte is ever out of reach because of how the others lie, and tiers that hold a
few distinct sizes, which all do, nearly always find a run as long as the value that was evicted.

    |aaaa|bb|    |cc|aa  |dddd|      an extent is (first byte, end byte), both multiples of UNIT; free runs that touch
                                     are one
Not thread-safe.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, insort
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide.kvcache import ConfigError, MissingExtra

UNIT = 1024
Extent = tuple[int, int]


class Slab:
    """`num_bytes` of memory, rounded down to units. `pinned` asks CUDA for memory that devices can copy from."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self.num_bytes = num_bytes // UNIT * UNIT
        self.memory = _pinned(self.num_bytes) if pinned else _pageable(self.num_bytes)
        self.free_bytes = 0
        self._end_of: dict[int, int] = {}  # free runs: first byte -> end
        self._start_of: dict[int, int] = {}  # and end -> first byte
        self._of_length: dict[int, dict[int, None]] = {}  # length -> first bytes, in the order they came free
        self._lengths: list[int] = []  # the lengths there are, ascending
        self._add(0, self.num_bytes)

    def take(self, num_bytes: int) -> list[Extent] | None:
        """Extents of `num_bytes` together, rounded up to units; None if there are not so many free."""
        wanted = round_up(num_bytes)
        if wanted > self.free_bytes:
            return None
        taken: list[Extent] = []
        while wanted:
            at = min(bisect_left(self._lengths, wanted), len(self._lengths) - 1)
            length = self._lengths[at]
            start = next(reversed(self._of_length[length]))  # what came free last is most likely in a cache
            self._remove(start, start + length)
            part = min(length, wanted)
            if part < length:
                self._add(start + part, start + length)
            taken.append((start, start + part))
            wanted -= part
        return taken

    def give(self, extents: list[Extent]) -> None:
        """Take back what `take` lent."""
        for start, end in extents:
            before, after = self._start_of.get(start), self._end_of.get(end)
            if before is not None:
                self._remove(before, start)
                start = before
            if after is not None:
                self._remove(end, after)
                end = after
            self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        length = end - start
        self._end_of[start], self._start_of[end] = end, start
        if length not in self._of_length:
            self._of_length[length] = {}
            insort(self._lengths, length)
        self._of_length[length][start] = None
        self.free_bytes += length

    def _remove(self, start: int, end: int) -> None:
        length = end - start
        del self._end_of[start], self._start_of[end]
        of_length = self._of_length[length]
        del of_length[start]
        if not of_length:
            del self._of_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
        self.free_bytes -= length


def round_up(num_bytes: int) -> int:
    """Bytes of the units that hold `num_bytes`."""
    return -(-num_bytes // UNIT) * UNIT


def _pageable(num_bytes: int) -> npt.NDArray[np.uint8]:
    try:
        memory = mmap.mmap(-1, num_bytes)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(f"{num_bytes} bytes of memory cannot be had: {error}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _pinned(num_bytes: int) -> npt.NDArray[np.uint8]:
    try:
        import torch
    except ImportError:
        raise MissingExtra("pinned memory", "torch", "torch") from None
    if not torch.cuda.is_available():
        raise ConfigError("pinned is true, but no CUDA device is there; leave it out")
    try:
        memory: Any = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise ConfigError(f"{num_bytes} bytes of pinned memory cannot be had: {error}") from None
    return memory.numpy()  # type: ignore[no-any-return]
