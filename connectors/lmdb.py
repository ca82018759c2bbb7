"""The embedded store, and the default: values in preallocated segment files, their places in an LMDB index.

One process writes and any number of others read, with `read_only: true`, at the same time. A put writes its data,
makes it as durable as promised, and then commits its index entry; an eviction commits the removal of entries before
their slots are written again. What a read finds is believed when header, key, generation and checksum say so, and a
reader that the writer overtook looks again.

    durability   what was acknowledged survives kill -9 of any process, always; and a loss of power:
    none         nothing is promised; what the kernel had written by then is found again
    interval     all that was acknowledged more than `sync_interval_s` before
    strict       all of it, for one fdatasync per call of put (and segment that it writes to)

A restart after a kill finds everything. After a loss of power, or where the index is lost or damaged, it is built anew
from the headers in the segments, which are what was synced: a header and a checksum tell a whole value. A deleted value
may come back then, and an evicted one; never another key's.

`max_bytes` is a hard bound on the segments and the index together. Each size class has its own eviction policy; when
there is no room for another segment, a class evicts its own next victim, or takes a whole segment from another class
whose values have on average been unused for longer than that victim.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

import lmdb
from msgspec import Meta

from kvtide.kvcache import ConfigError
from kvtide.offload.eviction import make_policy
from kvtide.offload.keys import StoreKey
from kvtide.offload.store import Entry, Lease, Status, StoreStats
from kvtide.offload.values import HEADER_BYTES, BadValue, Header

from .base import BaseConnector
from .disk.files import PAGE, fault_kind
from .disk.parallel import Parallel
from .disk.value_io import write_value
from .segment_store import recovery
from .segment_store.index import Index, Place
from .segment_store.reader import SegmentReader
from .segment_store.segments import Segments, now
from .segment_store.space import Limits, Move, Space
from .segment_store.writer import SegmentWriter
from .settings import CodecName, StoreConfig

_SEGMENTS = 64
_MAX_SEGMENT_BYTES = 256 << 20
_SAVE_USES_S = 10.0
_SCAN_STEP = 1000
_SHARED_OUT_BYTES = 1 << 17


class LMDBConfig(StoreConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `LMDBConnector`."""

    sizes = ("max_bytes", "min_free_bytes", "segment_bytes")
    least = MappingProxyType({"max_bytes": "192KiB"})  # the index, and room for a small value or two

    path: Annotated[str, Meta(description="Directory of the store; made if it is not there.", min_length=1)]
    max_bytes: Annotated[int | str, Meta(description="Bound on its bytes on the disk, such as 500GiB.")] = "64GiB"
    min_free_bytes: Annotated[
        int | str | None, Meta(description="No segment is added that would leave less than this free on the disk.")
    ] = None
    eviction: Annotated[str, Meta(description="What goes first when the store is full: lru, s3fifo or arc.")] = "s3fifo"
    durability: Annotated[
        Literal["none", "interval", "strict"],
        Meta(
            description="What survives a loss of power: nothing is promised (none), what is older than sync_interval_s "
            "(interval), everything (strict). A killed process loses nothing with any of them."
        ),
    ] = "interval"
    sync_interval_s: Annotated[float, Meta(description="Seconds between syncs with durability interval.", gt=0)] = 5.0
    segment_bytes: Annotated[
        int | str | None, Meta(description="Length of a segment file; max_bytes / 64 and at most 256MiB by default.")
    ] = None
    codec: CodecName = "raw"
    io_threads: Annotated[
        int, Meta(description="Threads that share the values of one batch, the caller's among them.", ge=1, le=64)
    ] = 4
    read_only: Annotated[bool, Meta(description="Whether to only load, beside the process that stores.")] = False


class LMDBConnector(BaseConnector):
    """Values on a local disk, for one writing process and any number of reading ones.

    `ConfigError` for a path that holds something else, another version's store, or one that another process writes.
    """

    Config = LMDBConfig
    name = "lmdb"

    def __init__(self, config: LMDBConfig) -> None:
        super().__init__(config.codec)
        self._config = config
        self._limits = _limits(config)
        self._path = Path(config.path).expanduser()
        self._lock = threading.RLock()  # guards the space
        self._doubtful = False  # whether the index failed in a way that its file may show
        self._wake = threading.Event()
        self._keeper: threading.Thread | None = None
        self._space: Space | None = None  # what follows is the writing process's
        self._writer: SegmentWriter | None = None
        self._locked = -1
        make_policy(config.eviction)  # before anything is made for a name that is wrong
        recovery.prepare(self._path, read_only=config.read_only)
        try:
            if config.read_only:
                self._segments = Segments(self._path / "segments", read_only=True)
                self._index = self._open_to_read()
                self.recovered = "read only"
            else:
                self._locked = recovery.lock(self._path)
                self._open_to_write()
            self._parallel = Parallel(config.io_threads, "kvtide-lmdb-io", min_item_bytes=_SHARED_OUT_BYTES)
            self._reader = SegmentReader(
                self._segments, self._index, self._parallel, self._fault, discover=config.read_only
            )
            if self._space is not None:
                self._start(self._space)
        except (OSError, lmdb.Error) as error:
            self._unlock()
            raise ConfigError(f"path {config.path!r} cannot be opened: {error}") from None
        except BaseException:
            self._unlock()
            raise

    def lease(self, keys: Sequence[StoreKey]) -> Lease:
        if self._space is None:
            return super().lease(keys)
        with self._lock:
            return self._space.holds.lease(keys, self.contains(keys))

    def touch(self, keys: Sequence[StoreKey]) -> None:
        if self._space is None or not self._enter():
            return
        try:
            self._used([(key, place) for key, place in zip(keys, self._index.lookup(keys), strict=True) if place])
        except lmdb.Error as error:
            self._index_failed(error)
        finally:
            self._leave()

    def touch_prefix(self, keys: Sequence[StoreKey]) -> None:
        if self._space is not None:
            with self._lock:
                self._space.order(keys)

    def scan(self) -> Iterator[Entry]:
        entries = self._index.scan()
        while self._enter():
            try:
                found = list(islice(entries, _SCAN_STEP))
            except lmdb.Error as error:
                self._index_failed(error)
                return
            finally:
                self._leave()
            if not found:
                return
            yield from (Entry(key, HEADER_BYTES + place.stored_bytes) for key, place in found)

    def stats(self) -> StoreStats:
        stats = super().stats()
        if self._space is not None:
            with self._lock:
                stats.num_values, stats.num_bytes = len(self._space), self._space.num_bytes
                stats.evicted = self._space.evicted
                if self._space.no_room:
                    stats.faults["no room for a segment"] = self._space.no_room
        else:
            sizes = [entry.num_bytes for entry in self.scan()]
            stats.num_values, stats.num_bytes = len(sizes), sum(sizes)
        # A reader's is its own configuration's, which is the writer's where they share it.
        stats.capacity_bytes = self._limits.max_bytes
        return stats

    def gc(self) -> int:
        """Forget readers that died; delete segments whose values fit into others, moving a segment's bytes at most."""
        if self._space is None or not self._enter():
            return 0
        try:
            self._index.forget_dead_readers()
            with self._lock:
                return self._space.compact(self._limits.segment_bytes, self._copy)
        except lmdb.Error as error:
            self._index_failed(error)
        except OSError as error:
            self._fault(fault_kind(error))
        finally:
            self._leave()
        return 0

    def _contains(self, keys: Sequence[StoreKey]) -> list[Status]:
        space = self._space
        if space is not None:
            return [Status.HIT if key in space else Status.MISS for key in keys]
        try:
            return [Status.HIT if found else Status.MISS for found in self._index.has(keys)]
        except lmdb.Error as error:
            return self._index_failed(error, len(keys))

    def _get(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        try:
            found = self._reader.get(keys, views, self.max_value_bytes)
            for at, place, error in found.damaged:
                found.statuses[at] = self._damaged(keys[at], place, error)
            self._used(found.hits)
        except lmdb.Error as error:
            return self._index_failed(error, len(keys))
        return found.statuses

    def _put(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        return [Status.REFUSED] * len(keys) if self._writer is None else self._writer.put(keys, views)

    def _delete(self, keys: Sequence[StoreKey]) -> list[Status]:
        if self._space is None:
            self._fault("read only", len(keys))
            return [Status.ERROR] * len(keys)
        try:
            with self._lock:
                there = {key for key in keys if key in self._space}
                self._space.remove(there)
        except lmdb.Error as error:
            return self._index_failed(error, len(keys))
        statuses = []
        for key in keys:
            statuses.append(Status.DELETED if key in there else Status.MISS)
            there.discard(key)
        return statuses

    def _headers(self, keys: Sequence[StoreKey]) -> list[Header | None]:
        try:
            return self._reader.headers(keys, self.max_value_bytes)
        except lmdb.Error as error:
            self._index_failed(error)
            return [None] * len(keys)

    def _shut(self) -> None:
        if self._keeper is not None:
            self._wake.set()
            self._keeper.join()
        try:
            if self._space is not None:
                self._segments.save_uses()
                self._segments.sync()
                self._index.flush()
        except (OSError, lmdb.Error) as error:
            self._not_sealed(error)
        try:
            self._index.close()
            if self._space is not None and not self._doubtful:
                recovery.seal(self._path)
        except (OSError, lmdb.Error) as error:
            self._not_sealed(error)
        finally:
            self._parallel.close()
            self._segments.close()
            self._unlock()

    def _not_sealed(self, error: OSError | lmdb.Error) -> None:
        """Count what went wrong in closing; the next opening checks everything."""
        self._doubtful = True
        self._fault(fault_kind(error) if isinstance(error, OSError) else f"index: {type(error).__name__}")

    def _damaged(self, key: StoreKey, place: Place, error: BadValue) -> Status:
        status = self._bad(error)
        if self._space is not None and status is Status.CORRUPT:
            with self._lock:
                self._space.remove_if(key, place)
        return status

    def _used(self, hits: Sequence[tuple[StoreKey, Place]]) -> None:
        if self._space is not None and hits:
            when = now()
            with self._lock:
                for key, place in reversed(hits):
                    self._space.use(key, place, when)

    def _copy(self, moves: Sequence[Move]) -> None:
        for move in moves:
            data = bytearray(HEADER_BYTES + move.place.stored_bytes)
            self._segments.read(move.segment, move.place.slot, (data,))
            view = memoryview(data)
            with self._segments.opened(move.target) as fd:
                move.target.dirty = True
                write_value(fd, move.target.offset(move.slot), view[:HEADER_BYTES], view[HEADER_BYTES:])
        if self._config.durability != "none":
            for target in {move.target.number: move.target for move in moves}.values():
                self._segments.sync_one(target)

    def _open_to_read(self) -> Index:
        if not recovery.is_believable(self._path):
            raise ConfigError(
                f"path {str(self._path)!r} holds a store whose writer died and whose index is damaged; "
                "the next writer will mend it"
            )
        return Index(self._path / "index", read_only=True)

    def _open_to_write(self) -> None:
        self._segments = Segments(self._path / "segments", read_only=False)
        found = recovery.recover(self._path, self._segments, self.max_value_bytes)
        self._index, self.recovered = found.opened, found.how
        self._space = Space(
            self._segments,
            self._index,
            self._limits,
            lambda: make_policy(self._config.eviction),
            durable=self._config.durability != "none",
        )
        self._space.load(found.keys, found.entries)

    def _start(self, space: Space) -> None:
        self._writer = SegmentWriter(
            self._segments,
            self._index,
            space,
            self._lock,
            self._parallel,
            self._codec,
            strict=self._config.durability == "strict",
            fault=self._fault,
            index_fault=self._note_index_fault,
        )
        self._keeper = threading.Thread(target=self._keep, name="kvtide-lmdb", daemon=True)
        self._keeper.start()

    def _keep(self) -> None:
        """Now and then, write the times of use, and make everything durable where that is promised."""
        every = self._config.sync_interval_s if self._config.durability == "interval" else _SAVE_USES_S
        saved = time.monotonic()
        while not self._wake.wait(every):
            try:
                if time.monotonic() - saved >= _SAVE_USES_S:
                    saved = time.monotonic()
                    self._segments.save_uses()
                    self._index.forget_dead_readers()
                if self._config.durability == "interval":
                    self._segments.sync()
            except OSError as error:
                self._fault(fault_kind(error))
            except lmdb.Error as error:
                self._index_failed(error)

    def _index_failed(self, error: lmdb.Error, count: int = 1) -> list[Status]:
        self._note_index_fault(error)
        return [Status.ERROR] * count

    def _note_index_fault(self, error: lmdb.Error) -> None:
        self._doubtful = True
        self._fault(f"index: {type(error).__name__}")

    def _unlock(self) -> None:
        if self._locked >= 0:
            os.close(self._locked)
            self._locked = -1


def _limits(config: LMDBConfig) -> Limits:
    max_bytes = config.num_bytes("max_bytes")
    segment = config.num_bytes("segment_bytes") or max(PAGE, min(max_bytes // _SEGMENTS, _MAX_SEGMENT_BYTES))
    return Limits(max_bytes, config.num_bytes("min_free_bytes"), segment)
