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
from .hashing import KeyChain
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
    everything could serve. Others may part there too. `node` is that of the hit's last key, -1 without a hit.
    """

    num_tokens: int
    blocks: dict[int, GroupHit]
    limited_by: tuple[str, ...]
    junction: int = 0
    node: int = -1

    def num_blocks(self) -> dict[int, int]:
        """Blocks of the hit by group."""
        return {number: part.ids.size for number, part in self.blocks.items()}

    def all_ids(self) -> Int64Array:
        """Ids of all blocks of the hit."""
        return np.concatenate([np.empty(0, dtype=np.int64), *(part.ids.T.ravel() for part in self.blocks.values())])

    def tail_first(self) -> Int64Array:
        """The same, its tail before its head, in one order over all groups."""
        if not self.blocks:
            return self.all_ids()
        ends = np.concatenate([np.repeat(part.tokens, part.ids.shape[0]) for part in self.blocks.values()])
        ordered: Int64Array = self.all_ids()[np.argsort(-ends, kind="stable")]
        return ordered


def find_nodes(groups: Sequence[ManagedGroup], index: PrefixIndex, chain: KeyChain, most: int) -> Int64Array:
    """Nodes of the first `most` keys of a chain as far as they matter for a hit, -1 for those not known."""
    # The smallest block of the groups that keep everything is the base, so without one key they serve nothing more.
    if any(group.cells_per_key and not (group.is_bounded or group.is_state) for group in groups):
        return index.find_run(chain, most)
    return index.find(chain.between(0, most))


def find_hit(groups: Sequence[ManagedGroup], index: PrefixIndex, nodes: Int64Array, drop_last: bool) -> Hit:
    """The longest hit over the nodes of a chain's keys.

    `drop_last` gives up the last base block that all groups agree on, for drafters that must recompute it.
    """
    cacheable = [group for group in groups if group.cells_per_key]
    if not len(nodes) or not cacheable:
        return Hit(0, {}, ())
    base = cacheable[0].base
    keeping = [group for group in cacheable if not (group.is_bounded or group.is_state)]
    if nodes.max() < 0:
        return Hit(0, {}, tuple(group.name for group in cacheable))
    lengths = np.arange(1, len(nodes) + 1) * base
    cells = index.all_cells(nodes)
    ids = {group.number: _ids_by_block(group, cells[group.number]) for group in cacheable}
    serves = {group.number: servable(group, ids[group.number], lengths) for group in cacheable}
    common = np.logical_and.reduce(list(serves.values()))
    agreed = np.flatnonzero(common)
    if drop_last:
        agreed = agreed[:-1]
    best = int(agreed[-1]) if len(agreed) else -1
    whole = np.flatnonzero(np.logical_and.reduce([serves[group.number] for group in keeping])) if keeping else agreed
    junction = int(lengths[whole[-1]]) if len(whole) else 0
    beyond = min(best + 1, len(nodes) - 1)
    limited = tuple(group.name for group in cacheable if not serves[group.number][beyond])
    if best < 0:
        return Hit(0, {}, limited, junction)
    length = int(lengths[best])
    blocks = {group.number: _blocks(group, ids[group.number], length) for group in cacheable}
    return Hit(length, blocks, limited, junction, int(nodes[best]))


def _ids_by_block(group: ManagedGroup, cells: Int64Array) -> Int64Array:
    """Cached ids `[logical blocks, tables]` (per key for states), -1 where not cached, of a group's cells by key."""
    return cells[group.keys_per_block - 1 :: group.keys_per_block].reshape(-1, group.fmt.tables)


def servable(group: ManagedGroup, ids: Int64Array, lengths: Int64Array) -> npt.NDArray[np.bool_]:
    """Which of the lengths, one per key, a group can serve; `ids` `[blocks, tables]` are -1 for what is not there."""
    if group.is_state:
        present: npt.NDArray[np.bool_] = np.logical_and.reduce(ids >= 0, axis=1)
        return present
    size, tables = group.fmt.block_size, group.fmt.tables
    complete: npt.NDArray[np.bool_] = lengths % size == 0
    if ids.min(initial=0) >= 0:
        return complete
    missing = np.zeros(len(ids) + 1, dtype=np.int64)
    missing[1:] = np.cumsum(ids < 0)[tables - 1 :: tables]
    ends = lengths // size
    first = np.minimum(group.first_block(lengths), ends) if group.is_bounded else 0
    sinks = np.minimum(group.table.sink_blocks, ends)
    complete &= (missing[ends] == missing[first]) & (missing[sinks] == 0)
    return complete


def _blocks(group: ManagedGroup, ids: Int64Array, length: int) -> GroupHit:
    if group.is_state:
        return GroupHit(0, 1, ids[length // group.base - 1][:, None], np.array([length]))
    end = length // group.fmt.block_size
    if not group.is_bounded:
        return GroupHit(0, end, ids[:end].T, np.arange(1, end + 1) * group.fmt.block_size)
    sinks = group.table.sink_blocks
    first = int(group.first_block(np.array(length)))
    logical = np.concatenate([np.arange(min(end, sinks)), np.arange(first, max(end, first))])
    return GroupHit(first, end, ids[logical].T, (logical + 1) * group.fmt.block_size)
