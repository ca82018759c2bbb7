"""The stores' metrics as Prometheus scrapes them."""

from __future__ import annotations

import pytest

from kvtide.connectors.config import make_store
from kvtide.offload.keys import store_key

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
