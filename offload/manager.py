"""`OffloadManager`: a `HybridMemoryManager` whose prefixes go on in a store.

    admit, resume ─► look-up ─► reserve_load ─► load ─► settle ─► the row is ready
         │              └─ nothing worth it, no room, a fault ─────────┘ (what did not arrive is computed)
         └─ another row is loading the same ─► look again when it is done
    commit, checkpoint, preempt, release ─► what the policy says is stored (`storing`)

An engine calls it in place of the manager for these, reserves only for rows that are `ready`, and calls `poll` at every
step boundary. A load takes, per group, only what a row of that length holds and the device lacks: every block of full
attention, the last blocks of a window, one checkpoint of a state. A hit is the longest length that all groups can
serve, from device and store together. Nothing here waits for the store, and no fault of it does more than leave tokens
to be computed. Not thread-safe: the manager's thread calls it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.hma import Admission, Copy, HybridMemoryManager
from kvtide.hma.loads import LoadRun, needed_blocks
from kvtide.kvcache import ConfigError, Exhausted, ModelLayout

from .plan import BlockPlan, Found, Question
from .policies import Event, LoadPolicy, StorePolicy
from .requests import LeaseOperation
from .staging import staging_bytes
from .store import Status
from .storing import Storing
from .transfers import Transfer, Transfers, Value

# Blocks that puts hold at a time, as a share of the pool: offload must never keep the engine from allocating.
MAX_HELD_SHARE = 0.1
# After a load that failed in part the store is asked once more: what it has left may serve a shorter length.
ATTEMPTS = 2


@dataclass(eq=False)
class _Load:
    """A row on its way: it waits for another row, then for its look-up, then for its values.

    `num_sent` of the values have been asked for, in `transfers`; `groups` and `blocks` say where each belongs.
    """

    attempt: int
    first_key: bytes
    waits_for: _Load | None = None
    question: Question | None = None
    look_up: LeaseOperation | None = None
    junction: int = 0
    is_loading: bool = False
    runs: list[LoadRun] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    num_sent: int = 0
    progressed: float = 0.0


class OffloadStats(NamedTuple):
    """Now and since the start.

    `tokens` of requests by where they were hit: `device`, `store`. `bytes_by_kind`: by place (`device`, `store` or
    `stored`) and layer kind, what hits took over from each and what was given to puts. `counts`: what was dropped,
    given up or failed, by name. Rows that are looked up or loaded, bytes held for puts, and free staging bytes are of
    now.
    """

    tokens: dict[str, int]
    bytes_by_kind: dict[tuple[str, str], int]
    counts: dict[str, int]
    rows_on_their_way: int
    held_bytes: int
    staging_bytes_free: int


class OffloadManager:
    """Offload for one rank.

    `model` and `revision` name the weights. `full_layout` is the layout of all ranks where `manager`'s is one rank's
    share (`ModelLayout.shard`); ranks agree on keys if their managers have the same `key_space` and block sizes.
    Groups that several ranks hold alike are stored by the first of them. `read_tp_sizes` names larger TP sizes whose
    values are read as well. `stores`, `loads`: the engine's role. `max_held_bytes` of the pool may be held for puts, a
    tenth of it if None. With `layerwise`, a row is ready while its values are still on their way from staging memory
    to the device: the engine calls `wait_layer` in every step, before each layer.
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
        read_tp_sizes: Sequence[int] = (),
        store_policy: StorePolicy | None = None,
        load_policy: LoadPolicy | None = None,
        stores: bool = True,
        loads: bool = True,
        max_held_bytes: int | None = None,
        layerwise: bool = False,
    ) -> None:
        if not manager.prefix_caching:
            raise ConfigError("offload needs a manager with prefix caching: keys say what is stored")
        self.manager = manager
        self.transfers = transfers
        self._plan = BlockPlan(
            manager,
            model=model,
            revision=revision,
            full_layout=full_layout,
            tp_rank=tp_rank,
            tp_size=tp_size,
            read_tp_sizes=read_tp_sizes,
        )
        self._counts: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._bytes_by_kind: Counter[tuple[str, str]] = Counter()
        pool_bytes = manager.pool.num_pages * manager.geometry.page_bytes
        self._storing = Storing(
            manager,
            transfers,
            self._plan,
            store_policy or StorePolicy(),
            max_held_bytes=int(MAX_HELD_SHARE * pool_bytes) if max_held_bytes is None else max_held_bytes,
            counts=self._counts,
            bytes_by_kind=self._bytes_by_kind,
        )
        self._policy = load_policy or LoadPolicy()
        self._stores = stores
        self._loads = loads
        self._layerwise = layerwise
        # Loads of rows that have become ready, whose copies only the layers that need them wait for.
        self._arriving: list[Transfer] = []
        self._active: dict[int, _Load] = {}
        # Which load is to bring the block behind a hit, by that block's key.
        self._bringing: dict[bytes, _Load] = {}
        self._turn_ends: dict[int, list[int]] = {}
        self._ready: list[int] = []

    # -- a request comes and goes -------------------------------------------------------------------------------------

    def admit(
        self, request_id: str, token_ids: npt.ArrayLike, *, turn_ends: Iterable[int] = (), **options: Any
    ) -> Admission:
        """`HybridMemoryManager.admit`; then looks further in the store. Reserve for the row once it is ready.

        `turn_ends` are lengths in tokens at which prefixes of later prompts are likely to end: of a system prompt, of
        turns of a conversation.
        """
        admission = self.manager.admit(request_id, token_ids, **options)
        self._turn_ends[admission.row] = list(turn_ends)
        self._begin(admission)
        return admission

    def resume(self, row: int) -> Admission:
        """`HybridMemoryManager.resume`, the same way."""
        admission = self.manager.resume(row)
        self._begin(admission)
        return admission

    def preempt(self, row: int) -> None:
        """Preempt a row; if loading it back is worth it, store what it has first."""
        self._leave(row, Event.PREEMPTED)

    def release(self, row: int) -> None:
        """Store what is left to store, and release the row; at any stage."""
        self._leave(row, Event.FINISHED)

    def abort(self, request_id: str) -> None:
        """Release a request by name."""
        self.release(self.manager.row_of(request_id))

    def ready(self, row: int) -> bool:
        """Whether the row is neither being looked up nor loaded."""
        return row not in self._active

    def commit(self, rows: npt.ArrayLike, num_accepted: npt.ArrayLike, token_ids: npt.ArrayLike | None = None) -> None:
        """`HybridMemoryManager.commit`; blocks that have become whole are stored as the policy says."""
        self.manager.commit(rows, num_accepted, token_ids)
        if self._stores:
            self._storing.committed(np.asarray(rows, dtype=np.int64))

    def checkpoint(self, row: int) -> list[Copy]:
        """`HybridMemoryManager.checkpoint`; make the copies at once: the checkpoint is stored at the next commit."""
        copies = self.manager.checkpoint(row)
        if copies and self._stores:
            self._storing.checkpointed(row)
        return copies

    def poll(self) -> list[int]:
        """Bring everything one step further, without waiting. Returns the rows that have become ready."""
        self._await_copies()
        self.transfers.poll()
        self._storing.poll()
        for row, load in list(self._active.items()):
            if load.waits_for is not None:
                if self._bringing.get(load.first_key) is not load.waits_for:
                    self._begin_again(row, self.manager.look_again(row), load.attempt, may_wait=False)
            elif not load.is_loading:
                self._looked_up(row, load)
            if load.is_loading and self._active.get(row) is load:
                self._load(row, load)
        ready, self._ready = self._ready, []
        return ready

    def wait_layer(self, layer: int) -> None:
        """Let the current stream wait until a layer of the rows that have become ready is on the device.

        Call it, with `layerwise`, before the layer's keys and values are written or read. Without a device it is done.
        """
        for transfer in self._arriving:
            transfer.wait_layer(layer)

    def stats(self) -> OffloadStats:
        """What has been moved and what is on its way."""
        return OffloadStats(
            dict(self._tokens),
            dict(self._bytes_by_kind),
            dict(self._counts),
            len(self._active),
            self._storing.held_bytes,
            self.transfers.staging_bytes_free,
        )

    def close(self, timeout: float = 5.0) -> bool:
        """Give up loads, finish puts, end holds; False if the store hung. The store stays open.

        Rows stay as they are; they can be released, and nothing is stored any more.
        """
        for row, load in list(self._active.items()):
            self._drop(row, load)
            if load.is_loading:
                self.manager.cancel_load(row)
        self._stores = self._loads = False
        closed = self.transfers.close(timeout)
        self._storing.close()
        return closed

    # -- loading ------------------------------------------------------------------------------------------------------

    def _begin(self, admission: Admission) -> None:
        hit = admission.num_cached_tokens
        self._tokens["device"] += hit
        for group in self._plan.groups if hit else ():
            num_bytes = len(needed_blocks(group, hit)[0]) * group.fmt.block_bytes * group.fmt.tables
            self._bytes_by_kind["device", group.fmt.group.spec.kind] += num_bytes
        self._begin_again(admission.row, admission, 1)

    def _begin_again(self, row: int, admission: Admission, attempt: int, *, may_wait: bool = True) -> None:
        """Look further than a hit, wait (once) for the row that brings what is needed next, or be ready."""
        hit, base = admission.num_cached_tokens, self.manager.base
        self._active.pop(row, None)
        if self._stores:
            self._storing.begin(row, hit, self._turn_ends.get(row, ()))
        limit = self.manager.most_cached(row) // base * base
        if not self._loads or attempt > ATTEMPTS or limit - hit < max(self._policy.min_tokens, 1):
            self._ready.append(row)
            return
        (first_key,) = self.manager.keys(row, hit // base, hit // base + 1)
        load = self._active[row] = _Load(attempt, first_key, self._bringing.get(first_key) if may_wait else None)
        if load.waits_for is not None:
            return
        load.question = self._plan.question(row, hit)
        load.look_up = self.transfers.look_up(load.question.keys) if load.question.keys else None
        if load.look_up is None:
            self._counts["look_up_dropped"] += bool(load.question.keys)
            self._be_ready(row, load)
            return
        self._bringing.setdefault(first_key, load)

    def _looked_up(self, row: int, load: _Load) -> None:
        assert load.look_up is not None
        assert load.question is not None
        statuses = load.look_up.statuses
        if statuses is None:
            return
        found = self._plan.found(load.question, statuses)
        serves = self._plan.serves(row, found, load.question.limit)
        load.junction = serves.junction
        if not self._start_load(row, load, found, serves.num_tokens):
            self._be_ready(row, load)

    def _start_load(self, row: int, load: _Load, found: Found, length: int) -> bool:
        hit = int(self.manager.committed[row])
        if length <= hit:
            return False
        if not self._policy.is_worth(length - hit, self._plan.num_bytes(row, length)):
            self._counts["load_not_worth_it"] += 1
            return False
        try:
            load.runs = self.manager.reserve_load(row, length)
        except Exhausted:
            self._counts["load_without_room"] += 1
            return False
        for run in load.runs:
            values, blocks = self._plan.values(row, run, found)
            load.values += values
            load.blocks += blocks
            load.groups += [run.group] * len(values)
        load.is_loading = True
        load.progressed = time.monotonic()
        return True

    def _load(self, row: int, load: _Load) -> None:
        """Ask for more values as staging has room; settle when all have come or failed."""
        rest = load.values[load.num_sent :]
        if rest and staging_bytes(rest[0].num_bytes) <= self.transfers.staging_bytes_free:
            transfer, taken = self.transfers.get(rest)
            if transfer is not None:
                load.transfers.append(transfer)
                load.num_sent += taken
        statuses = [status for transfer in load.transfers for status in transfer.statuses or ()]
        if len(statuses) < load.num_sent:
            load.progressed = time.monotonic()
            return
        if load.num_sent < len(load.values):
            if time.monotonic() < load.progressed + self._policy.patience_s:
                return
            self._counts["load_without_staging"] += 1
        statuses += [Status.ERROR] * (len(load.values) - len(statuses))
        self._loaded(row, load, statuses)

    def _loaded(self, row: int, load: _Load, statuses: Sequence[Status]) -> None:
        hit = int(self.manager.committed[row])
        failed: dict[str, list[int]] = {}
        for value, group, block, status in zip(load.values, load.groups, load.blocks, statuses, strict=True):
            if status is Status.HIT:
                self._bytes_by_kind["store", self.manager.group(group).fmt.group.spec.kind] += value.num_bytes
            else:
                self._counts[f"load_{status.name.lower()}"] += 1
                failed.setdefault(group, []).append(block)
        for run in load.runs if self._stores else ():
            arrived = ~np.isin(run.logical, failed.get(run.group, []))
            self._storing.loaded(row, LoadRun(run.group, run.logical[arrived], run.entries[:, arrived]))
        self._drop(row, load)
        admission = self.manager.settle_load(row, failed)
        self._tokens["store"] += max(admission.num_cached_tokens - hit, 0)
        self._begin_again(row, admission, load.attempt + 1 if failed else ATTEMPTS + 1)
        if self._stores:
            self._storing.parted_at(row, load.junction)

    def _be_ready(self, row: int, load: _Load) -> None:
        self._drop(row, load)
        self._ready.append(row)
        if self._stores:
            self._storing.parted_at(row, load.junction)

    def _drop(self, row: int, load: _Load) -> None:
        """A row is no longer on its way: close its lease, cancel its transfers, let others look again."""
        del self._active[row]
        if self._bringing.get(load.first_key) is load:
            del self._bringing[load.first_key]
        if load.look_up is not None:
            load.look_up.close()
        for transfer in load.transfers:
            if transfer.statuses is None:
                transfer.cancel()
        # Copies to the arena may still run; what comes next waits for them.
        self._arriving += load.transfers
        if not self._layerwise:
            self._await_copies()

    def _await_copies(self) -> None:
        for transfer in self._arriving:
            transfer.wait_copied()
        self._arriving.clear()

    # -- leaving ------------------------------------------------------------------------------------------------------

    def _leave(self, row: int, event: Event) -> None:
        manager = self.manager
        is_running = 0 <= row < manager.max_requests and row in manager.running_rows
        self._await_copies()  # its blocks may be given away, or stored, before anything reads them
        dropped = []
        if (load := self._active.get(row)) is not None:
            self._drop(row, load)
            self._counts["load_cancelled"] += 1
        elif is_running and self._stores and (event is Event.FINISHED or self._is_worth_swapping(row)):
            dropped = self._storing.leave(row, event)
        if row in self._ready:
            self._ready.remove(row)
        if event is Event.FINISHED:
            manager.release(row)
            self._turn_ends.pop(row, None)
        else:
            manager.preempt(row)
        for group, entries in dropped:
            manager.forget(group, entries)

    def _is_worth_swapping(self, row: int) -> bool:
        """Whether loading the row back, all of it, would beat computing it again."""
        length = self._plan.length(int(self.manager.committed[row]))
        sizes = [
            len(needed_blocks(group, length)[0]) * group.fmt.block_bytes * group.fmt.tables
            for group in self._plan.groups
        ]
        worth = self._policy.is_worth(length, sum(sizes))
        self._counts["swapped_out" if worth else "swap_not_worth_it"] += 1
        return worth
