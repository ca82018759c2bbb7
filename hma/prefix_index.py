"""The prefix index: which cached blocks hold the tokens behind a key.

One *node* per key (a prefix of whole base blocks). For every group a node has one cell per block that ends inside its
base block: all tables, and several blocks where a group's block is smaller than the base; a group with larger blocks
has cells only at every n-th node. A cell is a block id, or -1. Blocks point back to their node, so that evicting blocks
finds the cells; a node without any cell left is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtide.kvcache.specs import Int64Array

EMPTY = -1
ONE = np.int32(1)


class PrefixIndex:
    """`cells_per_node[group]` is the width of a group's cells; `num_blocks` bounds the block ids."""

    def __init__(self, cells_per_node: Sequence[int], num_blocks: int) -> None:
        self._nodes: dict[bytes, int] = {}
        self._keys: list[bytes] = []
        self._recycled: list[int] = []
        self._capacity = 1024
        self._offsets = np.concatenate([[0], np.cumsum(cells_per_node)])
        self._cells = np.full((self._capacity, self._offsets[-1]), EMPTY, dtype=np.int64)
        self._filled = np.zeros(self._capacity, dtype=np.int32)
        # Both are stored plus one, so that zeroed memory means "none" and costs nothing until it is touched.
        self._node_of = np.zeros(num_blocks, dtype=np.int32)
        self._cell_of = np.zeros(num_blocks, dtype=np.int32)

    def __len__(self) -> int:
        """Keys with at least one cached block."""
        return len(self._nodes)

    def find(self, keys: Sequence[bytes]) -> Int64Array:
        """Node per key, -1 where a key is not known."""
        get = self._nodes.get
        return np.array([get(key, EMPTY) for key in keys], dtype=np.int64)

    def cells(self, group: int, nodes: Int64Array) -> Int64Array:
        """Block ids `[len(nodes), width]` of a group; -1 for what is not cached, and for unknown nodes."""
        cells: Int64Array = self._cells[nodes, self._offsets[group] : self._offsets[group + 1]]
        cells[nodes < 0] = EMPTY
        return cells

    def nodes_for(self, keys: Sequence[bytes]) -> Int64Array:
        """Node per key; unknown keys get one."""
        nodes, table, recycled = [], self._nodes, self._recycled
        for key in keys:
            node = table.get(key)
            if node is None:
                if recycled:
                    node = recycled.pop()
                    self._keys[node] = key
                else:
                    node = len(self._keys)
                    self._keys.append(key)
                table[key] = node
            nodes.append(node)
        if len(self._keys) > self._capacity:
            self._grow(len(self._keys))
        return np.array(nodes, dtype=np.int64)

    def insert(self, group: int, nodes: Int64Array, columns: Int64Array, ids: Int64Array) -> Int64Array:
        """Put blocks into empty cells; returns the ids that were put. A cell that is taken keeps its block."""
        columns = columns + self._offsets[group]
        empty = self._cells[nodes, columns] == EMPTY
        if not empty.all():
            nodes, columns, ids = nodes[empty], columns[empty], ids[empty]
        self._cells[nodes, columns] = ids
        # Two rows may bring the same cell in one call: the last one written has it.
        won = self._cells[nodes, columns] == ids
        if not won.all():
            nodes, columns, ids = nodes[won], columns[won], ids[won]
        np.add.at(self._filled, nodes, ONE)
        self._node_of[ids] = nodes + 1
        self._cell_of[ids] = columns + 1
        return ids

    def remove(self, ids: Int64Array) -> None:
        """Empty the cells of cached blocks."""
        nodes = self.node_of(ids)
        columns = self._cell_of[ids] - 1
        self._cells[nodes, columns] = EMPTY
        self._node_of[ids] = 0
        np.subtract.at(self._filled, nodes, ONE)
        self.forget_empty(nodes)

    def complete_cells(self, ids: Int64Array) -> list[tuple[bytes, int]]:
        """Key and group of the complete sets of cells that removing the blocks would break, each once."""
        nodes = self.node_of(ids)
        groups = np.searchsorted(self._offsets, self._cell_of[ids] - 1, side="right") - 1
        broken = set(zip(nodes.tolist(), groups.tolist(), strict=True))
        return [
            (self._keys[node], group)
            for node, group in sorted(broken)
            if (self._cells[node, self._offsets[group] : self._offsets[group + 1]] != EMPTY).all()
        ]

    def forget_empty(self, nodes: Int64Array) -> None:
        """Forget those of the nodes that have no cell left."""
        for node in set(nodes[self._filled[nodes] == 0].tolist()):
            if self._nodes.pop(self._keys[node], None) is not None:
                self._recycled.append(node)

    def node_of(self, ids: Int64Array) -> Int64Array:
        """Node of each cached block."""
        return self._node_of[ids].astype(np.int64) - 1

    def key_of(self, node: int) -> bytes:
        """Key of a node."""
        return self._keys[node]

    def _grow(self, needed: int) -> None:
        capacity = max(needed, 2 * self._capacity)
        cells = np.full((capacity, self._offsets[-1]), EMPTY, dtype=np.int64)
        cells[: self._capacity] = self._cells
        self._cells = cells
        filled = np.zeros(capacity, dtype=np.int32)
        filled[: self._capacity] = self._filled
        self._filled, self._capacity = filled, capacity

    def check(self, cached: Int64Array) -> None:
        """Cells, back pointers and the pool's cached blocks agree; `AssertionError` on the first difference."""
        found: list[int] = []
        for node in self._nodes.values():
            for column, block in enumerate(self._cells[node].tolist()):
                if block != EMPTY:
                    assert self._node_of[block] - 1 == node, "a block's back pointer differs"
                    assert self._cell_of[block] - 1 == column, "a block's cell differs"
                    found.append(block)
        assert sorted(found) == sorted(cached.tolist()), "cached blocks and cells differ"
        for key, node in self._nodes.items():
            assert self._keys[node] == key, "a node's key differs"
            assert self._filled[node] > 0, "an empty node is kept"
