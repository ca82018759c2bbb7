"""The embedded store, and the default: values in preallocated segment files, their places in an LMDB index.

One process writes and any number of others read, with `read_only: true`, at the same time. A put writes its data,
makes it as durable as promised, and then commits its index entry; an eviction commits the removal of entries before
their slots are written again. What a read finds is believed when header, key, generation and checksum say so, and a
reader that the writer overtook looks again.

    durability   what was acknowledged survives kill -9 of any process, always; and a loss of power:
    none         nothing is promised; what the kernel had written by then is found again
    interval     all that was acknowledged more than `sync_interval_s` before
    strict       all of it, for one fdatasync and one commit on the disk per call of put

A restart after a kill finds everything; where the index is lost, damaged or not to be believed, it is built anew from
the headers in the segments. A deleted value may come back then, an evicted one too: never another key's.

`max_bytes` is a hard bound on the segments and the index together. Each size class has its own eviction policy; when
there is no room for another segment, a class evicts its own next victim, or takes a whole segment from another class
whose values have on average been unused for longer than that victim.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Annotated

import lmdb
import msgspec
from msgspec import Meta

from kvtide.kvcache import ConfigError
from kvtide.kvcache.sizes import parse_bytes
from kvtide.offload.eviction import make_policy
from kvtide.offload.keys import StoreKey
from kvtide.offload.sealing import seal
from kvtide.offload.store import Entry, Lease, Status, StoreStats
from kvtide.offload.values import HEADER_BYTES, BadValue, Header, parse_header

from . import recovery
from .files import NO_ROOM, PAGE, fault_kind, read_value
from .index import Index, Place
from .recovery import Durability
from .remote import CodecName, RemoteStore
from .segments import Segment, Segments, now
from .space import Limits, Move, Space

_SEGMENTS = 64
_MAX_SEGMENT_BYTES = 256 << 20
_SAVE_USES_S = 10.0
_GROUP_BYTES = 64 << 20
_LOOKS = 4
_SCAN_STEP = 1000


class LMDBConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `LMDBConnector`."""

    path: Annotated[str, Meta(description="Directory of the store; made if it is not there.", min_length=1)]
    max_bytes: Annotated[int | str, Meta(description="Bound on its bytes on the disk, such as 500GiB.")] = "64GiB"
    min_free_bytes: Annotated[
        int | str | None, Meta(description="No segment is added that would leave less than this free on the disk.")
    ] = None
    eviction: Annotated[str, Meta(description="What goes first when the store is full: lru, s3fifo or arc.")] = "lru"
    durability: Annotated[
        Durability,
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
    read_only: Annotated[bool, Meta(description="Whether to only load, beside the process that stores.")] = False


class LMDBConnector(RemoteStore):
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
        self._strict = config.durability == "strict"
        self._lock = threading.RLock()  # guards the space
        self._adding = threading.Lock()  # from looking whether a key is there to adding it
        self._doubtful = False  # whether the index failed in a way that its file may show
        self._generations = count(time.time_ns())
        self._wake = threading.Event()
        self._keeper: threading.Thread | None = None
        self._space: Space | None = None
        self._writer = -1
        make_policy(config.eviction)  # before anything is made for a name that is wrong
        recovery.prepare(self._path, read_only=config.read_only)
        try:
            if config.read_only:
                self._segments = Segments(self._path / "segments", read_only=True)
                self._index = self._open_to_read()
                self.recovered = "read only"
            else:
                self._writer = recovery.lock(self._path)
                self._open_to_write()
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
            stats.capacity_bytes = self._limits.max_bytes
        else:
            sizes = [entry.num_bytes for entry in self.scan()]
            stats.num_values, stats.num_bytes = len(sizes), sum(sizes)
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
        statuses = [Status.MISS] * len(keys)
        suspects: dict[int, tuple[Place, BadValue]] = {}
        hits = []
        todo = list(range(len(keys)))
        try:
            for _ in range(_LOOKS):
                places = self._index.lookup([keys[at] for at in todo])
                found = [(place, at) for place, at in zip(places, todo, strict=True) if place is not None]
                todo = []
                for place, at in sorted(found):
                    suspect = suspects.get(at)
                    if suspect is not None and suspect[0] == place:
                        statuses[at] = self._damaged(keys[at], *suspect)
                        continue
                    try:
                        self._read(keys[at], place, views[at])
                        statuses[at] = Status.HIT
                        hits.append((keys[at], place))
                    except BadValue as error:
                        suspects[at] = place, error
                        todo.append(at)
                    except OSError as error:
                        self._fault(fault_kind(error))
                        statuses[at] = Status.ERROR
                if not todo:
                    break
            self._used(hits)
        except lmdb.Error as error:
            self._index_failed(error)
            for at in todo:
                statuses[at] = Status.ERROR
        return statuses

    def _put(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        if self._space is None:
            return [Status.REFUSED] * len(keys)
        results: dict[StoreKey, Status] = {}
        statuses: list[Status] = []
        group: dict[StoreKey, memoryview] = {}
        for key, view in zip(keys, views, strict=True):
            if key in self._space:
                results.setdefault(key, Status.PRESENT)
            elif key not in results and key not in group:
                group[key] = view
                if sum(map(len, group.values())) > _GROUP_BYTES:
                    results.update(self._put_all(self._space, group))
                    group = {}
        results.update(self._put_all(self._space, group))
        for key in keys:
            statuses.append(results[key])
            if results[key] is Status.STORED:
                results[key] = Status.PRESENT
        return statuses

    def _put_all(self, space: Space, group: dict[StoreKey, memoryview]) -> dict[StoreKey, Status]:
        """Store values, in more than one go where they need the slots of each other."""
        results: dict[StoreKey, Status] = {}
        while group:
            done = self._put_group(space, group)
            results.update(done)
            group = {key: view for key, view in group.items() if done[key] is Status.FULL}
            if Status.STORED not in done.values():
                break
        return results

    def _put_group(self, space: Space, group: dict[StoreKey, memoryview]) -> dict[StoreKey, Status]:
        """Store values that are not there: slots, data, the disk where promised, and then the index."""
        packed = {key: self._packed(key, view) for key, view in group.items()} if self._codec is not None else {}
        results: dict[StoreKey, Status] = {}
        written: dict[StoreKey, tuple[Segment, Place]] = {}
        try:
            with self._lock:
                slots = space.take([len(packed[key][1]) if packed else len(view) for key, view in group.items()])
        except lmdb.Error as error:
            return dict.fromkeys(group, self._index_failed(error)[0])
        except OSError as error:
            self._fault(fault_kind(error))
            return dict.fromkeys(group, Status.ERROR)
        for (key, view), slot in zip(group.items(), slots, strict=True):
            if slot is None:
                results[key] = Status.FULL
                continue
            try:
                # Checksum and write one after the other, so that the second finds the bytes in the processor's cache.
                header, payload, generation = packed.pop(key) if packed else self._packed(key, view)
                self._write(space, *slot, header, payload)
                written[key] = slot[0], Place(slot[0].number, slot[1], len(payload), generation)
            except OSError as error:
                self._fault(fault_kind(error))
                with self._lock:
                    space.release(*slot)
                results[key] = Status.FULL if error.errno in NO_ROOM else Status.ERROR
        if self._strict:
            self._sync(space, written, results)
        self._commit(space, written, results)
        return results

    def _packed(self, key: StoreKey, view: memoryview) -> tuple[bytes, memoryview, int]:
        generation = next(self._generations)
        return *seal(key, view, self._codec, generation), generation

    def _write(self, space: Space, segment: Segment, slot: int, header: bytes, payload: memoryview) -> None:
        try:
            self._segments.write(segment, slot, header, payload)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            with self._lock:
                if not space.give_back():
                    raise
            self._segments.write(segment, slot, header, payload)

    def _sync(
        self, space: Space, written: dict[StoreKey, tuple[Segment, Place]], results: dict[StoreKey, Status]
    ) -> None:
        """Make what was written durable; what cannot be made so is not stored."""
        for segment in {segment.number: segment for segment, _ in written.values()}.values():
            try:
                self._segments.sync_one(segment)
            except OSError as error:
                self._fault(fault_kind(error))
                failed = [key for key, (where, _) in written.items() if where is segment]
                status = Status.FULL if error.errno in NO_ROOM else Status.ERROR
                self._give_up(space, {key: written.pop(key) for key in failed}, results, status)

    def _commit(
        self, space: Space, written: dict[StoreKey, tuple[Segment, Place]], results: dict[StoreKey, Status]
    ) -> None:
        with self._adding:
            with self._lock:
                lost = {key: each for key, each in written.items() if key in space}
                self._give_up(space, lost, results, Status.PRESENT)
            added = {key: place for key, (_, place) in written.items() if key not in lost}
            try:
                self._add(space, list(added.items()))
            except lmdb.Error as error:
                status = Status.FULL if error.code in NO_ROOM else self._index_failed(error)[0]
                self._give_up(space, {key: written[key] for key in added}, results, status)
                return
            with self._lock:
                for key, place in added.items():
                    space.settle(key, place)
                    results[key] = Status.STORED

    def _add(self, space: Space, entries: list[tuple[StoreKey, Place]]) -> None:
        try:
            self._index.add(entries)
        except lmdb.Error as error:
            if error.code not in NO_ROOM:
                raise
            self._fault(os.strerror(error.code).lower())
            with self._lock:
                if not space.give_back():
                    raise
            self._index.add(entries)

    def _give_up(
        self,
        space: Space,
        written: dict[StoreKey, tuple[Segment, Place]],
        results: dict[StoreKey, Status],
        status: Status,
    ) -> None:
        with self._lock:
            for key, (segment, place) in written.items():
                space.release(segment, place.slot)
                results[key] = status

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
            return [self._header_at(key, place) for key, place in zip(keys, self._index.lookup(keys), strict=True)]
        except lmdb.Error as error:
            self._index_failed(error)
            return [None] * len(keys)

    def _header_at(self, key: StoreKey, place: Place | None) -> Header | None:
        if place is None:
            return None
        start = bytearray(HEADER_BYTES)
        try:
            self._segments.read(self._segment(place), place.slot, [start])
            return parse_header(start, key, max_value_bytes=self.max_value_bytes)
        except OSError as error:
            self._fault(fault_kind(error))
        except BadValue:
            pass
        return None

    def _shut(self) -> None:
        if self._keeper is not None:
            self._wake.set()
            self._keeper.join()
        try:
            if self._space is not None:
                self._segments.save_uses()
                self._segments.sync()
                self._index.flush()
            self._index.close()
            if self._space is not None and not self._doubtful:
                recovery.seal(self._path, self._config.durability)
        except (OSError, lmdb.Error) as error:  # not sealed, so the next opening checks everything
            self._fault(str(error).lower())
        finally:
            self._segments.close()
            self._unlock()

    def _read(self, key: StoreKey, place: Place, view: memoryview) -> None:
        try:
            segment = self._segment(place)
            header = read_value(
                lambda parts, skip: self._segments.read(segment, place.slot, parts, skip=skip),
                place.stored_bytes,
                key,
                view,
                self.max_value_bytes,
            )
        except FileNotFoundError:
            raise BadValue("no segment") from None
        if header.generation != place.generation:
            raise BadValue("other generation")

    def _segment(self, place: Place) -> Segment:
        segment = self._segments.by_number.get(place.segment)
        if segment is None and self._space is None:
            with self._lock:
                self._segments.discover()
            segment = self._segments.by_number.get(place.segment)
        if segment is None or place.slot >= segment.num_slots:
            raise FileNotFoundError
        return segment

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
                for key, place in hits:
                    self._space.use(key, place, when)

    def _copy(self, moves: Sequence[Move]) -> None:
        for move in moves:
            data = bytearray(HEADER_BYTES + move.place.stored_bytes)
            self._segments.read(move.segment, move.place.slot, [data])
            self._segments.write(move.target, move.slot, bytes(data[:HEADER_BYTES]), memoryview(data)[HEADER_BYTES:])
        if self._config.durability != "none":
            for target in {move.target.number: move.target for move in moves}.values():
                self._segments.sync_one(target)

    def _open_to_read(self) -> Index:
        if not recovery.is_believable(self._path):
            raise ConfigError(
                f"path {str(self._path)!r} holds a store whose writer died and whose index is damaged; "
                "the next writer will mend it"
            )
        return Index(self._path / "index", read_only=True, sync=False)

    def _open_to_write(self) -> None:
        self._segments = Segments(self._path / "segments", read_only=False)
        found = recovery.recover(self._path, self._segments, self._config.durability, self.max_value_bytes)
        self._index, self.recovered = found.opened, found.how
        self._space = Space(
            self._segments,
            self._index,
            self._limits,
            lambda: make_policy(self._config.eviction),
            durable=self._config.durability != "none",
        )
        self._space.load(found.entries)
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
                    self._index.flush()
            except OSError as error:
                self._fault(fault_kind(error))
            except lmdb.Error as error:
                self._index_failed(error)

    def _index_failed(self, error: lmdb.Error, count: int = 1) -> list[Status]:
        self._doubtful = True
        self._fault(f"index: {type(error).__name__}")
        return [Status.ERROR] * count

    def _unlock(self) -> None:
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1


def _limits(config: LMDBConfig) -> Limits:
    def size(name: str, value: int | str) -> int:
        try:
            return parse_bytes(value)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None

    max_bytes = size("max_bytes", config.max_bytes)
    min_free = 0 if config.min_free_bytes is None else size("min_free_bytes", config.min_free_bytes)
    if config.segment_bytes is None:
        segment = max(PAGE, min(max_bytes // _SEGMENTS, _MAX_SEGMENT_BYTES))
    else:
        segment = size("segment_bytes", config.segment_bytes)
    return Limits(max_bytes, min_free, segment)
