"""The store on a shared file system: the conformance suite, and what only it promises."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("kvtide.offload.conformance")

from kvtide.connectors.shared_storage import SharedStorageConfig, SharedStorageConnector  # noqa: E402
from kvtide.kvcache import ConfigError  # noqa: E402
from kvtide.offload.conformance import StoreConformance, key_of, value_of  # noqa: E402
from kvtide.offload.keys import StoreKey  # noqa: E402
from kvtide.offload.store import Status, Store  # noqa: E402


class TestSharedStorageConnector(StoreConformance):
    persistent = True
    shared = True
    knows_prefixes = True

    def open_store(self, place: Any) -> Store:
        return SharedStorageConnector(SharedStorageConfig(shared_storage_path=str(place)))

    def open_small(self, place: Any, num_bytes: int) -> Store:
        return SharedStorageConnector(SharedStorageConfig(shared_storage_path=str(place), max_bytes=num_bytes))

    def stored(self, store: Store, place: Path, key: StoreKey) -> bytes:
        return file_of(store, key).read_bytes()

    def overwrite(self, store: Store, place: Path, key: StoreKey, data: bytes) -> None:
        file_of(store, key).write_bytes(data)


def file_of(store: Store, key: StoreKey) -> Path:
    assert isinstance(store, SharedStorageConnector)
    return Path(store._tree.path(key))


def open_store(path: Path, **settings: Any) -> SharedStorageConnector:
    return SharedStorageConnector(SharedStorageConfig(shared_storage_path=str(path), **settings))


def test_what_dead_writers_left_is_removed_by_age(tmp_path: Path) -> None:
    key = key_of(1)
    with open_store(tmp_path) as store:
        store.put([key], [b"value"])
        folder = file_of(store, key).parent
        old, young = folder / ".aa.1-2-3.part", folder / ".bb.1-2-3.part"
        old.write_bytes(bytes(1000))
        young.write_bytes(bytes(1000))
        os.utime(old, (0, time.time() - 2 * 3600))
        assert store.gc() == 1000
        assert not old.exists()
        assert young.exists()
        assert [entry.key for entry in store.scan()] == [key]


def test_damaged_values_are_set_aside_for_a_day(tmp_path: Path) -> None:
    key = key_of(1)
    with open_store(tmp_path) as store:
        store.put([key], [b"value"])
        file_of(store, key).write_bytes(b"garbage")
        assert store.get_into([key], [bytearray(5)]) == [Status.CORRUPT]
        (aside,) = (tmp_path / "kvtide-1" / "quarantine").iterdir()
        assert aside.name.startswith(key.hex())
        assert aside.read_bytes() == b"garbage"
        assert store.gc() == 0
        os.utime(aside, (0, time.time() - 90_000))
        assert store.gc() == len(b"garbage")


def test_what_the_system_refuses_is_an_error_of_its_key(tmp_path: Path) -> None:
    keys = [key_of(number) for number in range(3)]
    with open_store(tmp_path) as store:
        store.put(keys, [b"value"] * 3)
        loop = file_of(store, keys[1])
        loop.unlink()
        loop.symlink_to(loop.name)  # works for root too, unlike permissions
        assert store.contains(keys) == [Status.HIT, Status.ERROR, Status.HIT]
        assert store.get_into(keys, [bytearray(5) for _ in keys]) == [Status.HIT, Status.ERROR, Status.HIT]
        assert store.put(keys, [b"value"] * 3) == [Status.PRESENT, Status.ERROR, Status.PRESENT]
        assert store.headers(keys)[1] is None
        assert store.stats().faults == {"too many levels of symbolic links": 4}


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    keys = [key_of(number) for number in range(12)]
    with open_store(tmp_path, max_bytes=11 * 10_096) as store:
        for age, key in enumerate(keys[:10]):
            store.put([key], [value_of(key, 10_000)])
            os.utime(file_of(store, key), (0, time.time() - 10_000 + age))
        assert store.get_into(keys[:1], [bytearray(10_000)]) == [Status.HIT]
        store.put(keys[10:], [value_of(key, 10_000) for key in keys[10:]])
        found = store.contains(keys)
        assert found[0] is Status.HIT
        assert found[1] is Status.MISS
        assert found[9:] == [Status.HIT] * 3


def test_reading_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used: No such file"):
        open_store(tmp_path / "new", read_only=True)
    with open_store(tmp_path) as writer, open_store(tmp_path, read_only=True) as reader:
        key = key_of(1)
        writer.put([key], [b"value"])
        assert reader.put([key_of(2)], [b"value"]) == [Status.REFUSED]
        assert reader.delete([key]) == [Status.ERROR]
        file_of(writer, key).write_bytes(b"garbage")
        assert reader.get_into([key], [bytearray(5)]) == [Status.CORRUPT]
        assert file_of(writer, key).exists()


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    with open_store(tmp_path / "a" / "store") as store:
        store.put([key_of(1)], [b"value"])
        for each in [tmp_path / "a" / "store", *(tmp_path / "a" / "store").rglob("*")]:
            assert each.stat().st_mode & 0o077 == 0, each
