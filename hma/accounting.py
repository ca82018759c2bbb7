"""Where the pool's bytes are right now, by cause: the manager's counterpart of the simulator's final-length charge.

Every byte of every page has one cause, so the causes add up to the pool. A slot that several requests share counts
once, and as needed if any of them needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvtide.kvcache.specs import Int64Array

from .groups import ManagedGroup
from .pool import PoolCounts
from .tables import NO_BLOCK

if TYPE_CHECKING:
    from .manager import HybridMemoryManager


class MemoryByCause(NamedTuple):
    """Bytes of a pool by cause.

    `needed`: the next query of a request reads it. `out_of_window`: held, and no query can reach it again.
    `group_padding`, `page_padding`: bytes that no block can use. `block_tail`: slots of a last block that no token
    fills yet. `draft_reserve`: slots for drafts. `in_flight_reserve`: slots of tokens being computed, and blocks that
    wait for a step. `idle_cached`: cached blocks that no request holds. `free`: everything else.
    """

    needed: int
    out_of_window: int
    group_padding: int
    page_padding: int
    block_tail: int
    draft_reserve: int
    in_flight_reserve: int
    idle_cached: int
    free: int


class _Slots(NamedTuple):
    """Slots (or states) of the blocks that rows hold in one table, per block."""

    needed: Int64Array
    out_of_window: Int64Array
    in_flight: Int64Array
    draft: Int64Array
    tail: Int64Array


def account(manager: HybridMemoryManager) -> MemoryByCause:
    """The bytes of a manager's pool by cause; looks at every page and every table entry."""
    pool, page_bytes = manager.pool, manager.geometry.page_bytes
    parts = [_free_pages(pool.free_pages * page_bytes)]
    for group in manager.groups:
        counts = pool.counts(group.number)
        pages = int((pool.owner == group.number).sum())
        parts.append(_group(manager, group, counts, pages))
    return _total(parts)


def account_active(manager: HybridMemoryManager) -> MemoryByCause:
    """The same for active pages alone: what running requests keep others from having."""
    pool = manager.pool
    return _total(
        [
            _group(manager, group, pool.active_counts(group.number), pool.active_pages[group.number])
            for group in manager.groups
        ]
    )


def _total(parts: list[MemoryByCause]) -> MemoryByCause:
    return MemoryByCause(*(sum(values) for values in zip(*parts, strict=True)))


def _free_pages(num_bytes: int) -> MemoryByCause:
    return MemoryByCause(0, 0, 0, 0, 0, 0, 0, 0, free=num_bytes)


def _group(manager: HybridMemoryManager, group: ManagedGroup, counts: PoolCounts, pages: int) -> MemoryByCause:
    fmt = group.fmt
    ids, slots = _held_slots(manager, group)
    only_pinned = _only_pinned(manager, group)
    waiting = counts.referenced - fmt.tables * len(ids) - only_pinned
    slot_bytes = fmt.group.bytes_per_token or fmt.group.state_bytes
    padding = fmt.padding_layers * fmt.layer_bytes
    inner = fmt.tables * fmt.block_bytes - padding - max(fmt.block_size, 1) * slot_bytes
    return MemoryByCause(
        needed=int(slots.needed.sum()) * slot_bytes,
        out_of_window=int(slots.out_of_window.sum()) * slot_bytes,
        group_padding=len(ids) * padding,
        page_padding=pages * fmt.page_tail_bytes + len(ids) * inner,
        block_tail=int(slots.tail.sum()) * slot_bytes,
        draft_reserve=int(slots.draft.sum()) * slot_bytes,
        in_flight_reserve=int(slots.in_flight.sum()) * slot_bytes + waiting * fmt.block_bytes,
        idle_cached=(counts.evictable + only_pinned) * fmt.block_bytes,
        free=counts.free * fmt.block_bytes,
    )


def _only_pinned(manager: HybridMemoryManager, group: ManagedGroup) -> int:
    """Blocks of a group that pins hold and no running request does."""
    pinned = np.unique(manager.pinned_blocks())
    if not len(pinned):
        return 0
    pinned = pinned[manager.pool.owner[pinned // manager.pool.stride] == group.number]
    return len(np.setdiff1d(pinned, _all_ids(manager, group)))


def _all_ids(manager: HybridMemoryManager, group: ManagedGroup) -> Int64Array:
    rows = [group.table.ids_of(row).ravel() for row in manager.running_rows.tolist()]
    return np.unique(np.concatenate([np.empty(0, dtype=np.int64), *rows]))


def _held_slots(manager: HybridMemoryManager, group: ManagedGroup) -> tuple[Int64Array, _Slots]:
    """Distinct blocks that running rows hold in the group's first table, and the slots of each by cause."""
    rows, logical, ids = [], [], []
    for row in manager.running_rows.tolist():
        numbers, entries = group.table.held(row)
        taken = entries[0] != NO_BLOCK
        rows.append(np.full(int(taken.sum()), row))
        logical.append(numbers[taken])
        ids.append(group.table.to_ids(entries[0, taken]))
    if not rows:
        return np.empty(0, dtype=np.int64), _Slots(*[np.empty(0, dtype=np.int64)] * 5)
    owners, numbers = np.concatenate(rows), np.concatenate(logical)
    slots = _slots_of(manager, group, owners, numbers)
    # Rows that share a block agree that its tokens are committed; it is needed as much as the neediest of them says.
    held = np.concatenate(ids)
    order = np.lexsort((slots.needed, held))
    last = np.append(held[order][1:] != held[order][:-1], True)
    chosen = order[last]
    return held[chosen], _Slots(*(part[chosen] for part in slots))


def _slots_of(manager: HybridMemoryManager, group: ManagedGroup, rows: Int64Array, logical: Int64Array) -> _Slots:
    if group.is_state:
        running = (logical == 0).astype(np.int64)
        none = np.zeros_like(running)
        return _Slots(running, none, none, 1 - running, none)
    size = group.fmt.block_size
    begin = logical * size

    def within(low: Int64Array, high: Int64Array) -> Int64Array:
        count: Int64Array = np.clip(np.minimum(high, begin + size) - np.maximum(low, begin), 0, None)
        return count

    if group.is_cross:
        stored = manager.image_tokens[rows]
        needed = within(np.zeros_like(begin), stored)
        none = np.zeros_like(needed)
        return _Slots(needed, none, none, none, size - needed)
    committed = manager.committed[rows]
    scheduled = committed + manager.in_flight[rows]
    ahead = scheduled + manager.lookahead
    reach = group.fmt.group.spec.needed(committed + 1)
    needed = within(reach.first, committed) + within(np.zeros_like(begin), np.minimum(reach.sinks, committed))
    in_flight, draft = within(committed, scheduled), within(scheduled, ahead)
    stored = within(np.zeros_like(begin), committed)
    tail = size - stored - in_flight - draft
    return _Slots(needed, stored - needed, in_flight, draft, tail)
