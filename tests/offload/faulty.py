"""A store that fails as real ones do, key by key: errors, values gone or corrupt when read, no room, slowness.

And copies that are as late as a device's may be.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from awkward import AwkwardStore

from kvtide.offload.copies import Copied, Copies
from kvtide.offload.store import Lease, Status, Store


class FaultyStore(AwkwardStore):
    """Around a real store; what `AwkwardStore` can do wrong for a whole call, and with `rate` something for each key.

    A look-up may then say HIT for what is not there or will be gone, a read ERROR, MISS or CORRUPT with garbage in the
    buffer, a put FULL, REFUSED or ERROR (stored or not); batches are served in part. Calls take up to `latency_s`.
    """

    def __init__(self, store: Store, seed: object) -> None:
        super().__init__(store)
        self.rate = 0.0
        self.latency_s = 0.0
        self.faults = 0
        self._rng = random.Random(f"faults {seed}")
        self._lock = threading.Lock()

    def _strikes(self) -> bool:
        with self._lock:
            strikes = self._rng.random() < self.rate
            self.faults += strikes
            return strikes

    def _choose(self, *choices: Any) -> Any:
        with self._lock:
            return self._rng.choice(choices)

    def _wait(self) -> None:
        if self.latency_s:
            time.sleep(self._choose(0, 0, 0.5, 1) * self.latency_s)

    def lease(self, keys: Sequence[bytes]) -> Lease:
        self._wait()
        lease = super().lease(keys)
        for number, key in enumerate(keys):
            if self._strikes():
                lease.statuses[number] = self._choose(Status.HIT, Status.MISS, Status.ERROR)
                if self._choose(False, False, True):
                    self.store.delete([key])
        return lease

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> list[Status]:
        self._wait()
        statuses = super().get_into(keys, buffers)
        for number, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            if self._strikes():
                statuses[number] = self._choose(Status.ERROR, Status.MISS, Status.CORRUPT)
                view = memoryview(buffer).cast("B")
                view[: len(view) // 2] = b"\x99" * (len(view) // 2)
                if statuses[number] is Status.CORRUPT:
                    self.store.delete([key])
        return statuses

    def put(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> list[Status]:
        self._wait()
        good = [number for number in range(len(keys)) if not self._strikes()]
        found = super().put([keys[n] for n in good], [buffers[n] for n in good])
        statuses = [self._choose(Status.ERROR, Status.FULL, Status.REFUSED) for _ in keys]
        for number, status in zip(good, found, strict=True):
            statuses[number] = status
        return statuses


class LateCopies:
    """Copies that happen some polls after they were asked for, or when somebody waits for them: as on a CUDA stream.

    What is copied out is what the blocks hold by then, so a block that was let go too early shows in the store.
    """

    def __init__(self, copies: Copies, seed: object) -> None:
        self.staging = copies.staging
        self._copies = copies
        self._rng = random.Random(f"late {seed}")

    def out(self, runs: Any) -> Copied:
        return _Late(lambda: self._copies.out(runs), self._rng.choice([0, 1, 3]))

    def into(self, parts: Any) -> Copied:
        return _Late(lambda: self._copies.into(parts), self._rng.choice([0, 1, 3]))


class _Late(Copied):
    def __init__(self, copy: Callable[[], Copied], polls: int) -> None:
        self._copy: Callable[[], Copied] | None = copy
        self._polls = polls

    def done(self) -> bool:
        self._polls -= 1
        if self._polls < 0:
            self.wait()
        return self._copy is None

    def wait(self, part: int | None = None) -> None:
        if self._copy is not None:
            self._copy()
            self._copy = None
