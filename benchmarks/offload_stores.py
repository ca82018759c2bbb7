"""The parts of `offload.py` about the file stores: beside plain system calls, and beside values in LMDB itself."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Self

import lmdb
import xxhash
from report import Figure, Target, alternate, scaled

from kvtide.connectors.lmdb import LMDBConfig, LMDBConnector
from kvtide.connectors.segment_store import recovery
from kvtide.connectors.segment_store.index import Index, Place
from kvtide.connectors.segment_store.segments import Segment, slot_bytes
from kvtide.connectors.shared_storage import SharedStorageConfig, SharedStorageConnector
from kvtide.offload.sealing import seal
from kvtide.offload.store import Status, Store

KIB, MIB = 1 << 10, 1 << 20
BATCH = 32
LOOKUP_KEYS = 8192
PAGE = 4096
_SLOTS = 1 << 15

_READER = """
import sys, time
from kvtide.connectors.segment_store import recovery
from kvtide.connectors.segment_store.index import Index, Place
from kvtide.connectors.lmdb import LMDBConfig, LMDBConnector
keys = [bytes.fromhex(line) for line in sys.stdin.read().split()]
with LMDBConnector(LMDBConfig(path=sys.argv[1], read_only=True)) as store:
    times = []
    for _ in range(7):
        start = time.perf_counter()
        found = store.contains(keys)
        times.append(time.perf_counter() - start)
    assert all(status == 0 for status in found)
print(sorted(times)[3])
"""


@dataclass
class Run:
    """What a run measures, and where."""

    place: Path
    sizes: tuple[int, ...] = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
    bytes_per_turn: int = 128 * MIB
    repetitions: int = 7
    lookup_objects: int = 1_000_000
    objects: int = 1_000_000
    lmcache: Path | None = None
    versions: dict[str, str] = field(default_factory=lambda: {"lmdb": lmdb.__version__, "xxhash": xxhash.VERSION})

    @classmethod
    def of(cls, place: Path, *, quick: bool, smoke: bool, objects: int | None, lmcache: Path | None) -> Self:
        """The run that the command line asks for."""
        run = cls(place, lmcache=lmcache)
        if quick:
            run.bytes_per_turn, run.repetitions, run.lookup_objects, run.objects = 64 * MIB, 5, 100_000, 100_000
        if smoke:
            run.sizes, run.bytes_per_turn, run.repetitions = (64 * KIB,), 4 * MIB, 1
            run.lookup_objects, run.objects = 10_000, 5000
        run.objects = objects or run.objects
        return run

    def new(self, name: str) -> Path:
        """A new empty directory."""
        path = self.place / f"{name}-{time.monotonic_ns()}"
        path.mkdir()
        return path


class Contestant:
    """A store that writes, reads and forgets the same number of values of one size, in batches."""

    def __init__(self, store: Store, size: int, count: int) -> None:
        self._store = store
        self._values = list(islice(cycle([os.urandom(size) for _ in range(min(count, 64 * MIB // size))]), count))
        self._buffers = list(islice(cycle([bytearray(size) for _ in range(min(count, 64 * MIB // size))]), count))
        self._keys: list[bytes] = []

    def write(self) -> float:
        """Seconds to store the values under new keys, in the room of those before."""
        self._store.delete(self._keys)
        self._keys = [os.urandom(32) for _ in self._values]
        return self._time(lambda keys, at: self._store.put(keys, self._values[at : at + BATCH]), Status.STORED)

    def read(self) -> float:
        """Seconds to read them."""
        return self._time(lambda keys, at: self._store.get_into(keys, self._buffers[at : at + BATCH]), Status.HIT)

    def churn(self) -> float:
        """Seconds to replace as many values, picked at random, as there are, a batch at a time."""
        seconds = 0.0
        for at in range(0, len(self._keys), BATCH):
            places = random.sample(range(len(self._keys)), BATCH)
            old, new = [self._keys[place] for place in places], [os.urandom(32) for _ in places]
            start = time.perf_counter()
            self._store.delete(old)
            self._store.put(new, self._values[at : at + BATCH])
            seconds += time.perf_counter() - start
            for place, key in zip(places, new, strict=True):
                self._keys[place] = key
        return seconds

    def _time(self, call: Callable[[Sequence[bytes], int], Sequence[Status]], expected: Status) -> float:
        start = time.perf_counter()
        for at in range(0, len(self._keys), BATCH):
            if set(call(self._keys[at : at + BATCH], at)) != {expected}:
                raise RuntimeError(f"a batch was not all {expected.name}: {self._store.stats().faults}")
        return time.perf_counter() - start


class Plain:
    """The same with nothing but system calls: blocks of a preallocated file, without header, index or checksum."""

    def __init__(self, path: Path, size: int, count: int, *, sync: bool) -> None:
        self._fd = os.open(path / "plain", os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(self._fd, 0, (size + PAGE) * count)
        self._step = size + PAGE
        self._sync = sync
        self._values = list(islice(cycle([os.urandom(size) for _ in range(min(count, 64 * MIB // size))]), count))
        self._buffers = list(islice(cycle([bytearray(size) for _ in range(min(count, 64 * MIB // size))]), count))

    def write(self) -> float:
        """Seconds to write the blocks."""
        start = time.perf_counter()
        for at, value in enumerate(self._values):
            os.pwritev(self._fd, (value,), at * self._step)
            if self._sync and at % BATCH == BATCH - 1:
                os.fdatasync(self._fd)
        return time.perf_counter() - start

    def read(self) -> float:
        """Seconds to read them."""
        start = time.perf_counter()
        for at, buffer in enumerate(self._buffers):
            os.preadv(self._fd, (buffer,), at * self._step)
        return time.perf_counter() - start

    def read_and_hash(self) -> float:
        """Seconds of `read`'s time that checksums of what was just read add to it."""
        hashing = 0.0
        for at, buffer in enumerate(self._buffers):
            os.preadv(self._fd, (buffer,), at * self._step)
            start = time.perf_counter()
            xxhash.xxh3_128_digest(buffer)
            hashing += time.perf_counter() - start
        return hashing


def beside_system_calls(run: Run) -> Iterator[Figure]:
    """Writes and reads of the LMDB and the shared store, and the checksum's share."""
    for size in run.sizes:
        count = max(BATCH, run.bytes_per_turn // size)
        label = f"{size // KIB}KiB"
        plain = Plain(run.new("plain"), size, count, sync=False)
        room = 2 * count * (size + 2 * PAGE) + 16 * MIB
        with (
            LMDBConnector(LMDBConfig(path=str(run.new("one")), max_bytes=room, durability="none", io_threads=1)) as one,
            LMDBConnector(LMDBConfig(path=str(run.new("all")), max_bytes=room, durability="none")) as every,
            SharedStorageConnector(SharedStorageConfig(shared_storage_path=str(run.new("shared")))) as shared,
        ):
            stores = [Contestant(store, size, count) for store in (one, every, shared)]
            peer, *values = alternate(run.repetitions, plain.write, *(store.write for store in stores))
            yield from _figures("write", label, peer, values, count, Target("ratio", ">=", 0.7))
            peer, hashing, *values = alternate(
                run.repetitions, plain.read, plain.read_and_hash, *(store.read for store in stores)
            )
            yield from _figures("read", label, peer, values, count, Target("ratio", ">=", 0.8))
            assert hashing is not None
            assert values[0] is not None
            share = hashing / values[0]
            yield Figure(f"checksum_{label}", share, "fraction", target=Target("value", "<=", 0.15), note="of a read")
        few = max(BATCH, count // 4 // BATCH * BATCH)
        plain = Plain(run.new("plain"), size, few, sync=True)
        with LMDBConnector(LMDBConfig(path=str(run.new("strict")), max_bytes=room, durability="strict")) as strict:
            peer, value = alternate(max(1, run.repetitions // 2), plain.write, Contestant(strict, size, few).write)
            each = 1e6 / few
            yield Figure(
                f"strict_write_{label}",
                scaled(value, each),
                "µs",
                scaled(peer, each),
                Target("ratio", ">=", 0.7),
                "durability strict; peer: fdatasync per 32 values",
            )


def values_inline(run: Run) -> Iterator[Figure]:
    """Values in LMDB itself: put, get and churn, as the peer of segments."""
    for size in run.sizes:
        count = max(BATCH, run.bytes_per_turn // 2 // size)
        label = f"{size // KIB}KiB"
        inline = _Inline(run.new("inline"), size, count)
        place = run.new("segments")
        room = 2 * count * (size + 2 * PAGE) + 16 * MIB
        with LMDBConnector(LMDBConfig(path=str(place), max_bytes=room, durability="none", io_threads=1)) as store:
            segments = Contestant(store, size, count)
            figure = partial(_inline_figure, label, 1e6 / count)
            yield figure("put", *alternate(run.repetitions, segments.write, inline.write), "after deleting")
            yield figure("get", *alternate(run.repetitions, segments.read, inline.read), "not verified in LMDB")
            yield figure("churn", *alternate(run.repetitions, segments.churn, inline.churn), "delete, then put")
            held = count * size
            own = sum(each.stat().st_size for each in (place / "segments").iterdir())
            yield Figure(f"inline_file_{label}", own / held, "× data", inline.file_bytes() / held, note="after churn")
        inline.close()


def _inline_figure(label: str, each: float, what: str, value: float | None, peer: float | None, note: str) -> Figure:
    return Figure(f"inline_{what}_{label}", scaled(value, each), "µs", scaled(peer, each), note=note)


class _Inline:
    def __init__(self, path: Path, size: int, count: int) -> None:
        self._env = lmdb.open(str(path), map_size=4 * count * (size + PAGE) + 64 * MIB, sync=False)
        self._values = list(islice(cycle([os.urandom(size) for _ in range(min(count, 64 * MIB // size))]), count))
        self._buffers = list(islice(cycle([bytearray(size) for _ in range(min(count, 64 * MIB // size))]), count))
        self._keys: list[bytes] = []

    def write(self) -> float:
        with self._env.begin(write=True) as txn:
            for key in self._keys:
                txn.delete(key)
        self._keys = [os.urandom(32) for _ in self._values]
        start = time.perf_counter()
        for at in range(0, len(self._keys), BATCH):
            with self._env.begin(write=True) as txn:
                for key, value in zip(self._keys[at : at + BATCH], self._values[at : at + BATCH], strict=True):
                    txn.put(key, value)
        return time.perf_counter() - start

    def read(self) -> float:
        start = time.perf_counter()
        for at in range(0, len(self._keys), BATCH):
            with self._env.begin(buffers=True) as txn:
                for key, buffer in zip(self._keys[at : at + BATCH], self._buffers[at : at + BATCH], strict=True):
                    memoryview(buffer)[:] = txn.get(key)
        return time.perf_counter() - start

    def churn(self) -> float:
        seconds = 0.0
        for at in range(0, len(self._keys), BATCH):
            places = random.sample(range(len(self._keys)), BATCH)
            new = [os.urandom(32) for _ in places]
            start = time.perf_counter()
            with self._env.begin(write=True) as txn:
                for place in places:
                    txn.delete(self._keys[place])
            with self._env.begin(write=True) as txn:
                for key, value in zip(new, self._values[at : at + BATCH], strict=True):
                    txn.put(key, value)
            seconds += time.perf_counter() - start
            for place, key in zip(places, new, strict=True):
                self._keys[place] = key
        return seconds

    def file_bytes(self) -> int:
        return int(self._env.info()["last_pgno"] + 1) * PAGE

    def close(self) -> None:
        self._env.close()


def lookups(run: Run) -> Iterator[Figure]:
    """8,192 keys of a large store, asked for at once."""
    path = run.new("lookup")
    keys = fill(path, run.lookup_objects)
    asked = keys[:: max(1, len(keys) // LOOKUP_KEYS)][:LOOKUP_KEYS]
    note = f"{len(asked)} of {len(keys)} keys"
    with LMDBConnector(LMDBConfig(path=str(path), max_bytes="1TiB")) as store:

        def ask() -> float:
            start = time.perf_counter()
            found = store.contains(asked)
            seconds = time.perf_counter() - start
            assert set(found) == {Status.HIT}
            return seconds

        (value,) = alternate(run.repetitions, ask)
        yield Figure("lookup_writer", scaled(value, 1e3), "ms", target=Target("value", "<", 5), note=note)
        reader = subprocess.run(
            [sys.executable, "-c", _READER, str(path)],
            input="\n".join(key.hex() for key in asked),
            capture_output=True,
            text=True,
            check=True,
        )
        yield Figure("lookup_reader", 1e3 * float(reader.stdout), "ms", target=Target("value", "<", 5), note=note)


def fill(path: Path, count: int, *, headers: bool = False) -> list[bytes]:
    """Make a closed store with `count` entries, in sparse segments, with or without the values' headers; their keys."""
    recovery.prepare(path, read_only=False)
    keys = [os.urandom(32) for _ in range(count)]
    index = Index(path / "index", read_only=False)
    for number, start in enumerate(range(0, count, _SLOTS)):
        segment = Segment(number, slot_bytes(1), _SLOTS)
        part = keys[start : start + _SLOTS]
        with (path / "segments" / segment.name).open("wb") as file:
            file.truncate(segment.file_bytes)
            if headers:
                for slot, key in enumerate(part):
                    os.pwrite(file.fileno(), b"".join(seal(key, b"v", generation=1)), slot * segment.slot_bytes)
        index.add([(key, Place(number, slot, 1, 1)) for slot, key in enumerate(part)])
    index.flush()
    index.close()
    recovery.seal(path)
    return keys


def _figures(
    what: str, label: str, peer: float | None, values: Sequence[float | None], count: int, target: Target
) -> Iterator[Figure]:
    each = 1e6 / count
    for value, name, note, bound in (
        (values[0], f"{what}_1_thread_{label}", "LMDB store, io_threads 1; peer: system call", target),
        (values[1], f"{what}_{label}", "LMDB store; peer: system call, one thread", target),
        (values[2], f"{what}_shared_{label}", "shared storage; peer: system call, one thread", None),
    ):
        yield Figure(name, scaled(value, each), "µs", scaled(peer, each), bound, note)
