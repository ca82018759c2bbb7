"""A queue of (id, stamp) pairs in arrays, with lazy deletion.

Nothing is ever removed from the middle: an id that leaves the queue for another reason gets a new stamp elsewhere, and
its entry here is recognised as stale when it is popped. Pushing and popping are slices. The owner passes `is_valid`,
which says for arrays of ids and stamps which entries still mean something.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtide.kvcache.specs import Int64Array

IsValid = Callable[[Int64Array, Int64Array], npt.NDArray[np.bool_]]

NO_STAMP = np.iinfo(np.int64).max
# Entries looked at first: each look-up is a cache miss in a large pool, a numpy call costs as much as a few dozen.
PROBE = 32


class Ring:
    """First in, first out; `pop` skips stale entries. Stamps must be pushed in ascending order."""

    def __init__(self, is_valid: IsValid) -> None:
        self._is_valid = is_valid
        self._entries = np.empty((2, PROBE), dtype=np.int64)
        self._head = 0
        self._tail = 0

    def __len__(self) -> int:
        """Entries, stale ones included."""
        return self._tail - self._head

    def push(self, ids: Int64Array, stamps: Int64Array) -> None:
        """Append entries."""
        count = len(ids)
        if self._tail + count > self._entries.shape[1]:
            self._make_room(count)
        self._entries[0, self._tail : self._tail + count] = ids
        self._entries[1, self._tail : self._tail + count] = stamps
        self._tail += count

    def head_stamp(self) -> int:
        """Stamp of the first valid entry, `NO_STAMP` when there is none; drops the stale entries before it."""
        probe = PROBE
        while self._head < self._tail:
            ids, stamps = self._entries[:, self._head : min(self._head + probe, self._tail)]
            valid = self._is_valid(ids, stamps)
            first = int(valid.argmax())
            if valid[first]:
                self._head += first
                return int(stamps[first])
            self._head += len(ids)
            probe *= 4
        return NO_STAMP

    def pop(self, count: int, before: int = NO_STAMP) -> Int64Array:
        """Up to `count` valid ids with stamps below `before`, oldest first."""
        parts: list[Int64Array] = []
        while count and self._head < self._tail:
            ids, stamps = self._entries[:, self._head : min(self._head + max(count, PROBE), self._tail)]
            usable = int(stamps.searchsorted(before))
            picks = self._is_valid(ids[:usable], stamps[:usable]).nonzero()[0][:count]
            parts.append(ids[picks])
            count -= len(picks)
            if count == 0:
                self._head += int(picks[-1]) + 1
            else:
                self._head += usable
                if usable < len(ids):
                    break
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def valid(self) -> Int64Array:
        """Ids of all valid entries, oldest first; for tests and debugging."""
        ids, stamps = self._entries[:, self._head : self._tail]
        live: Int64Array = ids[self._is_valid(ids, stamps)]
        return live

    def _make_room(self, count: int) -> None:
        live = self._entries[:, self._head : self._tail]
        live = live[:, self._is_valid(live[0], live[1])]
        size = max(self._entries.shape[1], 2 * (live.shape[1] + count))
        entries = np.empty((2, size), dtype=np.int64)
        entries[:, : live.shape[1]] = live
        self._entries = entries
        self._head, self._tail = 0, live.shape[1]


class Stack:
    """Last in, first out, lazily deleted like `Ring`."""

    def __init__(self, is_valid: IsValid) -> None:
        self._is_valid = is_valid
        self._entries = np.empty((2, PROBE), dtype=np.int64)
        self._top = 0

    def push(self, ids: Int64Array, stamps: Int64Array) -> None:
        """Put entries on top, the last of them topmost."""
        count = len(ids)
        if self._top + count > self._entries.shape[1]:
            live = self._entries[:, : self._top]
            live = live[:, self._is_valid(live[0], live[1])]
            entries = np.empty((2, max(self._entries.shape[1], 2 * (live.shape[1] + count))), dtype=np.int64)
            entries[:, : live.shape[1]] = live
            self._entries, self._top = entries, live.shape[1]
        self._entries[0, self._top : self._top + count] = ids
        self._entries[1, self._top : self._top + count] = stamps
        self._top += count

    def valid(self) -> Int64Array:
        """Ids of all valid entries, bottom first; for tests and debugging."""
        ids, stamps = self._entries[:, : self._top]
        live: Int64Array = ids[self._is_valid(ids, stamps)]
        return live

    def pop(self, count: int) -> Int64Array:
        """Up to `count` valid ids, topmost first."""
        parts: list[Int64Array] = []
        while count and self._top:
            bottom = max(self._top - max(count, PROBE), 0)
            ids, stamps = self._entries[:, bottom : self._top]
            picks = self._is_valid(ids, stamps).nonzero()[0][::-1][:count]
            parts.append(ids[picks])
            count -= len(picks)
            self._top = bottom + int(picks[-1]) if count == 0 else bottom
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
