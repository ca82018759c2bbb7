"""Values of an upper tier that the tiers below do not have yet: held until they are written down, in the background.

    put ──► tier, and held by a lease ──► over the high mark, or room is needed ──► a tier below has it; let go

What is pending cannot be evicted, so nothing is lost by being slow; and it is bounded: a caller that stores faster than
the tier below takes writes down itself. A value that no tier below takes (not admitted, too large, full) is let go and
counted; one that a tier below failed on stays pending. No lock is held during a tier's I/O.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtide.offload.eviction import EvictionPolicy
from kvtide.offload.keys import StoreKey
from kvtide.offload.store import Lease, Status

from .tiers import Tier

_BATCH_BYTES = 32 << 20
_IDLE_S = 0.5  # between looks at tiers that failed, and at values' ages
_TOUCHES = 1 << 10  # batches of keys that wait to be passed on; the oldest are forgotten


@dataclass(frozen=True)
class Marks:
    """Pending bytes of a tier: the writer starts above `high` and stops at `low`; above `most`, callers help."""

    low: int
    high: int
    most: int


@dataclass(eq=False)
class _Entry:
    num_bytes: int
    lease: Lease
    dropped: bool = False


class Pending:
    """The pending values of one tier, and their way down. Thread-safe.

    `tiers` are the tier and those below it; `below[i]` is what is pending in `tiers[i]`, None for the last.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        below: Sequence[Pending | None],
        marks: Marks,
        policy: EvictionPolicy,
        fault: Callable[[str], None],
    ) -> None:
        self.marks = marks
        self._tier, *self._lower = tiers
        self._below = below
        self._fault = fault
        self._changed = threading.Condition()  # guards what follows
        self._entries: dict[StoreKey, _Entry] = {}
        self._num_bytes = 0
        self._policy = policy  # in which order they are written; without those that are being written
        self._leaving: set[StoreKey] = set()  # deleted while they were being written, and not yet deleted below

    @property
    def num_bytes(self) -> int:
        """Bytes that the tiers below do not have."""
        with self._changed:
            return self._num_bytes

    def add(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[int]:
        """Hold values that the tier has just stored; the places of those that it has lost already."""
        lost = []
        for at, (key, size) in enumerate(zip(keys, sizes, strict=True)):
            lease = self._tier.store.lease([key])
            if lease.statuses != [Status.HIT]:
                lost.append(at)
                continue
            with self._changed:
                self._changed.wait_for(lambda key=key: key not in self._leaving)  # type: ignore[misc]
                before = self._entries.get(key)
                if before is not None:  # the tier lost that value, and has this one now
                    self._policy.on_remove(key)
                    self._num_bytes -= before.num_bytes
                self._entries[key] = _Entry(size, lease)
                self._num_bytes += size
                self._policy.on_insert(key, size)
            if before is not None:
                before.lease.close()
        return lost

    def used(self, keys: Sequence[StoreKey]) -> None:
        """Values were read: they are not the next to be written down."""
        with self._changed:
            for key in reversed(keys):
                self._policy.on_hit(key)

    def order(self, keys: Sequence[StoreKey]) -> None:
        """Values are one prefix: the last are written down first."""
        with self._changed:
            self._policy.on_prefix(keys)

    def drop(self, keys: Sequence[StoreKey]) -> None:
        """Values are to be deleted: they are not written down, and what is being written now is deleted afterwards."""
        with self._changed:
            known = [key for key in keys if key in self._entries]
            self._leaving.update(key for key in known if key not in self._policy)
            entries = [self._entries.pop(key) for key in known]
            for key, entry in zip(known, entries, strict=True):
                self._policy.on_remove(key)
                self._num_bytes -= entry.num_bytes
                entry.dropped = True
            self._changed.notify_all()
        for entry in entries:
            entry.lease.close()

    def write_down(self, num_bytes: int) -> None:
        """Let values of `num_bytes` go by writing them down, or as many as can be."""
        while num_bytes > 0:
            with self._changed:
                keys = self._policy.victims(min(num_bytes, _BATCH_BYTES))
                entries = [self._entries[key] for key in keys]
                before = self._num_bytes
                if not keys:
                    # Others write the rest; it counts when they are done.
                    if before and self._changed.wait_for(lambda before=before: self._num_bytes < before, _IDLE_S):  # type: ignore[misc]
                        num_bytes -= before - self._num_bytes
                        continue
                    return
            gone = self._write(keys, entries)
            num_bytes -= gone
            if gone < sum(entry.num_bytes for entry in entries):
                return

    def _write(self, keys: list[StoreKey], entries: list[_Entry]) -> int:
        """Write a batch down; the bytes that are pending no more."""
        views = [memoryview(bytearray(entry.num_bytes)) for entry in entries]
        found = self._tier.peek(keys, views)
        failed = [at for at, status in enumerate(found) if status is Status.ERROR]
        for status in found:
            if status in (Status.MISS, Status.CORRUPT):
                self._fault("lost before it was written down")
        left = [at for at, status in enumerate(found) if status is Status.HIT]
        written: list[tuple[Tier, Pending | None, int]] = []
        for tier, below in zip(self._lower, self._below[1:], strict=True):
            if left and tier.stores:
                statuses = put_with_room(tier, below, [keys[at] for at in left], [views[at] for at in left])
                written += [(tier, below, at) for at, status in zip(left, statuses, strict=True) if status in THERE]
                failed += [at for at, status in zip(left, statuses, strict=True) if status is Status.ERROR]
                left = [at for at, status in zip(left, statuses, strict=True) if status not in THERE]
        stay = set(left) & set(failed) | {at for at in failed if found[at] is Status.ERROR}
        for _ in set(left) - stay:
            self._fault("not taken below")
        with self._changed:
            for at, (key, entry) in enumerate(zip(keys, entries, strict=True)):
                if self._entries.get(key) is not entry:
                    continue
                if at in stay:
                    self._policy.on_insert(key, entry.num_bytes)
                else:
                    del self._entries[key]
                    self._num_bytes -= entry.num_bytes
            dropped = {key for key, entry in zip(keys, entries, strict=True) if entry.dropped}
            self._changed.notify_all()
        if dropped:
            for tier, below, at in written:
                if keys[at] in dropped:
                    delete_from(tier, below, [keys[at]])
            with self._changed:
                self._leaving -= dropped
                self._changed.notify_all()
        for at, entry in enumerate(entries):
            if at not in stay:
                entry.lease.close()
        return sum(entry.num_bytes for at, entry in enumerate(entries) if at not in stay)


THERE = (Status.STORED, Status.PRESENT)


def put_with_room(
    tier: Tier, pending: Pending | None, keys: Sequence[StoreKey], views: Sequence[memoryview]
) -> list[Status]:
    """Put values into a tier; where it is full of what it may not evict, make room once and try again.

    What is stored is pending there, if the tier is one that writes down; ERROR for what it lost at once.
    """
    statuses = tier.put(keys, views)
    if pending is None:
        return statuses
    full = [at for at, status in enumerate(statuses) if status is Status.FULL]
    if full:
        pending.write_down(sum(views[at].nbytes for at in full))
        again = tier.put([keys[at] for at in full], [views[at] for at in full])
        for at, status in zip(full, again, strict=True):
            statuses[at] = status
    stored = [at for at, status in enumerate(statuses) if status is Status.STORED]
    for lost in pending.add([keys[at] for at in stored], [views[at].nbytes for at in stored]):
        statuses[stored[lost]] = Status.ERROR
    return statuses


def delete_from(tier: Tier, pending: Pending | None, keys: Sequence[StoreKey]) -> list[Status]:
    """Delete values from a tier, before they are written down if they are pending."""
    if pending is not None:
        pending.drop(keys)
    return tier.delete(keys)


class Writer:
    """The thread that writes down what is over high marks, passes uses on to lower tiers, and lets values expire."""

    def __init__(self, tiers: Sequence[Tier], pending: Sequence[Pending]) -> None:
        self._tiers = tiers
        self._pending = pending
        self._touches: deque[tuple[Callable[[Tier, list[StoreKey]], None], Sequence[Tier], list[StoreKey]]] = deque(
            maxlen=_TOUCHES
        )
        self._wake = threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="kvtide-multi", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Something may be over its mark."""
        if any(pending.num_bytes > pending.marks.high for pending in self._pending):
            self._wake.set()

    def touch(self, tiers: Sequence[Tier], keys: list[StoreKey]) -> None:
        """Pass a use on to tiers, soon."""
        self._touches.append((Tier.touch, tiers, keys))

    def touch_prefix(self, tiers: Sequence[Tier], keys: list[StoreKey]) -> None:
        """Pass the order of a prefix on to tiers, soon."""
        self._touches.append((Tier.touch_prefix, tiers, keys))

    def close(self) -> None:
        """Let the thread end after what it does now."""
        self._ending = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending:
            self._wake.wait(_IDLE_S)
            self._wake.clear()
            while self._touches and not self._ending:
                pass_on, tiers, keys = self._touches.popleft()
                for tier in tiers:
                    pass_on(tier, keys)
            for pending in self._pending:
                excess = pending.num_bytes
                if excess > pending.marks.high and not self._ending:
                    pending.write_down(excess - pending.marks.low)
            for tier in self._tiers:
                tier.expire()
