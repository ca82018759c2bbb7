"""Lanes: threads for calls into libraries that may hang, each with the memory that its call may still write to.

    with lanes.take() as lane:            # a free one; waits for it no longer than the time limit
        ... fill lane.memory ...
        lane.run(lambda: library(...))    # on the lane's thread; `TimeoutError` after the time limit
        ... read lane.memory ...

A call that is given up on keeps its lane, thread and memory, until it returns: nothing that it writes late reaches
memory that somebody else uses, and in particular never the caller's buffers. With every lane held by a hung call,
`take` gives up at once: a service that hangs costs its callers the time limit a few times, not every time.
"""

from __future__ import annotations

import ctypes
import mmap
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

from kvtide.offload.values import HEADER_BYTES

ALIGNMENT = 4096  # of memory, and of the places in it: what direct I/O asks for

Result = TypeVar("Result")


class Memory:
    """Page-aligned memory for a library: `view` starts at `address`."""

    def __init__(self, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, num_bytes)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


class Lane:
    """One thread and its memory: `memory` starts at `address`, page-aligned. `context` is the owner's, per lane."""

    def __init__(self, lanes: Lanes, num_bytes: int, name: str) -> None:
        self._lanes = lanes
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        memory = Memory(num_bytes)
        self.memory = memory.view
        self.address = memory.address
        self.context: Any = None
        self.hung = False
        threading.Thread(target=self._loop, name=name, daemon=True).start()

    def run(self, call: Callable[[], Result]) -> Result:
        """What `call` returns or raises on the lane's thread; `TimeoutError` when it takes longer than the limit."""
        future: Future[Result] = Future()

        def work() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            self._lanes.returned(self)

        self._work.put(work)
        wait([future], self._lanes.seconds)
        if self._lanes.gave_up(self, future):
            raise TimeoutError(f"no answer within {self._lanes.seconds:g} s")
        return future.result()

    def end(self, last: Callable[[Any], None]) -> Future[None]:
        """Do `last` with the context after what the lane runs, and let the thread end."""
        future: Future[None] = Future()

        def finish() -> None:
            if self.context is not None:
                last(self.context)
                self.context = None
            future.set_result(None)

        self._work.put(finish)
        self._work.put(None)
        return future

    def _loop(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class Lanes:
    """`count` lanes of `lane_bytes` each, and one time limit for waiting for a lane and for a call."""

    def __init__(self, count: int, lane_bytes: int, seconds: float, name: str) -> None:
        self.seconds = seconds
        self.lane_bytes = lane_bytes
        self.all = [Lane(self, lane_bytes, f"{name}-{number}") for number in range(count)]
        self._free = list(self.all)
        self._changed = threading.Condition()

    @property
    def max_value_bytes(self) -> int:
        """The longest raw value that fits into a lane with its header."""
        return self.lane_bytes - HEADER_BYTES

    @contextmanager
    def take(self) -> Iterator[Lane]:
        """A free lane for the block; `TimeoutError` if there is none in time, or every one is held by a hung call."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or all(lane.hung for lane in self.all), self.seconds)
            if not self._free:
                raise TimeoutError("no lane is free")
            lane = self._free.pop()
        try:
            yield lane
        finally:
            with self._changed:
                if not lane.hung:
                    self._give_back(lane)

    def gave_up(self, lane: Lane, future: Future[Any]) -> bool:
        """Mark the lane as held by a hung call, unless the call has returned after all."""
        with self._changed:
            lane.hung = not future.done()
            return lane.hung

    def returned(self, lane: Lane) -> None:
        """The lane's call has returned; one that was given up on comes back into use."""
        with self._changed:
            if lane.hung:
                lane.hung = False
                self._give_back(lane)

    def close(self, last: Callable[[Any], None] = lambda context: None) -> None:
        """Do `last` with every lane's context, on its thread, and end the threads.

        Waits for it, within the time limit; a lane that is held by a hung call does it when the call returns.
        """
        done = [lane.end(last) for lane in self.all]
        wait([future for lane, future in zip(self.all, done, strict=True) if not lane.hung], self.seconds)

    def _give_back(self, lane: Lane) -> None:
        self._free.append(lane)
        self._changed.notify()


def aligned(num_bytes: int) -> int:
    """Rounded up to `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def parts(sizes: list[int], most: int) -> Iterator[list[tuple[int, int]]]:
    """Batches of (index, offset): values of these sizes laid out one behind the other, aligned, in `most` bytes."""
    batch: list[tuple[int, int]] = []
    end = 0
    for at, size in enumerate(sizes):
        if batch and end + size > most:
            yield batch
            batch, end = [], 0
        batch.append((at, end))
        end += aligned(size)
    if batch:
        yield batch
