"""MultiConnector: the suite of all stores over several stacks, write policies, faults of single tiers, quotas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtide.connectors.config import make_store
from kvtide.offload.conformance import StoreConformance
from kvtide.offload.store import Store

HOST = {"kv_connector": "HostConnector", "kv_connector_extra_config": {"max_bytes": "32MiB", "eviction": "lru"}}


def host(num_bytes: int | str) -> dict[str, Any]:
    return {"kv_connector": "HostConnector", "kv_connector_extra_config": {"max_bytes": num_bytes, "eviction": "lru"}}


def multi(*tiers: dict[str, Any], **settings: Any) -> Any:
    return make_store("MultiConnector", {"connectors": list(tiers), **settings})


def shared(path: Path, **settings: Any) -> dict[str, Any]:
    config = {"shared_storage_path": str(path), **settings}
    return {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": config}


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
