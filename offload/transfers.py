"""The transfer engine: values between the arena and a store, in batches, both directions at once.

    put   arena ─copy─► staging ─worker─► store        `released` after the copy: the blocks may be reused
    get   store ─worker─► staging ─copy─► arena        the copy happens in `poll`, only for verified values

The arena is touched by the manager's thread alone, inside these calls; workers see staging memory. So a store that is
late, hangs or lies can never write into a block that was given to somebody else: its staging bytes simply stay taken
until its thread returns. When staging is full nothing waits: puts are dropped and counted, gets are cut short and the
rest recomputed. Large transfers are cut into pieces that several workers share. Call `poll` at every step boundary.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvtide.kvcache import KvtideError

from .copies import Bytes, Copied, Run, make_copies
from .keys import StoreKey
from .requests import LeaseOperation, Operation, Requests
from .staging import Grant
from .store import Status, Store

if TYPE_CHECKING:
    import torch

# A piece is what one worker handles in one call of the store.
PIECE_VALUES = 64
PIECE_BYTES = 8 << 20


class Value(NamedTuple):
    """A value of the store and where its bytes lie in the arena: `(byte offset, length)` runs in the value's order.

    `layers` are the model's layers that lie in it, in equal parts, if loads are to arrive layer by layer.
    """

    key: StoreKey
    segments: tuple[tuple[int, int], ...]
    layers: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the value."""
        return sum(length for _, length in self.segments)


class _Piece:
    """Values that are one operation of the store; a grant per value."""

    def __init__(self, values: Sequence[Value], grants: list[Grant]) -> None:
        self.values = values
        self.grants = grants
        self.operation: Operation | None = None


class Transfer:
    """A batch on its way. `statuses` are set when it is finished, `released` when it no longer uses the arena."""

    def __init__(self, kind: Literal["put", "get"], pieces: list[_Piece], owner: str) -> None:
        self.kind = kind
        self.values = [value for piece in pieces for value in piece.values]
        self.statuses: list[Status] | None = None
        self.released = False
        self.cancelled = False
        self.layers: list[int] = []
        self._pieces = pieces
        self._owner = owner
        self._copied: Copied | None = None

    @property
    def progress(self) -> tuple[int, int]:
        """Values that the store is done with, and all values."""
        if self.statuses is not None:
            return len(self.values), len(self.values)
        done = sum(len(p.values) for p in self._pieces if p.operation is not None and p.operation.future.done())
        return done, len(self.values)

    def cancel(self) -> None:
        """Finish it without waiting: at the next poll every status is ERROR, and a get never writes the arena."""
        self.cancelled = True
        for piece in self._pieces:
            if piece.operation is not None:
                piece.operation.cancel()

    def wait_copied(self) -> None:
        """Let the current stream wait until all copies that were begun are done; nothing to wait for on a CPU."""
        if self._copied is not None:
            self._copied.wait()

    def wait_layer(self, layer: int) -> None:
        """Let the current stream wait until this layer of a finished get has arrived; nothing to wait for on a CPU."""
        if self._copied is not None and layer in self.layers:
            self._copied.wait(self.layers.index(layer))


class Polled(NamedTuple):
    """What has changed since the last poll."""

    released: list[Transfer]
    finished: list[Transfer]


class Transfers:
    """Moves values between one arena and one store.

    `arena` is flat uint8: a numpy array or a torch tensor. `staging_bytes` bounds what is on its way. `deadline` is in
    seconds, per piece. `counts` has puts and gets, in values and bytes, and what was dropped.
    """

    def __init__(
        self,
        arena: torch.Tensor | Bytes,
        store: Store,
        *,
        staging_bytes: int = 256 << 20,
        threads: int = 4,
        deadline: float = 30.0,
    ) -> None:
        self.store = store
        self.counts: Counter[str] = Counter()
        self._copies = make_copies(arena, staging_bytes)
        self._requests = Requests(store, threads=threads, deadline=deadline)
        self._active: list[Transfer] = []
        # Pieces of transfers that are over, while a worker or a copy still uses their staging bytes.
        self._ending: list[tuple[_Piece, Copied | None]] = []
        self._closed = False

    @property
    def staging_bytes_free(self) -> int:
        """Staging bytes that nothing uses."""
        return self._copies.staging.free_bytes

    @property
    def staging_bytes(self) -> int:
        """All staging bytes."""
        return self._copies.staging.num_bytes

    @property
    def requests(self) -> Requests:
        """The store's calls: queue depths, faults and latencies."""
        return self._requests

    def look_up(self, keys: Sequence[StoreKey]) -> LeaseOperation | None:
        """Ask which keys are there and hold them; None if too much waits already. Close it in any case."""
        return self._requests.lease(keys)

    def put(self, values: Iterable[Value], *, owner: str = "") -> Transfer | None:
        """Store values on the account of an owner. None, and counted, when staging has no room for all of them."""
        values = list(values)
        pieces = self._cut(values)
        if sum(len(piece.values) for piece in pieces) < len(values):
            for piece in pieces:
                self._give_back(piece)
            self.counts["put_dropped"] += len(values)
            return None
        transfer = Transfer("put", pieces, owner)
        transfer._copied = self._copies.out([run for piece in pieces for run in _runs(piece)])
        self._active.append(transfer)
        return transfer

    def get(self, values: Iterable[Value]) -> tuple[Transfer | None, int]:
        """Load as many of the values, from the first on, as staging has room for: the transfer, and how many."""
        values = list(values)
        pieces = self._cut(values)
        count = sum(len(piece.values) for piece in pieces)
        self.counts["get_cut_short"] += len(values) - count
        if not count:
            return None, 0
        transfer = Transfer("get", pieces, "")
        for piece in pieces:
            views = [self._copies.staging.view(grant) for grant in piece.grants]
            piece.operation = self._requests.get_into([value.key for value in piece.values], views)
        self._active.append(transfer)
        return transfer, count

    def touch_prefix(self, keys: Sequence[StoreKey]) -> None:
        """`Store.touch_prefix`, soon."""
        self._requests.touch_prefix(lambda: keys)

    def poll(self) -> Polled:
        """Bring everything one step further, without waiting: copies, operations, deadlines."""
        self._requests.expire()
        polled = Polled([], [])
        for transfer in self._active:
            (self._poll_put if transfer.kind == "put" else self._poll_get)(transfer, polled)
        self._active = [t for t in self._active if t.statuses is None or not t.released]
        still = []
        for piece, copied in self._ending:
            if (piece.operation is None or piece.operation.settled) and (copied is None or copied.done()):
                self._give_back(piece)
            else:
                still.append((piece, copied))
        self._ending = still
        return polled

    def wait(self, transfer: Transfer, timeout: float) -> bool:
        """Poll until a transfer is finished and released; False after `timeout` seconds. For tests and shutdown."""
        return self._wait(lambda: transfer.statuses is not None and transfer.released, timeout)

    def drain(self, timeout: float) -> bool:
        """Poll until nothing is on its way and the store does nothing more; False after `timeout` seconds."""
        return self._wait(
            lambda: not (self._active or self._ending or self._requests.num_queued or self._requests.num_running),
            timeout,
        )

    def close(self, timeout: float = 5.0) -> bool:
        """Finish the puts, cancel the gets, end the workers; False if something hung. The store stays open."""
        if self._closed:
            return True
        self._closed = True
        for transfer in self._active:
            if transfer.kind == "get":
                transfer.cancel()
        drained = self.drain(timeout)
        for transfer in self._active:
            transfer.cancel()
        return self._requests.close(timeout if drained else 0.0) and drained

    def _poll_put(self, transfer: Transfer, polled: Polled) -> None:
        copied = transfer._copied
        assert copied is not None
        if not transfer.released:
            if not copied.done():
                return
            transfer.released = True
            polled.released.append(transfer)
            for piece in transfer._pieces:
                if not transfer.cancelled:
                    views = [self._copies.staging.view(grant) for grant in piece.grants]
                    keys = [value.key for value in piece.values]
                    piece.operation = self._requests.put(keys, views, owner=transfer._owner)
        self._finish(transfer, polled)

    def _poll_get(self, transfer: Transfer, polled: Polled) -> None:
        if transfer.statuses is None and self._finish(transfer, polled):
            transfer.released = transfer._copied is None
        if not transfer.released and transfer._copied is not None and transfer._copied.done():
            transfer.released = True
        if transfer.released:
            polled.released.append(transfer)

    def _finish(self, transfer: Transfer, polled: Polled) -> bool:
        """Set the statuses if every piece has them; verified values of a get are copied to the arena now."""
        statuses: list[Status] = []
        for piece in transfer._pieces:
            found = None if piece.operation is None else piece.operation.statuses
            if transfer.cancelled or piece.operation is None:  # no operation: the queue was full
                found = [Status.ERROR] * len(piece.values)
            if found is None:
                return False
            statuses += found
        if transfer.kind == "get" and Status.HIT in statuses:
            transfer.layers, parts = _by_layer(transfer._pieces, statuses)
            transfer._copied = self._copies.into(parts)
        transfer.statuses = statuses
        for value, status in zip(transfer.values, statuses, strict=True):
            self.counts[f"{transfer.kind}_{status.name.lower()}"] += 1
            self.counts[f"{transfer.kind}_{status.name.lower()}_bytes"] += value.num_bytes
        self._ending += [(piece, transfer._copied) for piece in transfer._pieces]
        polled.finished.append(transfer)
        return True

    def _cut(self, values: Sequence[Value]) -> list[_Piece]:
        """Pieces of the leading values that staging has room for."""
        if self._closed:
            raise KvtideError("the transfer engine is closed")
        pieces: list[_Piece] = []
        start, size, grants = 0, 0, list[Grant]()
        for number, value in enumerate(values):
            grant = self._copies.staging.take(value.num_bytes)
            if grant is None:
                values = values[:number]
                break
            if grants and (len(grants) == PIECE_VALUES or size + value.num_bytes > PIECE_BYTES):
                pieces.append(_Piece(values[start:number], grants))
                start, size, grants = number, 0, []
            grants.append(grant)
            size += value.num_bytes
        if grants:
            pieces.append(_Piece(values[start:], grants))
        return pieces

    def _give_back(self, piece: _Piece) -> None:
        for grant in piece.grants:
            self._copies.staging.give_back(grant)

    def _wait(self, holds: Callable[[], bool], timeout: float) -> bool:
        expires = time.monotonic() + timeout
        pause = 0.0001
        while True:
            self.poll()
            if holds():
                return True
            if time.monotonic() >= expires:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.01)


def _runs(piece: _Piece) -> list[Run]:
    runs = []
    for value, grant in zip(piece.values, piece.grants, strict=True):
        place = grant.start
        for offset, length in value.segments:
            runs.append(Run(offset, place, length))
            place += length
    return runs


def _by_layer(pieces: Sequence[_Piece], statuses: Sequence[Status]) -> tuple[list[int], list[list[Run]]]:
    """The runs of the values that were hit, layer by layer; values that name no layers come first, as layer -1."""
    parts: dict[int, list[Run]] = {}
    at = 0
    for piece in pieces:
        for value, grant in zip(piece.values, piece.grants, strict=True):
            if statuses[at] is Status.HIT:
                runs = _runs(_Piece([value], [grant]))
                if not value.layers:
                    parts.setdefault(-1, []).extend(runs)
                else:
                    share = value.num_bytes // len(value.layers)
                    for number, layer in enumerate(value.layers):
                        low = grant.start + number * share
                        parts.setdefault(layer, []).extend(_overlap(runs, low, low + share))
            at += 1
    layers = sorted(parts)
    return layers, [parts[layer] for layer in layers]


def _overlap(runs: Sequence[Run], low: int, high: int) -> list[Run]:
    """What of the runs lies in staging bytes `[low, high)`."""
    found = []
    for run in runs:
        start, end = max(run.staging, low), min(run.staging + run.num_bytes, high)
        if start < end:
            found.append(Run(run.arena + start - run.staging, start, end - start))
    return found
