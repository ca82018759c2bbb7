"""A store on a shared file system: one file a value, published by rename, with no index, no server and no locks.

Any number of engines on any number of machines read and write it at once. It relies on what NFS gives: rename is
atomic within a directory, and a file that was closed is there for whoever opens it afterwards. It takes no locks,
creates files under names of its own, and believes no order of times: they only choose what goes first when room is
needed. Where two write one key, both write the same value and the later rename stays. A value that goes while it is
read is a miss. Damaged ones are moved aside, and removed a day later. `shared_files.tree` shows the files.

What was acknowledged survives the death of any engine at every durability, and with `strict`, for an fsync of the file
and one of its directory, also a loss of power (as far as the file server keeps its own promise).

`max_bytes` bounds what all engines keep together. Each counts from its last look at the whole tree and what it wrote
since, looks again after having written a sixteenth of the bound, and when it is reached removes the longest unused
down to nine tenths: n engines that write at full speed exceed it by at most n sixteenths for a moment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from kvtide.kvcache import ConfigError
from kvtide.offload.keys import StoreKey
from kvtide.offload.store import Entry, Lease, Status, StoreStats
from kvtide.offload.values import HEADER_BYTES, BadValue, Header, parse_header

from .base import BaseConnector
from .disk.files import NO_ROOM, fault_kind, read_all, write_all
from .disk.leases import Holds
from .disk.parallel import Parallel
from .disk.value_io import read_value, write_raw
from .settings import CodecName, StoreConfig
from .shared_files.room import Room, Totals
from .shared_files.tree import Tree

_TOUCH_S = 3600.0
_QUARANTINE_S = 86_400.0
_SCAN_STEP = 1000


class SharedStorageConfig(StoreConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `SharedStorageConnector`."""

    sizes = ("max_bytes", "min_free_bytes")

    shared_storage_path: Annotated[str, Meta(description="Directory that all engines share.", min_length=1)]
    max_bytes: Annotated[
        int | str | None, Meta(description="Bound on what all engines keep together, such as 10TiB; none by default.")
    ] = None
    min_free_bytes: Annotated[
        int | str | None, Meta(description="Values are removed, or refused, rather than leave less free than this.")
    ] = None
    durability: Annotated[
        Literal["none", "strict"],
        Meta(description="none: stored values survive engines that die; strict: also a loss of power."),
    ] = "none"
    part_age_s: Annotated[
        float, Meta(description="Seconds after which an unfinished file counts as left by a dead writer.", ge=1)
    ] = 3600.0
    codec: CodecName = "raw"
    io_threads: Annotated[
        int, Meta(description="Threads that share the values of one batch, the caller's among them.", ge=1, le=64)
    ] = 4
    read_only: Annotated[bool, Meta(description="Whether to only load.")] = False


class SharedStorageConnector(BaseConnector):
    """Values as files in a directory that many engines share."""

    Config = SharedStorageConfig
    name = "shared_storage"

    def __init__(self, config: SharedStorageConfig) -> None:
        super().__init__(config.codec)
        self._config = config
        capacity = config.num_bytes("max_bytes") or None
        root = Path(config.shared_storage_path).expanduser()
        try:
            self._tree = Tree(root, read_only=config.read_only)
            if config.read_only:
                os.scandir(root).close()
        except OSError as error:
            raise ConfigError(f"shared_storage_path {str(root)!r} cannot be used: {error.strerror}") from None
        self._parallel = Parallel(config.io_threads, "kvtide-shared-io")
        self._holds = Holds()
        self._room = Room(self._tree, self._holds, capacity, config.num_bytes("min_free_bytes"))

    def lease(self, keys: Sequence[StoreKey]) -> Lease:
        statuses = self.contains(keys)
        lease = self._holds.lease(keys, statuses)
        self.touch([key for key, status in zip(keys, statuses, strict=True) if status is Status.HIT])
        return lease

    def touch(self, keys: Sequence[StoreKey]) -> None:
        if not self._config.read_only:
            self._tree.touch(keys)

    def touch_prefix(self, keys: Sequence[StoreKey]) -> None:
        self.touch(keys)

    def scan(self) -> Iterator[Entry]:
        files = self._tree.walk()
        while self._enter():
            try:
                found = list(islice(files, _SCAN_STEP))
            except OSError as error:
                self._fault(fault_kind(error))
                return
            finally:
                self._leave()
            if not found:
                return
            yield from (Entry(each.key, each.num_bytes) for each in found)

    def stats(self) -> StoreStats:
        try:
            totals = self._room.totals()
        except OSError as error:
            self._fault(fault_kind(error))
            totals = Totals()
        stats = super().stats()
        stats.num_values, stats.num_bytes = totals
        stats.capacity_bytes = self._room.capacity
        stats.evicted = self._room.evicted
        return stats

    def gc(self) -> int:
        """Remove what dead writers left and old damaged values, then what exceeds `max_bytes`; bytes given back."""
        if self._config.read_only or not self._enter():
            return 0
        given_back = 0
        try:
            given_back = self._tree.sweep(self._config.part_age_s, _QUARANTINE_S)
            given_back += self._room.trim()
        except OSError as error:
            self._fault(fault_kind(error))
        finally:
            self._leave()
        return given_back

    def _contains(self, keys: Sequence[StoreKey]) -> list[Status]:
        return [self._contains_one(key) for key in keys]

    def _contains_one(self, key: StoreKey) -> Status:
        try:
            return Status.HIT if self._tree.size(key) is not None else Status.MISS
        except OSError as error:
            return self._failed(error)

    def _get(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        statuses = [Status.ERROR] * len(keys)

        def get(places: Sequence[int]) -> None:
            for at in places:
                statuses[at] = self._get_one(keys[at], views[at])

        self._parallel.run(get, range(len(keys)), sum(map(len, views)))
        return statuses

    def _get_one(self, key: StoreKey, view: memoryview) -> Status:
        try:
            fd = self._tree.open(key)
            if fd is None:
                return Status.MISS
            try:
                return self._read(key, view, fd)
            finally:
                os.close(fd)
        except OSError as error:
            return self._failed(error)

    def _read(self, key: StoreKey, view: memoryview, fd: int) -> Status:
        found = os.fstat(fd)
        stored_bytes = found.st_size - HEADER_BYTES
        try:
            read_value(fd, 0, stored_bytes, key, view, self.max_value_bytes)
        except BadValue as error:
            status = self._bad(error)
            if status is Status.CORRUPT and not self._config.read_only and self._tree.set_aside(key, fd):
                self._room.changed(-1, -found.st_size)
            return status
        if abs(time.time() - found.st_mtime) > _TOUCH_S:
            self.touch([key])
        return Status.HIT

    def _put(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        if self._config.read_only:
            return [Status.REFUSED] * len(keys)
        statuses = [Status.ERROR] * len(keys)
        first = {key: at for at, key in reversed(list(enumerate(keys)))}

        def put(places: Sequence[int]) -> None:
            for at in places:
                statuses[at] = self._put_one(keys[at], views[at])

        self._parallel.run(put, list(first.values()), sum(map(len, views)))
        self.touch([key for key, at in first.items() if statuses[at] is Status.STORED][::-1])
        for at, key in enumerate(keys):
            if at != first[key]:
                there = statuses[first[key]]
                statuses[at] = Status.PRESENT if there is Status.STORED else there
        return statuses

    def _put_one(self, key: StoreKey, view: memoryview) -> Status:
        try:
            if self._tree.has(key):
                return Status.PRESENT
            if self._codec is None:
                size = HEADER_BYTES + len(view)
                publish = partial(write_raw, offset=0, key=key, view=view, generation=0, pad=False)
            else:
                parts = self._seal(key, view)
                size = sum(map(len, parts))
                publish = partial(write_all, parts=parts, offset=0)
            if not self._room.reserve(size):
                return Status.FULL
            stored = False
            try:
                self._publish(key, publish, size)
                stored = True
            finally:
                self._room.settle(size, stored=stored)
        except OSError as error:
            if error.errno in NO_ROOM:
                return Status.FULL
            return self._failed(error)
        return Status.STORED

    def _publish(self, key: StoreKey, write: Callable[[int], None], size: int) -> None:
        """Publish a value; on a full disk, make room and try once more."""
        durable = self._config.durability == "strict"
        try:
            self._tree.publish(key, write, size, durable=durable)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self._fault(fault_kind(error))
            if not self._room.evict(size):
                raise
            self._tree.publish(key, write, size, durable=durable)

    def _delete(self, keys: Sequence[StoreKey]) -> list[Status]:
        if self._config.read_only:
            self._fault("read only", len(keys))
            return [Status.ERROR] * len(keys)
        return [self._delete_one(key) for key in keys]

    def _delete_one(self, key: StoreKey) -> Status:
        try:
            size = self._tree.size(key)
            if size is None or not self._tree.remove(key):
                return Status.MISS
        except OSError as error:
            return self._failed(error)
        self._room.changed(-1, -size)
        return Status.DELETED

    def _headers(self, keys: Sequence[StoreKey]) -> list[Header | None]:
        return [self._header_of(key) for key in keys]

    def _header_of(self, key: StoreKey) -> Header | None:
        data = bytearray(HEADER_BYTES)
        try:
            fd = self._tree.open(key)
            if fd is None:
                return None
            try:
                read_all(fd, (data,), 0)
            finally:
                os.close(fd)
            return parse_header(data, key, max_value_bytes=self.max_value_bytes)
        except OSError as error:
            self._fault(fault_kind(error))
        except BadValue:
            pass
        return None

    def _shut(self) -> None:
        self._parallel.close()

    def _failed(self, error: OSError) -> Status:
        self._fault(fault_kind(error))
        return Status.ERROR
