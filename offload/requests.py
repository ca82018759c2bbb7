"""A store's calls on worker threads: handles instead of waiting, deadlines, cancellation, bounded queues.

    submit ──► queued ──► running ──► finished: `statuses` are set
                 │           │                        settled: no thread touches the buffers any more
                 └───────────┴── deadline, cancel ──► finished at once, with ERROR; settled when the thread returns

A store that hangs cannot be interrupted, and may still write into a buffer long after the deadline; so a caller reuses
buffers when the operation is *settled*, not when it is finished. Whoever waits never waits for a hung store: queued
operations expire, and after failures in a row the store is left alone (`breaker`) and operations finish at once.
Threads are daemons: a hung one does not keep the process from ending.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtide.kvcache import ConfigError

from .breaker import Breaker
from .keys import StoreKey
from .store import Lease, Status, Store

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


# Upper bounds of the latency buckets, in seconds.
LATENCY_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass
class Latencies:
    """Operations by the time from asking to the answer: `buckets[i]` took up to `LATENCY_BOUNDS[i]`, the last more."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS) + 1))
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one operation."""
        self.buckets[bisect_left(LATENCY_BOUNDS, seconds)] += 1
        self.seconds += seconds


class Operation:
    """One batch on its way to the store. `future` holds its statuses, for callbacks and asyncio."""

    def __init__(
        self, requests: Requests, name: str, num_keys: int, call: Callable[[], list[Status]], deadline: float
    ) -> None:
        self.future: Future[list[Status]] = Future()
        self._requests = requests
        self._name = name
        self._began = time.monotonic()
        self._num_keys = num_keys
        self._call = call
        self._expires = self._began + deadline
        self._claimed = False  # somebody is setting the result
        self._settled = threading.Event()

    @property
    def statuses(self) -> list[Status] | None:
        """One status per key once the operation is finished."""
        return self.future.result() if self.future.done() else None

    @property
    def settled(self) -> bool:
        """Whether the buffers are the caller's again; never before the operation is finished."""
        return self._settled.is_set() and self.future.done()

    def cancel(self) -> None:
        """Finish it now, with ERROR for every key, unless it is finished already."""
        self._requests._drop(self, "cancelled")

    def wait_settled(self, timeout: float) -> bool:
        """Wait until the buffers are the caller's again; False if that takes longer than `timeout` seconds."""
        return self._settled.wait(timeout)

    def _finish(self, statuses: list[Status]) -> bool:
        """Set the result, once; outside of the lock, since callbacks run here."""
        with self._requests._state:
            if self._claimed:
                return False
            self._claimed = True
            self._requests.latencies[self._name].add(time.monotonic() - self._began)
        self.future.set_result(statuses)
        return True

    def _errors(self) -> list[Status]:
        return [Status.ERROR] * self._num_keys


class Requests:
    """Runs a store on `threads` workers. At most `max_queued` operations wait; `deadline` is in seconds."""

    def __init__(self, store: Store, *, threads: int = 4, max_queued: int = 1024, deadline: float = 30.0) -> None:
        for name, value in (("threads", threads), ("max_queued", max_queued)):
            if value < 1:
                raise ConfigError(f"{name} {value} must be at least 1")
        if not deadline > 0:
            raise ConfigError(f"deadline {deadline} must be more than 0 seconds")
        self.store = store
        self.faults: Counter[str] = Counter()
        self.latencies: defaultdict[str, Latencies] = defaultdict(Latencies)  # by what was asked for
        self._max_queued = max_queued
        self._deadline = deadline
        self._breaker = Breaker()
        self._state = threading.Condition()  # guards what follows, `faults` and `latencies`
        self._queue: deque[Operation] = deque()
        self._running: set[Operation] = set()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"kvtide-requests-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def get_into(
        self, keys: Sequence[StoreKey], buffers: Sequence[WriteableBuffer], *, deadline: float | None = None
    ) -> Operation | None:
        """`Store.get_into` on a worker; None if too many operations wait already."""
        return self._submit("load", len(keys), lambda: self.store.get_into(keys, buffers), deadline)

    def put(
        self,
        keys: Sequence[StoreKey],
        buffers: Sequence[ReadableBuffer],
        *,
        owner: str = "",
        deadline: float | None = None,
    ) -> Operation | None:
        """`Store.put_for` on a worker; None if too many operations wait already."""
        return self._submit("store", len(keys), lambda: self.store.put_for(owner, keys, buffers), deadline)

    def lease(self, keys: Sequence[StoreKey], *, deadline: float | None = None) -> LeaseOperation | None:
        """`Store.lease` on a worker; None if too many operations wait already."""
        holder = _Holder()

        def call() -> list[Status]:
            return holder.take(self.store.lease(keys))

        operation = self._submit("look up", len(keys), call, deadline)
        return None if operation is None else LeaseOperation(operation, holder)

    def touch_prefix(self, keys: Callable[[], Sequence[StoreKey]]) -> None:
        """`Store.touch_prefix` on a worker; left out if too many operations wait already, or the store fails.

        `keys` is called there too.
        """

        def call() -> list[Status]:
            self.store.touch_prefix(keys())
            return []

        self._submit("touch", 0, call, None)

    def run(
        self, num_keys: int, call: Callable[[], list[Status]], *, deadline: float | None = None
    ) -> Operation | None:
        """Several calls of the store as one operation, with a status per key; None if too many wait already."""
        return self._submit("run", num_keys, call, deadline)

    def expire(self) -> None:
        """Finish operations that are past their deadline. Cheap; call it often."""
        now = time.monotonic()
        with self._state:
            late = [operation for operation in (*self._queue, *self._running) if operation._expires <= now]
        for operation in late:
            self._drop(operation, "deadline")

    @property
    def num_queued(self) -> int:
        """Operations that wait for a worker."""
        with self._state:
            return len(self._queue)

    @property
    def num_running(self) -> int:
        """Operations that a worker is busy with, those past their deadline included."""
        with self._state:
            return len(self._running)

    def close(self, timeout: float = 5.0) -> bool:
        """Drop what is queued, wait for what runs; False if a hung call is left behind after `timeout` seconds."""
        with self._state:
            self._closed = True
            queued = list(self._queue)
            self._state.notify_all()
        for operation in queued:
            operation.cancel()
        expires = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, expires - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _submit(
        self, name: str, num_keys: int, call: Callable[[], list[Status]], deadline: float | None
    ) -> Operation | None:
        operation = Operation(self, name, num_keys, call, self._deadline if deadline is None else deadline)
        with self._state:
            if len(self._queue) >= self._max_queued:
                self.faults["queue full"] += 1
                return None
            # A closed or failing store answers at once; nobody waits out a deadline for it.
            # What has no statuses cannot tell whether a failing store works again.
            allowed = self._breaker.allows() if num_keys else self._breaker.is_closed
            refused = "closed" if self._closed else "" if allowed else "left alone"
            if not refused:
                self._queue.append(operation)
                self._state.notify()
                return operation
            self.faults[refused] += 1
        operation._finish(operation._errors())
        operation._settled.set()
        return operation

    def _drop(self, operation: Operation, why: str) -> None:
        with self._state:
            queued = operation in self._queue
            if queued:
                self._queue.remove(operation)
        # Else its thread settles it, or has done so.
        if operation._finish(operation._errors()):
            with self._state:
                self.faults[why] += 1
            if why == "deadline":
                self._breaker.note(failed=True)
        if queued:
            operation._settled.set()

    def _work(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                operation = self._queue.popleft()
                self._running.add(operation)
            try:
                statuses = operation._call()
            except Exception as error:  # a store that breaks its promise not to raise
                with self._state:
                    self.faults[type(error).__name__] += 1
                statuses = operation._errors()
            operation._call = list  # the closure holds the caller's buffers
            with self._state:
                self._running.discard(operation)
            if operation._finish(statuses) and statuses:
                self._breaker.note(failed=Status.ERROR in statuses)
            operation._settled.set()


class LeaseOperation:
    """A lease on its way. `close` at any stage, more than once, lets go of what it holds or is about to hold."""

    def __init__(self, operation: Operation, holder: _Holder) -> None:
        self._operation = operation
        self._holder = holder

    @property
    def statuses(self) -> list[Status] | None:
        """HIT for what is held, once the look-up is finished."""
        return self._operation.statuses

    def close(self) -> None:
        """Let go."""
        self._operation.cancel()
        self._holder.close()


class _Holder:
    """Passes a lease from the worker to whoever asked; after `close` a late one is let go at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lease: Lease | None = None
        self._closed = False

    def take(self, lease: Lease) -> list[Status]:
        with self._lock:
            if not self._closed:
                self._lease = lease
                return lease.statuses
        lease.close()
        return lease.statuses

    def close(self) -> None:
        with self._lock:
            self._closed = True
            lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()
