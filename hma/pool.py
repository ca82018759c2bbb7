"""The pool: which page belongs to which group, and the state of every block, as arrays.

A block id is `page * stride + slot`. Every block of an owned page is exactly one of

    free         no content            taken first
    evictable    cached, unreferenced  taken when nothing is free, lowest class first, then least recently used
    referenced   held by sequences     never taken

A page with a referenced block is *active* and only its own group can use its other blocks. A page without one is
*inactive*: whoever needs a page may have it, its cached blocks are dropped. A page whose last block dies is free again.
The pool knows nothing of sequences or keys; it tells `on_evict` which cached blocks it drops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.kvcache.errors import KvtideError
from kvtide.kvcache.geometry import PageGeometry
from kvtide.kvcache.specs import Int64Array

from .rings import NO_STAMP, Ring, Stack

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


class PagePool:
    """`num_pages` pages of a geometry. All calls take and return int64 arrays of block ids."""

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

    def pages_short(self, needs: Sequence[int], shared: Int64Array | None = None) -> int:
        """Pages missing to take `needs[group]` blocks of every group at once; 0 or less when they all fit.

        `shared` are cached blocks that will be acquired first.
        """
        spare = [self.spare_blocks(group) for group in range(len(needs))]
        reclaimable = self.reclaimable_pages
        if shared is not None and len(idle := shared[self.refs[shared] == 0]):
            # Their pages become active, and what else lies in those can be had by their own group alone.
            for group, count in self._by_group(idle // self.stride):
                spare[group] -= count
            woken = np.unique(idle // self.stride)
            woken = woken[self.page_refs[woken] == 0]
            reclaimable -= len(woken)
            for group, count in self._by_group(woken):
                spare[group] += count * self.per_page[group]
        pages = 0
        for group, need in enumerate(needs):
            beyond = need - spare[group]
            if beyond > 0:
                pages += -(-beyond // self.per_page[group])
        return pages - reclaimable

    def take(self, needs: Sequence[int]) -> list[Int64Array]:
        """Reference `needs[group]` blocks of every group. The caller has checked `pages_short(needs)`."""
        beyond_need = -self.pages_short(needs)
        taken = []
        for group, need in enumerate(needs):
            # A group may claim pages before it has used up its own, but never those that another one cannot do without.
            required = max(0, -(-(need - self.spare_blocks(group)) // self.per_page[group]))
            active = self._num_active
            taken.append(self._take(group, need, required + beyond_need))
            beyond_need -= self._num_active - active - required
        return taken

    def _take(self, group: int, count: int, max_pages: int) -> Int64Array:
        if not count:
            return np.empty(0, dtype=np.int64)
        single = self.per_page[group] == 1
        ids = np.empty(0, dtype=np.int64) if single else self._slots[group].pop(count)
        limit = self._num_active + max_pages
        while missing := count - len(ids):
            wanted = min(-(-missing // self.per_page[group]), limit - self._num_active)
            fresh = self._claim_free_pages(group, wanted)
            if not len(fresh):
                fresh = self._evict(group, missing, wanted)
            ids = np.concatenate([ids, fresh[:missing]]) if len(ids) else fresh[:missing]
            if len(fresh) > missing:
                self._push_slots(group, fresh[missing:])
        self.refs[ids] = 1
        if single:
            self.page_refs[ids // self.stride] = 1
        else:
            np.add.at(self.page_refs, ids // self.stride, ONE)
        self.referenced[group] += count
        return ids

    def acquire(self, ids: Int64Array, counts: Mapping[int, int] | None = None) -> None:
        """Add a reference to each cached block (a hit). Ids are unique in a call, `counts[group]` of each group."""
        refs = self.refs[ids]
        self.refs[ids] = refs + ONE
        idle = ids
        if refs.any():
            idle, counts = ids[refs == 0], None
        if not len(idle):
            return
        pages = idle // self.stride
        for group, count in self._by_group(pages) if counts is None else counts.items():
            self.referenced[group] += count
        woken = pages[self.page_refs[pages] == 0]
        np.add.at(self.page_refs, pages, ONE)
        if len(woken):
            self._activate(woken[self._is_last(woken)])

    def release(
        self, ids: Int64Array, classes: int | npt.NDArray[np.uint8], counts: Mapping[int, int] | None = None
    ) -> None:
        """Drop one reference of each block, first the one to be evicted first. Ids are unique within the call.

        Cached blocks without a reference become evictable with the given class; the others are free. Blocks of several
        groups, `counts[group]` of each, may be mixed: their order holds across groups.
        """
        np.subtract.at(self.refs, ids, ONE)
        refs = self.refs[ids]
        if refs.any():
            if refs.min() < 0:
                np.add.at(self.refs, ids, ONE)
                raise KvtideError(f"block {int(ids[refs < 0][0])} has no reference left to release")
            idle, counts = refs == 0, None
            ids = ids[idle]
            classes = classes if isinstance(classes, int) else classes[idle]
        if len(ids):
            self._class[ids] = classes
            self._let_go(ids, counts)

    def release_pages(self, group: int, ids: Int64Array, classes: npt.NDArray[np.uint8]) -> None:
        """`release` for blocks of one group that fill a page each and have one reference: windows slide like that."""
        pages = ids // self.stride
        if not (self.refs[ids] == 1).all() or not self._is_last(pages).all():
            raise KvtideError("blocks that fill a page each are not all different, or do not have one reference each")
        self.refs[ids] = 0
        self.page_refs[pages] = 0
        self._class[ids] = classes
        self.referenced[group] -= len(ids)
        self.active_pages[group] -= len(ids)
        self._num_active -= len(ids)
        has_content = self.cached[ids]
        if not has_content.all():
            self._return_empty(pages[~has_content])
            pages, classes = pages[has_content], classes[has_content]
        self._push_pages(pages, classes)

    def classes(self, ids: Int64Array) -> npt.NDArray[np.uint8]:
        """The classes that evictable blocks were released with."""
        return self._class[ids]

    def set_cached(self, ids: Int64Array) -> None:
        """Mark referenced blocks as having a key."""
        self.cached[ids] = True
        np.add.at(self._page_cached, ids // self.stride, ONE)

    def drop_cached(self, ids: Int64Array) -> None:
        """Forget the content of cached blocks; unreferenced ones become free. The caller has dropped their keys."""
        self.cached[ids] = False
        np.subtract.at(self._page_cached, ids // self.stride, ONE)
        idle = ids[self.refs[ids] == 0]
        pages = idle // self.stride
        active = self.page_refs[pages] > 0
        self._push_free(idle[active])
        empty = pages[~active]
        self._return_empty(empty[self._is_last(empty)])

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

    # -- state changes ------------------------------------------------------------------------------------------------

    def _let_go(self, ids: Int64Array, counts: Mapping[int, int] | None) -> None:
        """Blocks whose last reference has gone, in eviction order; `counts[group]` of each group."""
        pages = ids // self.stride
        for group, count in self._by_group(pages) if counts is None else counts.items():
            self.referenced[group] -= count
        np.subtract.at(self.page_refs, pages, ONE)
        rests = self.page_refs[pages] == 0
        if rests.any():
            # A page rests when its last block is let go.
            resting = pages[rests]
            self._deactivate(resting[self._is_last(resting)])
            if rests.all():
                return
            # Blocks of a page that rests are had with the page; the others can be taken one by one.
            ids = ids[~rests]
        cached = self.cached[ids]
        self._push_evictable(ids[cached])
        # LIFO: the last pushed is taken first, so the block to be reused first comes last.
        self._push_free(ids[~cached][::-1])

    def _deactivate(self, pages: Int64Array) -> None:
        for group, count in self._by_group(pages):
            self.active_pages[group] -= count
        self._num_active -= len(pages)
        has_content = self._page_cached[pages] > 0
        full = pages[has_content]
        if len(full) < len(pages):
            self._return_empty(pages[~has_content])
        self._push_pages(full, self._highest_class(full))

    def _push_pages(self, pages: Int64Array, classes: npt.NDArray[np.uint8]) -> None:
        """Inactive pages with content can be had, by class in this order."""
        if not len(pages):
            return
        self._page_class[pages] = classes
        stamps = self._next_stamps(len(pages))
        self._page_stamp[pages] = stamps
        for number, chosen in _by_value(classes):
            self._pages[number].push(pages[chosen], stamps[chosen])

    def _activate(self, pages: Int64Array) -> None:
        """Pages that were inactive and have a reference again: their other blocks can be taken one by one."""
        for group, count in self._by_group(pages):
            self.active_pages[group] += count
        self._num_active += len(pages)
        pages = pages[self.page_refs[pages] < self._capacity[self.owner[pages]]]
        if not len(pages):
            return
        slots = np.arange(self.stride)
        ids = (pages[:, None] * self.stride + slots)[slots < self._capacity[self.owner[pages]][:, None]]
        ids = ids[self.refs[ids] == 0]
        self._push_evictable(ids[self.cached[ids]])
        self._push_free(ids[~self.cached[ids]])

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

    def _return_empty(self, pages: Int64Array) -> None:
        """Give inactive pages without any content back to the pool."""
        pages = pages[(self._page_cached[pages] == 0) & (self.page_refs[pages] == 0)]
        if not len(pages):
            return
        self._invalidate_slots(pages)
        self.owner[pages] = NO_OWNER
        if self._num_returned + len(pages) > len(self._returned):
            self._returned = np.concatenate([self._returned, np.empty(len(self._returned) + len(pages), np.int64)])
        self._returned[self._num_returned : self._num_returned + len(pages)] = pages[::-1]
        self._num_returned += len(pages)

    def _claim_free_pages(self, group: int, wanted: int) -> Int64Array:
        """Blocks of up to `wanted` free pages, which now belong to the group."""
        reused = min(wanted, self._num_returned)
        fresh = min(wanted - reused, self.num_pages - self._fresh)
        pages = np.arange(self._fresh, self._fresh + fresh)
        self._fresh += fresh
        if reused:
            self._num_returned -= reused
            returned = self._returned[self._num_returned : self._num_returned + reused][::-1]
            pages = np.concatenate([returned, pages]) if fresh else returned
        return self._own(group, pages)

    def _own(self, group: int, pages: Int64Array) -> Int64Array:
        self.owner[pages] = group
        self.active_pages[group] += len(pages)
        self._num_active += len(pages)
        if self.per_page[group] == 1:
            return pages * self.stride
        return (pages[:, None] * self.stride + np.arange(self.per_page[group])).ravel()

    def _evict(self, group: int, blocks: int, max_pages: int) -> Int64Array:
        """Blocks for a group out of cached content: the lowest class first, in it the least recently used.

        With `max_pages` 0 they come from the group's own active pages.
        """
        for number in range(NUM_CLASSES):
            ring, pages = self._blocks[group][number], self._pages[number]
            block_stamp = ring.head_stamp()
            page_stamp = pages.head_stamp() if max_pages else NO_STAMP
            if block_stamp < page_stamp:
                ids = ring.pop(blocks, before=page_stamp)
                self._forget(ids)
                return ids
            if page_stamp < NO_STAMP:
                chosen = pages.pop(max_pages, before=block_stamp)
                if self._single_blocks(chosen):
                    self._forget(chosen * self.stride)
                else:
                    ids = (chosen[:, None] * self.stride + np.arange(self.stride)).ravel()
                    self._forget(ids[self.cached[ids]])
                self._invalidate_slots(chosen)
                return self._own(group, chosen)
        raise KvtideError(f"no block of group {group} can be taken; pages_short was not checked")

    def _invalidate_slots(self, pages: Int64Array) -> None:
        """What the owner of these pages still has in its stack must not become valid again under another owner."""
        if not self._single_blocks(pages):
            self._stamp[pages[:, None] * self.stride + np.arange(self.stride)] = 0

    def _forget(self, ids: Int64Array) -> None:
        self._on_evict(ids)
        self.cached[ids] = False
        np.subtract.at(self._page_cached, ids // self.stride, ONE)

    # -- queues -------------------------------------------------------------------------------------------------------

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

    def _blocks_of(self, group: int) -> Int64Array:
        return self._blocks_in(group, np.flatnonzero(self.owner[: self._fresh] == group))

    def _blocks_in(self, group: int, pages: Int64Array) -> Int64Array:
        return (pages[:, None] * self.stride + np.arange(self.per_page[group])).ravel()

    # -- invariants ---------------------------------------------------------------------------------------------------

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
