"""A store that does what it is told to do wrong, around a real one, and keys for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from kvtide.connectors.host import HostConfig, HostConnector
from kvtide.offload.keys import store_key
from kvtide.offload.store import Entry, Lease, Status, Store, StoreStats
from kvtide.offload.values import Header


def key(number: int) -> bytes:
    return store_key(b"s" * 16, number.to_bytes(16, "little"))


def host(max_bytes: int = 8 << 20) -> HostConnector:
    return HostConnector(HostConfig(max_bytes=max_bytes, copy_threads=1))


class AwkwardStore(Store):
    """`gate` closed: calls hang until it opens. `failing`: every status is ERROR. `lying`: raises, against the promise.

    `open_leases` counts the leases that nobody has closed.
    """

    name = "awkward"

    def __init__(self, store: Store) -> None:
        self.store = store
        self.gate = threading.Event()
        self.gate.set()
        self.failing = self.lying = False
        self.calls = self.open_leases = 0

    def _pass(self, keys: Sequence[bytes], call: Any) -> list[Status]:
        self.calls += 1
        self.gate.wait()
        if self.lying:
            raise OSError("not a status")
        if self.failing:
            return [Status.ERROR] * len(keys)
        found: list[Status] = call()
        return found

    def contains(self, keys: Sequence[bytes]) -> list[Status]:
        return self._pass(keys, lambda: self.store.contains(keys))

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> list[Status]:
        return self._pass(keys, lambda: self.store.get_into(keys, buffers))

    def put(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> list[Status]:
        return self._pass(keys, lambda: self.store.put(keys, buffers))

    def delete(self, keys: Sequence[bytes]) -> list[Status]:
        return self._pass(keys, lambda: self.store.delete(keys))

    def lease(self, keys: Sequence[bytes]) -> Lease:
        lease = self.store.lease(keys)
        self._pass(keys, lambda: [])
        self.open_leases += 1
        return _CountedLease(self, lease)

    def headers(self, keys: Sequence[bytes]) -> list[Header | None]:
        return self.store.headers(keys)

    def scan(self) -> Iterator[Entry]:
        return self.store.scan()

    def stats(self) -> StoreStats:
        return self.store.stats()

    def close(self) -> None:
        self.store.close()


class _CountedLease(Lease):
    def __init__(self, owner: AwkwardStore, lease: Lease) -> None:
        super().__init__(lease.statuses)
        self._owner = owner
        self._lease: Lease | None = lease

    def close(self) -> None:
        if self._lease is not None:
            self._owner.open_leases -= 1
            self._lease.close()
            self._lease = None
