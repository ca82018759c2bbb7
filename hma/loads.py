"""Blocks for tokens that are loaded instead of computed: what a row must hold at a length it has not computed.

A load takes a row from its hit straight to a longer length. Per group the row ends up with exactly the blocks that a
device hit of that length would have given it (everything for full attention, the last blocks for a window, the running
state): those it holds already stay, the others are taken and must be filled by whoever loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.kvcache.specs import Int64Array

from .groups import ManagedGroup
from .pool import PagePool
from .tables import NO_BLOCK


class LoadRun(NamedTuple):
    """Blocks of one group to be filled: logical numbers `[n]` and table entries `[tables, n]`, int32.

    A recurrent state is one block with logical number 0.
    """

    group: str
    logical: Int64Array
    entries: npt.NDArray[np.int32]


class _Change(NamedTuple):
    wanted: Int64Array
    ids: Int64Array  # [tables, n], -1 where a block has to be taken
    dropped: Int64Array
    first: int


def needed_blocks(group: ManagedGroup, num_tokens: int) -> tuple[Int64Array, int]:
    """Logical blocks that a row of `num_tokens` tokens, a multiple of the block size, holds; the first behind sinks."""
    end = num_tokens // group.fmt.block_size
    sinks = min(group.table.sink_blocks, end)
    first = sinks
    if group.is_bounded:
        first = max(sinks, min(end, int(group.first_block(np.array(num_tokens)))))
    return np.concatenate([np.arange(sinks), np.arange(first, end)]), first


def take_load(
    groups: Sequence[ManagedGroup], pool: PagePool, row: int, num_tokens: int, lookahead: int
) -> tuple[list[LoadRun], Int64Array] | list[int]:
    """Bring the row's tables to `num_tokens` tokens. Returns what to fill, and the ids of blocks it no longer needs.

    When the pool cannot give the blocks: the blocks that each group lacks, and nothing has changed.
    """
    needs: list[int] = []
    changes: list[_Change | None] = []
    for group in groups:
        if group.is_state:
            changes.append(None)
            needs.append(0 if group.table.end[row] else (1 + lookahead) * group.fmt.tables)
            continue
        found = _change(group, row, num_tokens)
        changes.append(found)
        needs.append(int((found.ids < 0).sum()))
    if pool.pages_short(needs) > 0:
        return needs
    runs: list[LoadRun] = []
    dropped = [np.empty(0, dtype=np.int64)]
    for group, change, taken in zip(groups, changes, pool.take(needs), strict=True):
        if change is None:
            if len(taken):
                rows = np.array([row])
                group.append(rows, group.growth(rows, rows, None, lookahead), taken)
            runs.append(LoadRun(group.name, np.zeros(1, dtype=np.int64), group.table.entries[:, row, :1].copy()))
            continue
        missing = change.ids[0] < 0
        ids = change.ids.copy()
        ids[:, missing] = taken.reshape(group.fmt.tables, -1)
        group.table.clear(row)
        group.table.place(row, change.first, num_tokens // group.fmt.block_size, ids)
        runs.append(LoadRun(group.name, change.wanted[missing], group.table.to_entries(ids[:, missing])))
        dropped.append(change.dropped)
    return runs, np.concatenate(dropped)


def _change(group: ManagedGroup, row: int, num_tokens: int) -> _Change:
    wanted, first = needed_blocks(group, num_tokens)
    logical, entries = group.table.held(row)
    held = entries[0] != NO_BLOCK
    logical, ids = logical[held], group.table.to_ids(entries[:, held])
    stays = np.isin(logical, wanted)
    found = np.full((group.fmt.tables, len(wanted)), -1, dtype=np.int64)
    found[:, np.searchsorted(wanted, logical[stays])] = ids[:, stays]
    return _Change(wanted, found, ids[:, ~stays].T.ravel(), first)
