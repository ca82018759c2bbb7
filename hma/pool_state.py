"""The pool's arrays: the state of every block and page, and the queues from which they are taken.

Nothing here decides; `pool` does. What can be counted or looked up is here, and the check that arrays, counters and
queues agree.
"""

from __future__ import annotations

from collections.abc import Callable
from types import EllipsisType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.kvcache.geometry import PageGeometry
from kvtide.kvcache.specs import Int64Array

from .rings import Ring, Stack

# Eviction classes, lowest first: what cannot complete a likely hit, then cached prefixes by priority.
CLASS_SCRAP = 0
CLASS_NORMAL = 4
NUM_CLASSES = 8

NO_OWNER = -1
# Of the counters' own type: ufunc.at is 25 times slower when it has to cast.
ONE = np.int32(1)


class PoolCounts(NamedTuple):
    """Blocks of one group by state."""

    free: int
    evictable: int
    referenced: int


class PoolState:
    """Arrays by block id and by page, counters by group, and queues; see `PagePool`."""

    def __init__(self, geometry: PageGeometry, num_pages: int, on_evict: Callable[[Int64Array], None]) -> None:
        self.num_pages = num_pages
        self.per_page = [fmt.blocks_per_page for fmt in geometry.formats]
        self.stride = max(self.per_page)
        self._capacity = np.array(self.per_page, dtype=np.int64)
        self._on_evict = on_evict
        blocks = num_pages * self.stride
        self.refs = np.zeros(blocks, dtype=np.int32)
        self.cached = np.zeros(blocks, dtype=np.bool_)
        self._stamp = np.zeros(blocks, dtype=np.int64)
        self._class = np.zeros(blocks, dtype=np.uint8)
        self.owner = np.full(num_pages, NO_OWNER, dtype=np.int8)
        self.page_refs = np.zeros(num_pages, dtype=np.int32)
        self._page_cached = np.zeros(num_pages, dtype=np.int32)
        self._page_stamp = np.zeros(num_pages, dtype=np.int64)
        self._page_class = np.zeros(num_pages, dtype=np.uint8)
        self._place = np.zeros(num_pages, dtype=np.int64)  # scratch of `_is_last`
        # Pages never used lie above `_fresh`; those given back lie on a stack. Both are free for any group.
        self._fresh = 0
        self._returned = np.empty(64, dtype=np.int64)
        self._num_returned = 0
        self.active_pages = [0] * len(self.per_page)
        self.referenced = [0] * len(self.per_page)
        self._num_active = 0
        self._tick = 1
        self._slots = [Stack(self._is_free_slot) for _ in self.per_page]
        self._blocks = [[Ring(self._is_evictable_of(c)) for c in range(NUM_CLASSES)] for _ in self.per_page]
        self._pages = [Ring(self._is_inactive_of(c)) for c in range(NUM_CLASSES)]

    @property
    def free_pages(self) -> int:
        """Pages that belong to no group."""
        return self.num_pages - self._fresh + self._num_returned

    @property
    def reclaimable_pages(self) -> int:
        """Pages that any group can have: the free ones and the inactive ones."""
        return self.num_pages - self._num_active

    def spare_blocks(self, group: int) -> int:
        """Blocks that a group can have without another page: everything unreferenced in its active pages."""
        return self.active_pages[group] * self.per_page[group] - self.referenced[group]

    def evictable_blocks(self, group: int) -> Int64Array:
        """Ids of all cached unreferenced blocks of a group; looks at every page."""
        ids = self._blocks_of(group)
        evictable: Int64Array = ids[self.cached[ids] & (self.refs[ids] == 0)]
        return evictable

    def counts(self, group: int) -> PoolCounts:
        """Blocks of a group by state; looks at every page."""
        return self._count(self._blocks_of(group))

    def active_counts(self, group: int) -> PoolCounts:
        """Blocks of a group's active pages by state; looks at every page."""
        active = self.page_refs[: self._fresh] > 0
        return self._count(self._blocks_in(group, np.flatnonzero(active & (self.owner[: self._fresh] == group))))

    def _count(self, ids: Int64Array) -> PoolCounts:
        referenced = int((self.refs[ids] > 0).sum())
        evictable = int((self.cached[ids] & (self.refs[ids] == 0)).sum())
        return PoolCounts(len(ids) - referenced - evictable, evictable, referenced)

    # -- queues --------------------------------------------------------------------------------------------------------

    def _push_free(self, ids: Int64Array) -> None:
        if len(ids):
            for group, chosen in _by_value(self.owner[ids // self.stride]):
                self._push_slots(group, ids[chosen])

    def _push_slots(self, group: int, ids: Int64Array) -> None:
        stamps = self._next_stamps(len(ids))
        self._stamp[ids] = stamps
        self._slots[group].push(ids, stamps)

    def _push_evictable(self, ids: Int64Array) -> None:
        if not len(ids):
            return
        stamps = self._next_stamps(len(ids))
        self._stamp[ids] = stamps
        queues = self.owner[ids // self.stride].astype(np.int64) * NUM_CLASSES + self._class[ids]
        for queue, chosen in _by_value(queues):
            self._blocks[queue // NUM_CLASSES][queue % NUM_CLASSES].push(ids[chosen], stamps[chosen])

    def _push_pages(self, pages: Int64Array, classes: npt.NDArray[np.uint8]) -> None:
        """Inactive pages with content can be had, by class in this order."""
        if not len(pages):
            return
        self._page_class[pages] = classes
        stamps = self._next_stamps(len(pages))
        self._page_stamp[pages] = stamps
        for number, chosen in _by_value(classes):
            self._pages[number].push(pages[chosen], stamps[chosen])

    def _next_stamps(self, count: int) -> Int64Array:
        self._tick += count
        return np.arange(self._tick - count, self._tick)

    def _is_free_slot(self, ids: Int64Array, stamps: Int64Array) -> npt.NDArray[np.bool_]:
        valid: npt.NDArray[np.bool_] = (
            (self._stamp[ids] == stamps)
            & (self.refs[ids] == 0)
            & ~self.cached[ids]
            & (self.page_refs[ids // self.stride] > 0)
        )
        return valid

    def _is_evictable_of(self, number: int) -> Callable[[Int64Array, Int64Array], npt.NDArray[np.bool_]]:
        def is_valid(ids: Int64Array, stamps: Int64Array) -> npt.NDArray[np.bool_]:
            valid: npt.NDArray[np.bool_] = (
                (self._stamp[ids] == stamps)
                & (self.refs[ids] == 0)
                & self.cached[ids]
                & (self._class[ids] == number)
                & (self.page_refs[ids // self.stride] > 0)
            )
            return valid

        return is_valid

    def _is_inactive_of(self, number: int) -> Callable[[Int64Array, Int64Array], npt.NDArray[np.bool_]]:
        def is_valid(pages: Int64Array, stamps: Int64Array) -> npt.NDArray[np.bool_]:
            valid: npt.NDArray[np.bool_] = (
                (self._page_stamp[pages] == stamps)
                & (self.page_refs[pages] == 0)
                & (self._page_cached[pages] > 0)
                & (self._page_class[pages] == number)
            )
            return valid

        return is_valid

    # -- blocks and pages ----------------------------------------------------------------------------------------------

    def _blocks_of(self, group: int) -> Int64Array:
        return self._blocks_in(group, np.flatnonzero(self.owner[: self._fresh] == group))

    def _blocks_in(self, group: int, pages: Int64Array) -> Int64Array:
        return (pages[:, None] * self.stride + np.arange(self.per_page[group])).ravel()

    def _highest_class(self, pages: Int64Array) -> npt.NDArray[np.uint8]:
        """The highest class of each page's cached blocks."""
        if not len(pages) or self._single_blocks(pages):
            return self._class[pages * self.stride]
        classes = self._class.reshape(-1, self.stride)[pages] * self.cached.reshape(-1, self.stride)[pages]
        # Along the long axis: reducing many short rows is slow.
        highest: npt.NDArray[np.uint8] = classes.T.copy().max(axis=0)
        return highest

    def _is_last(self, pages: Int64Array) -> npt.NDArray[np.bool_]:
        """Which entries are the last of their page; without a sort, since of repeated indices the last one is kept."""
        places = np.arange(len(pages))
        self._place[pages] = places
        last: npt.NDArray[np.bool_] = self._place[pages] == places
        return last

    def _single_blocks(self, pages: Int64Array) -> bool:
        """Whether every one of the pages holds one block only."""
        return self.stride == 1 or bool(self._capacity[self.owner[pages]].max() == 1)

    def _by_group(self, pages: Int64Array) -> list[tuple[int, int]]:
        """Groups that own the pages, and how many entries of `pages` each has."""
        counts = np.bincount(self.owner[pages], minlength=len(self.per_page))
        return [(group, count) for group, count in enumerate(counts.tolist()) if count]

    # -- invariants ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Recompute every count from the arrays; `AssertionError` on the first difference. For tests and debugging."""
        refs = self.refs.reshape(self.num_pages, self.stride)
        cached = self.cached.reshape(self.num_pages, self.stride)
        assert (refs >= 0).all(), "a reference count is negative"
        assert ((refs > 0).sum(axis=1) == self.page_refs).all(), "referenced blocks per page"
        assert (cached.sum(axis=1) == self._page_cached).all(), "cached blocks per page"
        unowned = self.owner == NO_OWNER
        assert not refs[unowned].any(), "a block of a free page is in use"
        assert not cached[unowned].any(), "a block of a free page is cached"
        assert int(unowned.sum()) == self.free_pages, "free pages"
        returned = self._returned[: self._num_returned]
        assert len(np.unique(returned)) == len(returned), "a page was returned twice"
        assert unowned[returned].all(), "a returned page has an owner"
        for group, per_page in enumerate(self.per_page):
            pages = self.owner == group
            assert not refs[pages, per_page:].any(), "a slot beyond the page's blocks is in use"
            assert not cached[pages, per_page:].any(), "a slot beyond the page's blocks is cached"
            assert int((self.page_refs[pages] > 0).sum()) == self.active_pages[group], "active pages"
            assert int((refs[pages] > 0).sum()) == self.referenced[group], "referenced blocks"
            assert ((self._page_cached[pages] > 0) | (self.page_refs[pages] > 0)).all(), "an empty page is not free"
            self._check_queues(group)
        assert sum(self.active_pages) == self._num_active, "active pages in all"

    def _check_queues(self, group: int) -> None:
        """Every unreferenced block of an active page, and every inactive page, can be found in its queue."""
        ids = self._blocks_of(group)
        idle = ids[(self.refs[ids] == 0) & (self.page_refs[ids // self.stride] > 0)]
        free, evictable = idle[~self.cached[idle]], idle[self.cached[idle]]
        assert set(free) == set(self._slots[group].valid()), "free blocks and their stack differ"
        queued: set[np.int64] = set()
        for ring in self._blocks[group]:
            queued |= set(ring.valid())
        assert set(evictable) == queued, "evictable blocks and their rings differ"
        pages = np.flatnonzero((self.owner == group) & (self.page_refs == 0))
        waiting = {page for ring in self._pages for page in ring.valid()}
        assert set(pages) <= waiting, "an inactive page is in no ring"


def _by_value(values: npt.NDArray[np.integer]) -> list[tuple[int, npt.NDArray[np.bool_] | EllipsisType]]:
    """Distinct small non-negative numbers (counting is faster than sorting), each with an index of where it stands."""
    distinct = np.flatnonzero(np.bincount(values)).tolist()
    if len(distinct) == 1:
        return [(distinct[0], ...)]
    return [(number, values == number) for number in distinct]
