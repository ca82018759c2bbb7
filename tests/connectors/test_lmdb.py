"""The embedded store: the conformance suite, and what only it promises."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("kvtide.offload.conformance")

from kvtide.connectors.lmdb import LMDBConfig, LMDBConnector  # noqa: E402
from kvtide.kvcache import ConfigError  # noqa: E402
from kvtide.offload.conformance import StoreConformance, key_of, value_of  # noqa: E402
from kvtide.offload.keys import StoreKey  # noqa: E402
from kvtide.offload.store import Status, Store  # noqa: E402
from kvtide.offload.values import HEADER_BYTES  # noqa: E402

HIT, MISS, STORED = Status.HIT, Status.MISS, Status.STORED
SIZE = 6000


class TestLMDBConnector(StoreConformance):
    persistent = True
    knows_prefixes = True

    def open_store(self, place: Any) -> Store:
        return LMDBConnector(LMDBConfig(path=str(place), max_bytes="1GiB"))

    def open_small(self, place: Any, num_bytes: int) -> Store:
        return LMDBConnector(LMDBConfig(path=str(place), max_bytes=num_bytes))

    def stored(self, store: Store, place: Path, key: StoreKey) -> bytes:
        assert isinstance(store, LMDBConnector)
        path, offset, length = slot_of(store, place, key)
        return path.read_bytes()[offset : offset + length]

    def overwrite(self, store: Store, place: Path, key: StoreKey, data: bytes) -> None:
        assert isinstance(store, LMDBConnector)
        path, offset, length = slot_of(store, place, key)
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(data.ljust(length, b"\0"))


def slot_of(store: LMDBConnector, place: Path, key: StoreKey) -> tuple[Path, int, int]:
    """The file of a value, its offset and its length with header."""
    (found,) = store._index.lookup([key])
    assert found is not None
    segment = store._segments.by_number[found.segment]
    return place / "segments" / segment.name, found.slot * segment.slot_bytes, HEADER_BYTES + found.stored_bytes


def open_store(path: Path, **settings: Any) -> LMDBConnector:
    return LMDBConnector(LMDBConfig(path=str(path), **{"max_bytes": "64MiB", "segment_bytes": "128KiB"} | settings))


def put(store: Store, numbers: range, size: int = SIZE) -> None:
    keys = [key_of(number) for number in numbers]
    assert store.put(keys, [value_of(key, size) for key in keys]) == [STORED] * len(keys)


def served(store: Store, numbers: range, size: int = SIZE) -> list[int]:
    keys, buffers = [key_of(number) for number in numbers], [bytearray(size) for _ in numbers]
    statuses = store.get_into(keys, buffers)
    assert set(statuses) <= {HIT, MISS}
    for key, buffer, status in zip(keys, buffers, statuses, strict=True):
        assert status is MISS or buffer == value_of(key, size)
    return [number for number, status in zip(numbers, statuses, strict=True) if status is HIT]


def run(script: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run a script that has `open_store`, `put` and `served`, and the path as `path`."""
    begin = f"import os, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom pathlib import Path\n"
    begin += f"from test_lmdb import *\npath = Path({str(path)!r})\n"
    return subprocess.run([sys.executable, "-c", begin + script], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("durability", ["none", "interval", "strict"])
def test_after_a_loss_of_power_the_index_is_not_believed(durability: str, tmp_path: Path) -> None:
    """What the disk holds then is what was synced: here everything, and an index that may be anything."""
    run(
        f"store = open_store(path, durability={durability!r}); put(store, range(50)); os.kill(os.getpid(), 9)", tmp_path
    )
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["clean"] is False
    (tmp_path / "state.json").write_text(json.dumps(state | {"boot": "another"}))
    (tmp_path / "index" / "data.mdb").write_bytes(os.urandom(40_000))
    with open_store(tmp_path, durability=durability) as store:
        assert isinstance(store, LMDBConnector)
        assert store.recovered == "rebuilt"
        assert served(store, range(50)) == list(range(50))
        assert store.stats().num_values == 50


def test_how_a_store_is_opened_again(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        assert store.recovered == "new"
        put(store, range(10))
    with open_store(tmp_path) as store:
        assert store.recovered == "sealed"
    done = run(
        "store = open_store(path); put(store, range(10, 20)); store.lease([key_of(0)]); os.kill(os.getpid(), 9)",
        tmp_path,
    )
    assert done.returncode == -9, done.stderr
    with open_store(tmp_path, max_bytes="1MiB") as store:  # the lease ended with its process
        assert store.recovered == "checked"
        assert served(store, range(20)) == list(range(20))
        put(store, range(100, 300))
        assert 0 not in served(store, range(1))


def test_what_is_not_a_store_of_this_format_is_refused(tmp_path: Path) -> None:
    open_store(tmp_path / "store").close()
    (tmp_path / "store" / "format-1").rename(tmp_path / "store" / "format-2")
    for read_only in (False, True):
        with pytest.raises(ConfigError, match="holds a store of format-2; this kvtide reads format-1"):
            open_store(tmp_path / "store", read_only=read_only)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("dear")
    with pytest.raises(ConfigError, match="something else than a store"):
        open_store(tmp_path / "home")
    assert [each.name for each in (tmp_path / "home").iterdir()] == ["thesis.tex"]
    with pytest.raises(ConfigError, match="no store yet"):
        open_store(tmp_path / "new", read_only=True) if (tmp_path / "new").mkdir() is None else None
    with pytest.raises(ConfigError, match="eviction 'random' is not known"):
        open_store(tmp_path / "other", eviction="random")
    assert not (tmp_path / "other").exists()


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    with open_store(tmp_path / "a" / "store") as store:
        put(store, range(3))
        for each in [tmp_path / "a" / "store", *(tmp_path / "a" / "store").rglob("*")]:
            assert each.stat().st_mode & 0o077 == 0, each


def test_recency_survives_a_restart_and_a_kill(tmp_path: Path) -> None:
    with open_store(tmp_path, max_bytes="2MiB") as store:
        put(store, range(100))
    script = """
import time
store = open_store(path, max_bytes="2MiB")
time.sleep(0.25)
assert len(served(store, range(20))) == 20
store._segments.save_uses() if {save} else None
store.close() if not {save} else os.kill(os.getpid(), 9)
"""
    for save in (True, False):
        run(script.format(save=save), tmp_path)
        with open_store(tmp_path, max_bytes="2MiB") as store:
            first = store.stats().num_values
            put(store, range(1000, 1000 + 120))
            assert store.stats().evicted > 50 if first == 100 else True
            assert served(store, range(20)) == list(range(20))
            store.delete([key_of(number) for number in range(1000, 1120)])


def test_the_map_grows_under_writers_and_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.connectors.segment_store.index._START_BYTES", 1 << 16)
    follow = """
import kvtide.connectors.segment_store.index
kvtide.connectors.segment_store.index._START_BYTES = 1 << 16
with open_store(path, read_only=True) as store:
    print("open", flush=True)
    for line in sys.stdin:
        print(len(served(store, range(int(line)), 10)), flush=True)
"""
    with open_store(tmp_path) as store:
        before = store._index._env.info()["map_size"]
        begin = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom pathlib import Path\n"
        begin += f"from test_lmdb import *\npath = Path({str(tmp_path)!r})\n"
        with subprocess.Popen(
            [sys.executable, "-c", begin + follow], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as reader:
            assert reader.stdin is not None
            assert reader.stdout is not None
            assert reader.stdout.readline() == "open\n"
            for start in range(0, 3000, 500):
                put(store, range(start, start + 500), 10)
                reader.stdin.write(f"{start + 500}\n")
                reader.stdin.flush()
                assert int(reader.stdout.readline()) == start + 500
            reader.stdin.close()
            assert reader.wait() == 0
        assert store._index._env.info()["map_size"] >= 4 * before
        assert not store.stats().faults


def test_gc_gives_sparse_segments_back(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, range(200))
        before = sum(each.stat().st_size for each in (tmp_path / "segments").iterdir())
        store.delete([key_of(number) for number in range(200) if number % 10])
        given_back = 0
        while more := store.gc():
            given_back += more
        after = sum(each.stat().st_size for each in (tmp_path / "segments").iterdir())
        assert given_back == before - after
        assert after < before / 3
        assert served(store, range(200)) == list(range(0, 200, 10))
    with open_store(tmp_path) as store:
        assert served(store, range(200)) == list(range(0, 200, 10))


def test_codecs_pack_values_into_smaller_slots(tmp_path: Path) -> None:
    keys = [key_of(number) for number in range(8)]
    with open_store(tmp_path, codec="zstd") as store:
        assert store.put(keys, [bytes(200_000)] * 8) == [STORED] * 8
        assert store.stats().num_bytes < 8 * 1000
    with open_store(tmp_path) as store:
        buffers = [bytearray(b"x" * 200_000) for _ in keys]
        assert store.get_into(keys, buffers) == [HIT] * 8
        assert set(map(bytes, buffers)) == {bytes(200_000)}


def test_a_reader_says_what_the_store_may_hold(tmp_path):
    with open_store(tmp_path, max_bytes="64MiB") as writer:
        writer.put([bytes(32)], [b"x" * 1000])
    with open_store(tmp_path, max_bytes="64MiB", read_only=True) as reader:
        assert reader.stats().capacity_bytes == 64 << 20
        assert reader.stats().num_values == 1


@pytest.mark.parametrize("where", ["uses", "seal"])
def test_a_disk_that_is_full_at_closing_leaves_nothing_open(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    open_store(tmp_path).close()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    store = open_store(tmp_path)
    put(store, range(3))
    with monkeypatch.context() as patch:
        patch.setattr(
            *(
                (store._segments, "save_uses")
                if where == "uses"
                else ("kvtide.connectors.segment_store.recovery.seal",)
            ),
            full,
        )
        store.close()
    assert store.stats().faults == {"no space left on device": 1}
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    with open_store(tmp_path) as again:
        assert again.recovered == "checked"
        assert served(again, range(3)) == [0, 1, 2]


def test_a_state_that_cannot_be_written_leaves_no_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path) as store:
        put(store, range(3))
        monkeypatch.setattr("kvtide.connectors.segment_store.recovery.write_all", lambda *_: os.fsync(1 << 20))  # EBADF
    monkeypatch.undo()
    assert not list(tmp_path.glob("state.json.*"))
    assert store.stats().faults == {"bad file descriptor": 1}


def test_the_index_counts_with_all_its_files(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, range(50))
        sizes = {path.name: path.stat().st_size for path in (tmp_path / "index").iterdir()}
        assert min(sizes["data.mdb"], sizes["lock.mdb"]) > 0
        assert store._index.file_bytes() == sum(sizes.values())
