"""A circuit breaker: a store that keeps failing is left alone for a while, then tried again by one call at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_FAILURES = 3
_FIRST_REST_S = 1.0
_LONGEST_REST_S = 60.0


class Breaker:
    """Whether a store is left alone after failures. Thread-safe.

    After three failures in a row it rests for a second, then twice as long each time the call that tries it fails, up
    to a minute. Failures of calls from before the rest (a queue that expires) are no news.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._rest = _FIRST_REST_S
        self._again = 0.0
        self._trying = False

    @property
    def is_closed(self) -> bool:
        """Whether the store is in use, or due to be tried."""
        with self._lock:
            return self._failures < _FAILURES or self._clock() >= self._again

    def allows(self) -> bool:
        """Whether to call the store now; while it is left alone, one call in every rest may try it."""
        with self._lock:
            if self._failures < _FAILURES:
                return True
            now = self._clock()
            if now < self._again:
                return False
            self._again = now + self._rest
            self._trying = True
            return True

    def note(self, failed: bool) -> None:
        """A call has ended."""
        with self._lock:
            if not failed:
                self._failures, self._rest, self._trying = 0, _FIRST_REST_S, False
                return
            self._failures += 1
            if self._failures == _FAILURES or self._trying:
                self._trying = False
                self._again = self._clock() + self._rest
                self._rest = min(2 * self._rest, _LONGEST_REST_S)
