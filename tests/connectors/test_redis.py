"""RedisConnector on real servers: the conformance suite, TLS and passwords, a cluster, and what servers do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import services
from services import skipping

from kvtide.connectors.config import store_settings
from kvtide.connectors.redis import STRING_LIMIT, RedisConfig, RedisConnector
from kvtide.kvcache import ConfigError
from kvtide.offload.conformance import StoreConformance, key_of, value_of
from kvtide.offload.store import Status, Store
from kvtide.offload.values import HEADER_BYTES

client = pytest.importorskip("redis")
numbers = count()
TIMEOUT_S = 1.5  # long enough that a busy machine answers, short enough to wait for


def open_redis(server: services.Redis, **settings: Any) -> RedisConnector:
    settings = {"url": server.url, "prefix": f"t{next(numbers)}:", "timeout_seconds": TIMEOUT_S} | settings
    return RedisConnector(RedisConfig(**settings))


def put(store: Store, keys: list[bytes], size: int = 1000) -> None:
    assert store.put(keys, [value_of(key, size) for key in keys]) == [Status.STORED] * len(keys)


class TestRedis(StoreConformance):
    persistent = True
    shared = True
    holds = False
    exact_stats = False

    @pytest.fixture
    def place(self, redis: services.Redis) -> tuple[services.Redis, str]:
        return redis, f"t{next(numbers)}:"

    def open_store(self, place: Any) -> Store:
        server, prefix = place
        return open_redis(server, prefix=prefix, timeout_seconds=10.0)

    def stored(self, store: Store, place: Any, key: bytes) -> bytes:
        with client.Redis.from_url(place[0].url) as raw:
            return raw.get(place[1] + key.hex())

    def overwrite(self, store: Store, place: Any, key: bytes, data: bytes) -> None:
        with client.Redis.from_url(place[0].url) as raw:
            raw.set(place[1] + key.hex(), data)


# Faults.


def test_a_hung_server_is_an_error_in_time_and_costs_nothing_afterwards(redis: services.Redis) -> None:
    with open_redis(redis) as store:
        keys = [key_of(i) for i in range(40)]
        put(store, keys, 500_000)
        with redis.service.paused():
            started = time.monotonic()
            assert store.get_into(keys, [bytearray(500_000) for _ in keys]) == [Status.ERROR] * 40
            assert store.put([key_of(99)], [b"value"]) == [Status.ERROR]
            assert store.delete(keys[:1]) == [Status.ERROR]
            assert store.headers(keys[:1]) == [None]
            assert list(store.scan()) == []
            assert time.monotonic() - started < 44 * TIMEOUT_S / 2  # a time limit a call, and not one a key
        buffers = [bytearray(500_000) for _ in keys]
        assert store.get_into(keys, buffers) == [Status.HIT] * 40
        assert buffers == [value_of(key, 500_000) for key in keys]
        assert store.stats().faults["timeout"] >= 42


def test_a_server_that_dies_mid_transfer_and_comes_back_empty(tmp_path: Path) -> None:
    with skipping(), services.redis_server(tmp_path) as server, open_redis(server) as store:
        keys = [key_of(i) for i in range(12)]
        values = [value_of(key, 2_000_000) for key in keys]
        store.put(keys, values)
        killer = services.after(0.05, server.service.kill)
        seen = set()
        while Status.ERROR not in seen:
            buffers = [bytearray(2_000_000) for _ in keys]
            statuses = store.get_into(keys, buffers)
            for value, buffer, status in zip(values, buffers, statuses, strict=True):
                assert status is not Status.HIT or buffer == value
            seen |= set(statuses)
        killer.join()
        assert seen <= {Status.HIT, Status.ERROR}
        assert set(store.put(keys, values)) == {Status.ERROR}
        server.service.start()
        assert store.contains(keys) == [Status.MISS] * 12
        assert store.put(keys, values) == [Status.STORED] * 12


def test_a_server_that_is_not_there_yet(tmp_path: Path) -> None:
    with skipping(), services.redis_server(tmp_path) as server:
        server.service.kill()
        with open_redis(server) as store:
            assert store.contains([key_of(1)]) == [Status.ERROR]
            assert store.stats().faults["connection"] >= 2
            server.service.start()
            put(store, [key_of(1)])


def test_what_the_server_evicts_is_a_miss(tmp_path: Path) -> None:
    options = ("--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru")
    with skipping(), services.redis_server(tmp_path, *options) as server, open_redis(server) as store:
        keys = [key_of(i) for i in range(100)]
        for start in range(0, 100, 10):
            put(store, keys[start : start + 10], 200_000)
        buffers = [bytearray(200_000) for _ in keys]
        statuses = store.get_into(keys, buffers)
        assert set(statuses) == {Status.HIT, Status.MISS}
        for key, buffer, status in zip(keys, buffers, statuses, strict=True):
            assert status is Status.MISS or buffer == value_of(key, 200_000)
        stats = store.stats()
        assert stats.capacity_bytes == 8 << 20
        assert stats.num_values == 100 - stats.evicted <= statuses.count(Status.HIT)  # answering may evict more


def test_a_server_that_evicts_nothing_is_full(tmp_path: Path) -> None:
    options = ("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    with skipping(), services.redis_server(tmp_path, *options) as server, open_redis(server) as store:
        keys = [key_of(i) for i in range(100)]
        statuses = store.put(keys, [value_of(key, 200_000) for key in keys])
        assert set(statuses) == {Status.STORED, Status.FULL}
        looked_up = [Status.HIT if status is Status.STORED else Status.MISS for status in statuses]
        assert store.contains(keys) == looked_up
        store.delete(keys)
        put(store, keys[-1:], 200_000)


# Who may, and whose values.


def test_prefixes_keep_values_apart(redis: services.Redis) -> None:
    with open_redis(redis, prefix="a:") as one, open_redis(redis, prefix="a:b:") as other:
        put(one, [key_of(1)])
        put(other, [key_of(2)])
        assert [entry.key for entry in one.scan()] == [key_of(1)]
        assert [entry.key for entry in other.scan()] == [key_of(2)]
        assert one.contains([key_of(2)]) == other.contains([key_of(1)]) == [Status.MISS]
        assert one.delete([key_of(2)]) == [Status.MISS]


def test_values_expire_whole(redis: services.Redis) -> None:
    with open_redis(redis, prefix="ttl:", ttl_seconds=100) as store, client.Redis.from_url(redis.url) as raw:
        put(store, [key_of(1)])
        (name,) = raw.keys("ttl:*")
        assert 90_000 < raw.pttl(name) <= 100_000
        raw.pexpire(name, 1)
        time.sleep(0.01)
        assert store.get_into([key_of(1)], [bytearray(1000)]) == [Status.MISS]


def test_a_packed_value_is_read_by_a_store_of_any_codec(redis: services.Redis) -> None:
    pytest.importorskip("zstandard")
    with open_redis(redis, prefix="z:", codec="zstd") as packing, open_redis(redis, prefix="z:") as plain:
        value = bytes(range(100)) * 1000
        assert packing.put([key_of(1)], [value]) == [Status.STORED]
        header = plain.headers([key_of(1)])[0]
        assert header is not None
        assert header.stored_bytes < 2000
        buffer = bytearray(len(value))
        assert plain.get_into([key_of(1)], [buffer]) == [Status.HIT]
        assert buffer == value


def test_unix_sockets(redis: services.Redis) -> None:
    with open_redis(redis, url=redis.unix_url) as store:
        put(store, [key_of(1)], 3_000_000)
        assert store.verify([key_of(1)]) == [Status.HIT]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[services.Redis]:
    with skipping(), services.redis_server(tmp_path_factory.mktemp("secured"), secured=True) as server:
        yield server


def test_tls_and_a_password_from_the_environment_or_a_file(
    secured: services.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHE_PASSWORD", services.PASSWORD)
    (tmp_path / "password").write_text(services.PASSWORD + "\n")
    url = f"rediss://127.0.0.1:{secured.port}"
    ca = {"tls_ca_file": str(secured.ca_file)}
    for settings in (
        {"url": url, "username": "kvtide", "password_env": "CACHE_PASSWORD", **ca},
        {"url": url, "username": "kvtide", "password_file": str(tmp_path / "password"), **ca},
        {"url": f"rediss://kvtide:{services.PASSWORD}@127.0.0.1:{secured.port}", **ca},
    ):
        with open_redis(secured, **settings) as store:
            put(store, [key_of(1)])
            assert services.PASSWORD not in f"{store!r} {store.stats()!r}"


def test_wrong_credentials_are_an_error_of_the_configuration(
    secured: services.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHE_PASSWORD", "wr0ng")
    url, ca = f"rediss://127.0.0.1:{secured.port}", {"tls_ca_file": str(secured.ca_file)}
    for settings in (
        {"url": url, **ca},
        {"url": url, "username": "kvtide", "password_env": "CACHE_PASSWORD", **ca},
        {"url": f"rediss://kvtide:wr0ng@127.0.0.1:{secured.port}", **ca},
    ):
        with pytest.raises(ConfigError, match="refuses the username or password") as caught:
            open_redis(secured, **settings)
        assert "wr0ng" not in str(caught.value)


def test_a_certificate_that_nobody_trusts_is_refused(secured: services.Redis) -> None:
    with open_redis(secured, url=f"rediss://kvtide:{services.PASSWORD}@127.0.0.1:{secured.port}") as store:
        assert store.contains([key_of(1)]) == [Status.ERROR]
        assert set(store.stats().faults) == {"connection"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "redis://:s3cret@h", "password_env": "HOME"}, r"'redis://\*\*\*@h' holds a password, so"),
        ({"password_env": "NOT_SET_ANYWHERE"}, "'NOT_SET_ANYWHERE', which is not set"),
        ({"password_env": "HOME", "password_file": "/x"}, "must not both be given"),
        ({"password_file": "/nonexistent"}, "password_file '/nonexistent' cannot be read: No such file"),
        ({"tls_ca_file": "/x"}, "needs a url that begins with rediss://"),
        ({"url": "rediss://h", "tls_ca_file": "/nonexistent"}, "is not a file"),
        ({"url": "unix:///x", "cluster": True}, "a cluster is reached by TCP"),
        ({"url": "redis://h:port"}, "url 'redis://h:port'"),
        ({"codec": "gzip"}, "codec 'gzip' is not known"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        RedisConnector(RedisConfig(**{"url": "redis://h", **settings}))
    assert "s3cret" not in str(caught.value)


def test_a_password_in_the_url_is_shown_nowhere() -> None:
    for url in ("redis://kvtide:s3cret@127.0.0.1:1", "redis://:s3cret@127.0.0.1:1/0"):
        config = RedisConfig(url=url)
        with RedisConnector(config) as store:
            assert store.contains([key_of(1)]) == [Status.ERROR]
            assert "s3cret" not in f"{config!r} {config} {store!r} {store.stats()!r}"


def test_settings_are_read_as_every_stores_are() -> None:
    settings = store_settings("RedisConnector", {"url": "redis://h", "ttl_seconds": 5, "codec": "zstd"})
    assert settings == RedisConfig(url="redis://h", ttl_seconds=5, codec="zstd")
    for wrong in ({"url": "http://h"}, {"url": "redis://h", "ttl_seconds": 0}, {"url": "redis://h", "prefix": "*"}, {}):
        with pytest.raises(ConfigError, match="RedisConnector's kv_connector_extra_config"):
            store_settings("RedisConnector", wrong)


def test_no_value_is_longer_than_the_server_takes() -> None:
    assert RedisConnector.max_value_bytes + HEADER_BYTES == STRING_LIMIT


# A cluster.


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[services.Redis]]:
    with skipping(), services.redis_cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


def test_a_cluster_stores_on_every_node(cluster: list[services.Redis]) -> None:
    with open_redis(cluster[1], cluster=True) as store:
        keys = [key_of(i) for i in range(60)]
        put(store, keys, 30_000)
        buffers = [bytearray(30_000) for _ in keys]
        assert store.get_into(keys, buffers) == [Status.HIT] * 60
        assert buffers == [value_of(key, 30_000) for key in keys]
        assert sorted(entry.key for entry in store.scan()) == sorted(keys)
        for node in cluster:
            with client.Redis(port=node.port) as raw:
                assert raw.dbsize() > 0
        assert store.stats().num_values == 60
        assert store.delete([*keys, key_of(99)]) == [Status.DELETED] * 60 + [Status.MISS]


def test_a_slot_that_moved_is_followed(cluster: list[services.Redis]) -> None:
    with open_redis(cluster[0], cluster=True, prefix="moved:") as store:
        put(store, [key_of(0)])  # the client knows the slots
        name = f"moved:{key_of(1).hex()}"
        nodes = [client.Redis(port=node.port) for node in cluster]
        slot = nodes[0].cluster("keyslot", name)
        owner = next(at for at in range(3) if 16384 * at // 3 <= slot < 16384 * (at + 1) // 3)
        new = nodes[(owner + 1) % 3]
        for node in (new, *nodes):
            node.execute_command("CLUSTER SETSLOT", slot, "NODE", new.cluster("myid"))
        try:
            put(store, [key_of(1)])
            assert new.exists(name)
            assert store.verify([key_of(0), key_of(1)]) == [Status.HIT] * 2
            assert store.delete([key_of(1)]) == [Status.DELETED]
        finally:
            for node in (nodes[owner], *nodes):
                node.execute_command("CLUSTER SETSLOT", slot, "NODE", nodes[owner].cluster("myid"))
            for node in nodes:
                node.close()


def test_a_hung_node_fails_its_own_keys_in_time(cluster: list[services.Redis]) -> None:
    with open_redis(cluster[0], cluster=True) as store:
        keys = [key_of(i) for i in range(60)]
        put(store, keys, 30_000)
        with cluster[2].service.paused():
            started = time.monotonic()
            buffers = [bytearray(30_000) for _ in keys]
            statuses = store.get_into(keys, buffers)
            assert time.monotonic() - started < 20 * TIMEOUT_S / 2  # one time limit, and not one a key
        assert set(statuses) == {Status.HIT, Status.ERROR}
        for key, buffer, status in zip(keys, buffers, statuses, strict=True):
            assert status is Status.ERROR or buffer == value_of(key, 30_000)
        assert set(store.contains(keys)) == {Status.HIT}
