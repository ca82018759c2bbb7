"""A worker's half of the vLLM bridge: it owns the store, and moves values between it and this rank's cache tensors.

    save   blocks ─copy, in vLLM's step─► staging ─thread─► store        the blocks are vLLM's again after the copy
    load   store ─thread─► staging ─copy, in `poll`─► blocks             only verified values, only while it is wanted

vLLM's memory is touched inside these calls only, never by a thread: a store that hangs, is late or lies cannot write
into a block that was given to another request. Nothing waits for the store; what it does not answer in time counts as
a miss (look-ups), as failed (loads) or as not stored (saves). Look-ups, loads and saves have threads and staging
memory of their own, so that none of them waits for another.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvtide.kvcache import ConfigError
from kvtide.offload.keys import StoreKey, store_key
from kvtide.offload.requests import Operation, Requests
from kvtide.offload.staging import Grant, Staging
from kvtide.offload.store import Status, Store

from .groups import Group, Hit, find_hit, prefix_keys
from .messages import Answer, Block, FromWorker, Load, LookUp, Save, Served, ToWorker

# A piece is what one thread handles in one call of the store.
_PIECE_VALUES = 64
_PIECE_BYTES = 8 << 20
_IDLE_WAIT_S = 0.005  # in steps that compute nothing, instead of turning at full speed
_CLOSE_S = 10.0


class GroupPages(Protocol):
    """What is used of `pages.Pages`."""

    value_bytes: int

    def read(self, blocks: Sequence[int], out: npt.NDArray[np.uint8]) -> None: ...

    def write(self, blocks: Sequence[int], values: npt.NDArray[np.uint8]) -> None: ...


class Part(NamedTuple):
    """This rank's part of one group: the space of its keys, its memory, and whether it is for this rank to store."""

    group: Group
    space: bytes
    pages: GroupPages
    stores: bool


class Results(NamedTuple):
    """Requests whose blocks are free (`sent`) or whose load is over (`received`), and what of them failed."""

    sent: set[str]
    received: set[str]
    failed: set[str]
    failed_blocks: set[int]


class _LookingUp:
    """A look-up, from its start until its request is loaded or over. The hit is made by a thread."""

    def __init__(self, ticket: int) -> None:
        self.ticket = ticket
        self.hit: Hit | None = None
        self.operation: Operation | None = None
        self.answered = False


class _Piece:
    """Values of one part that are one call of the store."""

    def __init__(self, part: Part, blocks: Sequence[Block]) -> None:
        self.part = part
        self.keys: list[StoreKey] = [store_key(part.space, chain) for chain, _ in blocks]
        self.blocks = [block for _, block in blocks]
        self.num_bytes = part.pages.value_bytes * len(blocks)
        self.grant: Grant | None = None
        self.operation: Operation | None = None


class _Loading:
    def __init__(self, pieces: list[_Piece], expires: float) -> None:
        self.waiting = pieces
        self.running: list[_Piece] = []
        self.expires = expires
        self.failed: set[int] = set()


class WorkerSide:
    """One rank's. `store` is closed with it. `counts` are told to the scheduler with every `news`."""

    def __init__(
        self, store: Store, *, staging_bytes: int, threads: int, look_up_timeout_s: float, transfer_timeout_s: float
    ) -> None:
        self.store = store
        self._parts: list[Part] = []
        self._timeout = transfer_timeout_s
        self._look_requests = Requests(store, threads=2, deadline=look_up_timeout_s)
        self._load_requests = Requests(store, threads=threads, deadline=transfer_timeout_s)
        self._save_requests = Requests(store, threads=threads, deadline=transfer_timeout_s)
        self._load_staging = Staging(staging_bytes // 2)
        self._save_staging = Staging(staging_bytes // 2)
        self._looking: dict[str, _LookingUp] = {}
        self._dropped: list[_LookingUp] = []
        self._loading: dict[str, _Loading] = {}
        self._saving: list[_Piece] = []
        self._ending: list[_Piece] = []  # loads that are over while a thread still has their staging memory
        self._sent: set[str] = set()
        self._news = FromWorker()
        self._seen_faults: Counter[str] = Counter()
        self._closed = False

    def register(self, parts: Sequence[Part]) -> None:
        """The rank's memory, once vLLM has made it; no work may come before."""
        largest = max(part.pages.value_bytes for part in parts)
        if largest > self._load_staging.num_bytes:
            raise ConfigError(
                f"staging_bytes must be at least {2 * largest}: a value, one block of a group, has {largest} bytes"
            )
        self._parts = list(parts)

    def start(self, work: ToWorker) -> None:
        """Begin a step's look-ups and loads."""
        for req_id in work.over:
            self._let_go(req_id)
        for look_up in work.look_ups:
            self._look_up(look_up)
        for load in work.loads:
            self._load(load)
        work.look_ups, work.loads, work.over = [], [], []

    def save(self, work: ToWorker) -> None:
        """Copy what a step has computed, and store it."""
        for save in work.saves:
            self._save(save)
        for served in work.served:
            self._touch(served)
        work.saves, work.served = [], []

    def poll(self, *, idle: bool) -> Results:
        """Bring everything one step further; in an idle step wait a moment for the store if something waits for it."""
        if idle:
            self._wait_a_moment()
        for requests in (self._look_requests, self._load_requests, self._save_requests):
            requests.expire()
        self._poll_look_ups()
        results = Results(self._sent, set(), set(), set())
        self._sent = set()
        for req_id, loading in list(self._loading.items()):
            if self._poll_load(loading):
                del self._loading[req_id]
                self._let_go(req_id)
                results.received.add(req_id)
                if loading.failed:
                    results.failed.add(req_id)
                    results.failed_blocks.update(loading.failed)
        self._news.failed |= results.failed
        self._saving = [piece for piece in self._saving if not self._poll_save(piece)]
        self._ending = [piece for piece in self._ending if not self._give_back(self._load_staging, piece)]
        return results

    def news(self) -> FromWorker:
        """What the scheduler has to know, once."""
        faults: Counter[str] = Counter()
        for requests in (self._look_requests, self._load_requests, self._save_requests):
            faults.update(requests.faults)
        for name, count in (faults - self._seen_faults).items():
            self._news.counts[f"fault: {name}"] += count
        self._seen_faults = faults
        news, self._news = self._news, FromWorker()
        return news

    def close(self) -> None:
        """Finish the saves, as far as the store answers in time, and close the store."""
        if self._closed:
            return
        self._closed = True
        for req_id in list(self._looking):
            self._let_go(req_id)
        expires = time.monotonic() + min(_CLOSE_S, 2 * self._timeout)
        while self._saving and time.monotonic() < expires:
            self.poll(idle=False)
            time.sleep(0.001)
        alive = [
            requests
            for requests in (self._look_requests, self._load_requests, self._save_requests)
            if not requests.close(max(0.0, expires - time.monotonic()))
        ]
        if not alive:  # else a call hangs inside the store, and closing would wait for it
            self.store.close()

    def _look_up(self, look_up: LookUp) -> None:
        self._let_go(look_up.req_id)
        looking = _LookingUp(look_up.ticket)
        groups = [(part.group, part.space) for part in self._parts]

        def call() -> list[Status]:
            looking.hit = find_hit(
                self.store.lease, self.store.contains, groups, look_up.chains, look_up.start, look_up.limit
            )
            return [Status.HIT if looking.hit.end else Status.MISS]

        looking.operation = self._look_requests.run(1, call)
        if looking.operation is None:  # too many wait
            self._news.answers[look_up.ticket] = Answer(0, 0)
        else:
            self._looking[look_up.req_id] = looking

    def _poll_look_ups(self) -> None:
        for looking in self._looking.values():
            assert looking.operation is not None
            statuses = looking.operation.statuses
            if statuses is not None and not looking.answered:
                looking.answered = True
                hit = looking.hit if Status.ERROR not in statuses else None
                self._news.counts["look_up_hit" if hit is not None and hit.end else "look_up_miss"] += 1
                self._news.answers[looking.ticket] = Answer(0, 0) if hit is None else Answer(hit.end, hit.run)
        still = []
        for looking in self._dropped:
            assert looking.operation is not None
            if not looking.operation.settled:  # its thread may still find something to hold
                still.append(looking)
            elif looking.hit is not None:
                looking.hit.close()
        self._dropped = still

    def _let_go(self, req_id: str) -> None:
        """What a look-up found for a request is no longer needed, or no longer wanted."""
        looking = self._looking.pop(req_id, None)
        if looking is not None and looking.operation is not None:
            looking.operation.cancel()
            self._dropped.append(looking)

    def _load(self, load: Load) -> None:
        pieces = [
            piece
            for part, blocks in zip(self._parts, load.blocks, strict=True)
            for piece in _cut(part, blocks, self._load_staging.num_bytes)
        ]
        self._loading[load.req_id] = _Loading(pieces, time.monotonic() + self._timeout)
        self._submit_loads(self._loading[load.req_id])

    def _submit_loads(self, loading: _Loading) -> None:
        while loading.waiting:
            piece = loading.waiting[0]
            piece.grant = self._load_staging.take(piece.num_bytes)
            if piece.grant is None:
                return
            piece.operation = self._load_requests.get_into(piece.keys, self._views(self._load_staging, piece))
            if piece.operation is None:  # too many wait; so does this one
                self._load_staging.give_back(piece.grant)
                return
            loading.running.append(loading.waiting.pop(0))

    def _poll_load(self, loading: _Loading) -> bool:
        """Whether a load is over."""
        still = []
        for piece in loading.running:
            assert piece.operation is not None
            assert piece.grant is not None
            statuses = piece.operation.statuses
            if statuses is None:
                still.append(piece)
                continue
            self._count("load", piece, statuses)
            values = self._load_staging.memory[piece.grant.start : piece.grant.start + piece.grant.num_bytes]
            found = [at for at, status in enumerate(statuses) if status is Status.HIT]
            if len(found) < len(statuses):
                loading.failed.update(set(piece.blocks) - {piece.blocks[at] for at in found})
                values = values.reshape(len(statuses), -1)[found].reshape(-1)
            if found:
                piece.part.pages.write([piece.blocks[at] for at in found], values)
            self._ending.append(piece)
        loading.running = still
        if loading.failed or time.monotonic() > loading.expires:  # the rest is of no use
            for piece in loading.waiting:
                self._count("load", piece, [Status.ERROR] * len(piece.keys))
                loading.failed.update(piece.blocks)
            loading.waiting = []
        self._submit_loads(loading)
        return not loading.running and not loading.waiting

    def _save(self, save: Save) -> None:
        if save.last:
            self._sent.add(save.req_id)
        for part, blocks in zip(self._parts, save.blocks, strict=True):
            if not part.stores:
                continue
            for piece in _cut(part, blocks, self._save_staging.num_bytes):
                piece.grant = self._save_staging.take(piece.num_bytes)
                if piece.grant is None:
                    self._news.counts["save_dropped"] += len(piece.keys)
                    continue
                grant = piece.grant
                part.pages.read(piece.blocks, self._save_staging.memory[grant.start : grant.start + grant.num_bytes])
                views = self._views(self._save_staging, piece)
                piece.operation = self._save_requests.put(piece.keys, views, owner=save.owner)
                if piece.operation is None:
                    self._save_staging.give_back(grant)
                    self._news.counts["save_dropped"] += len(piece.keys)
                    continue
                self._saving.append(piece)

    def _touch(self, served: Served) -> None:
        groups = [(part.group, part.space) for part in self._parts]
        self._save_requests.touch_prefix(lambda: prefix_keys(groups, served.chains, served.length, served.ends))

    def _poll_save(self, piece: _Piece) -> bool:
        """Whether a save is over and its staging memory free."""
        if not self._give_back(self._save_staging, piece):
            return False
        assert piece.operation is not None
        assert piece.operation.statuses is not None
        self._count("save", piece, piece.operation.statuses)
        return True

    def _count(self, what: str, piece: _Piece, statuses: Sequence[Status]) -> None:
        for status in statuses:
            self._news.counts[f"{what}_{status.name.lower()}"] += 1
            self._news.counts[f"{what}_{status.name.lower()}_bytes"] += piece.part.pages.value_bytes

    def _give_back(self, staging: Staging, piece: _Piece) -> bool:
        assert piece.operation is not None
        assert piece.grant is not None
        if not piece.operation.settled:
            return False
        staging.give_back(piece.grant)
        return True

    def _views(self, staging: Staging, piece: _Piece) -> list[memoryview]:
        assert piece.grant is not None
        whole, size = staging.view(piece.grant), piece.part.pages.value_bytes
        return [whole[at : at + size] for at in range(0, piece.num_bytes, size)]

    def _wait_a_moment(self) -> None:
        waited = [looking.operation for looking in self._looking.values()]
        waited += [piece.operation for loading in self._loading.values() for piece in loading.running]
        futures = [operation.future for operation in waited if operation is not None]
        if futures:
            wait(futures, _IDLE_WAIT_S, FIRST_COMPLETED)
        elif self._loading:
            time.sleep(_IDLE_WAIT_S)  # for staging memory


def _cut(part: Part, blocks: Sequence[Block], most_bytes: int) -> list[_Piece]:
    """Pieces of a part's blocks that staging memory can hold."""
    size = part.pages.value_bytes
    count = max(1, min(_PIECE_VALUES, min(_PIECE_BYTES, most_bytes) // size))
    return [_Piece(part, blocks[at : at + count]) for at in range(0, len(blocks), count)]
