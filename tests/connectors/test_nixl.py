"""NixlConnector with the plug-ins POSIX and OBJ: the conformance suite, full disks, damaged files, hung services."""

from __future__ import annotations

import os
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import services
from services import BUCKET

from kvtide.connectors.config import store_settings
from kvtide.connectors.nixl import NixlConfig, NixlConnector
from kvtide.connectors.transport.nixl_agent import Agent, Piece, nixl_api
from kvtide.connectors.transport.nixl_media import Files
from kvtide.kvcache import ConfigError, MissingExtra
from kvtide.offload.conformance import StoreConformance, key_of, value_of
from kvtide.offload.store import Status, Store
from kvtide.offload.values import HEADER_BYTES

# One build for all of the tests, since a process loads only one; this one's OBJ needs none of CUDA's libraries.
PACKAGE = "nixl_cu12"
pytest.importorskip("nixl_cu12", exc_type=ImportError)
numbers = count()


def open_files(path: Path, /, **settings: Any) -> NixlConnector:
    fixed = {"path": str(path), "package": PACKAGE, "lane_bytes": "8MiB", "timeout_seconds": 20.0}
    return NixlConnector(NixlConfig(**{**fixed, **settings}))


def open_objects(server: services.S3, **settings: Any) -> NixlConnector:
    fixed = {"plugin": "OBJ", "bucket": BUCKET, "endpoint_url": server.endpoint, "prefix": f"n{next(numbers)}/"}
    more = {"package": PACKAGE, "lanes": 1, "lane_bytes": "8MiB", "timeout_seconds": 20.0}
    return NixlConnector(NixlConfig(**{**fixed, **more, **settings}))


def put(store: Store, keys: list[bytes], size: int = 1000) -> None:
    assert store.put(keys, [value_of(key, size) for key in keys]) == [Status.STORED] * len(keys)


def file_of(path: Path, key: bytes) -> Path:
    return Path(Files(path, {}, direct=False, fsync=False)._tree.path(key))


class TestFiles(StoreConformance):
    persistent = True
    shared = True
    holds = False
    exact_stats = False

    def open_store(self, place: Path) -> Store:
        return open_files(place)

    def stored(self, store: Store, place: Path, key: bytes) -> bytes:
        return file_of(place, key).read_bytes()

    def overwrite(self, store: Store, place: Path, key: bytes, data: bytes) -> None:
        file_of(place, key).write_bytes(data)


class TestBoundedFiles(StoreConformance):
    """With a bound of their own the files are counted, and the longest unused go."""

    persistent = True
    shared = True
    holds = False
    knows_prefixes = True
    exact_stats = False  # two writers of one key count it twice, until the next count

    def open_store(self, place: Path) -> Store:
        return open_files(place, max_bytes="1GiB")

    def open_small(self, place: Path, num_bytes: int) -> Store:
        return open_files(place, max_bytes=num_bytes)

    def test_the_longest_unused_go_first(self, place: Path) -> None:
        with self.open_small(place, 1 << 20) as store:
            put(store, [key_of(number) for number in range(20)], 50_000)
            for number in range(20):  # by the clock of the file system: the last ones were used last
                os.utime(file_of(place, key_of(number)), (number, number))
            assert store.get_into([key_of(0)], [bytearray(50_000)]) == [Status.HIT]
            put(store, [key_of(100)], 50_000)
            assert store.contains([key_of(number) for number in (0, 1, 19, 100)]) == [
                Status.HIT, Status.MISS, Status.HIT, Status.HIT,
            ]  # fmt: skip
            assert store.stats().evicted > 0

    def test_objects_have_no_such_bound(self) -> None:
        with pytest.raises(ConfigError, match="has no use for the key 'max_bytes'"):
            NixlConnector(NixlConfig(plugin="OBJ", bucket="b", max_bytes=1))


class TestDirectFiles(StoreConformance):
    """Past the page cache: files are whole pages. Bytes behind a value's end are nobody's."""

    persistent = True
    shared = True
    holds = False
    exact_stats = False

    def open_store(self, place: Path) -> Store:
        return open_files(place, direct=True, io="uring", fsync=True)

    def test_files_are_padded_with_zeros(self, store: Store, place: Path) -> None:
        put(store, [key_of(1), key_of(2)], 5000)
        store.delete([key_of(1)])
        put(store, [key_of(3)], 10)  # into memory that held other values
        data = file_of(place, key_of(3)).read_bytes()
        assert len(data) == 4096
        assert data[HEADER_BYTES + 10 :] == bytes(4096 - HEADER_BYTES - 10)

    def test_a_file_that_lost_its_end_is_damaged(self, store: Store, place: Path) -> None:
        for left in (0, HEADER_BYTES, 4096, 8191):
            put(store, [key_of(1)], 5000)
            os.truncate(file_of(place, key_of(1)), left)
            assert store.get_into([key_of(1)], [bytearray(5000)]) == [Status.CORRUPT]
            assert store.contains([key_of(1)]) == [Status.MISS]


class TestObjects(StoreConformance):
    persistent = True
    shared = True
    holds = False
    exact_stats = False

    @pytest.fixture
    def place(self, s3: services.S3) -> Any:
        return s3, f"n{next(numbers)}/"

    if os.environ.get("KVTIDE_HYPOTHESIS") != "long":  # a second each and more, since the service is slow
        sizes = (1, 4097, (1 << 20) + 13)
        test_batches_answer_per_key_in_order = None
        test_closing_leaves_no_files_and_no_threads = None

    def open_store(self, place: Any) -> Store:
        return open_objects(place[0], prefix=place[1])

    def stored(self, store: Store, place: Any, key: bytes) -> bytes:
        return place[0].client().get_object(Bucket=BUCKET, Key=place[1] + key.hex())["Body"].read()

    def overwrite(self, store: Store, place: Any, key: bytes, data: bytes) -> None:
        place[0].client().put_object(Bucket=BUCKET, Key=place[1] + key.hex(), Body=data)


# Files.


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("io", ["aio", "uring"])
def test_a_full_disk_is_full_and_leaves_nothing_behind(io: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk, open_files(disk, io=io) as store:
        keys = [key_of(i) for i in range(12)]
        statuses = store.put(keys, [value_of(key, 600_000) for key in keys])
        assert set(statuses) == {Status.STORED, Status.FULL}
        looked_up = [Status.HIT if status is Status.STORED else Status.MISS for status in statuses]
        assert store.contains(keys) == store.verify(keys) == looked_up
        assert not list(disk.rglob("*.part"))
        assert store.delete(keys[:2]) == [Status.DELETED] * 2
        put(store, keys[:1], 600_000)  # and goes on


def test_files_are_private_and_published_by_renaming(tmp_path: Path) -> None:
    with open_files(tmp_path / "new") as store:
        put(store, [key_of(1)])
        file = file_of(tmp_path / "new", key_of(1))
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        assert key_of(1).hex()[32:] in file.name
        (file.parent / f".{file.stem}.dead-writer.part").write_bytes(bytes(5000))
        assert [entry.key for entry in store.scan()] == [key_of(1)]
        assert store.gc() == 0  # its writer may be alive
        os.utime(file.parent / f".{file.stem}.dead-writer.part", (0, 0))
        assert store.gc() == 5000


def test_many_values_need_few_descriptors(tmp_path: Path) -> None:
    with open_files(tmp_path, lane_bytes="8MiB", lanes=1) as store:
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        keys = [key_of(i) for i in range(300)]
        put(store, keys, 100)
        assert store.get_into(keys, [bytearray(100) for _ in keys]) == [Status.HIT] * 300
        assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


def test_a_slow_file_system_is_an_error_in_time_and_the_callers_buffers_stay_theirs(tmp_path: Path) -> None:
    # A hung NFS server cannot be had here: a read from a pipe that nobody writes to hangs in its stead.
    with open_files(tmp_path, lanes=1) as store:
        put(store, [key_of(1)])
        store._lanes.seconds = 0.3
        let_go = threading.Event()
        read = store._where.read
        store._where.read = lambda *args: (let_go.wait(300), read(*args))[1]  # type: ignore[method-assign]
        buffer = bytearray(b"\x5a" * 1000)
        assert store.get_into([key_of(1)], [buffer]) == [Status.ERROR]
        # The only lane is lost to the call that hangs: no call waits for it, however long the time limit.
        store._lanes.seconds = 120.0
        started = time.monotonic()
        assert store.put([key_of(2)], [bytes(1000)]) == [Status.ERROR]
        assert time.monotonic() - started < 60
        let_go.set()
        services.wait_for(lambda: not store._lanes.all[0].hung)
        assert buffer == b"\x5a" * 1000
        assert store.get_into([key_of(1)], [buffer]) == [Status.HIT]
        assert store.stats().faults == {"timeout": 2}


# Objects.


def test_a_hung_service_is_an_error_in_time(s3: services.S3) -> None:
    with open_objects(s3, timeout_seconds=3.0) as store:
        keys = [key_of(i) for i in range(40)]
        put(store, keys)
        with s3.service.paused():
            started = time.monotonic()
            assert store.get_into(keys, [bytearray(1000) for _ in keys]) == [Status.ERROR] * 40
            assert store.put([key_of(99)], [b"value"]) == [Status.ERROR]
            assert time.monotonic() - started < 41 * 3.0 / 2  # a time limit a call, and not one a key
        services.wait_for(lambda: not store._lanes.all[0].hung)
        assert store.verify(keys) == [Status.HIT] * 40


def test_objects_and_an_s3_store_are_one(s3: services.S3) -> None:
    from kvtide.connectors.s3 import S3Config, S3Connector

    prefix = f"n{next(numbers)}/"
    config = S3Config(bucket=BUCKET, endpoint_url=s3.endpoint, prefix=prefix)
    with open_objects(s3, prefix=prefix) as objects, S3Connector(config) as plain:
        put(objects, [key_of(1)], 5000)
        put(plain, [key_of(2)], 5000)
        assert plain.verify([key_of(1)]) == objects.verify([key_of(2)]) == [Status.HIT]


def test_what_nixl_reports_when_an_object_is_too_short(s3: services.S3) -> None:
    """Why lengths are asked of S3: NIXL calls a read beyond an object's end done."""
    parameters = {"bucket": BUCKET, "endpoint_override": s3.endpoint, "scheme": "http", "region": "us-east-1"}
    agent = Agent("OBJ", {**parameters, "use_virtual_addressing": "false"}, "OBJ", PACKAGE)
    from kvtide.connectors.transport.lanes import Lanes

    lanes = Lanes(1, 8192, 20.0, "test")
    lane = lanes.all[0]
    agent.register(lane.address, 8192)
    s3.client().put_object(Bucket=BUCKET, Key="short", Body=b"x" * 100)
    outcomes = agent.move(
        "READ", [Piece(lane.address, 200, 0, 1, "short"), Piece(lane.address + 4096, 9, 0, 2, "none")]
    )
    assert outcomes[0] is None
    assert type(outcomes[1]).__name__ == "nixlBackendError"
    lanes.close()


# What cannot be opened.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": None}, "plugin 'POSIX' needs the key 'path'"),
        ({"plugin": "OBJ", "path": None}, "plugin 'OBJ' needs the key 'bucket'"),
        ({"plugin": "OBJ", "bucket": "b"}, "plugin 'OBJ' has no use for the key 'path'"),
        ({"bucket": "b"}, "plugin 'POSIX' has no use for the key 'bucket', which is 'b'"),
        ({"lane_bytes": 10_000}, "lane_bytes 10000 must be a multiple of 4KiB"),
        ({"path": "/proc/none"}, "path '/proc/none' cannot be used: No such file"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        open_files(tmp_path, **settings)


def test_a_plugin_counts_when_it_can_be_created(tmp_path: Path) -> None:
    """GDS is in the package, and listed; without CUDA it cannot be created."""
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("GDS may work on this machine")
    with pytest.raises(ConfigError, match="plugin 'GDS' is listed by NIXL but cannot be created here"):
        open_files(tmp_path, plugin="GDS")


def test_a_version_that_reports_short_writes_as_done_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "1.4.1")
    with pytest.raises(ConfigError, match=r"NIXL 1\.4\.1 is installed; at least 1\.5\.0 is needed"):
        nixl_api(PACKAGE)


def test_a_missing_package_names_the_extra() -> None:
    with pytest.raises(MissingExtra, match=r"pip install 'kvtide\[nixl\]'"):
        nixl_api("nixl_cu99")


def test_settings_are_read_as_every_stores_are() -> None:
    good: dict[str, Any] = {"plugin": "OBJ", "bucket": "b", "endpoint_url": "https://h"}
    assert store_settings("NixlConnector", good) == NixlConfig(**good)
    with pytest.raises(ConfigError, match="NixlConnector's kv_connector_extra_config"):
        store_settings("NixlConnector", {"plugin": "TAPE"})


def test_with_fsync_the_name_is_synced_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the file and, after the rename, its folder: a lost name is a lost value."""
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())), fsync(fd))[1]
    )
    with open_files(tmp_path, fsync=True) as store:
        put(store, [key_of(1)])
        folder = file_of(tmp_path, key_of(1)).parent
        assert any(name.endswith(".part") and name.startswith(str(folder)) for name in synced)
        assert synced[-1] == str(folder)
