"""MooncakeConnector on a real master over TCP: the conformance suite, and what becomes of values and calls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import services
from services import skipping

from kvtide.connectors.config import store_settings
from kvtide.connectors.mooncake import MooncakeConfig, MooncakeConnector
from kvtide.kvcache import ConfigError, KvtideError
from kvtide.offload.conformance import StoreConformance, key_of, value_of
from kvtide.offload.store import Status, Store, StoreStats

numbers = count()


def open_mooncake(server: services.Mooncake, **settings: Any) -> MooncakeConnector:
    fixed = {
        "master_server_address": f"127.0.0.1:{server.port}",
        "metrics_port": server.metrics_port,
        "local_hostname": "127.0.0.1",
        "global_segment_size": "64MiB",
        "local_buffer_size": "16MiB",
        "lane_bytes": "8MiB",
        "lanes": 2,
        "timeout_seconds": 20.0,
        "prefix": f"t{next(numbers)}/",
    }
    return MooncakeConnector(MooncakeConfig(**{**fixed, **settings}))


def put(store: Store, keys: list[bytes], size: int = 1000) -> None:
    assert store.put(keys, [value_of(key, size) for key in keys]) == [Status.STORED] * len(keys)


@pytest.fixture(scope="module")
def memory(mooncake: services.Mooncake) -> Iterator[MooncakeConnector]:
    """A store that brings the memory for all others; closing one takes a second, so that tests share it."""
    try:
        store = open_mooncake(mooncake, timeout_seconds=20.0)
    except KvtideError as missing:
        pytest.skip(str(missing))
    with store:
        yield store


class TestMooncake(StoreConformance):
    shared = True
    holds = False
    exact_stats = False

    @pytest.fixture
    def place(self, mooncake: services.Mooncake, memory: MooncakeConnector) -> Any:
        return mooncake, memory, f"t{next(numbers)}/"

    @pytest.fixture
    def store(self, place: Any, monkeypatch: pytest.MonkeyPatch) -> Store:
        """The shared store with names and counts of its own."""
        _, store, prefix = place
        monkeypatch.setattr(store, "_prefix", prefix)
        monkeypatch.setattr(store, "_counts", StoreStats(faults=Counter()))
        monkeypatch.setattr(store, "max_value_bytes", store.max_value_bytes)
        return store

    def open_store(self, place: Any) -> Store:
        return open_mooncake(place[0], prefix=place[2], global_segment_size=0, timeout_seconds=20.0)

    def stored(self, store: Store, place: Any, key: bytes) -> bytes:
        return place[1].library.get(place[2] + key.hex())

    def overwrite(self, store: Store, place: Any, key: bytes, data: bytes) -> None:
        place[1].library.remove(place[2] + key.hex(), True)
        assert place[1].library.put(place[2] + key.hex(), data or b"\0") == 0  # it does not keep empty objects


# Faults.


def test_a_hung_master_is_an_error_in_time_and_costs_nothing_afterwards(
    mooncake: services.Mooncake, memory: MooncakeConnector
) -> None:
    with open_mooncake(mooncake, global_segment_size=0, lanes=1) as store:
        keys = [key_of(i) for i in range(40)]
        put(store, keys, 100_000)
        store._lanes.seconds = store._timeout = 0.5
        buffers = [bytearray(b"\x5a" * 100_000) for _ in keys]
        with mooncake.service.paused():
            started = time.monotonic()
            assert store.get_into(keys, buffers) == [Status.ERROR] * 40
            assert time.monotonic() - started < 40 * 0.5 / 2  # one time limit, and not one a key
            # Its lane is lost to the call that hangs: no call waits for it, however long the time limit.
            store._lanes.seconds = 120.0
            started = time.monotonic()
            assert store.put([key_of(99)], [b"value"]) == store.delete(keys[:1]) == [Status.ERROR]
            assert store.headers(keys[:1]) == [None]
            assert time.monotonic() - started < 60
            assert list(store.scan()) == []
        services.wait_for(lambda: not any(lane.hung for lane in store._lanes.all))
        # The call that was given up on has read its values by now, and not into the caller's buffers.
        assert buffers == [bytearray(b"\x5a" * 100_000)] * 40
        assert store.get_into(keys, buffers) == [Status.HIT] * 40
        assert buffers == [value_of(key, 100_000) for key in keys]
        assert store.stats().faults["timeout"] >= 42


def test_a_master_that_dies_is_an_error_and_one_that_comes_back_is_empty(tmp_path: Path) -> None:
    with skipping(), services.mooncake_master(tmp_path) as server, open_mooncake(server) as store:
        keys = [key_of(i) for i in range(10)]
        put(store, keys, 100_000)
        store._lanes.seconds = 1.0
        server.service.kill()
        started = time.monotonic()
        assert set(store.contains(keys)) == {Status.ERROR}
        assert set(store.get_into(keys, [bytearray(100_000) for _ in keys])) == {Status.ERROR}
        assert time.monotonic() - started < 20
        assert store.stats().faults["connection"] + store.stats().faults["timeout"] >= 20
        store._lanes.seconds = 20.0
        server.service.start()
        values = [value_of(key, 100_000) for key in keys]
        services.wait_for(lambda: set(store.put(keys, values)) <= {Status.STORED, Status.PRESENT})
        assert store.verify(keys) == [Status.HIT] * 10


HOLDER = """
import sys, time
from kvtide.connectors.mooncake import MooncakeConfig, MooncakeConnector
port, metrics_port, prefix = sys.argv[1:]
store = MooncakeConnector(MooncakeConfig(
    master_server_address=f"127.0.0.1:{port}", metrics_port=int(metrics_port), local_hostname="127.0.0.1",
    global_segment_size="64MiB", local_buffer_size="16MiB", lane_bytes="8MiB", lanes=1, prefix=prefix,
))
keys = [bytes([i]) * 32 for i in range(20)]
print(set(store.put(keys, [key * 30_000 for key in keys])), flush=True)
time.sleep(100)
"""


def test_a_peer_that_dies_takes_its_values_and_nothing_else(tmp_path: Path) -> None:
    with skipping(), services.mooncake_master(tmp_path, "-client_ttl=1") as server:
        arguments = [str(server.port), str(server.metrics_port), "held/"]
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            assert holder.stdout is not None
            assert "STORED" in holder.stdout.readline()
            keys = [bytes([i]) * 32 for i in range(20)]
            with open_mooncake(server, prefix="held/", global_segment_size=0) as store:
                assert store.verify(keys) == [Status.HIT] * 20
                killer = services.after(0.03, lambda: os.kill(holder.pid, signal.SIGKILL))
                statuses: set[Status] = set()
                while Status.ERROR not in statuses:
                    buffers = [bytearray(960_000) for _ in keys]
                    answers = store.get_into(keys, buffers)
                    for key, buffer, status in zip(keys, buffers, answers, strict=True):
                        assert status is not Status.HIT or buffer == key * 30_000
                    statuses |= set(answers)
                    if Status.MISS in answers:
                        break
                killer.join()
                assert statuses <= {Status.HIT, Status.ERROR, Status.MISS}
                # Until the master gives the peer up, its values cannot be read; then they are not there.
                services.wait_for(lambda: store.contains(keys) == [Status.MISS] * 20, 60)
        finally:
            holder.kill()
            holder.communicate()


def test_what_the_master_evicts_is_a_miss(tmp_path: Path) -> None:
    options = ("-default_kv_lease_ttl=100",)
    with (
        skipping(),
        services.mooncake_master(tmp_path, *options) as server,
        open_mooncake(server, global_segment_size="32MiB", timeout_seconds=10.0) as store,
    ):
        keys = [key_of(i) for i in range(120)]
        seen = set()
        for key in keys:
            for _ in range(50):
                (status,) = store.put([key], [value_of(key, 500_000)])
                seen.add(status)
                if status is not Status.FULL:
                    break
                time.sleep(0.02)
        assert Status.STORED in seen
        assert seen <= {Status.STORED, Status.FULL}
        services.wait_for(lambda: Status.MISS in store.contains(keys))
        buffers = [bytearray(500_000) for _ in keys]
        statuses = store.get_into(keys, buffers)
        assert set(statuses) == {Status.HIT, Status.MISS}
        for key, buffer, status in zip(keys, buffers, statuses, strict=True):
            assert status is Status.MISS or buffer == value_of(key, 500_000)
        assert store.stats().evicted > 0
        assert store.stats().capacity_bytes == 32 << 20


def test_an_expired_lease_is_tried_once_more_and_then_a_miss(
    memory: MooncakeConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A transfer slower than a lease cannot be had on this machine at will: the library's answer is changed.
    keys = [key_of(i) for i in range(1000, 1004)]
    put(memory, keys)
    library, asked = memory.library, []

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(library, name)

        def batch_get_into(self, names: list[str], places: list[int], sizes: list[int]) -> list[int]:
            asked.append(len(names))
            codes = library.batch_get_into(names, places, sizes)
            late = (keys[1], keys[2]) if len(asked) == 1 else (keys[2],)
            return [
                -707 if any(key.hex() in name for key in late) else code
                for name, code in zip(names, codes, strict=True)
            ]

    monkeypatch.setattr(memory, "library", Slow())
    buffers = [bytearray(1000) for _ in keys]
    assert memory.get_into(keys, buffers) == [Status.HIT, Status.HIT, Status.MISS, Status.HIT]
    assert asked == [4, 2]
    for at in (0, 1, 3):
        assert buffers[at] == value_of(keys[at], 1000)
    assert memory.stats().faults["lease expired"] == 3


def test_values_of_every_prefix_are_apart_and_listed_apart(
    mooncake: services.Mooncake, memory: MooncakeConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    for prefix, key in (("a/", key_of(1)), ("a/b/", key_of(2))):
        monkeypatch.setattr(memory, "_prefix", prefix)
        put(memory, [key], 3000)
        assert [entry.key for entry in memory.scan()] == [key]
    assert memory.contains([key_of(1)]) == [Status.MISS]


# What cannot be opened.


def test_a_master_that_is_not_there_is_an_error_of_the_configuration() -> None:
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"master_server_address '127.0.0.1:1' cannot be reached: .*refused"):
        MooncakeConnector(MooncakeConfig(master_server_address="127.0.0.1:1"))
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lane_bytes": 4096}, "lane_bytes 4096 must be at least 8KiB"),
        ({"lane_bytes": "big"}, "'big' is not a size"),
        ({"codec": "gzip"}, "codec 'gzip' is not known"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MooncakeConnector(MooncakeConfig(**{"master_server_address": "127.0.0.1:1", **settings}))


def test_a_missing_library_is_named() -> None:
    # In a process of its own, in which the loader finds no libibverbs.
    code = """
import importlib, sys
import kvtide.connectors.mooncake as room
def refuse(name):
    raise ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")
room.import_module = refuse
try:
    room.MooncakeConnector(room.MooncakeConfig(master_server_address="127.0.0.1:1"))
except room.KvtideError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "libibverbs.so.1" in done.stdout
    assert "apt-get install libibverbs1" in done.stdout


def test_settings_are_read_as_every_stores_are() -> None:
    good: dict[str, Any] = {"master_server_address": "[::1]:5", "protocol": "rdma"}
    assert store_settings("MooncakeConnector", good) == MooncakeConfig(**good)
    with pytest.raises(ConfigError, match="MooncakeConnector's kv_connector_extra_config"):
        store_settings("MooncakeConnector", {"master_server_address": "h"})
