"""MultiConnector: the suite of all stores over several stacks, write policies, faults of single tiers, quotas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services import wait_for

from kvtide.connectors.config import make_store
from kvtide.offload.conformance import StoreConformance, key_of, value_of
from kvtide.offload.store import Status, Store

HOST = {"kv_connector": "HostConnector", "kv_connector_extra_config": {"max_bytes": "32MiB", "eviction": "lru"}}


def host(num_bytes: int | str) -> dict[str, Any]:
    return {"kv_connector": "HostConnector", "kv_connector_extra_config": {"max_bytes": num_bytes, "eviction": "lru"}}


def multi(*tiers: dict[str, Any], **settings: Any) -> Any:
    return make_store("MultiConnector", {"connectors": list(tiers), **settings})


def shared(path: Path, **settings: Any) -> dict[str, Any]:
    config = {"shared_storage_path": str(path), **settings}
    return {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": config}


def put(store: Store, keys: list[bytes], size: int) -> None:
    assert store.put(keys, [value_of(key, size) for key in keys]) == [Status.STORED] * len(keys)


class TestTwoHosts(StoreConformance):
    exact_stats = False
    policy = "write_through"

    def open_store(self, place: Path) -> Store:
        return multi(host("16MiB"), host("64MiB"), write_policy=self.policy)

    def open_small(self, place: Path, num_bytes: int) -> Store:
        return multi(host(num_bytes // 4), host(num_bytes), write_policy=self.policy)


class TestWriteBack(TestTwoHosts):
    policy = "write_back"


class TestWriteOnEvict(TestTwoHosts):
    policy = "write_on_evict"


def test_of_a_prefix_every_tier_keeps_the_beginning() -> None:
    with multi(host(30 << 10), host(60 << 10), write_policy="write_through") as store:
        keys = [key_of(number) for number in range(10)]
        for key in keys:
            put(store, [key], 2000)
        near, far = (tier.store for tier in store._tiers)
        for _ in range(2):  # it is passed on one after the other: when the second is taken up, the first is done
            store.touch_prefix(keys)
        wait_for(lambda: not store._writer._touches)
        for number in range(100, 110):
            put(store, [key_of(number)], 2000)
            for tier in near, far:
                found = tier.contains(keys)
                assert found == sorted(found, key=[Status.HIT, Status.MISS].index)
        assert Status.MISS in near.contains(keys)


def test_what_is_pending_of_a_prefix_is_written_down_from_its_end() -> None:
    with multi(
        host(64 << 10), host(1 << 20), write_policy="write_on_evict", low_watermark=0.3, high_watermark=0.4
    ) as store:
        keys = [key_of(number) for number in range(10)]
        for key in keys:
            put(store, [key], 2000)
        store.touch_prefix(keys)
        far = store._tiers[1].store
        for number in range(100, 108):
            put(store, [key_of(number)], 2000)
        wait_for(lambda: Status.HIT in far.contains(keys))
        found = far.contains(keys)
        assert found == sorted(found, key=[Status.MISS, Status.HIT].index)
