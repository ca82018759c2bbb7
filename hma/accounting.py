"""Where the pool's bytes are right now, by cause: the manager's counterpart of the simulator's final-length charge.

Every byte of every page has one cause, so the causes add up to the pool. A slot that several requests share counts
once, and as needed if any of them needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvtide.kvcache.specs import Int64Array

from .groups import ManagedGroup
from .pool_state import PoolCounts
from .tables import NO_BLOCK

if TYPE_CHECKING:
    from .core import ManagerCore


class MemoryByCause(NamedTuple):
    """Bytes of a pool by cause.

    `needed`: the next query of a request reads it. `out_of_window`: held, and no query can reach it again.
    `group_padding`, `page_padding`: bytes that no block can use. `block_tail`: slots of a last block that no token
    fills yet. `draft_reserve`: slots for drafts. `in_flight_reserve`: slots of tokens being computed or loaded, and
    blocks that wait for a step. `idle_cached`: cached blocks that no request holds. `free`: everything else.
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
    """Slots (or states) of held blocks by cause."""

    needed: int
    out_of_window: int
    in_flight: int
    draft: int
    tail: int


class _SlotArrays(NamedTuple):
    """The same per block."""

    needed: Int64Array
    out_of_window: Int64Array
    in_flight: Int64Array
    draft: Int64Array
    tail: Int64Array


def account(manager: ManagerCore) -> MemoryByCause:
    """The bytes of a manager's pool by cause; looks at every page and every table entry."""
    pool, page_bytes = manager.pool, manager.geometry.page_bytes
    parts = [_free_pages(pool.free_pages * page_bytes)]
    for group in manager.groups:
        counts = pool.counts(group.number)
        pages = int((pool.owner == group.number).sum())
        parts.append(_group(manager, group, counts, pages))
    return _total(parts)


def account_active(manager: ManagerCore) -> MemoryByCause:
    """The same for active pages alone: what running requests keep others from having."""
    return _total(list(account_active_groups(manager).values()))


def account_active_groups(manager: ManagerCore) -> dict[str, MemoryByCause]:
    """`account_active`, by group name."""
    pool = manager.pool
    return {
        group.name: _group(manager, group, pool.active_counts(group.number), pool.active_pages[group.number])
        for group in manager.groups
    }


def _total(parts: list[MemoryByCause]) -> MemoryByCause:
    return MemoryByCause(*(sum(values) for values in zip(*parts, strict=True)))


def _free_pages(num_bytes: int) -> MemoryByCause:
    return MemoryByCause(0, 0, 0, 0, 0, 0, 0, 0, free=num_bytes)


def _group(manager: ManagerCore, group: ManagedGroup, counts: PoolCounts, pages: int) -> MemoryByCause:
    fmt = group.fmt
    only_pinned = _only_pinned(manager, group)
    tables = _tables(manager, group)
    waiting = counts.referenced - sum(blocks for blocks, _ in tables) - only_pinned
    layers = fmt.layers_per_block
    slot_bytes = fmt.group.spec.bytes_per_token or fmt.group.spec.state_bytes
    causes = _Slots(0, 0, 0, 0, 0)
    padding = inner = 0
    for number, (blocks, slots) in enumerate(tables):
        # Padding layers come last.
        real = min(max(len(fmt.group.layers) - number * layers, 0), layers)
        causes = _Slots(*(total + real * slot_bytes * part for total, part in zip(causes, slots, strict=True)))
        padding += blocks * (layers - real) * fmt.layer_bytes
        inner += blocks * real * (fmt.layer_bytes - max(fmt.block_size, 1) * slot_bytes)
    return MemoryByCause(
        needed=causes.needed,
        out_of_window=causes.out_of_window,
        group_padding=padding,
        page_padding=pages * fmt.page_tail_bytes + inner,
        block_tail=causes.tail,
        draft_reserve=causes.draft,
        in_flight_reserve=causes.in_flight + waiting * fmt.block_bytes,
        idle_cached=(counts.evictable + only_pinned) * fmt.block_bytes,
        free=counts.free * fmt.block_bytes,
    )


def _only_pinned(manager: ManagerCore, group: ManagedGroup) -> int:
    """Blocks of a group that nothing but pins holds."""
    pool = manager.pool
    pinned, times = np.unique(manager.pinned_blocks(), return_counts=True)
    return int(((pool.refs[pinned] == times) & (pool.owner[pinned // pool.stride] == group.number)).sum())


def _tables(manager: ManagerCore, group: ManagedGroup) -> list[tuple[int, _Slots]]:
    """Distinct blocks that running rows hold in each table of the group, and their slots by cause."""
    rows, logical, entries = group.table.held_by(manager.running_rows)
    if not len(rows):
        return [(0, _Slots(0, 0, 0, 0, 0))] * group.fmt.tables
    taken = entries[0] != NO_BLOCK
    by_block = _slots_of(manager, group, rows[taken], logical[taken])
    tables = []
    # Rows can share a block of one table and not of another, where only one of them was evicted in between.
    for held in group.table.to_ids(entries[:, taken]):
        # Rows that share a block agree that its tokens are committed; it is needed as much as the neediest says.
        order = np.lexsort((by_block.needed, held))
        last = np.ones(len(held), dtype=np.bool_)
        np.not_equal(held[order][1:], held[order][:-1], out=last[:-1])
        chosen = order[last]
        tables.append((len(chosen), _Slots(*(int(part[chosen].sum()) for part in by_block))))
    return tables


def _slots_of(manager: ManagerCore, group: ManagedGroup, rows: Int64Array, logical: Int64Array) -> _SlotArrays:
    if group.is_state:
        running = (logical == 0).astype(np.int64)
        none = np.zeros_like(running)
        return _SlotArrays(running, none, none, 1 - running, none)
    size = group.fmt.block_size
    begin = logical * size

    def within(low: Int64Array, high: Int64Array) -> Int64Array:
        count: Int64Array = np.clip(np.minimum(high, begin + size) - np.maximum(low, begin), 0, None)
        return count

    if group.is_cross:
        stored = manager.image_tokens[rows]
        needed = within(np.zeros_like(begin), stored)
        none = np.zeros_like(needed)
        return _SlotArrays(needed, none, none, none, size - needed)
    committed = manager.committed[rows]
    scheduled = committed + manager.in_flight[rows]
    for row, num_tokens in manager.loading_rows.items():
        scheduled[rows == row] = num_tokens
    ahead = scheduled + manager.lookahead
    reach = group.fmt.group.spec.needed(committed + 1)
    needed = within(reach.first, committed) + within(np.zeros_like(begin), np.minimum(reach.sinks, committed))
    in_flight, draft = within(committed, scheduled), within(scheduled, ahead)
    stored = within(np.zeros_like(begin), committed)
    tail = size - stored - in_flight - draft
    return _SlotArrays(needed, stored - needed, in_flight, draft, tail)
