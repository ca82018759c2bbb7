"""The prefix index: which cached blocks hold the tokens behind a key.

One *node* per key (a prefix of whole base blocks). For every group a node has one cell per block that ends inside its
base block: all tables, and several blocks where a group's block is smaller than the base; a group with larger blocks
has cells only at every n-th node. A cell is a block id, or -1. Blocks point back to their node, so that evicting blocks
finds the cells; a node without any cell left is forgotten.

A prompt that comes again is looked up by spans of `SPAN` base blocks: the last key of a span leads to the nodes of all
its keys, so only that one has to be hashed. Where it is not known the keys are looked up one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide.kvcache.specs import Int64Array

from .hashing import SPAN, KeyChain

EMPTY = -1
ONE = np.int32(1)


class PrefixIndex:
    """`cells_per_node[group]` is the width of a group's cells; `num_blocks` bounds the block ids."""

    def __init__(self, cells_per_node: Sequence[int], num_blocks: int) -> None:
        self._capacity = 1024
        self._nodes: dict[bytes, int] = {}
        # By the last key of a span, the bytes of `[2, SPAN]`: its nodes and their births. A node that was forgotten
        # since has another birth, or none.
        self._spans: dict[bytes, bytes] = {}
        self._birth = np.zeros(self._capacity, dtype=np.int64)
        self._births = 0
        # Nodes that somebody wants to know of when they are found or forgotten; whether one has been forgotten.
        self.watched = np.zeros(self._capacity, dtype=np.bool_)
        self.lost_watched = False
        self._keys: list[bytes] = []
        self._recycled: list[int] = []
        self._offsets = [0, *accumulate(cells_per_node)]
        self._width = max(self._offsets[-1], 1)
        self._filled = np.zeros(self._capacity, dtype=np.int32)
        # Block by cell, node after node, and cell by block. Both are stored plus one, so that zeroed memory means
        # "none" and costs nothing until it is touched.
        self._cells = np.zeros(self._capacity * self._width, dtype=np.int32)
        self._cell_of = np.zeros(num_blocks, dtype=np.int64)

    def __len__(self) -> int:
        """Keys with at least one cached block."""
        return len(self._nodes)

    def births(self, nodes: Int64Array) -> Int64Array:
        """A number per node that no other node has or had; 0 when it has been forgotten."""
        births: Int64Array = self._birth[nodes]
        return births

    def find(self, keys: Sequence[bytes]) -> Int64Array:
        """Node per key, -1 where a key is not known."""
        get = self._nodes.get
        return np.array([get(key, EMPTY) for key in keys], dtype=np.int64)

    def find_run(self, chain: KeyChain, most: int) -> Int64Array:
        """Nodes of a chain's first `most` keys up to the first that is not known, for which -1 stands at the end."""
        chain.hash_prompt(self._spans, most)
        skipped = np.frombuffer(b"".join([self._spans.get(key, b"") for key in chain.span_keys]), dtype=np.int64)
        start = len(chain.span_keys) * SPAN
        nodes, births = skipped.reshape(-1, 2, SPAN).transpose(1, 0, 2).reshape(2, -1)
        if len(nodes) < start or (self._birth[nodes] != births).any():
            nodes, start = nodes[:0], 0
        get, found = self._nodes.get, []
        for key in chain.between(start, max(start, most)):
            found.append(get(key, EMPTY))
            if found[-1] == EMPTY:
                break
        rest = np.array(found, dtype=np.int64)
        for begin in range(0, len(rest) - SPAN + 1, SPAN):
            self._join(rest[begin : begin + SPAN])
        return np.concatenate([nodes, rest])[:most]

    def join_spans(self, rows: Int64Array, numbers: Int64Array, nodes: Int64Array) -> None:
        """Remember the whole spans among the nodes of base blocks `numbers[i]` of `rows[i]`, each row's in order."""
        ahead = SPAN - 1
        if len(rows) <= ahead:
            return
        spans = (rows[ahead:] == rows[:-ahead]) & (numbers[:-ahead] % SPAN == 0)
        for begin in spans.nonzero()[0].tolist():
            self._join(nodes[begin : begin + SPAN])

    def _join(self, nodes: Int64Array) -> None:
        births = self._birth[nodes]
        if nodes[-1] != EMPTY and births.all():
            self._spans[self._keys[nodes[-1]]] = np.concatenate([nodes, births]).tobytes()

    def cells(self, group: int, nodes: Int64Array) -> Int64Array:
        """Block ids `[len(nodes), width]` of a group; -1 for what is not cached, and for unknown nodes."""
        cells: Int64Array = self._cells[self._positions(group, nodes)].astype(np.int64) - 1
        if nodes.min(initial=0) < 0:
            cells[nodes < 0] = EMPTY
        return cells

    def all_cells(self, nodes: Int64Array) -> list[Int64Array]:
        """`cells` of every group at once, which is cheaper for many nodes."""
        cells = self._cells.reshape(-1, self._width).take(nodes, axis=0).astype(np.int64)
        cells -= 1
        if nodes.min(initial=0) < 0:
            cells[nodes < 0] = EMPTY
        return [cells[:, begin:end] for begin, end in pairwise(self._offsets)]

    def _positions(self, group: int, nodes: Int64Array) -> Int64Array:
        """Where a group's cells `[len(nodes), width]` of some nodes stand."""
        positions: Int64Array = (nodes * self._width)[:, None] + np.arange(*self._offsets[group : group + 2])
        return positions

    def nodes_for(self, keys: Sequence[bytes]) -> Int64Array:
        """Node per key; unknown keys get one."""
        nodes = self.find(keys)
        unknown = (nodes == EMPTY).nonzero()[0]
        if not len(unknown):
            return nodes
        fresh = list(dict.fromkeys(keys if len(unknown) == len(keys) else [keys[i] for i in unknown.tolist()]))
        again = min(len(self._recycled), len(fresh))
        born = np.arange(len(self._keys) - again, len(self._keys) - again + len(fresh))
        if again:
            born[:again] = self._recycled[-again:]
            del self._recycled[-again:]
            for node, key in zip(born[:again].tolist(), fresh, strict=False):
                self._keys[node] = key
        self._keys += fresh[again:]
        self._nodes.update(zip(fresh, born.tolist(), strict=True))
        if len(self._keys) > self._capacity:
            self._grow(len(self._keys))
        self._birth[born] = np.arange(self._births, self._births + len(born)) + 1
        self._births += len(born)
        if len(fresh) == len(unknown):
            nodes[unknown] = born
            return nodes
        return self.find(keys)

    def insert(self, group: int, nodes: Int64Array, cells: Int64Array) -> Int64Array:
        """Put blocks `[len(nodes), width]` into empty cells, none where -1 stands; returns the ids that were put.

        A cell that is taken keeps its block.
        """
        positions, ids = self._positions(group, nodes).ravel(), cells.ravel()
        free = (self._cells[positions] == 0) & (ids != EMPTY)
        if not free.all():
            positions, ids = positions[free], ids[free]
        self._cells[positions] = ids + 1
        # Two rows may bring the same cell in one call: the last one written has it.
        won = self._cells[positions] == ids + 1
        if not won.all():
            positions, ids = positions[won], ids[won]
        np.add.at(self._filled, positions // self._width, ONE)
        self._cell_of[ids] = positions + 1
        return ids

    def remove(self, ids: Int64Array) -> None:
        """Empty the cells of cached blocks."""
        nodes = self.node_of(ids)
        self._cells[self._cell_of[ids] - 1] = 0
        self._cell_of[ids] = 0
        np.subtract.at(self._filled, nodes, ONE)
        self.forget_empty(nodes)

    def places(self, ids: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Node, group, and cell inside that group's cells, of each cached block."""
        columns = (self._cell_of[ids] - 1) % self._width
        groups = np.searchsorted(self._offsets, columns, side="right") - 1
        return self.node_of(ids), groups, columns - np.array(self._offsets)[groups]

    def complete_cells(self, ids: Int64Array) -> list[tuple[bytes, int]]:
        """Key and group of the complete sets of cells that removing the blocks would break, each once."""
        nodes, groups, _ = self.places(ids)
        broken = set(zip(nodes.tolist(), groups.tolist(), strict=True))
        return [
            (self._keys[node], group)
            for node, group in sorted(broken)
            if (self.cells(group, np.array([node])) != EMPTY).all()
        ]

    def forget_empty(self, nodes: Int64Array) -> None:
        """Forget those of the nodes that have no cell left."""
        is_empty = self._filled[nodes] == 0
        if not np.count_nonzero(is_empty):
            return
        empty = nodes[is_empty]
        self._birth[empty] = 0
        if np.count_nonzero(self.watched[empty]):
            self.watched[empty] = False
            self.lost_watched = True
        for node in set(empty.tolist()):
            key = self._keys[node]
            if self._nodes.pop(key, None) is not None:
                self._spans.pop(key, None)
                self._recycled.append(node)

    def node_of(self, ids: Int64Array) -> Int64Array:
        """Node of each cached block."""
        nodes: Int64Array = (self._cell_of[ids] - 1) // self._width
        return nodes

    def key_of(self, node: int) -> bytes:
        """Key of a node."""
        return self._keys[node]

    def _grow(self, needed: int) -> None:
        capacity = max(needed, 2 * self._capacity)
        self._cells = _grown(self._cells, capacity * self._width)
        self._filled, self._birth = _grown(self._filled, capacity), _grown(self._birth, capacity)
        self.watched = _grown(self.watched, capacity)
        self._capacity = capacity

    def check(self, cached: Int64Array) -> None:
        """Cells, back pointers and the pool's cached blocks agree; `AssertionError` on the first difference."""
        found: list[int] = []
        for node in self._nodes.values():
            for cell in range(node * self._width, (node + 1) * self._width):
                if block := int(self._cells[cell]):
                    assert self._cell_of[block - 1] - 1 == cell, "a block's back pointer differs"
                    found.append(block - 1)
        assert sorted(found) == sorted(cached.tolist()), "cached blocks and cells differ"
        for key, node in self._nodes.items():
            assert self._keys[node] == key, "a node's key differs"
            assert self._filled[node] > 0, "an empty node is kept"
            assert self._birth[node] > 0, "a node has no birth"
        assert self._spans.keys() <= self._nodes.keys(), "a span outlives its last node"


def _grown(array: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    grown = np.zeros(size, dtype=array.dtype)
    grown[: len(array)] = array
    return grown
