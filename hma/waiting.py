"""Rows whose whole blocks are not under their keys yet: that is put off until somebody could notice.

In a decode step every sixteenth row or so gets a whole block. Each would cost a hash, a dictionary entry and a few
array calls, at once; for many blocks of one row together all of that is several times cheaper. So the row waits until

    a look-up comes by    its prompt has the last key that the row is cached under, and might go on along the row
    the row lets go       it is preempted, released, or its window slides past a block without a key
    there are many        `MOST_WAITING` blocks

The last key of every row that waits is *watched* in the prefix index: a look-up that passes it finds the row, and when
the key is forgotten, the next look-up of all makes every row catch up. A row without such a key never waits.
"""

from __future__ import annotations

import numpy as np

from kvtide.kvcache.specs import Int64Array

from .prefix_index import PrefixIndex

# Base blocks of one row that may wait: what catching up costs stays well below a millisecond.
MOST_WAITING = 64


class WaitingRows:
    """Arrays by row: `whole` counts the row's whole base blocks, `is_waiting` says that some have no key yet."""

    def __init__(self, index: PrefixIndex, max_requests: int, base: int, *, enabled: bool) -> None:
        self._index = index
        self._base = base
        self._enabled = enabled
        self.whole = np.zeros(max_requests, dtype=np.int64)
        self._next = np.zeros(max_requests, dtype=np.int64)  # tokens at which there is one more
        self.is_waiting = np.zeros(max_requests, dtype=np.bool_)
        self._count = 0
        # Where the row's last key was put, and that node's birth.
        self._node = np.zeros(max_requests, dtype=np.int64)
        self._birth = np.zeros(max_requests, dtype=np.int64)

    def __bool__(self) -> bool:
        """Whether any row waits."""
        return self._count > 0

    def begin(self, row: int, whole: int, node: int) -> None:
        """A row starts with `whole` base blocks under keys; the last is at `node`, -1 when there is none."""
        self.skip_to(row, whole)
        self._node[row] = max(node, 0)
        self._birth[row] = -1 if node < 0 else int(self._index.births(self._node[row : row + 1])[0])

    def advance(self, rows: Int64Array, committed: Int64Array, registered: Int64Array) -> Int64Array:
        """Rows have `committed[i]` tokens now, and `registered[row]` blocks under keys.

        Returns those that have more whole blocks than before and may not wait.
        """
        more = (committed >= self._next[rows]).nonzero()[0]
        if not len(more):
            return more
        rows = rows[more]
        whole = committed[more] // self._base
        self._next[rows] = (whole + 1) * self._base
        self.whole[rows] = whole
        if not self._enabled:
            return rows
        may_not = whole - registered[rows] >= MOST_WAITING
        news = ~(self.is_waiting[rows] | may_not)
        if np.count_nonzero(news):
            new = rows[news]
            nodes = self._node[new]
            is_there = self._index.births(nodes) == self._birth[new]
            may_not[news] = ~is_there
            self._index.watched[nodes[is_there]] = True
            self.is_waiting[new[is_there]] = True
            self._count += int(np.count_nonzero(is_there))
        return rows[may_not]

    def skip_to(self, row: int, whole: int) -> None:
        """A row has got blocks all at once."""
        self.whole[row] = whole
        self._next[row] = (whole + 1) * self._base

    def rows(self) -> Int64Array:
        """All rows that wait."""
        rows: Int64Array = self.is_waiting.nonzero()[0]
        return rows

    def found(self, nodes: Int64Array) -> Int64Array:
        """Rows that wait and whose tokens may go on along a prompt whose keys are at these nodes (-1: not known)."""
        none = np.empty(0, dtype=np.int64)
        if not self._count:
            return none
        if self._index.lost_watched:
            self._index.lost_watched = False
            return self.rows()
        known = nodes[nodes >= 0]
        asked = known[self._index.watched[known]]
        if not len(asked):
            return none
        self._index.watched[asked] = False
        rows = self.rows()
        return rows[np.isin(self._node[rows], asked)]

    def registered(self, rows: Int64Array, nodes: Int64Array) -> None:
        """The rows' whole blocks have been put at these nodes, those of each row in order."""
        last = np.ones(len(rows), dtype=np.bool_)
        np.not_equal(rows[1:], rows[:-1], out=last[:-1])
        rows, nodes = rows[last], nodes[last]
        self._count -= int(np.count_nonzero(self.is_waiting[rows]))
        self.is_waiting[rows] = False
        births = self._index.births(nodes)
        self._node[rows] = nodes
        self._birth[rows] = np.where(births > 0, births, -1)
