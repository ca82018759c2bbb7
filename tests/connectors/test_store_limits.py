"""What bounds the file stores: a full disk, a limit on file sizes, few descriptors, and their own `max_bytes`."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from kvtide.connectors.lmdb import LMDBConfig, LMDBConnector
from kvtide.connectors.shared_storage import SharedStorageConfig, SharedStorageConnector
from kvtide.offload.conformance import key_of, value_of
from kvtide.offload.store import Status, Store

LONG = settings.default.max_examples > 1000
HIT, MISS, STORED, FULL = Status.HIT, Status.MISS, Status.STORED, Status.FULL
SIZE = 50_000

Opener = Callable[[Path], Store]

OPENERS: dict[str, Opener] = {
    "lmdb": lambda path: LMDBConnector(LMDBConfig(path=str(path), max_bytes="1GiB", segment_bytes="256KiB")),
    "shared": lambda path: SharedStorageConnector(SharedStorageConfig(shared_storage_path=str(path))),
}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "kvtide-test", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a file system may not be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)  # even if a failing test leaves a file open


def check(store: Store, numbers: range) -> int:
    """How many values are served, all of them right; the others are gone."""
    keys, buffers = [key_of(number) for number in numbers], [bytearray(SIZE) for _ in numbers]
    statuses = store.get_into(keys, buffers)
    for key, buffer, status in zip(keys, buffers, statuses, strict=True):
        assert status in (HIT, MISS)
        assert status is MISS or buffer == value_of(key, SIZE)
    assert store.stats().num_values == statuses.count(HIT) == len(list(store.scan()))
    return statuses.count(HIT)


@pytest.mark.parametrize("kind", OPENERS)
def test_a_full_disk_evicts_and_shows_nothing_half_written(kind: str, small_disk: Path) -> None:
    place = small_disk / "store"
    with OPENERS[kind](place) as store:
        for number in range(200):
            key = key_of(number)
            assert store.put([key], [value_of(key, SIZE)]) == [STORED]
            assert store.contains([key]) == [HIT]
        assert 20 < check(store, range(200)) < 85
        assert store.stats().faults
        # Somebody else takes what is left, and what the store gives back.
        with (small_disk / "junk").open("wb", buffering=0) as junk:
            for number in range(200, 230):
                with contextlib.suppress(OSError):
                    while junk.write(bytes(4096)):
                        pass
                (status,) = store.put([key_of(number)], [value_of(key_of(number), SIZE)])
                assert status in (STORED, FULL)
                assert store.contains([key_of(number)]) == [HIT if status is STORED else MISS]
        check(store, range(230))
        (small_disk / "junk").unlink()
        assert store.put([key_of(300)], [value_of(key_of(300), SIZE)]) == [STORED]
    assert not list(place.rglob("*.part"))
    with OPENERS[kind](place) as store:
        assert store.contains([key_of(300)]) == [HIT]
        check(store, range(301))


@pytest.mark.parametrize("kind", OPENERS)
def test_a_file_size_limit_is_no_room(kind: str, tmp_path: Path) -> None:
    script = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_store_limits import OPENERS, SIZE, FULL, STORED, MISS, HIT, key_of, value_of
with OPENERS[{kind!r}](Path({str(tmp_path)!r})) as store:
    assert store.put([key_of(0)], [value_of(key_of(0), SIZE)]) == [STORED]
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
    keys = [key_of(number) for number in range(1, 9)]
    found = store.put(keys, [value_of(key, 1_000_000) for key in keys])
    assert found == [FULL] * 8, found
    assert store.contains(keys) == [MISS] * 8
    assert not list(Path({str(tmp_path)!r}).rglob("*.part"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", OPENERS)
def test_many_objects_with_few_descriptors(kind: str, tmp_path: Path) -> None:
    count = 100_000 if LONG else 3000
    script = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_store_limits import OPENERS, HIT, STORED, key_of
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
keys = [key_of(number) for number in range({count})]
with OPENERS[{kind!r}](Path({str(tmp_path)!r})) as store:
    for at in range(0, len(keys), 100):
        part = keys[at : at + 100]
        assert set(store.put(part, [key * 30 for key in part])) == {{STORED}}
    if {kind!r} == "lmdb":
        assert len(store._segments.by_number) > 60
    for at in range(0, len(keys), 100):
        part, buffers = keys[at : at + 100], [bytearray(960) for _ in range(100)]
        assert set(store.get_into(part, buffers)) == {{HIT}}
        assert buffers == [key * 30 for key in part]
    assert not store.stats().faults
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def used(path: Path) -> int:
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file() and each.name != "lock.mdb")


@pytest.mark.parametrize("eviction", ["lru", "s3fifo", "arc"])
def test_the_embedded_stores_bound_is_hard_whatever_the_sizes(eviction: str, tmp_path: Path) -> None:
    rng, limit = random.Random(3), 3 << 20
    config = LMDBConfig(path=str(tmp_path), max_bytes=limit, eviction=eviction, durability="none")
    with LMDBConnector(config) as store:
        for turn in range(6):
            sizes = (300, 5000) if turn % 2 else (100_000, 20_000)
            for number in range(turn * 1000, turn * 1000 + 150):
                key = key_of(number)
                assert store.put([key], [value_of(key, rng.choice(sizes))]) == [STORED]
            assert used(tmp_path) <= limit
        assert store.stats().evicted > 300
        entries = list(store.scan())
        assert store.verify([entry.key for entry in entries]) == [HIT] * len(entries)
        # Values of one size took the room of the other again and again; most of the room is in use.
        assert store.stats().num_values > 100


def test_the_shared_stores_bound_holds_for_engines_together(tmp_path: Path) -> None:
    limit = 100 * SIZE
    stores = [
        SharedStorageConnector(SharedStorageConfig(shared_storage_path=str(tmp_path), max_bytes=limit))
        for _ in range(4)
    ]

    def work(engine: int) -> None:
        for number in range(engine * 1000, engine * 1000 + 100):
            assert stores[engine].put([key_of(number)], [value_of(key_of(number), SIZE)]) == [STORED]

    threads = [threading.Thread(target=work, args=(engine,)) for engine in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert used(tmp_path) <= limit * (1 + 4 / 16)
    stores[0].gc()
    assert limit // 3 < used(tmp_path) <= limit
    for store in stores:
        store.close()


def test_free_space_is_kept(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    more_than_there_is = disk.f_blocks * disk.f_frsize
    with LMDBConnector(
        LMDBConfig(path=str(tmp_path / "lmdb"), max_bytes="1GiB", min_free_bytes=more_than_there_is)
    ) as store:
        assert store.put([key_of(0)], [bytes(SIZE)]) == [FULL]
    with SharedStorageConnector(
        SharedStorageConfig(shared_storage_path=str(tmp_path / "shared"), min_free_bytes=more_than_there_is)
    ) as shared:
        assert shared.put([key_of(0)], [bytes(SIZE)]) == [FULL]
        assert not list((tmp_path / "shared").rglob("*.kv"))
