"""One batch on a few threads: reading, writing and checksums leave Python's lock, so that cores can share them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")

# What is worth a hand-over to another thread, which takes some 30 µs.
_WORTH_BYTES = 1 << 18


class Parallel:
    """`threads` threads, the caller's own among them. `work` must not raise.

    Items of fewer bytes than `min_item_bytes` are not shared out: passing Python's lock around costs more than they do.
    """

    def __init__(self, threads: int, name: str, *, min_item_bytes: int = 0) -> None:
        self._threads = threads
        self._min_item_bytes = min_item_bytes
        self._pool = ThreadPoolExecutor(threads - 1, thread_name_prefix=name) if threads > 1 else None

    def run(self, work: Callable[[Sequence[Item]], None], items: Sequence[Item], num_bytes: int) -> None:
        """`work` over all items, in as many runs of neighbours as their bytes are worth; returns when all are done."""
        parts = min(self._threads, len(items), num_bytes // _WORTH_BYTES)
        if self._pool is None or parts < 2 or num_bytes < len(items) * self._min_item_bytes:
            work(items)
            return
        bounds = [len(items) * part // parts for part in range(parts + 1)]
        others = [self._pool.submit(work, items[bounds[part] : bounds[part + 1]]) for part in range(1, parts)]
        work(items[: bounds[1]])
        for other in others:
            other.result()

    def close(self) -> None:
        """Let the threads end."""
        if self._pool is not None:
            self._pool.shutdown()
