"""The prefix cache: which blocks stay after their requests have gone, under which keys, for how long, and who is told.

It stands between the pool, which knows blocks but no keys, and the prefix index, which knows keys but no references.
The pool calls `reclaimed` when it takes cached blocks for something else. Pins hold prefixes, quotas bound what a salt
leaves behind, events let a router follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.kvcache import KvtideError
from kvtide.kvcache.specs import Int64Array

from .events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from .groups import ManagedGroup
from .hashing import KeyChain
from .hits import Hit, find_hit, find_nodes
from .pool import PagePool
from .pool_state import CLASS_NORMAL, CLASS_SCRAP
from .prefix_index import EMPTY, PrefixIndex
from .quotas import Quotas
from .sequences import FreshKeys, Sequences
from .waiting import WaitingRows


class Pin(NamedTuple):
    """A cached prefix that is held until `unpin`: `num_tokens` of it are there."""

    number: int
    num_tokens: int


class Evicted(NamedTuple):
    """Whole blocks of a group that lose a table's block to somebody else; nothing has been written over them yet.

    Block i is number `parts[i]` of those that end inside the base block whose chain key is `keys[i]`; `entries`
    `[tables, n]`, int32. Of a state: checkpoints.
    """

    group: str
    keys: list[bytes]
    parts: Int64Array
    entries: npt.NDArray[np.int32]


class PrefixCache:
    """One per manager. `enabled` False caches nothing; `drop_last` gives up the last block of every hit."""

    def __init__(
        self,
        pool: PagePool,
        groups: Sequence[ManagedGroup],
        sequences: Sequences,
        *,
        enabled: bool,
        drop_last: bool,
        events: bool,
    ) -> None:
        self.enabled = enabled
        self.index = PrefixIndex([group.cells_per_key for group in groups], len(pool.refs))
        self.quotas = Quotas(pool, [group.fmt.block_bytes for group in groups])
        self._pool = pool
        self._groups = groups
        self._sequences = sequences
        self._drop_last = drop_last
        self._events: list[KvEvent] | None = [] if events else None
        # A router follows the cache event by event, so then nothing waits.
        self._waiting = WaitingRows(
            self.index, len(sequences.registered), groups[0].base, enabled=enabled and not events
        )
        self._draft_groups = [group.number for group in groups if group.draft_only]
        self.on_evict: Callable[[list[Evicted]], None] | None = None
        self._pins: dict[int, tuple[Int64Array, str]] = {}
        self._next_pin = 0
        # Blocks that transfers read: ids, eviction classes and salt.
        self._holds: dict[int, tuple[Int64Array, npt.NDArray[np.uint8], str]] = {}
        self._next_hold = 0

    def find(self, chain: KeyChain, max_tokens: int) -> Hit:
        """The longest hit of at most `max_tokens` under these keys; its blocks are referenced at once."""
        if not self.enabled:
            return Hit(0, {}, ())
        most = max_tokens // self._groups[0].base
        nodes = find_nodes(self._groups, self.index, chain, most)
        while len(rows := self._waiting.found(nodes)):
            self.catch_up(rows)
            nodes = find_nodes(self._groups, self.index, chain, most)
        hit = find_hit(self._groups, self.index, nodes, self._drop_last)
        if hit.num_tokens:
            # All groups pin before anything else is taken, so that no group's growth evicts another's hit.
            self._pool.acquire(hit.all_ids(), hit.num_blocks())
        return hit

    # -- blocks come and go -------------------------------------------------------------------------------------------

    def begin(self, row: int, hit: Hit) -> None:
        """A row starts from a hit."""
        self._sequences.registered[row] = hit.num_tokens // self._groups[0].base
        self._waiting.begin(row, int(self._sequences.registered[row]), hit.node)

    def advance(self, rows: Int64Array, committed: Int64Array) -> None:
        """Rows have so many committed tokens now; what has become whole is cached, at once or when it matters."""
        now = self._waiting.advance(rows, committed, self._sequences.registered)
        if len(now):
            self.catch_up(now)

    def advance_loaded(self, row: int, num_tokens: int, missing: Int64Array) -> None:
        """A load has brought a row to so many tokens, all but the `missing` blocks of them."""
        self._waiting.skip_to(row, num_tokens // self._groups[0].base)
        self.catch_up(np.array([row]), without=missing)

    def catch_up(self, rows: Int64Array | None = None, *, without: Int64Array | None = None) -> None:
        """Put all whole blocks of some rows, or of all rows that wait, under their keys.

        `without` are blocks that hold nothing to be cached.
        """
        if rows is None:
            rows = self._waiting.rows()
        if len(rows):
            self._register(self._sequences.fresh(rows, self._waiting.whole[rows]), without)

    def catch_up_before(self, rows: Int64Array, tokens: Int64Array) -> None:
        """The rows are about to let go of blocks that lie in their first `tokens[i]` tokens."""
        if self._waiting:
            behind = self._sequences.registered[rows] * self._groups[0].base < tokens
            self.catch_up(rows[behind & self._waiting.is_waiting[rows]])

    def _register(self, fresh: FreshKeys, without: Int64Array | None) -> None:
        """Put the rows' blocks under keys that have become whole. A key that has its blocks already keeps them."""
        nodes = self.index.nodes_for(fresh.keys)
        for group in self._groups:
            if group.is_state or group.is_cross:
                continue
            which, cells = group.cells_of_keys(fresh.rows, fresh.numbers)
            if without is not None and len(without):
                cells = np.where(np.isin(cells, without), EMPTY, cells)
            put = self.index.insert(group.number, nodes[which], cells)
            self._pool.set_cached(put)
            self._announce(group, fresh, nodes, put)
        # A node can stay empty: a state-only model, or tokens that never had a block.
        self.index.forget_empty(nodes)
        self.index.join_spans(fresh.rows, fresh.numbers, nodes)
        self._waiting.registered(fresh.rows, nodes)

    def has_states(self, key: bytes, states: Sequence[ManagedGroup]) -> bool:
        """Whether every one of the groups has a checkpoint under the key."""
        node = self.index.find([key])
        return all((self.index.cells(group.number, node) >= 0).all() for group in states)

    def register_states(
        self,
        states: Sequence[ManagedGroup],
        taken: Sequence[Int64Array] | Mapping[int, Int64Array],
        fresh: FreshKeys,
    ) -> list[ManagedGroup]:
        """Put checkpoint blocks `taken[group]` under one key; returns the groups that had none there."""
        nodes = self.index.nodes_for(fresh.keys)
        added = []
        for group in states:
            ids = taken[group.number]
            put = self.index.insert(group.number, nodes, ids[None, :])
            self._pool.set_cached(put)
            if len(put):
                added.append(group)
                self._announce(group, fresh, nodes, put)
        self.index.forget_empty(nodes)
        return added

    def release(
        self,
        ids: Int64Array,
        classes: npt.NDArray[np.uint8],
        salt: str,
        counts: Mapping[int, int] | None = None,
    ) -> None:
        """Drop one reference of each block, first the one to be evicted first, and keep the salt's quota.

        `counts[group]` of the blocks belong to each group, where the caller knows.
        """
        self._pool.release(ids, self._adjusted(ids, classes), counts)
        if self.quotas:
            self._drop(self.quotas.overrun(salt, ids))

    def release_dead(
        self, group: ManagedGroup, ids: Int64Array, classes: npt.NDArray[np.uint8], salts: Sequence[str]
    ) -> None:
        """Drop references of a group's blocks of several rows, which may hold the same block; one salt per block."""
        rest, rest_classes = ids, classes
        # A block that two rows hold has two references.
        if group.fmt.blocks_per_page == 1 and (self._pool.refs[rest] == 1).all():
            self._pool.release_pages(group.number, rest, self._adjusted(rest, rest_classes))
            rest = rest[:0]
        while len(rest) and self._pool.refs[rest].max() > 1:
            _, once = np.unique(rest, return_index=True)
            once.sort()
            self._pool.release(rest[once], self._adjusted(rest[once], rest_classes[once]))
            rest, rest_classes = np.delete(rest, once), np.delete(rest_classes, once)
        if len(rest):
            self._pool.release(rest, self._adjusted(rest, rest_classes))
        if self.quotas:
            for salt in set(salts):
                self._drop(self.quotas.overrun(salt, _unique(ids[[other == salt for other in salts]])))

    def reclaimed(self, ids: Int64Array) -> None:
        """The pool takes cached blocks for something else; those that could complete a hit are shown first."""
        if self.on_evict is not None and (blocks := self._whole_blocks(ids[self._pool.classes(ids) > CLASS_SCRAP])):
            self.on_evict(blocks)
        self._forgotten(ids)

    def _whole_blocks(self, ids: Int64Array) -> list[Evicted]:
        found = []
        nodes, groups, cells = self.index.places(ids)
        for group in self._groups:
            mine = groups == group.number
            if not mine.any():
                continue
            tables = group.fmt.tables
            chosen = np.unique(np.stack([nodes[mine], cells[mine] // tables]), axis=1)
            blocks = self.index.cells(group.number, chosen[0]).reshape(len(chosen[0]), -1, tables)
            blocks = blocks[np.arange(len(blocks)), chosen[1]]
            whole = (blocks != EMPTY).all(axis=1)
            if whole.any():
                keys = [self.index.key_of(node) for node in chosen[0, whole].tolist()]
                found.append(Evicted(group.name, keys, chosen[1, whole], group.table.to_entries(blocks[whole].T)))
        return found

    def _forgotten(self, ids: Int64Array) -> None:
        """Cached blocks lose their keys."""
        if self._events is not None:
            broken = self.index.complete_cells(ids)
            self._events += [BlockRemoved(key, self._groups[number].name) for key, number in broken]
        self.index.remove(ids)
        if self.quotas:
            self.quotas.forget(ids)

    def _adjusted(self, ids: Int64Array, classes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Eviction classes; blocks of groups that only a drafter has go first, whatever their row's priority."""
        if self._draft_groups:
            owners = self._pool.owner[ids // self._pool.stride]
            classes = np.where(np.isin(owners, self._draft_groups), np.uint8(CLASS_SCRAP), classes)
        return classes

    def _drop(self, ids: Int64Array) -> None:
        if len(ids):
            self._forgotten(ids)
            self._pool.drop_cached(ids)

    def _announce(self, group: ManagedGroup, fresh: FreshKeys, nodes: Int64Array, put: Int64Array) -> None:
        """Tell of the keys whose cells these blocks have made complete."""
        if self._events is None:
            return
        whole = (self.index.cells(group.number, nodes) >= 0).all(axis=1) & np.isin(nodes, self.index.node_of(put))
        # Two rows can have computed one prefix in the same step.
        _, first = np.unique(nodes, return_index=True)
        for i in np.sort(first[whole[first]]).tolist():
            row, number = int(fresh.rows[i]), int(fresh.numbers[i])
            parent = self._sequences.chain(row).between(number - 1, number)[0] if number else None
            ids = self._sequences.token_ids(row, number)
            self._events.append(BlockStored(fresh.keys[i], parent, ids, group.name))

    # -- what its users steer -----------------------------------------------------------------------------------------

    def pin(self, chain: KeyChain, max_tokens: int, salt: str) -> Pin:
        """Hold the longest cached prefix of a salt, so that it cannot be evicted until `unpin`."""
        hit = self.find(chain, max_tokens)
        pin = Pin(self._next_pin, hit.num_tokens)
        self._next_pin += 1
        self._pins[pin.number] = (hit.tail_first(), salt)
        return pin

    def unpin(self, pin: Pin) -> None:
        """Let go of a pinned prefix; it stays cached like any other, and counts for its salt's quota."""
        if pin.number not in self._pins:
            raise KvtideError(f"pin {pin.number} is not held; it was let go already")
        ids, salt = self._pins.pop(pin.number)
        self.release(ids, np.full(len(ids), CLASS_NORMAL, dtype=np.uint8), salt)

    def pinned_blocks(self) -> Int64Array:
        """Ids of the blocks that pins hold; a block occurs once per pin."""
        return np.concatenate([np.empty(0, dtype=np.int64), *(ids for ids, _ in self._pins.values())])

    def hold(self, ids: Int64Array, classes: npt.NDArray[np.uint8], salt: str) -> int:
        """Keep blocks from being reused until `unhold`; they then count as released by a request of that class."""
        self._pool.acquire(ids)
        self._next_hold += 1
        self._holds[self._next_hold] = (ids, classes, salt)
        return self._next_hold

    def unhold(self, number: int) -> None:
        """End a hold."""
        if number not in self._holds:
            raise KvtideError(f"hold {number} has ended already")
        self.release(*self._holds.pop(number))

    def held_blocks(self) -> Int64Array:
        """Ids of the blocks in holds; a block occurs once per hold."""
        return np.concatenate([np.empty(0, dtype=np.int64), *(ids for ids, _, _ in self._holds.values())])

    def forget(self, ids: Int64Array) -> None:
        """Forget those of the blocks that are cached and that nothing holds."""
        self._drop(ids[self._pool.cached[ids] & (self._pool.refs[ids] == 0)])

    def reset(self) -> None:
        """Forget every cached block that nothing holds."""
        idle = np.concatenate([self._pool.evictable_blocks(group.number) for group in self._groups])
        events = self._events
        if events is None or len(idle) < np.count_nonzero(self._pool.cached):
            # Some prefix is still held, so what goes is named one by one.
            self._drop(idle)
            return
        self._events = None
        self._drop(idle)
        self._events = [*events, AllBlocksCleared()]

    def take_events(self) -> list[KvEvent]:
        """The KV events since the last call; `KvtideError` when they are off."""
        if self._events is None:
            raise KvtideError("events are off; construct the manager with events=True")
        events, self._events = self._events, []
        return events


def _unique(ids: Int64Array) -> Int64Array:
    """Each id once, in the order of first occurrence."""
    _, first = np.unique(ids, return_index=True)
    distinct: Int64Array = ids[np.sort(first)]
    return distinct
