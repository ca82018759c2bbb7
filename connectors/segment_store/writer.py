"""Writing to a segment store: slots, then data, then the disk where that is promised, and then the index.

What fails on the way gives its slot back and was never visible. Where the disk is full, a whole segment goes and the
step is tried once more.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count, groupby
from typing import NamedTuple

import lmdb

from kvtide.connectors.disk.files import NO_ROOM, fault_kind
from kvtide.connectors.disk.parallel import Parallel
from kvtide.connectors.disk.value_io import write_raw, write_value
from kvtide.offload.codecs import Codec
from kvtide.offload.keys import StoreKey
from kvtide.offload.sealing import seal
from kvtide.offload.store import Status

from .index import Index, Place
from .segments import Segment, Segments
from .space import Space

# Values are packed, written and committed in groups of about this much.
_GROUP_BYTES = 64 << 20


class _Packed(NamedTuple):
    header: bytes
    payload: memoryview
    generation: int


class _Job(NamedTuple):
    key: StoreKey
    view: memoryview
    segment: Segment
    slot: int


class _Written(NamedTuple):
    segment: Segment
    place: Place


class SegmentWriter:
    """Stores batches; a failure is a status, counted with `fault` or, where it is the index's, with `index_fault`."""

    def __init__(
        self,
        segments: Segments,
        index: Index,
        space: Space,
        lock: threading.RLock,
        parallel: Parallel,
        codec: Codec | None,
        *,
        strict: bool,
        fault: Callable[[str], None],
        index_fault: Callable[[lmdb.Error], None],
    ) -> None:
        self._segments = segments
        self._index = index
        self._space = space
        self._lock = lock  # guards the space
        self._parallel = parallel
        self._codec = codec
        self._strict = strict
        self._fault = fault
        self._index_fault = index_fault
        self._adding = threading.Lock()  # from looking whether a key is there to adding it
        self._generations = count(time.time_ns())

    def put(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        """Store values: STORED, PRESENT, FULL or ERROR per key."""
        results: dict[StoreKey, Status] = {}
        group: dict[StoreKey, memoryview] = {}
        group_bytes = 0
        for key, view in zip(keys, views, strict=True):
            if key in self._space:
                results.setdefault(key, Status.PRESENT)
            elif key not in results and key not in group:
                group[key] = view
                group_bytes += len(view)
                if group_bytes > _GROUP_BYTES:
                    results.update(self._put_all(group))
                    group, group_bytes = {}, 0
        results.update(self._put_all(group))
        statuses = []
        for key in keys:
            statuses.append(results[key])
            if results[key] is Status.STORED:
                results[key] = Status.PRESENT
        return statuses

    def _put_all(self, group: Mapping[StoreKey, memoryview]) -> dict[StoreKey, Status]:
        """Store values that are not there, in more than one go where they need the slots of each other."""
        results: dict[StoreKey, Status] = {}
        while group:
            done = self._put_group(group)
            results.update(done)
            group = {key: view for key, view in group.items() if done[key] is Status.FULL}
            if Status.STORED not in done.values():
                break
        return results

    def _put_group(self, group: Mapping[StoreKey, memoryview]) -> dict[StoreKey, Status]:
        # What a codec makes of a value tells how large its slot must be; raw ones are hashed as they are written.
        packed: dict[StoreKey, _Packed] = {}
        if self._codec is not None:
            total = sum(map(len, group.values()))
            self._parallel.run(
                lambda keys: packed.update((key, self._pack(key, group[key])) for key in keys), list(group), total
            )
        sizes = [len(packed[key].payload) if packed else len(view) for key, view in group.items()]
        try:
            with self._lock:
                slots = self._space.take(sizes)
        except lmdb.Error as error:
            self._index_fault(error)
            return dict.fromkeys(group, Status.ERROR)
        except OSError as error:
            self._fault(fault_kind(error))
            return dict.fromkeys(group, Status.ERROR)
        results = {key: Status.FULL for key, slot in zip(group, slots, strict=True) if slot is None}
        jobs = [_Job(key, group[key], *slot) for key, slot in zip(group, slots, strict=True) if slot is not None]
        written: dict[StoreKey, _Written] = {}

        def write(jobs: Sequence[_Job]) -> None:
            for _, part in groupby(jobs, key=lambda job: job.segment.number):
                self._write(list(part), packed, written, results)

        self._parallel.run(write, jobs, sum(sizes))
        if self._strict:
            self._sync(written, results)
        self._commit(written, results)
        return results

    def _pack(self, key: StoreKey, view: memoryview) -> _Packed:
        generation = next(self._generations)
        return _Packed(*seal(key, view, self._codec, generation), generation)

    def _write(
        self,
        jobs: Sequence[_Job],
        packed: Mapping[StoreKey, _Packed],
        written: dict[StoreKey, _Written],
        results: dict[StoreKey, Status],
    ) -> None:
        """Write values into slots of one segment."""
        done = 0
        segment = jobs[0].segment
        try:
            with self._segments.opened(segment) as fd:
                segment.dirty = True
                for job in jobs:
                    written[job.key] = _Written(segment, self._write_slot(fd, job, packed.get(job.key)))
                    done += 1
        except OSError as error:
            self._fault(fault_kind(error))
            with self._lock:
                for job in jobs[done:]:
                    self._space.release(segment, job.slot)
                    results[job.key] = _refused(error.errno)

    def _write_slot(self, fd: int, job: _Job, value: _Packed | None) -> Place:
        generation = next(self._generations) if value is None else value.generation
        size = len(job.view) if value is None else len(value.payload)
        offset = job.segment.offset(job.slot)

        def write() -> None:
            if value is None:
                write_raw(fd, offset, job.key, job.view, generation, pad=True)
            else:
                write_value(fd, offset, value.header, value.payload)

        try:
            write()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            with self._lock:
                if not self._space.give_back():
                    raise
            write()
        return Place(job.segment.number, job.slot, size, generation)

    def _sync(self, written: dict[StoreKey, _Written], results: dict[StoreKey, Status]) -> None:
        """Make what was written durable; what cannot be made so is not stored."""
        for segment in {each.segment.number: each.segment for each in written.values()}.values():
            try:
                self._segments.sync_one(segment)
            except OSError as error:
                self._fault(fault_kind(error))
                failed = [key for key, each in written.items() if each.segment is segment]
                self._give_up({key: written.pop(key) for key in failed}, results, _refused(error.errno))

    def _commit(self, written: dict[StoreKey, _Written], results: dict[StoreKey, Status]) -> None:
        with self._adding:
            with self._lock:
                lost = {key: each for key, each in written.items() if key in self._space}
                self._give_up(lost, results, Status.PRESENT)
            added = [(key, each.place) for key, each in written.items() if key not in lost]
            try:
                self._add(added)
            except lmdb.Error as error:
                if error.code not in NO_ROOM:
                    self._index_fault(error)
                self._give_up({key: written[key] for key, _ in added}, results, _refused(error.code))
                return
            with self._lock:
                for key, place in added:
                    self._space.settle(key, place)
                    results[key] = Status.STORED
                self._space.order([key for key, _ in added])

    def _add(self, entries: Sequence[tuple[StoreKey, Place]]) -> None:
        if not entries:
            return
        try:
            self._index.add(entries)
        except lmdb.Error as error:
            if error.code not in NO_ROOM:
                raise
            self._fault(os.strerror(error.code).lower())
            with self._lock:
                if not self._space.give_back():
                    raise
            self._index.add(entries)

    def _give_up(self, written: Mapping[StoreKey, _Written], results: dict[StoreKey, Status], status: Status) -> None:
        with self._lock:
            for key, each in written.items():
                self._space.release(each.segment, each.place.slot)
                results[key] = status


def _refused(code: int | None) -> Status:
    return Status.FULL if code in NO_ROOM else Status.ERROR
