"""The SGLang bridge's transfers: batches of values between memory and a store, waited for, never past their deadline.

    zero copy   memory ◄─worker─► store                  a call of the store that has begun is waited for to its end
    staged      memory ◄─copy─► staging ◄─worker─► store  what is late keeps its staging bytes, and no others

SGLang's storage threads wait for each batch; when it has returned, the pages may be given to another request. A store's
call that is late can be neither stopped nor kept from writing: so either it works on staging memory, and the batch
returns at its deadline, or the batch returns when it does. In both cases late values have failed; nothing raises.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from kvtide.kvcache import ConfigError
from kvtide.offload.keys import SPACE_BYTES, StoreKey
from kvtide.offload.requests import Operation, Requests
from kvtide.offload.staging import Grant, Staging, staging_bytes
from kvtide.offload.store import Status, Store

from .pages import Value

logger = logging.getLogger(__name__)

# A piece is what one thread handles in one call of the store.
_PIECE_VALUES = 64
_PIECE_BYTES = 8 << 20
_TICK_S = 1e-3
_OVERDUE_LOG_S = 30.0
_CLEAR_TIMEOUT_S = 60.0
_CLEAR_KEYS = 1024

_Submit = Callable[[Sequence[StoreKey], list[memoryview], float], Operation | None]


class _Piece(NamedTuple):
    start: int
    end: int
    operation: Operation
    grant: Grant | None


class _Lane:
    """One direction: its threads, its staging memory, and one batch at a time."""

    def __init__(self, store: Store, num_bytes: int, threads: int, timeout: float) -> None:
        self.requests = Requests(store, threads=threads, deadline=timeout)
        self.staging = Staging(num_bytes)
        self.lock = threading.Lock()
        self._late: list[_Piece] = []  # over, while a worker still has their staging memory

    def take(self, num_bytes: int) -> Grant | None:
        still = []
        for piece in self._late:
            if piece.operation.settled and piece.grant is not None:
                self.staging.give_back(piece.grant)
            else:
                still.append(piece)
        self._late = still
        return self.staging.take(num_bytes)

    def end(self, piece: _Piece) -> None:
        """The batch is done with a piece."""
        if piece.grant is not None:
            self._late.append(piece)
            return
        while not piece.operation.wait_settled(_OVERDUE_LOG_S):
            logger.warning("a call of the store hangs, and with it SGLang's storage thread, which lent it its pages")


class PageTransfers:
    """All traffic of one process with its store, which is closed with it. Methods may be called from any thread."""

    def __init__(
        self,
        store: Store,
        *,
        zero_copy: bool,
        staging_bytes: int,
        threads: int,
        look_up_timeout_s: float,
        transfer_timeout_s: float,
    ) -> None:
        self.store = store
        self._zero_copy = zero_copy
        self._timeout = transfer_timeout_s
        self._look_timeout = look_up_timeout_s
        self._look = Requests(store, threads=2, deadline=look_up_timeout_s)
        self._loads = _Lane(store, staging_bytes // 2, threads, transfer_timeout_s)
        self._saves = _Lane(store, staging_bytes // 2, threads, transfer_timeout_s)
        self._counts: Counter[str] = Counter()
        self._state = threading.Lock()

    def check_value(self, num_bytes: int) -> None:
        """`ConfigError` if a value of so many bytes could never be staged."""
        room = self._loads.staging.num_bytes
        if staging_bytes(num_bytes) > room:
            raise ConfigError(
                f"staging_bytes must be at least {2 * staging_bytes(num_bytes)}: a page's value has {num_bytes} bytes"
            )

    def look_up(self, keys: Sequence[StoreKey]) -> list[Status]:
        """HIT, MISS or ERROR per key."""
        if not keys:
            return []
        statuses = self._ask(len(keys), lambda: self.store.contains(keys), self._look_timeout)
        return statuses or [Status.ERROR] * len(keys)

    def load(self, keys: Sequence[StoreKey], values: Sequence[Value]) -> list[Status]:
        """Read values from the first on; after a piece that is not all HIT no more are begun (ERROR)."""

        def submit(some: Sequence[StoreKey], views: list[memoryview], deadline: float) -> Operation | None:
            return self._loads.requests.get_into(some, views, deadline=deadline)

        return self._transfer("load", self._loads, keys, values, submit)

    def save(self, keys: Sequence[StoreKey], values: Sequence[Value]) -> list[Status]:
        """Store values: STORED, PRESENT, FULL, REFUSED or ERROR per key."""

        def submit(some: Sequence[StoreKey], views: list[memoryview], deadline: float) -> Operation | None:
            return self._saves.requests.put(some, views, deadline=deadline)

        return self._transfer("save", self._saves, keys, values, submit)

    def clear(self, spaces: Collection[bytes]) -> bool:
        """Delete all values of these spaces; False if the store did not do so in a minute, or not for all."""

        def call() -> list[Status]:
            found = [entry.key for entry in self.store.scan() if entry.key[:SPACE_BYTES] in spaces]
            for at in range(0, len(found), _CLEAR_KEYS):
                if Status.ERROR in self.store.delete(found[at : at + _CLEAR_KEYS]):
                    return [Status.ERROR]
            return [Status.DELETED]

        return self._ask(1, call, _CLEAR_TIMEOUT_S) == [Status.DELETED]

    def count(self, name: str, by: int) -> None:
        """Add to the counts."""
        with self._state:
            self._counts[name] += by

    @property
    def counts(self) -> Counter[str]:
        """What happened since the start: values and bytes by what became of them, and faults."""
        with self._state:
            counts = Counter(self._counts)
        for requests in (self._look, self._loads.requests, self._saves.requests):
            for name, number in dict(requests.faults).items():
                counts[f"fault: {name}"] += number
        return counts

    def close(self) -> None:
        """End the threads and close the store, unless a call hangs in it."""
        everything = (self._look, self._loads.requests, self._saves.requests)
        ended = [requests.close(self._timeout) for requests in everything]
        if all(ended):
            self.store.close()

    def _ask(self, num_keys: int, call: Callable[[], list[Status]], timeout: float) -> list[Status] | None:
        expires = time.monotonic() + timeout
        operation = self._look.run(num_keys, call, deadline=timeout)
        return None if operation is None else _wait(self._look, operation, expires)

    def _transfer(
        self, what: str, lane: _Lane, keys: Sequence[StoreKey], values: Sequence[Value], submit: _Submit
    ) -> list[Status]:
        statuses = [Status.ERROR] * len(keys)
        expires = time.monotonic() + self._timeout
        cuts = deque(_cut(values, min(_PIECE_BYTES, lane.staging.num_bytes)))
        running: deque[_Piece] = deque()
        with lane.lock:
            while cuts or running:
                while cuts:
                    piece = self._begin(what, lane, keys, values, cuts[0], submit, expires)
                    if piece is None:
                        break
                    running.append(piece)
                    cuts.popleft()
                if not running:  # late pieces of earlier batches have all of the staging memory, or of the queue
                    self.count("fault: no staging memory", sum(end - start for start, end in cuts))
                    break
                piece = running.popleft()
                found = _wait(lane.requests, piece.operation, expires)
                if what == "load":
                    if piece.grant is not None:
                        _copy_out(lane.staging, piece, values, found)
                    if any(status is not Status.HIT for status in found):
                        cuts.clear()
                lane.end(piece)
                statuses[piece.start : piece.end] = found
        with self._state:
            for value, status in zip(values, statuses, strict=True):
                self._counts[f"{what}_{status.name.lower()}"] += 1
                self._counts[f"{what}_{status.name.lower()}_bytes"] += _num_bytes(value)
        return statuses

    def _begin(
        self,
        what: str,
        lane: _Lane,
        keys: Sequence[StoreKey],
        values: Sequence[Value],
        cut: tuple[int, int],
        submit: _Submit,
        expires: float,
    ) -> _Piece | None:
        start, end = cut
        some = values[start:end]
        grant: Grant | None = None
        if self._zero_copy and all(len(value) == 1 for value in some):
            views = [_memory(*value[0]) for value in some]
        else:
            grant = lane.take(sum(map(_num_bytes, some)))
            if grant is None:
                return None
            views = _views(lane.staging.view(grant), some)
            if what == "save":
                for value, view in zip(some, views, strict=True):
                    _gather(value, view)
        # What could not begin before is late already: it ends at once, and counts.
        operation = submit(keys[start:end], views, max(expires - time.monotonic(), _TICK_S))
        if operation is None:
            if grant is not None:
                lane.staging.give_back(grant)
            return None
        return _Piece(start, end, operation, grant)


def _wait(requests: Requests, operation: Operation, expires: float) -> list[Status]:
    """The statuses, at the operation's deadline at the latest, which is `expires`."""
    while True:
        try:
            return operation.future.result(max(expires - time.monotonic(), _TICK_S))
        except TimeoutError:
            requests.expire()


def _cut(values: Sequence[Value], most_bytes: int) -> list[tuple[int, int]]:
    """Runs of values that make a piece."""
    cuts, start, size = [], 0, 0
    for at, value in enumerate(values):
        num_bytes = _num_bytes(value)
        if at > start and (at - start == _PIECE_VALUES or size + num_bytes > most_bytes):
            cuts.append((start, at))
            start, size = at, 0
        size += num_bytes
    if values:
        cuts.append((start, len(values)))
    return cuts


def _num_bytes(value: Value) -> int:
    return sum(run.num_bytes for run in value)


def _memory(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")


def _views(whole: memoryview, values: Sequence[Value]) -> list[memoryview]:
    views, at = [], 0
    for value in values:
        views.append(whole[at : at + _num_bytes(value)])
        at += _num_bytes(value)
    return views


def _gather(value: Value, view: memoryview) -> None:
    at, target = 0, np.frombuffer(view, np.uint8)
    for address, num_bytes in value:
        target[at : at + num_bytes] = np.frombuffer(_memory(address, num_bytes), np.uint8)
        at += num_bytes


def _scatter(view: memoryview, value: Value) -> None:
    at, source = 0, np.frombuffer(view, np.uint8)
    for address, num_bytes in value:
        np.frombuffer(_memory(address, num_bytes), np.uint8)[:] = source[at : at + num_bytes]
        at += num_bytes


def _copy_out(staging: Staging, piece: _Piece, values: Sequence[Value], statuses: Sequence[Status]) -> None:
    assert piece.grant is not None
    some = values[piece.start : piece.end]
    for value, view, status in zip(some, _views(staging.view(piece.grant), some), statuses, strict=True):
        if status is Status.HIT:
            _scatter(view, value)
