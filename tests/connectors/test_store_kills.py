"""Writers killed at random points: nothing acknowledged is lost, nothing damaged is served.

`KVTIDE_HYPOTHESIS=long` kills each store's writer 200 times.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import settings

from kvtide.connectors.lmdb import LMDBConfig, LMDBConnector
from kvtide.kvcache import ConfigError

pytest.register_assert_rewrite("kvtide.offload.conformance")
sys.path.insert(0, str(Path(__file__).parent))

from store_writer import open_store, size_of  # noqa: E402

from kvtide.offload.conformance import key_of, value_of  # noqa: E402
from kvtide.offload.store import Status, Store  # noqa: E402

KILLS = 200 if settings.default.max_examples > 1000 else 5
WRITER = Path(__file__).with_name("store_writer.py")


@pytest.mark.parametrize("kind", ["lmdb", "shared"])
def test_a_killed_writer_loses_nothing_that_it_acknowledged(kind: str, tmp_path: Path) -> None:
    rng = random.Random(7)
    there: set[int] = set()
    gone: set[int] = set()
    for seed in range(1, KILLS + 1):
        stored, deleted = write_and_kill(kind, tmp_path, seed, rng.uniform(0.0, 0.25))
        gone |= deleted
        there = (there | stored) - gone
        with open_store(kind, tmp_path) as store:
            served = read(store, rng.sample(sorted(there), min(60, len(there))) + sorted(stored - gone))
            assert Status.MISS not in served
            assert Status.CORRUPT not in read(store, sorted(gone)) + served
            assert all(entry.key for entry in store.scan())
            assert not store.stats().faults
            drop = sorted(there)[:-200]
            store.delete([key_of(number) for number in drop])
            there -= set(drop)
            gone |= set(drop)
    with open_store(kind, tmp_path) as store:
        assert Status.MISS not in read(store, sorted(there))
        time.sleep(0)
        store.delete([entry.key for entry in store.scan()])
        assert (store.stats().num_values, store.stats().num_bytes) == (0, 0)


def write_and_kill(kind: str, path: Path, seed: int, after: float) -> tuple[set[int], set[int]]:
    """Start a writer and kill it `after` seconds of writing; what it acknowledged, and what it may have deleted."""
    writer = subprocess.Popen(
        [sys.executable, WRITER, kind, path, str(seed)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    first = writer.stdout.readline()
    time.sleep(after)
    writer.kill()
    rest, errors = writer.communicate()
    assert (first, errors) == ("open\n", "")
    stored: set[int] = set()
    deleted: set[int] = set()
    for line in rest.splitlines(keepends=True):
        if line.endswith("\n"):
            numbers = deleted if line.startswith("deleting") else stored
            numbers.update(int(word) for word in line.split() if word.isdigit())
    return stored, deleted


def read(store: Store, numbers: list[int]) -> list[Status]:
    """What each value's read came to; what is served is right."""
    keys, buffers = [key_of(number) for number in numbers], [bytearray(size_of(number)) for number in numbers]
    statuses = store.get_into(keys, buffers)
    for key, buffer, status in zip(keys, buffers, statuses, strict=True):
        assert status is not Status.HIT or buffer == value_of(key, len(buffer))
    return statuses


def test_one_writer_at_a_time_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, WRITER, "lmdb", tmp_path, "1"], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    writer.stdout.readline()
    with pytest.raises(ConfigError, match=f"being written by process {writer.pid};"):
        open_store("lmdb", tmp_path)
    writer.kill()
    writer.communicate()
    open_store("lmdb", tmp_path).close()


def test_readers_follow_a_writer_that_evicts_and_dies(tmp_path: Path) -> None:
    """A reader in another process sees what is committed, through evictions, a kill, and an index that is replaced."""
    small = LMDBConfig(path=str(tmp_path), max_bytes="4MiB", durability="none")
    with LMDBConnector(small) as writer:
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, str(tmp_path), str(Path(__file__).parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert reader.stdin is not None
        assert reader.stdout is not None
        for start in range(0, 300, 20):
            keys = [key_of(number) for number in range(start, start + 20)]
            statuses = writer.put(keys, [value_of(key, 50_000) for key in keys])
            assert set(statuses) == {Status.STORED}
            reader.stdin.write(f"{start}\n")
            reader.stdin.flush()
            if start % 100 == 0:
                assert int(reader.stdout.readline()) == 20
            else:
                reader.stdout.readline()
    for part in (tmp_path / "index").iterdir():
        part.unlink()
    with LMDBConnector(small) as writer:
        assert writer.recovered == "rebuilt"
        key = key_of(1000)
        writer.put([key] * 20, [value_of(key, 50_000)] * 20)
        for number in range(1001, 1020):
            writer.put([key_of(number)], [value_of(key_of(number), 50_000)])
        reader.stdin.write("1000\n")
        reader.stdin.flush()
        assert int(reader.stdout.readline()) == 20
        reader.stdin.close()
        assert reader.wait() == 0
        reader.stdout.close()


READER = """
import sys
sys.path.insert(0, sys.argv[2])
from kvtide.connectors.lmdb import LMDBConfig, LMDBConnector
from kvtide.offload.conformance import key_of, value_of
from kvtide.offload.store import Status
with LMDBConnector(LMDBConfig(path=sys.argv[1], read_only=True)) as store:
    for line in sys.stdin:
        start = int(line)
        keys = [key_of(number) for number in range(max(0, start - 100), start + 20)]
        buffers = [bytearray(50_000) for _ in keys]
        statuses = store.get_into(keys, buffers)
        assert set(statuses) <= {Status.HIT, Status.MISS}, statuses
        for key, buffer, status in zip(keys, buffers, statuses):
            assert status is Status.MISS or buffer == value_of(key, 50_000)
        assert store.put(keys[:1], buffers[:1]) == [Status.REFUSED]
        print(statuses[-20:].count(Status.HIT), flush=True)
"""
