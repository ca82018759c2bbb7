"""Which keys a store's leases hold: counts by key, so that leases may overlap."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence

from kvtide.offload.keys import StoreKey
from kvtide.offload.store import Lease, Status


class Holds:
    """The keys held now. A container of them, for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[StoreKey] = Counter()

    def __contains__(self, key: object) -> bool:
        return key in self._counts

    def __iter__(self) -> Iterator[StoreKey]:
        with self._lock:
            return iter(list(self._counts))

    def lease(self, keys: Sequence[StoreKey], statuses: Sequence[Status]) -> Lease:
        """A lease that holds the keys whose status is HIT."""
        found = [key for key, status in zip(keys, statuses, strict=True) if status is Status.HIT]
        with self._lock:
            self._counts.update(found)
        return _Lease(statuses, self, found)

    def release(self, keys: Sequence[StoreKey]) -> None:
        """Let go once of each."""
        with self._lock:
            for key in keys:
                self._counts[key] -= 1
                if not self._counts[key]:
                    del self._counts[key]


class _Lease(Lease):
    def __init__(self, statuses: Sequence[Status], holds: Holds, held: list[StoreKey]) -> None:
        super().__init__(statuses)
        self._holds = holds
        self._held = held

    def close(self) -> None:
        held, self._held = self._held, []
        self._holds.release(held)
