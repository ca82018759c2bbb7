"""A writer that is killed at any point leaves whole values or none, and every acknowledged one, in every store."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import services
from services import BUCKET, skipping

from kvtide.connectors.config import make_store
from kvtide.kvcache import KvtideError
from kvtide.offload.store import Status, Store

KILLS = 200 if os.environ.get("KVTIDE_HYPOTHESIS") == "long" else 3
MULTIPART = 5 << 20
numbers = count()

WRITER = """
import json, sys
from kvtide.connectors.config import make_store
name, settings, size, start = json.loads(sys.argv[1])
store = make_store(name, settings)
print("open", flush=True)
for number in range(start, start + 10**6, 4):
    keys = [i.to_bytes(32, "big") for i in range(number, number + 4)]
    for key, status in zip(keys, store.put(keys, [key * (size // 32) for key in keys])):
        print(key.hex() if status.name == "STORED" else status.name, flush=True)
"""


def kill_writers(name: str, settings: dict[str, Any], size: int, within: float = 0.15) -> Store:
    """Kill writers at random points of their first seconds; the store, open, with everything as it should be."""
    rng = random.Random(name)
    acknowledged: set[bytes] = set()
    for kill in range(KILLS):
        arguments = json.dumps([name, settings, size, kill * 10**6])
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as writer:
            try:
                assert writer.stdout is not None
                assert "open\n" in iter(writer.stdout.readline, "")  # a library may say things of its own before
                lines = []
                if kill % 2:  # at any point after something was acknowledged, however slow this machine is
                    lines.append(writer.stdout.readline().strip())
                killer = services.after(rng.random() * within, writer.kill)
                lines += writer.stdout.read().splitlines()
                killer.join()
            finally:
                writer.kill()
        acknowledged |= {bytes.fromhex(line) for line in lines if len(line) == 64}
    store = make_store(name, settings)
    found = [entry.key for entry in store.scan()]
    assert acknowledged <= set(found)
    assert acknowledged
    for key in found:
        buffer = bytearray(size)
        assert store.get_into([key], [buffer]) == [Status.HIT]
        assert buffer == key * (size // 32)
    assert not store.stats().faults
    # What was under way can be stored again.
    for kill in range(KILLS):
        after = kill * 10**6 + sum(kill * 10**6 <= int.from_bytes(key, "big") < (kill + 1) * 10**6 for key in found)
        keys = [number.to_bytes(32, "big") for number in range(after, after + 8)]
        services.wait_for(
            lambda keys=keys: (
                set(store.put(keys, [key * (size // 32) for key in keys])) <= {Status.STORED, Status.PRESENT}
            )
        )
        assert store.verify(keys) == [Status.HIT] * 8
    return store


def test_redis(redis: services.Redis) -> None:
    kill_writers("RedisConnector", {"url": redis.url, "prefix": f"k{next(numbers)}:"}, 320_000).close()


def test_s3_in_parts(s3: services.S3) -> None:
    prefix = f"k{next(numbers)}/"
    settings = {"bucket": BUCKET, "endpoint_url": s3.endpoint, "prefix": prefix, "multipart_bytes": MULTIPART}
    with kill_writers("S3Connector", settings, 6 << 20, within=1.5) as store:
        store.gc()  # this service says of every upload that it is old
    assert "Uploads" not in s3.client().list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)


@pytest.mark.parametrize("direct", [False, True])
def test_nixl_files(direct: bool, tmp_path: Path) -> None:
    pytest.importorskip("nixl_cu12", exc_type=ImportError)
    settings = {"path": str(tmp_path), "package": "nixl_cu12", "lane_bytes": "8MiB", "direct": direct}
    kill_writers("NixlConnector", settings, 320_000).close()


@contextmanager
def mooncake_memory(server: services.Mooncake, settings: dict[str, Any]) -> Iterator[None]:
    """A client that brings the memory, so that values outlive their writers."""
    try:
        store = make_store("MooncakeConnector", {**settings, "global_segment_size": "512MiB", "prefix": "none/"})
    except KvtideError as missing:
        pytest.skip(str(missing))
    with store:
        yield


def test_mooncake(tmp_path: Path) -> None:
    # A value whose writer died is forgotten after a second, where it is 30 by default.
    options = ("-put_start_discard_timeout_sec=1", "-put_start_release_timeout_sec=2")
    with skipping(), services.mooncake_master(tmp_path, *options) as server:
        settings = {
            "master_server_address": f"127.0.0.1:{server.port}",
            "metrics_port": server.metrics_port,
            "local_hostname": "127.0.0.1",
            "global_segment_size": 0,
            "lane_bytes": "8MiB",
        }
        with mooncake_memory(server, settings):
            kill_writers("MooncakeConnector", settings, 320_000).close()
