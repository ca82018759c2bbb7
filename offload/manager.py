"""`OffloadManager`: a `HybridMemoryManager` whose prefixes go on in a store.

    admit, resume ─► look-up ─► reserve_load ─► load ─► settle ─► the row is ready
                        └─ nothing worth it, no room, a fault ─────────┘ (what did not arrive is computed)
    commit ─► blocks that became whole ─► held ─► put            preempt, release ─► the last windows too

An engine calls it in place of the manager for these, reserves only for rows that are `ready`, and calls `poll` at every
step boundary. A load takes, per group, only what a row of that length holds: every block of full attention, the last
blocks of a window. A hit is the longest length that all groups can serve, from device and store together. Nothing here
waits for the store, and no fault of it does more than leave tokens to be computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide.hma import Admission, HybridMemoryManager
from kvtide.hma.groups import ManagedGroup
from kvtide.hma.loads import LoadRun, needed_blocks
from kvtide.kvcache import ConfigError, Exhausted, ModelLayout
from kvtide.kvcache.specs import Int64Array

from .keys import REPLICATED, HeadPart, StoreKey, ValueSpace, store_key
from .policies import LoadPolicy, StorePolicy
from .requests import LeaseOperation
from .store import Status
from .transfers import Transfer, Transfers, Value

# Blocks that puts hold at a time, as a share of the pool: offload must never keep the engine from allocating.
MAX_HELD_SHARE = 0.1


@dataclass
class _Load:
    """A row on its way: first its look-up, then its transfer up to `num_tokens`."""

    look_up: LeaseOperation | None
    keys: list[tuple[ManagedGroup, int, int]]  # group, table, logical block of every key looked up
    transfer: Transfer | None = None
    num_tokens: int = 0
    values: list[tuple[ManagedGroup, int]] | None = None  # group and logical block of every value


class OffloadManager:
    """Offload for one rank.

    `model` and `revision` name the weights. `full_layout` is the layout of all ranks where `manager`'s is one rank's
    share (`ModelLayout.shard`); groups that sharding leaves alone are stored once, by rank 0. Ranks agree on keys if
    their managers have the same `key_space`. `stores`, `loads`: the engine's role. `counts` has tokens by where they
    came from (`tokens_device`, `tokens_store`) and what went otherwise, by name.
    """

    def __init__(
        self,
        manager: HybridMemoryManager,
        transfers: Transfers,
        *,
        model: str,
        revision: str = "",
        full_layout: ModelLayout | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        store_policy: StorePolicy | None = None,
        load_policy: LoadPolicy | None = None,
        stores: bool = True,
        loads: bool = True,
    ) -> None:
        if not 0 <= tp_rank < tp_size:
            raise ConfigError(f"tp_rank {tp_rank} must be from 0 to {tp_size - 1}")
        if not manager.prefix_caching:
            raise ConfigError("offload needs a manager with prefix caching: keys say what is stored")
        self.manager = manager
        self.transfers = transfers
        self.counts: Counter[str] = Counter()
        self._step = manager.load_step
        self._store_policy = store_policy or StorePolicy()
        self._load_policy = load_policy or LoadPolicy()
        # Cross attention depends on images, states on the engine's checkpoints: such layouts stay on the device.
        offloadable = not any(group.is_state or group.is_cross for group in manager.groups)
        self._loads = loads and offloadable
        full = {layer.index: layer.spec for layer in (full_layout or manager.geometry.layout).layers}
        self._spaces: dict[tuple[int, int, int], bytes] = {}
        self._stored_groups: list[ManagedGroup] = []
        for group in manager.groups if offloadable else ():
            spec = full[group.fmt.group.layers[0]]
            replicated = spec == group.fmt.group.spec
            if stores and (tp_rank == 0 or not replicated):
                self._stored_groups.append(group)
            per_table = group.fmt.layers_per_block
            for table in range(group.fmt.tables):
                for part in range(group.blocks_per_key):
                    self._spaces[group.number, table, part] = ValueSpace(
                        model=model,
                        revision=revision,
                        # Where several blocks share a key, each is a part of what the key stands for.
                        layer_spec=f"{spec!r} part {part} of {group.blocks_per_key}",
                        layers=tuple(group.fmt.group.layers[table * per_table : (table + 1) * per_table]),
                        heads=REPLICATED if replicated else HeadPart(tp_rank, tp_size),
                        block_tokens=group.fmt.block_size,
                    ).digest()
        self._active: dict[int, _Load] = {}
        self._ready: list[int] = []
        self._puts: dict[Transfer, list[int]] = {}
        self._held_bytes = 0
        # Per row: tokens up to which full-attention blocks were stored, and whether the prompt's windows were.
        self._stored = np.zeros(manager.max_requests, dtype=np.int64)
        self._prompt_stored = np.zeros(manager.max_requests, dtype=np.bool_)

    # -- a request comes and goes -------------------------------------------------------------------------------------

    def admit(self, request_id: str, token_ids: npt.ArrayLike, **options: Any) -> Admission:
        """`HybridMemoryManager.admit`; then looks further in the store. Reserve for the row once it is ready."""
        admission = self.manager.admit(request_id, token_ids, **options)
        self._prompt_stored[admission.row] = False
        self._begin(admission)
        return admission

    def resume(self, row: int) -> Admission:
        """`HybridMemoryManager.resume`, the same way."""
        admission = self.manager.resume(row)
        self._begin(admission)
        return admission

    def preempt(self, row: int) -> None:
        """Store what the row has, so that it can come back by loading, and preempt it."""
        self._end(row)
        self.manager.preempt(row)

    def release(self, row: int) -> None:
        """Store what is left to store, and release the row; at any stage."""
        self._end(row)
        self.manager.release(row)

    def abort(self, request_id: str) -> None:
        """Release a request by name."""
        self.release(self.manager.row_of(request_id))

    def ready(self, row: int) -> bool:
        """Whether the row is neither being looked up nor loaded."""
        return row not in self._active

    def commit(self, rows: npt.ArrayLike, num_accepted: npt.ArrayLike, token_ids: npt.ArrayLike | None = None) -> None:
        """`HybridMemoryManager.commit`; blocks that have become whole are stored as the policy says."""
        self.manager.commit(rows, num_accepted, token_ids)
        for row in np.asarray(rows).tolist() if self._stored_groups else ():
            committed = int(self.manager.committed[row])
            # The last token of a prompt is never loaded, so this is where the same prompt hits.
            prompt_end = (self.manager.prompt_tokens(row) - 1) // self._step * self._step
            ends = self._store_policy.at_prompt_end and not self._prompt_stored[row] and committed >= prompt_end > 0
            if ends:
                self._prompt_stored[row] = True
                self._put(row, prompt_end, windows=True)
            elif self._store_policy.while_running:
                self._put(row, committed // self.manager.base * self.manager.base, windows=False)

    def poll(self) -> list[int]:
        """Bring everything one step further, without waiting. Returns the rows that have become ready."""
        polled = self.transfers.poll()
        for transfer in polled.released:
            self._unhold(transfer)
        for row, load in list(self._active.items()):
            if load.transfer is None:
                self._looked_up(row, load)
            elif load.transfer.statuses is not None:
                self._loaded(row, load, load.transfer.statuses)
        ready, self._ready = self._ready, []
        return ready

    @property
    def held_bytes(self) -> int:
        """Bytes of blocks that puts hold."""
        return self._held_bytes

    def close(self, timeout: float = 5.0) -> bool:
        """Give up loads, finish puts, end holds; False if the store hung. The store stays open."""
        for row in list(self._active):
            self._cancel(row)
        closed = self.transfers.close(timeout)
        for transfer in list(self._puts):
            self._unhold(transfer)
        return closed

    # -- loading ------------------------------------------------------------------------------------------------------

    def _begin(self, admission: Admission) -> None:
        row, hit = admission.row, admission.num_cached_tokens
        self.counts["tokens_device"] += hit
        self._stored[row] = hit
        manager = self.manager
        known = manager.num_tokens(row)
        most = known if known > manager.prompt_tokens(row) else known - 1
        limit = most // self._step * self._step
        if not self._loads or limit - hit < self._load_policy.min_tokens:
            self._ready.append(row)
            return
        keys, places = self._keys(row, hit, limit)
        look_up = self.transfers.look_up(keys)
        if look_up is None:
            self.counts["look_up_dropped"] += 1
            self._ready.append(row)
            return
        self._active[row] = _Load(look_up, places, num_tokens=limit)

    def _keys(self, row: int, hit: int, limit: int) -> tuple[list[StoreKey], list[tuple[ManagedGroup, int, int]]]:
        """Keys of every block of every group that ends in `(hit, limit]`."""
        base = self.manager.base
        chain = self.manager.keys(row, 0, limit // base)
        keys, places = [], []
        for group in self.manager.groups:
            size = group.fmt.block_size
            for logical in range(hit // size, limit // size):
                number = -(-(logical + 1) * size // base) - 1
                part = logical % group.blocks_per_key
                for table in range(group.fmt.tables):
                    keys.append(store_key(self._spaces[group.number, table, part], chain[number]))
                    places.append((group, table, logical))
        return keys, places

    def _looked_up(self, row: int, load: _Load) -> None:
        assert load.look_up is not None
        statuses = load.look_up.statuses
        if statuses is None:
            return
        hit = int(self.manager.committed[row])
        length = self._longest(row, hit, load, statuses)
        if length > hit and self._start_load(row, load, length):
            return
        self._be_ready(row)

    def _longest(self, row: int, hit: int, load: _Load, statuses: list[Status]) -> int:
        """The longest length that every group can serve from what the row holds and what the store has."""
        limit = load.num_tokens
        there: dict[int, Int64Array] = {}
        for group in self.manager.groups:
            blocks = np.zeros(limit // group.fmt.block_size, dtype=np.int64)
            held, _ = group.table.held(row)
            blocks[held[held < len(blocks)]] = group.fmt.tables
            there[group.number] = blocks
        for (group, _, logical), status in zip(load.keys, statuses, strict=True):
            there[group.number][logical] += status is Status.HIT
        for length in range(limit, hit, -self._step):
            if all(
                (there[group.number][needed_blocks(group, length)[0]] >= group.fmt.tables).all()
                for group in self.manager.groups
            ):
                return length
        return hit

    def _start_load(self, row: int, load: _Load, length: int) -> bool:
        hit = int(self.manager.committed[row])
        try:
            runs = self.manager.reserve_load(row, length)
        except Exhausted:
            self.counts["load_without_room"] += 1
            return False
        values, load.values = self._values(row, runs)
        if self._load_policy.is_worth(length - hit, sum(value.num_bytes for value in values)):
            load.transfer, taken = self.transfers.get(values)
            if load.transfer is not None and taken == len(values):
                load.num_tokens = length
                return True
            # The leading values of a hit are of no use to a window that lacks its own.
            self.counts["load_without_staging"] += 1
            if load.transfer is not None:
                load.transfer.cancel()
        self.manager.cancel_load(row)
        return False

    def _values(self, row: int, runs: Iterable[LoadRun]) -> tuple[list[Value], list[tuple[ManagedGroup, int]]]:
        base, unit = self.manager.base, self.manager.geometry.unit
        values, places = [], []
        for run in runs:
            group = self.manager.group(run.group)
            size, block_bytes = group.fmt.block_size, group.fmt.block_bytes
            per_table = group.fmt.layers_per_block
            for at, logical in enumerate(run.logical.tolist()):
                number = -(-(logical + 1) * size // base) - 1
                (chain,) = self.manager.keys(row, number, number + 1)
                for table in range(group.fmt.tables):
                    space = self._spaces[group.number, table, logical % group.blocks_per_key]
                    offset = int(run.entries[table, at]) * unit
                    layers = tuple(group.fmt.group.layers[table * per_table : (table + 1) * per_table])
                    values.append(Value(store_key(space, chain), ((offset, block_bytes),), layers))
                    places.append((group, logical))
        return values, places

    def _loaded(self, row: int, load: _Load, statuses: list[Status]) -> None:
        """Keep the longest prefix that arrived; the rest is computed."""
        manager = self.manager
        hit = int(manager.committed[row])
        assert load.values is not None
        assert load.transfer is not None
        failed: dict[str, list[int]] = {}
        for (group, logical), status in zip(load.values, statuses, strict=True):
            if status is not Status.HIT:
                self.counts["blocks_not_loaded"] += 1
                failed.setdefault(group.name, []).append(logical)
        for layer in load.transfer.layers:
            load.transfer.wait_layer(layer)
        self._stored[row] = manager.settle_load(row, failed).num_cached_tokens
        self.counts["tokens_store"] += max(int(self._stored[row]) - hit, 0)
        self._be_ready(row)

    def _be_ready(self, row: int) -> None:
        load = self._active.pop(row)
        if load.look_up is not None:
            load.look_up.close()
        self._ready.append(row)

    def _cancel(self, row: int) -> None:
        """Give up a row's look-up or load; the row itself is about to leave, or starts from the device's hit."""
        load = self._active.pop(row, None)
        if load is None:
            return
        if load.look_up is not None:
            load.look_up.close()
        if load.transfer is not None:
            load.transfer.cancel()
            self.manager.cancel_load(row)
        self.counts["cancelled"] += 1

    # -- storing ------------------------------------------------------------------------------------------------------

    def _end(self, row: int) -> None:
        self._cancel(row)
        if row in self._ready:
            self._ready.remove(row)
        manager = self.manager
        is_running = 0 <= row < manager.max_requests and row in manager.running_rows
        if is_running and self._store_policy.at_end and self._stored_groups:
            self._put(row, int(manager.committed[row]) // self._step * self._step, windows=True)

    def _put(self, row: int, length: int, *, windows: bool) -> None:
        """Store the row's full-attention blocks up to `length`, and with `windows` those of the windows there."""
        manager = self.manager
        runs = []
        for group in self._stored_groups:
            size = group.fmt.block_size
            if group.is_bounded:
                if not windows or length % size:
                    continue
                logical, _ = needed_blocks(group, length)
            else:
                logical = np.arange(int(self._stored[row]) // size, length // size)
            entries = manager.blocks_of(row, group.name, logical)
            kept = (entries >= 0).all(axis=0)
            # A window that is not whole completes no hit.
            if kept.any() and (kept.all() or not group.is_bounded):
                runs.append(LoadRun(group.name, logical[kept], entries[:, kept]))
        self._stored[row] = max(int(self._stored[row]), length)
        values, _ = self._values(row, runs)
        num_bytes = sum(value.num_bytes for value in values)
        if not values:
            return
        if self._held_bytes + num_bytes > MAX_HELD_SHARE * manager.pool.num_pages * manager.geometry.page_bytes:
            self.counts["put_over_hold_bound"] += len(values)
            return
        transfer = self.transfers.put(values, owner=manager.salt(row))
        if transfer is not None:
            self._held_bytes += num_bytes
            self._puts[transfer] = [manager.hold(row, run.group, run.entries) for run in runs]

    def _unhold(self, transfer: Transfer) -> None:
        holds = self._puts.pop(transfer, None)
        if holds is not None:
            self._held_bytes -= sum(value.num_bytes for value in transfer.values)
            for hold in holds:
                self.manager.unhold(hold)
