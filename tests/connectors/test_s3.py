"""S3Connector on a real HTTP service: the conformance suite, multipart uploads, and what services do."""

from __future__ import annotations

import threading
import time
import urllib.request
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import services
from services import BUCKET, skipping

from kvtide.connectors.config import store_settings
from kvtide.connectors.s3 import S3Config, S3Connector
from kvtide.kvcache import ConfigError
from kvtide.offload.conformance import StoreConformance, key_of, value_of
from kvtide.offload.store import Status, Store
from kvtide.offload.values import HEADER_BYTES

pytest.importorskip("boto3")
numbers = count()
TIMEOUT_S = 1.5  # long enough that a busy machine answers, short enough to wait for
MULTIPART = 5 << 20


def open_s3(server: services.S3, **settings: Any) -> S3Connector:
    fixed = {"bucket": BUCKET, "endpoint_url": server.endpoint, "prefix": f"t{next(numbers)}/", "threads": 4}
    return S3Connector(S3Config(**{**fixed, "timeout_seconds": TIMEOUT_S, "retries": 0, **settings}))


def put(store: Store, keys: list[bytes], size: int = 1000) -> None:
    assert store.put(keys, [value_of(key, size) for key in keys]) == [Status.STORED] * len(keys)


class TestS3(StoreConformance):
    persistent = True
    shared = True
    holds = False
    exact_stats = False

    @pytest.fixture
    def place(self, s3: services.S3) -> tuple[services.S3, str]:
        return s3, f"t{next(numbers)}/"

    def open_store(self, place: Any) -> Store:
        return open_s3(place[0], prefix=place[1], timeout_seconds=20.0)

    def stored(self, store: Store, place: Any, key: bytes) -> bytes:
        return place[0].client().get_object(Bucket=BUCKET, Key=place[1] + key.hex())["Body"].read()

    def overwrite(self, store: Store, place: Any, key: bytes, data: bytes) -> None:
        place[0].client().put_object(Bucket=BUCKET, Key=place[1] + key.hex(), Body=data)


# Multipart uploads.


def test_large_values_travel_in_parts(s3: services.S3) -> None:
    with open_s3(s3, multipart_bytes=MULTIPART, timeout_seconds=20.0) as store:
        key, size = key_of(1), 12 << 20
        put(store, [key], size)
        buffer = bytearray(size)
        assert store.get_into([key], [buffer]) == [Status.HIT]
        assert buffer == value_of(key, size)
        etag = s3.client().head_object(Bucket=BUCKET, Key=store.object_name(key))["ETag"]
        assert etag.strip('"').endswith("-3")  # of three parts
        assert store.put([key], [bytes(size)]) == [Status.PRESENT]


def test_an_upload_that_fails_is_aborted(s3: services.S3, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_s3(s3, multipart_bytes=MULTIPART, timeout_seconds=20.0) as store:
        send = store._client.upload_part

        def fail_at_the_second(**request: Any) -> Any:
            # The service refuses a part of an upload that it does not know.
            return send(**{**request, "UploadId": "lost"} if request["PartNumber"] == 2 else request)

        monkeypatch.setattr(store._client, "upload_part", fail_at_the_second)
        assert store.put([key_of(1)], [bytes(12 << 20)]) == [Status.ERROR]
        assert "Uploads" not in s3.client().list_multipart_uploads(Bucket=BUCKET, Prefix=store._prefix)
        assert store.contains([key_of(1)]) == [Status.MISS]


def test_gc_aborts_what_dead_writers_left_long_ago(s3: services.S3, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_s3(s3) as store:
        client = s3.client()
        name = store.object_name(key_of(1))
        upload = client.create_multipart_upload(Bucket=BUCKET, Key=name)["UploadId"]
        client.upload_part(Bucket=BUCKET, Key=name, UploadId=upload, PartNumber=1, Body=bytes(MULTIPART))
        # The service says of every upload that it began in 2010.
        monkeypatch.setattr("kvtide.connectors.s3._ABANDONED", timedelta(days=365_000))
        assert store.gc() == 0  # it may still be under way
        monkeypatch.undo()
        assert store.gc() == MULTIPART
        assert "Uploads" not in client.list_multipart_uploads(Bucket=BUCKET, Prefix=store._prefix)


def test_two_writers_of_one_object_are_told_apart(s3: services.S3, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_s3(s3) as one, open_s3(s3, prefix=one._prefix) as other:
        look = one._look

        def look_then_lose_the_race(key: bytes) -> Status:
            try:
                return look(key)
            finally:
                put(other, [key])

        monkeypatch.setattr(one, "_look", look_then_lose_the_race)
        assert one.put([key_of(1)], [bytes(1000)]) == [Status.PRESENT]
        monkeypatch.undo()
        assert one.verify([key_of(1)]) == [Status.HIT]


# Faults.


def test_a_hung_service_is_an_error_in_time_and_costs_nothing_afterwards(s3: services.S3) -> None:
    with open_s3(s3) as store:
        keys = [key_of(i) for i in range(40)]
        put(store, keys)
        with s3.service.paused():
            started = time.monotonic()
            assert store.get_into(keys, [bytearray(1000) for _ in keys]) == [Status.ERROR] * 40
            assert store.put([key_of(99)], [b"value"]) == [Status.ERROR]
            assert store.delete(keys[:1]) == [Status.ERROR]
            assert store.headers(keys[:1]) == [None]
            assert list(store.scan()) == []
            assert time.monotonic() - started < 44 * TIMEOUT_S / 2  # a time limit a call, and not one a key
        assert store.stats().faults["timeout"] >= 5
        assert store.stats().faults["not asked"] >= 30
        buffers = [bytearray(1000) for _ in keys]
        assert store.get_into(keys, buffers) == [Status.HIT] * 40
        assert buffers == [value_of(key, 1000) for key in keys]


def test_a_service_that_dies_mid_transfer_and_comes_back_empty(tmp_path: Path, s3: services.S3) -> None:
    with skipping(), services.s3_server(tmp_path) as server:
        server.client().create_bucket(Bucket=BUCKET)
        with open_s3(server, timeout_seconds=5.0) as store:
            keys = [key_of(i) for i in range(12)]
            values = [value_of(key, 1_000_000) for key in keys]
            assert store.put(keys, values) == [Status.STORED] * 12
            killer = services.after(0.05, server.service.kill)
            seen = set()
            while Status.ERROR not in seen:
                buffers = [bytearray(1_000_000) for _ in keys]
                statuses = store.get_into(keys, buffers)
                for value, buffer, status in zip(values, buffers, statuses, strict=True):
                    assert status is not Status.HIT or buffer == value
                seen |= set(statuses)
            killer.join()
            assert seen <= {Status.HIT, Status.ERROR}, store.stats().faults
            server.service.start()
            assert store.contains(keys[:1]) == [Status.MISS]
            assert store.put(keys[:1], values[:1]) == [Status.ERROR]  # the bucket is gone
            assert store.stats().faults["server"] == 1
            server.client().create_bucket(Bucket=BUCKET)
            assert store.put(keys, values) == [Status.STORED] * 12


def test_a_service_that_is_not_there_yet(tmp_path: Path, s3: services.S3) -> None:
    with skipping(), services.s3_server(tmp_path) as server:
        server.service.kill()
        with open_s3(server) as store:
            assert store.contains([key_of(1)]) == [Status.ERROR]
            assert store.stats().faults["connection"] == 2
            server.service.start()
            server.client().create_bucket(Bucket=BUCKET)
            put(store, [key_of(1)])


# Who may, and whose values.


def test_wrong_credentials_are_an_error_of_the_configuration_or_of_the_key(s3: services.S3) -> None:
    def require(requests: bytes) -> None:
        headers = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{s3.endpoint}/moto-api/reset-auth", data=requests, headers=headers)
        urllib.request.urlopen(request).close()

    with open_s3(s3) as store:
        put(store, [key_of(1)])
        require(b"0")  # from the next request on, unknown access keys are refused
        try:
            with pytest.raises(ConfigError, match=f"bucket '{BUCKET}': the service refuses the credentials"):
                open_s3(s3)
            assert store.contains([key_of(1)]) == store.put([key_of(2)], [b"value"]) == [Status.ERROR]
            assert store.stats().faults == {"credentials": 2}
        finally:
            require(b"Infinity")
        assert store.verify([key_of(1)]) == [Status.HIT]


def test_no_credentials_and_no_bucket(s3: services.S3, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="bucket 'not-there' is not there"):
        open_s3(s3, bucket="not-there")
    with pytest.raises(ConfigError, match="bucket '!' cannot be a bucket's name"):
        open_s3(s3, bucket="!")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ConfigError, match="finds no credentials"):
        open_s3(s3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"multipart_bytes": "1MiB"}, "multipart_bytes '1MiB' must be at least 5MiB"),
        ({"multipart_bytes": "much"}, "'much' is not a size"),
        ({"endpoint_url": "http://not a host"}, "endpoint_url 'http://not a host'"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str, s3: services.S3) -> None:
    with pytest.raises(ConfigError, match=message):
        open_s3(s3, **settings)


def test_prefixes_keep_values_apart(s3: services.S3) -> None:
    with open_s3(s3, prefix="a/") as one, open_s3(s3, prefix="a/b/") as other:
        put(one, [key_of(1)])
        put(other, [key_of(2)])
        assert [entry.key for entry in one.scan()] == [key_of(1)]
        assert [entry.key for entry in other.scan()] == [key_of(2)]
        assert one.contains([key_of(2)]) == other.delete([key_of(1)]) == [Status.MISS]
        stats = one.stats()
        assert (stats.num_values, stats.num_bytes) == (1, 1000 + HEADER_BYTES)


def test_a_batch_is_side_by_side(s3: services.S3, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_s3(s3, threads=4, timeout_seconds=20.0) as store:
        met = threading.Barrier(4, timeout=60)
        monkeypatch.setattr(store, "_look", lambda key: Status.HIT if met.wait() >= 0 else Status.MISS)
        assert store.contains([key_of(i) for i in range(4)]) == [Status.HIT] * 4


def test_settings_are_read_as_every_stores_are() -> None:
    good: dict[str, Any] = {"bucket": "b", "endpoint_url": "https://h", "region": "r"}
    assert store_settings("S3Connector", good) == S3Config(**good)
    with pytest.raises(ConfigError, match="S3Connector's kv_connector_extra_config"):
        store_settings("S3Connector", {"bucket": "b", "endpoint_url": "h"})
