"""The storing half of offload: which blocks are put when, and what is held meanwhile.

    commit ─► due rows ─► whole blocks, windows at prefix ends ─► held ─► queue ─► staging has room ─► put ─► not held

A row is due when another of its blocks is whole or a prefix end is reached; rows that are not cost nothing. Blocks stay
held from when they are due until they are copied out, at most `max_held_bytes` of them, so that offload cannot keep the
engine from allocating. What would go beyond that is tried again at the next commit, as long as the row has it: a window
that slides on, and a row that leaves, are dropped and counted.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.hma import Evicted, HybridMemoryManager
from kvtide.hma.groups import ManagedGroup
from kvtide.hma.loads import LoadRun, key_numbers, needed_blocks
from kvtide.kvcache.specs import Int64Array

from .plan import BlockPlan
from .policies import WINDOW_KINDS, Action, Event, StorePolicy
from .staging import staging_bytes
from .store import Status
from .transfers import Transfer, Transfers, Value

# About as much is put at a time: what is copied out, and counted against the hold bound, as one.
PUT_BYTES = 4 << 20
NEVER = np.iinfo(np.int64).max


class _Piece(NamedTuple):
    """Held blocks that wait for staging memory; `ids[i]` are those of `values[i]`, one a table."""

    salt: str
    values: list[Value]
    ids: Int64Array
    num_bytes: int
    staging_bytes: int
    hold: int


class Storing:
    """`counts` and `bytes_by_kind` are the caller's, to be added to."""

    def __init__(
        self,
        manager: HybridMemoryManager,
        transfers: Transfers,
        plan: BlockPlan,
        policy: StorePolicy,
        *,
        max_held_bytes: int,
        counts: Counter[str],
        bytes_by_kind: Counter[tuple[str, str]],
    ) -> None:
        self.held_bytes = 0
        self._manager = manager
        self._transfers = transfers
        self._plan = plan
        self._policy = policy
        self._max_held_bytes = max_held_bytes
        self._put_bytes = max(min(PUT_BYTES, transfers.staging_bytes // 4, max_held_bytes // 4), 1)
        self._counts = counts
        self._bytes_by_kind = bytes_by_kind
        mine = [group for group in plan.groups if plan.is_writer(group)]
        self._bounded = [group for group in mine if group.is_bounded or group.is_state]
        self._whole = [group for group in mine if group not in self._bounded]
        # What leaves a window is looked at only if a rule says so.
        keeps = {kind for kind in WINDOW_KINDS if policy.action(Event.OUT_OF_WINDOW, kind) is Action.KEEP}
        self._sliding = [g for g in plan.groups if g.is_bounded and g.fmt.group.spec.kind not in keeps]
        self._evicting = [group for group in mine if policy.stores(Event.EVICTED, group.fmt.group.spec.kind)]
        if self._evicting:
            manager.on_evict(self.evicted)
        self._has_states = any(group.is_state for group in plan.groups)
        self._queue: deque[_Piece] = deque()
        self._puts: dict[Transfer, list[_Piece]] = {}
        self._holds: set[int] = set()
        rows, groups = manager.max_requests, len(manager.groups)
        self._stored = np.zeros(rows, dtype=np.int64)  # tokens of the groups that keep everything
        # Lengths at which windows and states are yet to be stored, ascending.
        self._ends: list[list[int]] = [[] for _ in range(rows)]
        self._stored_ends: list[list[int]] = [[] for _ in range(rows)]  # and those at which they have been
        self._slid = np.zeros((groups, rows), dtype=np.int64)  # blocks that had left the window at the last look
        self._due = np.full(rows, NEVER)
        # By block id, the mark of the content that was put from it or loaded into it.
        self._marks = np.zeros(len(manager.pool.refs), dtype=np.uint64)
        self._is_written_through = all(policy.stores(Event.COMMITTED, g.fmt.group.spec.kind) for g in self._whole)
        self._stores_committed = any(policy.stores(Event.COMMITTED, g.fmt.group.spec.kind) for g in self._whole)
        step = manager.load_step
        self._every = -(-policy.every_tokens // step) * step if not self._has_states else 0

    # -- a row --------------------------------------------------------------------------------------------------------

    def begin(self, row: int, hit: int, turn_ends: Iterable[int] = ()) -> None:
        """A row starts from a hit. Ends of turns are in tokens of the request."""
        manager, policy = self._manager, self._policy
        # What is hit was stored by whoever computed it, if whole blocks are stored at once.
        self._stored[row] = hit if self._is_written_through else 0
        self._ends[row] = []
        self._stored_ends[row] = [hit] if hit else []
        for group in self._sliding:
            self._slid[group.number, row] = int(group.first_block(np.array(hit)))
        if not self._has_states:
            # The last token of a prompt is never loaded, so the same prompt hits before it.
            ends = [manager.prompt_tokens(row) - 1] if policy.prompt_ends else []
            ends += [hit, manager.junction(row)] if policy.junctions else []
            ends += turn_ends if policy.turn_ends else []
            ends += [(hit // self._every + 1) * self._every] if self._every else []
            for end in ends:
                self._add_end(row, end, hit)
        self._set_due(row)

    def parted_at(self, row: int, num_tokens: int) -> None:
        """The store serves a row's prompt only so far; where it parts from what was there before, others may too."""
        if self._policy.junctions and not self._has_states:
            self._add_end(row, num_tokens, int(self._manager.committed[row]))
            self._set_due(row)

    def loaded(self, row: int, run: LoadRun) -> None:
        """Blocks that have come from the store need not be put."""
        group = self._manager.group(run.group)
        self._marks[group.table.to_ids(run.entries)] = self._marks_of(row, group, run.logical)

    def committed(self, rows: Int64Array) -> None:
        """Rows have committed more tokens: store what has become due."""
        for row in rows[self._manager.committed[rows] >= self._due[rows]].tolist():
            is_stored = self._store_whole(row, Event.COMMITTED)
            self._store_ends(row, Event.COMMITTED)
            self._slide(row)
            self._set_due(row)
            if not is_stored:
                self._due[row] = self._manager.committed[row] + 1
        self._pump()

    def checkpointed(self, row: int) -> None:
        """A checkpoint of the row's states was taken: hits can end here. It is read at the next commit."""
        committed = int(self._manager.committed[row])
        self._add_end(row, committed, committed)
        self._set_due(row)

    def leave(self, row: int, event: Event) -> list[tuple[str, npt.NDArray[np.int32]]]:
        """A row is about to leave: store what is left. Returns groups and entries of blocks to forget afterwards."""
        if not self._has_states:
            self._add_end(row, int(self._manager.committed[row]), 0)
        if not self._store_whole(row, event):
            self._counts["put_dropped_at_end"] += 1
        self._store_ends(row, event)
        self._pump()
        self._transfers.touch_prefix(self._plan.prefix(row, self._stored_ends[row]))
        self._due[row] = NEVER
        dropped = []
        for group in self._plan.groups:
            if not group.is_state and self._policy.action(event, group.fmt.group.spec.kind) is Action.DROP:
                _, entries = group.table.held(row)
                dropped.append((group.name, entries[:, entries[0] >= 0].copy()))
        return dropped

    def evicted(self, evicted: Sequence[Evicted]) -> None:
        """The device gives blocks to somebody else: copy out those that are to be stored and have not been."""
        for group, blocks in ((self._manager.group(each.group), each) for each in evicted):
            if group not in self._evicting:
                continue
            ids = group.table.to_ids(blocks.entries)
            new = np.flatnonzero((self._marks[ids] != self._marks_by(group, blocks.keys, blocks.parts)).any(axis=0))
            if not len(new):
                continue
            keys = [blocks.keys[i] for i in new.tolist()]
            values = self._plan.values_of(group, keys, blocks.parts[new], blocks.entries[:, new])
            # Nothing holds them, so it is now or never, and the step that takes them over must wait for the copies.
            transfer = self._transfers.put(values)
            if transfer is None:
                self._counts["evicted_dropped"] += len(values)
                continue
            transfer.wait_copied()
            self._bytes_by_kind["stored", group.fmt.group.spec.kind] += sum(value.num_bytes for value in values)

    def poll(self) -> None:
        """End the holds of what has been copied out; what waits for staging memory may have room now."""
        for transfer, batch in list(self._puts.items()):
            if transfer.released:
                for piece in batch:
                    self._unhold(piece)
            if transfer.released and transfer.statuses is not None:
                del self._puts[transfer]
                failed = np.array([status not in (Status.STORED, Status.PRESENT) for status in transfer.statuses])
                start = 0
                for piece in batch if failed.any() else ():
                    self._marks[piece.ids[failed[start : start + len(piece.ids)]]] = 0
                    start += len(piece.ids)
        self._pump()

    def close(self) -> None:
        """End all holds; the transfer engine has been closed."""
        for piece in (*self._queue, *(piece for batch in self._puts.values() for piece in batch)):
            self._unhold(piece)
        self._queue.clear()
        self._puts.clear()
        if self._evicting:
            self._manager.on_evict(None)

    # -- what is stored -----------------------------------------------------------------------------------------------

    def _add_end(self, row: int, num_tokens: int, least: int) -> None:
        end = self._plan.length(num_tokens) if not self._has_states else num_tokens
        if end >= max(least, 1) and end not in self._ends[row]:
            insort(self._ends[row], end)

    def _set_due(self, row: int) -> None:
        nexts = self._ends[row][:1] if self._bounded else []
        base, stored = self._manager.base, int(self._stored[row])
        if self._sliding:
            nexts = [*nexts, (int(self._manager.committed[row]) // base + 1) * base]
        if self._stores_committed:
            is_prompt = stored + base <= self._manager.prompt_tokens(row)
            nexts = [*nexts, stored + (base if is_prompt else max(base, self._policy.generated_tokens))]
        self._due[row] = min(nexts, default=NEVER)

    def _store_whole(self, row: int, event: Event) -> bool:
        """Store the blocks that the groups which keep everything have whole; False when the hold bound forbids some."""
        groups = [group for group in self._whole if self._policy.stores(event, group.fmt.group.spec.kind)]
        base = self._manager.base
        # Where groups are stored at different events, marks know what is left of each.
        start = int(self._stored[row]) if self._is_written_through or event is Event.COMMITTED else 0
        end = int(self._manager.committed[row]) // base * base
        token_bytes = sum(group.fmt.block_bytes * group.fmt.tables // group.fmt.block_size for group in groups)
        step = max(self._put_bytes // max(token_bytes, 1) // base, 1) * base
        for stop in (*range(start + step, end, step), end) if groups and end > start else ():
            runs = []
            for group in groups:
                first, last = start // group.fmt.block_size, stop // group.fmt.block_size
                entries = group.table.entries[:, row, first:last]  # its rows hold every block, from the first on
                runs.append((group, LoadRun(group.name, np.arange(first, last), entries)))
            if not self._is_written_through:
                runs = [(group, self._not_put(row, group, run)) for group, run in runs]
            if not self._hold(row, runs):
                return False
            self._stored[row] = start = stop
        return True

    def _store_ends(self, row: int, event: Event) -> None:
        """Store the windows, and the checkpoints, at the prefix ends that have been reached."""
        ends, step = self._ends[row], self._manager.load_step
        groups = [group for group in self._bounded if self._policy.stores(event, group.fmt.group.spec.kind)]
        while ends and ends[0] <= self._manager.committed[row]:
            end = ends.pop(0)
            if self._every and end % self._every == 0:
                self._add_end(row, end + self._every, 0)
            # Where a hit gives up the last length that all groups agree on, there have to be two.
            lengths = [end - step, end] if self._manager.drop_last_block and end > step else [end]
            wanted = [
                (group, np.unique(np.concatenate([needed_blocks(group, n)[0] for n in lengths]))) for group in groups
            ]
            runs = [(group, self._run(row, group, blocks)) for group, blocks in wanted]
            if any((run.entries < 0).any() for _, run in runs):
                self._counts["ends_incomplete"] += 1  # a window that lacks a block completes no hit
            elif not self._hold(row, [(group, self._not_put(row, group, run)) for group, run in runs]):
                self._counts["ends_dropped"] += 1
            else:
                self._stored_ends[row] += lengths

    def _slide(self, row: int) -> None:
        """Store or forget what has left a window."""
        for group in self._sliding:
            first = int(group.first_block(self._manager.committed[row]))
            blocks = np.arange(self._slid[group.number, row], first)
            self._slid[group.number, row] = first
            run = self._run(row, group, blocks)
            run = _chosen(run, np.flatnonzero((run.entries >= 0).all(axis=0)))
            if not self._policy.stores(Event.OUT_OF_WINDOW, group.fmt.group.spec.kind):
                self._manager.forget(group.name, run.entries)
            elif self._plan.is_writer(group) and not self._hold(row, [(group, self._not_put(row, group, run))]):
                self._counts["ends_dropped"] += 1

    def _run(self, row: int, group: ManagedGroup, blocks: Int64Array) -> LoadRun:
        return LoadRun(group.name, blocks, self._manager.blocks_of(row, group.name, blocks))

    def _not_put(self, row: int, group: ManagedGroup, run: LoadRun) -> LoadRun:
        """Those of the blocks that have been neither put nor loaded as they are."""
        marks = self._marks[group.table.to_ids(run.entries)]
        return _chosen(run, np.flatnonzero((marks != self._marks_of(row, group, run.logical)).any(axis=0)))

    def _hold(self, row: int, runs: Sequence[tuple[ManagedGroup, LoadRun]]) -> bool:
        """Hold blocks and queue them; False, and nothing, if that would hold too much."""
        num_bytes = sum(run.entries.size * group.fmt.block_bytes for group, run in runs)
        if self.held_bytes + num_bytes > self._max_held_bytes:
            # What was queued may be copied out by now; on a CPU it is as soon as staging takes it.
            self._pump()
            self._transfers.poll()
            self.poll()
        if self.held_bytes + num_bytes > self._max_held_bytes:
            self._counts["put_over_hold_bound"] += 1
            return False
        salt = self._manager.salt(row)
        for group, whole in runs:
            value_bytes = group.fmt.block_bytes * group.fmt.tables
            at_once = max(self._put_bytes // staging_bytes(value_bytes), 1)
            for first in range(0, len(whole.logical), at_once):
                run = _chosen(whole, slice(first, first + at_once))
                hold = self._manager.hold(row, group.name, run.entries)
                self._holds.add(hold)
                values, _ = self._plan.values(row, run)
                ids = group.table.to_ids(run.entries).T
                needs = len(values) * staging_bytes(values[0].num_bytes)
                size = len(values) * value_bytes
                self._queue.append(_Piece(salt, values, ids, size, needs, hold))
                self._bytes_by_kind["stored", group.fmt.group.spec.kind] += size
                if not self._is_written_through or group.is_bounded or group.is_state or self._evicting:
                    self.loaded(row, run)
        self.held_bytes += num_bytes
        return True

    def _marks_of(self, row: int, group: ManagedGroup, blocks: Int64Array) -> npt.NDArray[np.uint64]:
        """What stands for the content of a row's blocks, `[tables, n]`."""
        numbers = key_numbers(group, blocks)
        low = int(numbers.min(initial=NEVER)) if len(numbers) else 0
        chain = self._manager.keys(row, low, int(numbers.max(initial=0)) + 1)
        return self._marks_by(group, [chain[number - low] for number in numbers.tolist()], blocks)

    def _marks_by(self, group: ManagedGroup, keys: Sequence[bytes], blocks: Int64Array) -> npt.NDArray[np.uint64]:
        """Half of the chain key of each block, and which of the key's blocks and tables it is; `[tables, n]`."""
        halves = np.frombuffer(b"".join(keys), dtype="<u8")[::2]
        parts = blocks % group.blocks_per_key + group.number * group.blocks_per_key
        places = parts + np.arange(1, group.fmt.tables + 1)[:, None] * len(self._manager.groups) * group.blocks_per_key
        marks: npt.NDArray[np.uint64] = halves ^ (places.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        return marks

    def _pump(self) -> None:
        """Put what is queued, as long as staging has room; pieces of one salt go together."""
        while self._queue:
            batch = [self._queue.popleft()]
            needs = batch[0].staging_bytes
            while self._queue and self._queue[0].salt == batch[0].salt and needs < self._put_bytes:
                batch.append(self._queue.popleft())
                needs += batch[-1].staging_bytes
            values = [value for piece in batch for value in piece.values]
            transfer = None
            if needs <= self._transfers.staging_bytes_free:
                transfer = self._transfers.put(values, owner=batch[0].salt)
            if transfer is not None:
                self._puts[transfer] = batch
            elif self._transfers.staging_bytes_free == self._transfers.staging_bytes:
                self._counts["put_over_staging"] += len(values)  # it never will have room for them
                for piece in batch:
                    self._unhold(piece)
                    self._marks[piece.ids] = 0
            else:
                self._queue.extendleft(reversed(batch))
                return

    def _unhold(self, piece: _Piece) -> None:
        if piece.hold in self._holds:
            self._holds.remove(piece.hold)
            self._manager.unhold(piece.hold)
            self.held_bytes -= piece.num_bytes


def _chosen(run: LoadRun, which: npt.NDArray[np.intp] | slice) -> LoadRun:
    return LoadRun(run.group, run.logical[which], run.entries[:, which])
