"""One tier of a `MultiConnector`: a store, with what keeps its faults, its age and its wear from the others.

- A circuit breaker: after a few batches in a row that failed, the tier is left alone for a second, then for longer and
  longer up to a minute, and one batch at a time tries it again.
- A time to live: values that came longer ago are not served, and are deleted. A value that was there before this
  process is taken to have come when it was first seen.
- Admission: with `min_uses`, a value is taken only after so many uses of its key (`offload.admission`).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvtide.connectors.config import make_store
from kvtide.offload.admission import TinyLFU
from kvtide.offload.breaker import Breaker
from kvtide.offload.keys import StoreKey
from kvtide.offload.store import Lease, Status, Store

_SKETCHED_KEYS = 1 << 18


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of a `MultiConnector`'s `connectors`."""

    kv_connector: Annotated[str, Meta(description="The tier's store, as at the top.", min_length=1)]
    kv_connector_extra_config: Annotated[dict[str, Any], Meta(description="The store's own settings.")] = {}
    kv_connector_module_path: Annotated[str | None, Meta(description="As at the top.")] = None
    kv_role: Annotated[
        Literal["kv_producer", "kv_consumer", "kv_both"],
        Meta(description="Whether values are only stored here (producer), only loaded (consumer), or both."),
    ] = "kv_both"
    ttl_s: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="Seconds after which a value is not served any more.")
    ] = None
    min_uses: Annotated[
        int,
        Meta(description="Recent uses of a key from which on its value is taken; saves a disk's life.", ge=1, le=16),
    ] = 1


class Tier:
    """A store as one of several. Its calls answer like the store's, and `skipped` for all keys if it is left alone."""

    def __init__(self, config: TierConfig, fault: Callable[[str], None]) -> None:
        self.store: Store = make_store(
            config.kv_connector, config.kv_connector_extra_config, config.kv_connector_module_path
        )
        self.loads = config.kv_role != "kv_producer"
        self.stores = config.kv_role != "kv_consumer"
        self.breaker = Breaker()
        self._fault = fault
        self._min_uses = config.min_uses
        self._sketch = TinyLFU(_SKETCHED_KEYS) if config.min_uses > 1 else None
        self._ttl = config.ttl_s
        self._lock = threading.Lock()
        self._came: OrderedDict[StoreKey, float] = OrderedDict()  # the oldest first; only with a time to live

    def contains(self, keys: Sequence[StoreKey]) -> list[Status]:
        """HIT, MISS or ERROR; MISS if the tier is left alone."""
        return self._look(keys, lambda: self.store.contains(keys))

    def get(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        """As the store's `get_into`; MISS if the tier is left alone."""
        if self._sketch is not None:
            self._sketch.record(keys)
        return self._look(keys, lambda: self.store.get_into(keys, views))

    def peek(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        """As the store's `peek_into`, of values that this process holds; ERROR if the tier is left alone."""
        return self._call(keys, lambda: self.store.peek_into(keys, views), left_alone=Status.ERROR)

    def lease(self, keys: Sequence[StoreKey]) -> Lease:
        """As the store's; nothing is held, and all is MISS, if the tier is left alone."""
        lease = Lease([])

        def look() -> list[Status]:
            nonlocal lease
            lease = self.store.lease(keys)
            return lease.statuses

        lease.statuses = self._look(keys, look)
        return lease

    def put(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        """As the store's; REFUSED for what is not admitted, ERROR if the tier is left alone."""
        admitted = list(range(len(keys)))
        if self._sketch is not None:
            self._sketch.record(keys)
            admitted = [at for at in admitted if self._sketch.frequency(keys[at]) >= self._min_uses]
        statuses = [Status.REFUSED] * len(keys)
        wanted, buffers = [keys[at] for at in admitted], [views[at] for at in admitted]
        found = self._call(wanted, lambda: self.store.put(wanted, buffers), left_alone=Status.ERROR)
        for at, status in zip(admitted, found, strict=True):
            statuses[at] = status
        if self._ttl is not None:
            self._note_arrival(key for key, status in zip(keys, statuses, strict=True) if status is Status.STORED)
        return statuses

    def delete(self, keys: Sequence[StoreKey]) -> list[Status]:
        """As the store's; ERROR if the tier is left alone, since what is there would come back with it."""
        with self._lock:
            for key in keys:
                self._came.pop(key, None)
        return self._call(keys, lambda: self.store.delete(keys), left_alone=Status.ERROR)

    def touch(self, keys: Sequence[StoreKey]) -> None:
        """As the store's."""
        if self.breaker.is_closed:
            self.store.touch(keys)

    def touch_prefix(self, keys: Sequence[StoreKey]) -> None:
        """As the store's."""
        if self.breaker.is_closed:
            self.store.touch_prefix(keys)

    def expire(self) -> int:
        """Delete what is older than the time to live; how many keys."""
        if self._ttl is None:
            return 0
        limit = time.monotonic() - self._ttl
        with self._lock:
            expired = []
            while self._came and next(iter(self._came.values())) <= limit:
                expired.append(self._came.popitem(last=False)[0])
        self._forget(expired)
        return len(expired)

    def _look(self, keys: Sequence[StoreKey], call: Callable[[], list[Status]]) -> list[Status]:
        if self._ttl is None:
            return self._call(keys, call, left_alone=Status.MISS)
        limit = time.monotonic() - self._ttl
        with self._lock:
            expired = {key for key in keys if self._came.get(key, limit + 1) <= limit}
            for key in expired:
                del self._came[key]
        self._forget(list(expired))
        statuses = self._call(keys, call, left_alone=Status.MISS)
        statuses = [Status.MISS if key in expired else status for key, status in zip(keys, statuses, strict=True)]
        self._note_arrival(
            (key for key, status in zip(keys, statuses, strict=True) if status is Status.HIT), first_seen=True
        )
        return statuses

    def _forget(self, expired: Sequence[StoreKey]) -> None:
        if expired:
            statuses = self._call(expired, lambda: self.store.delete(expired), left_alone=Status.ERROR)
            failed = [key for key, status in zip(expired, statuses, strict=True) if status is Status.ERROR]
            with self._lock:
                for key in failed:  # still too old, and the first to be tried again
                    self._came[key] = 0.0
                    self._came.move_to_end(key, last=False)

    def _note_arrival(self, keys: Iterable[StoreKey], *, first_seen: bool = False) -> None:
        now = time.monotonic()
        with self._lock:
            for key in keys:
                if not first_seen or key not in self._came:
                    self._came[key] = now
                    self._came.move_to_end(key)

    def _call(self, keys: Sequence[StoreKey], call: Callable[[], list[Status]], *, left_alone: Status) -> list[Status]:
        if not keys:
            return []
        if not self.breaker.allows():
            self._fault(f"{self.store.name} left alone")
            return [left_alone] * len(keys)
        statuses = call()
        failed = Status.ERROR in statuses
        if failed:
            self._fault(f"{self.store.name} failed")
        self.breaker.note(failed)
        return statuses
