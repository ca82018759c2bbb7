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

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvtide.kvcache.errors import KvtideError
from kvtide.kvcache.specs import Int64Array

from .pool_state import NO_OWNER, NUM_CLASSES, ONE, PoolState
from .rings import NO_STAMP


class PagePool(PoolState):
    """`num_pages` pages of a geometry. All calls take and return int64 arrays of block ids."""

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

    # -- state changes -------------------------------------------------------------------------------------------------

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
        if not (reused or fresh):
            return np.empty(0, dtype=np.int64)  # a cache that has been at work for a while fills the pool
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
            if not (len(ring) or len(pages)):
                continue
            block_stamp = ring.head_stamp()
            # Pages with one block each leave none to be taken singly; then the first page needs no look of its own.
            page_stamp = pages.head_stamp() if max_pages and block_stamp < NO_STAMP else NO_STAMP
            if block_stamp < page_stamp:
                ids = ring.pop(blocks, before=page_stamp)
                self._forget(ids)
                return ids
            chosen = pages.pop(max_pages, before=block_stamp)
            if len(chosen):
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
