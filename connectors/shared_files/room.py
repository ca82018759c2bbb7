"""How much a shared tree may hold, and what goes when that is reached: `SharedStorageConnector`'s accounts.

Nobody counts for all engines. Each knows what it found when it last counted the tree, and what it changed since; it
counts again after having written a sixteenth of the bound, and removes the longest unused down to nine tenths. Bytes
are reserved before they are written, so that the threads of one engine never exceed the bound together.
"""

from __future__ import annotations

import threading
from collections.abc import Container
from typing import NamedTuple

from kvtide.offload.keys import StoreKey

from .tree import Tree

_COUNT_AGAIN = 1 / 16
_LOW_WATER = 0.9


class Totals(NamedTuple):
    """Values and their bytes."""

    num_values: int = 0
    num_bytes: int = 0

    def plus(self, values: int, num_bytes: int) -> Totals:
        """With so many more."""
        return Totals(self.num_values + values, self.num_bytes + num_bytes)


class Room:
    """One engine's accounts of a tree; methods may raise `OSError`. `evicted` counts values that it removed."""

    def __init__(self, tree: Tree, holds: Container[StoreKey], capacity: int | None, min_free_bytes: int) -> None:
        self.capacity = capacity
        self.evicted = 0
        self._tree = tree
        self._holds = holds
        self._floor = min_free_bytes
        self._lock = threading.Lock()  # guards what follows
        self._seen: Totals | None = None
        self._added = Totals()  # in all, so that what appears during a walk of the tree is not missed: rather twice
        self._reserved = 0
        self._written = 0  # bytes since the last count
        self._removing = threading.Lock()  # one thread at a time makes room

    def totals(self) -> Totals:
        """What the tree holds, as far as this engine knows."""
        with self._lock:
            if self._seen is not None:
                return self._seen
        return self.count()

    def count(self) -> Totals:
        """Count the whole tree."""
        with self._lock:
            self._written = 0
            before = self._added
        sizes = [found.num_bytes for found in self._tree.walk()]
        return self._saw(Totals(len(sizes), sum(sizes)), before)

    def reserve(self, size: int) -> bool:
        """Set bytes aside for a value that is about to be written, removing others if that takes it; then `settle`."""
        if self._floor and not self._leaves_free(size):
            return False
        if self.capacity is None:
            with self._lock:
                self._reserved += size
            return True
        if size > self.capacity:
            return False
        self.totals()
        if not self._is_due() and self._reserve(size):
            return True
        with self._removing:
            if self._is_due():
                self.count()
            # Files that appear while others are removed are counted twice until the next count, so one removal may
            # seem not to have been enough. It is full only when nothing is left that may go.
            while not self._reserve(size):
                if not self.evict(size + int(self.capacity * (1 - _LOW_WATER))):
                    return False
        return True

    def settle(self, size: int, *, stored: bool) -> None:
        """What was reserved is written now, or will not be."""
        with self._lock:
            self._written += size if stored else 0
        if stored:
            self.changed(1, size)
        with self._lock:
            self._reserved -= size

    def changed(self, values: int, size: int) -> None:
        """Note what this engine has added or removed."""
        with self._lock:
            if values > 0:
                self._added = self._added.plus(values, size)
            if self._seen is not None:
                self._seen = self._seen.plus(values, size)

    def trim(self) -> int:
        """Count, and remove what exceeds the bound; the bytes removed."""
        num_bytes = self.count().num_bytes
        if self.capacity is None or num_bytes <= self.capacity:
            return 0
        return self.evict(num_bytes - int(self.capacity * _LOW_WATER))

    def evict(self, size: int) -> int:
        """Remove the longest unused values, `size` bytes of them if there are as many; the bytes removed."""
        with self._lock:
            before = self._added
        files = sorted(self._tree.walk(), key=lambda found: found.used)
        values, left = len(files), sum(found.num_bytes for found in files)
        removed = evicted = 0
        for found in files:
            if removed >= size:
                break
            if found.key in self._holds:
                continue
            # One that another engine has removed meanwhile makes room too, so that engines do not add up.
            evicted += self._tree.remove(found.key)
            removed += found.num_bytes
            values -= 1
        self._saw(Totals(values, left - removed), before)
        with self._lock:
            self.evicted += evicted
        return removed

    def _saw(self, found: Totals, before: Totals) -> Totals:
        """Take over what a walk found that began when `before` had been added."""
        with self._lock:
            added = self._added
            self._seen = found.plus(added.num_values - before.num_values, added.num_bytes - before.num_bytes)
            return self._seen

    def _is_due(self) -> bool:
        with self._lock:
            return self.capacity is not None and self._written > self.capacity * _COUNT_AGAIN

    def _reserve(self, size: int) -> bool:
        with self._lock:
            assert self._seen is not None
            assert self.capacity is not None
            fits = self._seen.num_bytes + self._reserved + size <= self.capacity
            self._reserved += size if fits else 0
            return fits

    def _leaves_free(self, size: int) -> bool:
        if self._short(size) <= 0:
            return True
        with self._removing:
            short = self._short(size)
            if short > 0:
                self.evict(short)
            return self._short(size) <= 0

    def _short(self, size: int) -> int:
        """Bytes that are missing for the file system to keep its free space after `size` more."""
        with self._lock:
            return self._floor + size + self._reserved - self._tree.free_bytes()
