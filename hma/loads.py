"""Blocks for tokens that are loaded instead of computed: what a row must hold at a length it has not computed.

A load takes a row from its hit straight to a longer length. Per group the row ends up with exactly the blocks that a
device hit of that length would have given it: everything for full attention, the last blocks for a window, a checkpoint
for a recurrent state. What the row holds already stays, what the cache has is shared, and the rest is taken and must be
filled by whoever loads. Cross attention is left alone, as hits leave it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.kvcache.specs import Int64Array

from .groups import ManagedGroup
from .hashing import KeyChain
from .pool import PagePool
from .prefix_index import EMPTY, PrefixIndex
from .tables import NO_BLOCK


class LoadRun(NamedTuple):
    """Blocks of one group to be filled: logical numbers `[n]` and table entries `[tables, n]`, int32.

    A checkpoint of a recurrent state has the number of the base block at whose end it stands.
    """

    group: str
    logical: Int64Array
    entries: npt.NDArray[np.int32]


class Load(NamedTuple):
    """A row's load: where it ends, what is to be filled, and per state group the ids of the checkpoint it ends at."""

    num_tokens: int
    runs: list[LoadRun]
    states: dict[int, Int64Array]


class Refused(NamedTuple):
    """The pool cannot give what a load needs: blocks to take per group, and cached blocks it would have shared."""

    needs: list[int]
    shared: Int64Array


class _Change(NamedTuple):
    """`ids` `[tables, n]` of the wanted blocks, -1 where one has to be taken; `first` is the row's first block."""

    wanted: Int64Array
    first: int
    ids: Int64Array
    shared: Int64Array
    dropped: Int64Array


def needed_blocks(group: ManagedGroup, num_tokens: int) -> tuple[Int64Array, int]:
    """Logical blocks that a row of `num_tokens` tokens, a multiple of the block size, holds; the first behind sinks.

    Of a state that is the one checkpoint, by the number of its base block.
    """
    if group.is_state:
        return np.array([num_tokens // group.base - 1]), 0
    end = num_tokens // group.fmt.block_size
    sinks = min(group.table.sink_blocks, end)
    first = sinks
    if group.is_bounded:
        first = max(sinks, min(end, int(group.first_block(np.array(num_tokens)))))
    return np.concatenate([np.arange(sinks), np.arange(first, end)]), first


def key_numbers(group: ManagedGroup, logical: Int64Array) -> Int64Array:
    """Number of the base block whose key each block (or checkpoint) is cached under."""
    if group.is_state:
        return logical
    numbers: Int64Array = ((logical + 1) * group.fmt.block_size - 1) // group.base
    return numbers


def cached_blocks(group: ManagedGroup, index: PrefixIndex, chain: KeyChain, logical: Int64Array) -> Int64Array:
    """Ids `[tables, n]` that the cache has for a sequence's blocks (or checkpoints), -1 where it has none."""
    if not len(logical) or not group.cells_per_key:
        return np.full((group.fmt.tables, len(logical)), EMPTY, dtype=np.int64)
    numbers = key_numbers(group, logical)
    low, high = int(numbers.min()), int(numbers.max()) + 1
    nodes = index.find(chain.between(low, high))[numbers - low]
    cells = index.cells(group.number, nodes).reshape(len(logical), -1, group.fmt.tables)
    ids: Int64Array = cells[np.arange(len(logical)), logical % group.blocks_per_key].T
    return ids


def own_blocks(group: ManagedGroup, row: int, committed: int, logical: Int64Array) -> Int64Array:
    """Ids `[tables, n]` of blocks that a row holds and has committed every token of, -1 for others."""
    found = np.full((group.fmt.tables, len(logical)), EMPTY, dtype=np.int64)
    if group.is_state:  # the running state is none that a key stands for
        return found
    held, entries = group.table.held(row)
    whole = (entries[0] != NO_BLOCK) & ((held + 1) * group.fmt.block_size <= committed)
    held, entries = held[whole], entries[:, whole]
    at = np.searchsorted(held, logical)
    mine = at < len(held)
    mine[mine] = held[at[mine]] == logical[mine]
    found[:, mine] = group.table.to_ids(entries[:, at[mine]])
    return found


def take_load(
    groups: Sequence[ManagedGroup],
    pool: PagePool,
    index: PrefixIndex,
    chain: KeyChain,
    *,
    row: int,
    committed: int,
    num_tokens: int,
) -> tuple[Load, Int64Array] | Refused:
    """Bring the row's tables to `num_tokens` tokens. Returns the load, and the ids of blocks the row no longer needs.

    When the pool cannot give the blocks, nothing has changed.
    """
    changes = [None if group.is_cross else _change(group, index, chain, row, committed, num_tokens) for group in groups]
    needs = [0 if change is None else int((change.ids < 0).sum()) for change in changes]
    shared = np.concatenate([np.empty(0, dtype=np.int64), *(change.shared for change in changes if change is not None)])
    if pool.pages_short(needs, shared) > 0:
        return Refused(needs, shared)
    pool.acquire(shared)
    load = Load(num_tokens, [], {})
    dropped = [np.empty(0, dtype=np.int64)]
    for group, change, taken in zip(groups, changes, pool.take(needs), strict=True):
        if change is None:
            continue
        missing = change.ids[0] < 0
        ids = change.ids
        ids[:, missing] = taken.reshape(group.fmt.tables, -1)
        if group.is_state:
            load.states[group.number] = ids[:, 0]
        else:
            group.table.clear(row)
            group.table.place(row, change.first, num_tokens // group.fmt.block_size, ids)
        if missing.any():
            load.runs.append(LoadRun(group.name, change.wanted[missing], group.table.to_entries(ids[:, missing])))
        dropped.append(change.dropped)
    return load, np.concatenate(dropped)


def _change(
    group: ManagedGroup, index: PrefixIndex, chain: KeyChain, row: int, committed: int, num_tokens: int
) -> _Change:
    wanted, first = needed_blocks(group, num_tokens)
    ids = own_blocks(group, row, committed, wanted)
    others = np.flatnonzero(ids[0] < 0)
    cached = cached_blocks(group, index, chain, wanted[others])
    whole = (cached >= 0).all(axis=0)
    ids[:, others[whole]] = cached[:, whole]
    held = np.empty(0, dtype=np.int64) if group.is_state else group.table.ids_of(row).T.ravel()
    return _Change(wanted, first, ids, cached[:, whole].ravel(), held[~np.isin(held, ids)])
