"""HostConnector: values in this process's own memory, bounded, the tier next to the device.

All memory is taken once (`slab`). Values are copied outside of the lock, in pieces that are checksummed while they are
in a core's cache. A value that is being read is held, one that is being written is not there yet, and whoever removes
one that is held leaves its memory to the last reader.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Meta

from kvtide.offload.eviction import POLICIES, make_policy
from kvtide.offload.keys import StoreKey
from kvtide.offload.sealing import unseal
from kvtide.offload.store import Entry, Lease, Status, StoreStats
from kvtide.offload.values import CODEC_RAW, HEADER_BYTES, BadValue, Header, pack_header, parse_header

from .base import BaseConnector
from .settings import CodecName, StoreConfig
from .slab import Extent, Slab, round_up

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# Copied, then hashed where the copy has just left it; two of them fit into a core's second-level cache.
_PIECE = 256 << 10
# Bytes of a batch that are worth another thread's start, and of a value: below it threads wait for the interpreter.
_SHARE = 1 << 20
_SHARED_VALUE = 128 << 10

Bytes = npt.NDArray[np.uint8]


class HostConfig(StoreConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a `HostConnector`."""

    sizes = ("max_bytes",)
    least = MappingProxyType({"max_bytes": "1KiB"})  # a unit of the slab

    max_bytes: Annotated[int | str, Meta(description="Memory for values, taken at the start, such as 64GiB.")]
    eviction: Annotated[str, Meta(description=f"Which values go when it is full: {', '.join(POLICIES)}.")] = "s3fifo"
    pinned: Annotated[bool, Meta(description="Whether the memory is pinned for CUDA devices.")] = False
    codec: CodecName = "raw"
    copy_threads: Annotated[
        int, Meta(description="Threads that share the copying of a large batch; 1: only the caller's.", ge=1, le=64)
    ] = 4


@dataclass(slots=True, eq=False)
class _Value:
    """Where a value lies: `num_bytes` of header and payload in `extents` of `held_bytes` together."""

    extents: list[Extent]
    num_bytes: int
    held_bytes: int
    pins: int = 0
    gone: bool = False  # removed; its memory comes free with the last pin


_Job = tuple[StoreKey, _Value | None, memoryview]


class _Pins(Lease):
    def __init__(self, store: HostConnector, statuses: Sequence[Status], values: list[_Value]) -> None:
        super().__init__(statuses)
        self._store = store
        self._values = values

    def close(self) -> None:
        values, self._values = self._values, []
        self._store._unpin(values)


class HostConnector(BaseConnector):
    """Values in host memory; lost when it is closed."""

    Config = HostConfig
    name = "host"

    def __init__(self, config: HostConfig) -> None:
        super().__init__(config.codec)
        self._lock = threading.Lock()  # guards what follows, but not the bytes of values
        self._policy = make_policy(config.eviction)
        self._slab = Slab(config.num_bytes("max_bytes"), pinned=config.pinned)
        self._memory = self._slab.memory
        self._values: dict[StoreKey, _Value] = {}
        self._num_bytes = 0
        self._pinned_bytes = 0  # of values that are in `_values`
        self._evicted = 0
        self._copy_threads = min(config.copy_threads, os.cpu_count() or 1)
        self._copiers = ThreadPoolExecutor(self._copy_threads, thread_name_prefix="kvtide-host")

    def lease(self, keys: Sequence[StoreKey]) -> Lease:
        values: list[_Value] = []

        def look_up() -> list[Status]:
            with self._lock:
                found = [self._values.get(key) for key in keys]
                values.extend(value for value in found if value is not None)
                self._pin(values)
            return [Status.MISS if value is None else Status.HIT for value in found]

        return _Pins(self, self._answer("contains", keys, look_up), values)

    def touch(self, keys: Sequence[StoreKey]) -> None:
        with self._lock:
            for key in reversed(keys):
                self._policy.on_hit(key)

    def touch_prefix(self, keys: Sequence[StoreKey]) -> None:
        with self._lock:
            self._policy.on_prefix(keys)

    def cool(self, keys: Sequence[StoreKey]) -> None:
        with self._lock:
            for key in keys:
                self._policy.on_cool(key)

    def scan(self) -> Iterator[Entry]:
        with self._lock:
            entries = [Entry(key, value.held_bytes) for key, value in self._values.items()]
        yield from entries

    def stats(self) -> StoreStats:
        stats = super().stats()
        with self._lock:
            stats.num_values, stats.num_bytes, stats.evicted = len(self._values), self._num_bytes, self._evicted
        stats.capacity_bytes = self._slab.num_bytes
        return stats

    def _contains(self, keys: Sequence[StoreKey]) -> list[Status]:
        with self._lock:
            return [Status.HIT if key in self._values else Status.MISS for key in keys]

    def peek_into(self, keys: Sequence[StoreKey], buffers: Sequence[WriteableBuffer]) -> list[Status]:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        return self._answer("get", keys, lambda: self._get(keys, views, used=False))

    def _get(self, keys: Sequence[StoreKey], views: Sequence[memoryview], *, used: bool = True) -> list[Status]:
        with self._lock:
            found = [self._values.get(key) for key in keys]
            pinned = [value for value in found if value is not None]
            self._pin(pinned)
            for key in reversed(keys) if used else ():
                self._policy.on_hit(key)
        try:
            return self._share(self._read, list(zip(keys, found, views, strict=True)))
        finally:
            self._unpin(pinned)

    def _put(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        statuses = self._share(self._write, [(key, None, view) for key, view in zip(keys, views, strict=True)])
        self.touch_prefix([key for key, status in zip(keys, statuses, strict=True) if status is Status.STORED])
        return statuses

    def _share(self, work: Callable[[_Job], Status], jobs: list[_Job]) -> list[Status]:
        """`work` on every job, by several threads where that is worth it."""
        num_bytes = sum(view.nbytes for _, _, view in jobs)
        threads = min(self._copy_threads, num_bytes // _SHARE, len(jobs))
        if threads < 2 or num_bytes < len(jobs) * _SHARED_VALUE:
            return list(map(work, jobs))
        futures = [
            self._copiers.submit(lambda part: list(map(work, part)), jobs[at::threads]) for at in range(1, threads)
        ]
        statuses = [Status.ERROR] * len(jobs)
        try:
            statuses[::threads] = map(work, jobs[::threads])
        finally:
            wait(futures)
        for at, future in enumerate(futures, 1):
            statuses[at::threads] = future.result()
        return statuses

    def _write(self, job: _Job) -> Status:
        key, _, view = job
        with self._lock:
            if key in self._values:
                return Status.PRESENT
        header, payload = (None, view) if self._codec is None else self._seal(key, view)
        num_bytes = HEADER_BYTES + payload.nbytes
        with self._lock:
            extents = self._room(num_bytes)
        if extents is None:
            return Status.FULL
        value = _Value(extents, num_bytes, round_up(num_bytes))
        try:
            digest = self._copy_in(value, np.asarray(payload))
            if header is None:
                header = pack_header(Header(CODEC_RAW, view.nbytes, view.nbytes, 0, key, digest))
            self._memory[extents[0][0] : extents[0][0] + HEADER_BYTES] = np.frombuffer(header, np.uint8)
        except BaseException:
            with self._lock:
                self._slab.give(extents)
            raise
        with self._lock:
            if key in self._values:
                self._slab.give(extents)
                return Status.PRESENT
            self._values[key] = value
            self._num_bytes += value.held_bytes
            self._policy.on_insert(key, value.held_bytes)
        return Status.STORED

    def _delete(self, keys: Sequence[StoreKey]) -> list[Status]:
        with self._lock:
            statuses = [Status.DELETED if key in self._values else Status.MISS for key in keys]
            for key in keys:
                if key in self._values:
                    self._policy.on_remove(key)
                    self._remove(key)
        return statuses

    def _headers(self, keys: Sequence[StoreKey]) -> list[Header | None]:
        with self._lock:
            starts = [self._start(value) if (value := self._values.get(key)) else None for key in keys]
        return [None if start is None else self._header(key, start) for key, start in zip(keys, starts, strict=True)]

    def _shut(self) -> None:
        self._copiers.shutdown()
        with self._lock:
            self._values.clear()
            self._num_bytes = 0
            self._memory = self._slab.memory = np.empty(0, np.uint8)

    def _read(self, job: _Job) -> Status:
        key, value, view = job
        if value is None:
            return Status.MISS
        try:
            header = parse_header(self._start(value), key, max_value_bytes=self.max_value_bytes)
            if header.raw_bytes != view.nbytes or HEADER_BYTES + header.stored_bytes != value.num_bytes:
                raise BadValue("length differs")
            if header.codec == CODEC_RAW:
                if self._copy_out(value, np.asarray(view)) != header.payload_digest:
                    raise BadValue("payload checksum")
            else:
                payload = np.empty(header.stored_bytes, np.uint8)
                self._copy_out(value, payload)
                unseal(header, payload.data, view)
        except BadValue as error:
            status = self._bad(error)
            if status is Status.CORRUPT:
                with self._lock:
                    if self._values.get(key) is value:
                        self._policy.on_remove(key)
                        self._remove(key)
            return status
        return Status.HIT

    def _copy_in(self, value: _Value, payload: Bytes) -> bytes:
        """Copy a payload to its place; its digest."""
        digest = xxhash.xxh3_128()
        for start, stop, at in _pieces(value):
            part = payload[at : at + stop - start]
            self._memory[start:stop] = part
            digest.update(part.data)
        return digest.digest()

    def _copy_out(self, value: _Value, out: Bytes) -> bytes:
        """Copy a payload to `out`; the digest of what is there then."""
        digest = xxhash.xxh3_128()
        for start, stop, at in _pieces(value):
            part = out[at : at + stop - start]
            part[:] = self._memory[start:stop]
            digest.update(part.data)
        return digest.digest()

    def _start(self, value: _Value) -> bytes:
        start = value.extents[0][0]  # extents are longer than a header
        return self._memory[start : start + HEADER_BYTES].tobytes()

    # Under the lock.

    def _room(self, num_bytes: int) -> list[Extent] | None:
        """Memory for a value, after evicting others if that takes it and is enough."""
        short = round_up(num_bytes) - self._slab.free_bytes
        if short > 0:
            if self._policy.num_bytes - self._pinned_bytes < short:
                return None
            for key in self._policy.victims(short, held=_Held(self._values)):
                self._remove(key)
                self._evicted += 1
        return self._slab.take(num_bytes)

    def _remove(self, key: StoreKey) -> None:
        value = self._values.pop(key)
        self._num_bytes -= value.held_bytes
        value.gone = True
        if value.pins:
            self._pinned_bytes -= value.held_bytes
        else:
            self._slab.give(value.extents)

    def _pin(self, values: Sequence[_Value]) -> None:
        for value in values:
            if not value.pins:
                self._pinned_bytes += value.held_bytes
            value.pins += 1

    def _unpin(self, values: Sequence[_Value]) -> None:
        with self._lock:
            for value in values:
                value.pins -= 1
                if not value.pins:
                    if value.gone:
                        self._slab.give(value.extents)
                    else:
                        self._pinned_bytes -= value.held_bytes


class _Held:
    """The keys whose values are pinned."""

    def __init__(self, values: dict[StoreKey, _Value]) -> None:
        self._values = values

    def __contains__(self, key: object) -> bool:
        return self._values[key].pins > 0  # type: ignore[index]


def _pieces(value: _Value) -> Iterator[tuple[int, int, int]]:
    """The payload's pieces: from and to where they lie in the slab, and from where in the payload."""
    at, skip = 0, HEADER_BYTES
    for start, end in value.extents:
        end = min(end, start + skip + value.num_bytes - HEADER_BYTES - at)
        for piece in range(start + skip, end, _PIECE):
            stop = min(piece + _PIECE, end)
            yield piece, stop, at
            at += stop - piece
        skip = 0
