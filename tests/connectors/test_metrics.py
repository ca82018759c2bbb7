"""The stores' metrics as Prometheus scrapes them."""

from __future__ import annotations

import numpy as np
import pytest

from kvtide.connectors.config import make_store
from kvtide.hma import HybridMemoryManager
from kvtide.kvcache import ModelLayout
from kvtide.kvcache.layout import Layer
from kvtide.kvcache.specs import FullAttention
from kvtide.offload.keys import store_key
from kvtide.offload.manager import OffloadManager
from kvtide.offload.policies import LoadPolicy
from kvtide.offload.transfers import Transfers

prometheus_client = pytest.importorskip("prometheus_client")


def test_metrics_of_a_tier_stack_as_scraped():
    from kvtide.connectors.metrics import StoreCollector

    tiers = [{"kv_connector": "HostConnector", "kv_connector_extra_config": {"max_bytes": n << 20}} for n in (1, 2)]
    keys = [store_key(b"s" * 16, bytes([n]) * 16) for n in range(3)]
    with make_store("MultiConnector", {"connectors": tiers}) as store:
        store.put(keys[:2], [b"x" * 1000] * 2)
        store.get_into(keys, [bytearray(1000) for _ in keys])
        registry = prometheus_client.CollectorRegistry()
        registry.register(StoreCollector({"kv": store}))

        def value(name, **labels):
            return registry.get_sample_value(name, labels)

        for tier in ("kv/0/host", "kv/1/host"):
            assert value("kvtide_store_values", store=tier) == 2
            assert value("kvtide_store_bytes", store=tier) >= 2 * (1000 + 96)
        assert value("kvtide_store_capacity_bytes", store="kv") == 3 << 20
        assert value("kvtide_store_operations_total", store="kv", operation="get", status="hit") == 2
        assert value("kvtide_store_operations_total", store="kv", operation="get", status="miss") == 1
        assert value("kvtide_store_operations_total", store="kv", operation="put", status="stored") == 2
        assert value("kvtide_store_evicted_total", store="kv") == 0
        text = prometheus_client.generate_latest(registry).decode()
    assert "# HELP kvtide_store_operations_total Keys by what became of them." in text


def test_metrics_of_an_offload_manager_as_scraped():
    from kvtide.connectors.metrics import OffloadCollector

    layout = ModelLayout(name="m", layers=(Layer(0, FullAttention(1, 8, 8)),), max_model_len=4096)
    manager = HybridMemoryManager(layout, "1MiB", max_requests=4)
    arena = np.zeros(1 << 20, dtype=np.uint8)
    store = make_store("HostConnector", {"max_bytes": 1 << 20})
    policy = LoadPolicy(seconds_per_token=1.0)
    with store:
        offload = OffloadManager(manager, Transfers(arena, store, staging_bytes=1 << 20), model="m", load_policy=policy)
        registry = prometheus_client.CollectorRegistry()
        registry.register(OffloadCollector({"e0": offload}))

        def value(name, **labels):
            return registry.get_sample_value(f"kvtide_offload_{name}", {"engine": "e0", **labels})

        def run(name):
            row = offload.admit(name, np.arange(257)).row
            assert value("loading_requests") in (0, 1)
            while not offload.ready(row):
                offload.poll()
            rest = 257 - int(manager.committed[row])
            manager.reserve([row], [rest])
            offload.commit([row], [rest])
            offload.release(row)
            assert offload.transfers.drain(10)
            offload.poll()

        run("a")
        run("b")  # hit on the device
        manager.reset_cache()
        run("c")  # hit in the store
        assert value("hit_tokens_total", tier="device") == 256
        assert value("hit_tokens_total", tier="store") == 256
        moved = 256 * 2 * 8 * 2
        for tier in ("device", "store", "stored"):
            assert value("bytes_total", tier=tier, kind="full_attention") == moved
        assert value("held_bytes") == 0
        assert value("staging_free_bytes") == offload.transfers.staging_bytes
        assert value("operations_queued") == value("operations_running") == 0
        for operation in ("look up", "load", "store"):
            asked = value("operation_seconds_count", operation=operation)
            assert asked == value("operation_seconds_bucket", operation=operation, le="+Inf") >= 1
            assert value("operation_seconds_sum", operation=operation) > 0
        offload.close()
        assert offload.transfers.requests.lease([b"k" * 32]).statuses is not None  # refused
        assert value("operation_faults_total", kind="closed") == 1
        text = prometheus_client.generate_latest(registry).decode()
    documented = {word.split("{")[0] for word in metrics_text().split() if word.startswith("kvtide_offload_")}
    shown = {line.split("{")[0].split()[0] for line in text.splitlines() if line.startswith("kvtide_offload_")}
    families = {name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for name in shown}
    assert families <= documented


def metrics_text():
    from kvtide.connectors import metrics

    return metrics.__doc__
