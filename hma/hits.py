"""Prefix hits: the longest length for which every group still holds what its next query needs.

Each group answers for all candidate lengths at once which of them it could serve: full attention needs every block from
the start, a window only the blocks in its reach, a state the one checkpoint. The hit is the longest length on which all
agree, so no group's rule is applied twice and no fixed point has to be searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.kvcache.specs import Int64Array

from .groups import ManagedGroup
from .prefix_index import PrefixIndex


class GroupHit(NamedTuple):
    """Blocks that a hit takes over: `first` block behind the sinks, ids `[tables, n]` as a table row holds them.

    `tokens[i]` is where column i ends.
    """

    first: int
    end: int
    ids: Int64Array
    tokens: Int64Array


class Hit(NamedTuple):
    """A hit of `num_tokens`; `limited_by` names the groups that could not serve the next longer length.

    `junction` is where this prompt parts from what was computed before: the longest length that the groups which keep
    everything could serve. Others may part there too.
    """

    num_tokens: int
    blocks: dict[int, GroupHit]
    limited_by: tuple[str, ...]
    junction: int = 0

    def all_ids(self) -> Int64Array:
        """Ids of all blocks of the hit, its tail before its head, in one order over all groups."""
        if not self.blocks:
            return np.empty(0, dtype=np.int64)
        parts = self.blocks.values()
        ends = np.concatenate([np.repeat(part.tokens, part.ids.shape[0]) for part in parts])
        ids = np.concatenate([part.ids.T.ravel() for part in parts])
        ordered: Int64Array = ids[np.argsort(-ends, kind="stable")]
        return ordered


def find_hit(
    groups: Sequence[ManagedGroup], index: PrefixIndex, keys: Sequence[bytes], max_tokens: int, drop_last: bool
) -> Hit:
    """The longest hit of at most `max_tokens`.

    `drop_last` gives up the last base block that all groups agree on, for drafters that must recompute it.
    """
    cacheable = [group for group in groups if group.cells_per_key]
    base = cacheable[0].base if cacheable else 1
    keys = keys[: max_tokens // base]
    if not keys:
        return Hit(0, {}, ())
    nodes = index.find(keys)
    if nodes.max() < 0:
        return Hit(0, {}, tuple(group.name for group in cacheable))
    lengths = np.arange(1, len(keys) + 1) * base
    ids = {group.number: _ids_by_block(group, index, nodes) for group in cacheable}
    serves = {group.number: _servable(group, ids[group.number], lengths) for group in cacheable}
    common = np.logical_and.reduce(list(serves.values()))
    agreed = np.flatnonzero(common)
    if drop_last:
        agreed = agreed[:-1]
    best = int(agreed[-1]) if len(agreed) else -1
    keeping = [serves[group.number] for group in cacheable if not (group.is_bounded or group.is_state)]
    whole = np.flatnonzero(np.logical_and.reduce(keeping)) if keeping else agreed
    junction = int(lengths[whole[-1]]) if len(whole) else 0
    beyond = min(best + 1, len(keys) - 1)
    limited = tuple(group.name for group in cacheable if not serves[group.number][beyond])
    if best < 0:
        return Hit(0, {}, limited, junction)
    length = int(lengths[best])
    return Hit(
        length, {group.number: _blocks(group, ids[group.number], length) for group in cacheable}, limited, junction
    )


def _ids_by_block(group: ManagedGroup, index: PrefixIndex, nodes: Int64Array) -> Int64Array:
    """Cached ids `[logical blocks, tables]` (per key for states), -1 where not cached."""
    cells = index.cells(group.number, nodes[group.keys_per_block - 1 :: group.keys_per_block])
    return cells.reshape(-1, group.fmt.tables)


def _servable(group: ManagedGroup, ids: Int64Array, lengths: Int64Array) -> npt.NDArray[np.bool_]:
    present: npt.NDArray[np.bool_] = np.logical_and.reduce(ids >= 0, axis=1)
    if group.is_state:
        return present
    size = group.fmt.block_size
    missing = np.concatenate([[0], np.cumsum(~present)])
    ends = lengths // size
    first = np.minimum(group.first_block(lengths), ends) if group.is_bounded else np.zeros_like(ends)
    sinks = np.minimum(group.table.sink_blocks, ends)
    complete: npt.NDArray[np.bool_] = (missing[ends] == missing[first]) & (missing[sinks] == 0)
    complete &= lengths % size == 0
    return complete


def _blocks(group: ManagedGroup, ids: Int64Array, length: int) -> GroupHit:
    if group.is_state:
        return GroupHit(0, 1, ids[length // group.base - 1][:, None], np.array([length]))
    end = length // group.fmt.block_size
    sinks = group.table.sink_blocks
    first = int(group.first_block(np.array(length))) if group.is_bounded else 0
    logical = np.concatenate([np.arange(min(end, sinks)), np.arange(first, max(end, first))])
    return GroupHit(first, end, ids[logical].T, (logical + 1) * group.fmt.block_size)
