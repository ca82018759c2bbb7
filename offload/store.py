"""The store interface: what every tier below the device answers, in batches, with one status per key.

    contains ──► lease ──► get_into(keys, caller's buffers) ──► close the lease
    put(keys, caller's buffers)          delete, scan, stats, close

A store holds immutable values under `StoreKey`s. Its promises, which the conformance suite tests on every store:

- a value is visible only when it is complete, and every read verifies its header and checksum: what is corrupt, torn,
  short or foreign is never served, is counted, and is removed or set aside;
- a buffer is valid only where the status is HIT; after any other status its bytes mean nothing;
- looking (`headers`, `scan`, `stats`) changes nothing and moves no recency;
- one key's fault never fails another key of the batch, and no fault raises: it becomes a status and a count;
- a failed put never counts as stored; putting a key that is there keeps the old value and says PRESENT;
- of the keys of one call the last are evicted first, as if they were blocks of one prefix, by stores that evict by use;
- all methods block, and may be called from several threads at once. Deadlines, cancellation and progress are the
  business of `requests.Requests`, which runs any store on worker threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from .keys import StoreKey
from .values import Header

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


class Status(IntEnum):
    """What became of one key of a batch."""

    HIT = 0  # found; after `get_into` the buffer holds the verified value
    MISS = 1  # not there
    CORRUPT = 2  # there, but not what was stored; removed or set aside
    ERROR = 3  # the store failed, or did not answer in time; whether the key is there is not known
    STORED = 4  # put: durable to the store's promised level
    PRESENT = 5  # put: there already, nothing written
    FULL = 6  # put: no room, and nothing that may be evicted
    REFUSED = 7  # put: the admission policy, a quota or the store's role does not take it
    DELETED = 8  # delete: it is gone


class Entry(NamedTuple):
    """One stored value, as `scan` finds it: its `key`, and `num_bytes` on the tier, header included."""

    key: StoreKey
    num_bytes: int


@dataclass
class StoreStats:
    """What a store holds now and what happened since it was opened. Bytes include headers.

    `capacity_bytes` None: not bounded by the store. `outcomes` counts (operation, status) pairs, where the operation is
    `contains`, `get`, `put` or `delete`; `faults` counts failures by a short name of their kind.
    """

    num_values: int = 0
    num_bytes: int = 0
    capacity_bytes: int | None = None
    evicted: int = 0
    outcomes: Counter[tuple[str, Status]] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)


class Lease:
    """Keeps values from being evicted until it is closed; closing twice is harmless. Also a context manager.

    `statuses[i]` is HIT for the keys that are held. A store that cannot hold values (a remote cache that evicts on its
    own) still answers; its later read may then be a MISS, never a wrong value.
    """

    def __init__(self, statuses: Sequence[Status]) -> None:
        self.statuses = list(statuses)

    def close(self) -> None:
        """Let go of what is held."""

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Store(ABC):
    """One tier. Subclasses implement the batch methods; sizes are checked against `max_value_bytes`.

    `max_value_bytes` bounds the raw bytes of one value, so that a length read from a damaged header never allocates
    more. Closing waits for running calls; later calls answer ERROR.
    """

    name: str = "store"
    max_value_bytes: int = 1 << 30

    @abstractmethod
    def contains(self, keys: Sequence[StoreKey]) -> list[Status]:
        """HIT, MISS or ERROR per key. Does not read values, so a HIT may still turn out CORRUPT."""

    @abstractmethod
    def get_into(self, keys: Sequence[StoreKey], buffers: Sequence[WriteableBuffer]) -> list[Status]:
        """Read values into the caller's buffers, each exactly as long as the value: HIT, MISS, CORRUPT or ERROR."""

    @abstractmethod
    def put(self, keys: Sequence[StoreKey], buffers: Sequence[ReadableBuffer]) -> list[Status]:
        """Store values: STORED, PRESENT, FULL, REFUSED or ERROR per key. The buffers are free when it returns."""

    @abstractmethod
    def delete(self, keys: Sequence[StoreKey]) -> list[Status]:
        """DELETED, MISS or ERROR per key."""

    @abstractmethod
    def headers(self, keys: Sequence[StoreKey]) -> list[Header | None]:
        """The checked header of each value, None where there is none; reads no payload. For looking into a store."""

    @abstractmethod
    def scan(self) -> Iterator[Entry]:
        """Every value, in no order; values that come or go meanwhile may or may not be among them."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """A snapshot of the counts."""

    @abstractmethod
    def close(self) -> None:
        """Finish what runs, make it durable, and let go of files, connections and threads. Twice is harmless."""

    @property
    def tiers(self) -> Sequence[Store]:
        """The stores that this one is made of, the nearest first; none for a plain store."""
        return ()

    def verify(self, keys: Sequence[StoreKey]) -> list[Status]:
        """Read and check values, as `get_into` does, into memory of its own: HIT, MISS, CORRUPT or ERROR."""
        found = self.headers(keys)
        return [
            self.get_into([key], [bytearray(header.raw_bytes)])[0] if header is not None else self._without_header(key)
            for key, header in zip(keys, found, strict=True)
        ]

    def _without_header(self, key: StoreKey) -> Status:
        # A header that was not read for a fault of the moment must not cost a sound value: ask once more.
        header = self.headers([key])[0]
        if header is not None:
            return self.get_into([key], [bytearray(header.raw_bytes)])[0]
        # What is there without a readable header is found out, counted and removed by a read of any length.
        return Status.MISS if self.contains([key]) == [Status.MISS] else self.get_into([key], [bytearray(1)])[0]

    def gc(self) -> int:
        """Give back what serves no value: leftovers of dead writers, expired values, sparse files. Bytes given back."""
        return 0

    def lease(self, keys: Sequence[StoreKey]) -> Lease:
        """Look keys up and hold those that are there. The default holds nothing."""
        return Lease(self.contains(keys))

    def touch(self, keys: Sequence[StoreKey]) -> None:  # noqa: B027  (a store without recency has nothing to do)
        """Tell the store's eviction that keys were of use although they were not read (a faster tier had them)."""

    def touch_prefix(self, keys: Sequence[StoreKey]) -> None:  # noqa: B027
        """Tell the store's eviction that keys are one prefix from its first block on, and that it was of use just now.

        No block is of use without those before it, so of the prefix the last go first. It counts as no use of a key:
        what was read, stored or touched has counted already. Keys that are not there are passed over.
        """

    def peek_into(self, keys: Sequence[StoreKey], buffers: Sequence[WriteableBuffer]) -> list[Status]:
        """`get_into`, but not counted as a use: a store that can moves no recency. For copying `keys` to another store.

        The same statuses, and the same promise about `buffers`.
        """
        return self.get_into(keys, buffers)

    def put_for(self, owner: str, keys: Sequence[StoreKey], buffers: Sequence[ReadableBuffer]) -> list[Status]:
        """As `put` of `keys` and `buffers`, on the account of `owner` (a salt, a tenant), for a store that has quotas.

        REFUSED where the owner's quota is spent and its own older values do not make room.
        """
        return self.put(keys, buffers)

    def cool(self, keys: Sequence[StoreKey]) -> None:  # noqa: B027
        """Tell the store's eviction that little is expected of keys: they go before the others, until they are used."""

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
