"""Prometheus metrics of stores, read from their counts when Prometheus asks; nothing runs on the way of a value.

    kvtide_store_values{store}                                   values that the store holds
    kvtide_store_bytes{store}                                    bytes of them on the tier, headers included
    kvtide_store_capacity_bytes{store}                           what it may hold; absent when not bounded
    kvtide_store_evicted_total{store}                            values evicted for room
    kvtide_store_operations_total{store, operation, status}      keys by operation and what became of them
    kvtide_store_faults_total{store, kind}                       faults by kind

Register `StoreCollector` with a `prometheus_client.CollectorRegistry`. Needs prometheus-client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvtide.kvcache import MissingExtra
from kvtide.offload.store import Store

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError:
    raise MissingExtra("a metrics collector", "prometheus-client", "metrics") from None


class StoreCollector(Collector):
    """The metrics of named stores; the tiers of a store that has some appear as `name/0/host` and so on."""

    def __init__(self, stores: Mapping[str, Store]) -> None:
        self._stores = dict(stores)

    def collect(self) -> Iterator[Metric]:
        values = GaugeMetricFamily("kvtide_store_values", "Values that the store holds.", labels=["store"])
        held = GaugeMetricFamily("kvtide_store_bytes", "Bytes of the values, headers included.", labels=["store"])
        capacity = GaugeMetricFamily("kvtide_store_capacity_bytes", "Bytes that it may hold.", labels=["store"])
        evicted = CounterMetricFamily("kvtide_store_evicted", "Values evicted for room.", labels=["store"])
        operations = CounterMetricFamily(
            "kvtide_store_operations", "Keys by what became of them.", labels=["store", "operation", "status"]
        )
        faults = CounterMetricFamily("kvtide_store_faults", "Faults by kind.", labels=["store", "kind"])
        for name, store in self._named():
            stats = store.stats()
            values.add_metric([name], stats.num_values)
            held.add_metric([name], stats.num_bytes)
            if stats.capacity_bytes is not None:
                capacity.add_metric([name], stats.capacity_bytes)
            evicted.add_metric([name], stats.evicted)
            for (operation, status), count in stats.outcomes.items():
                operations.add_metric([name, operation, status.name.lower()], count)
            for kind, count in stats.faults.items():
                faults.add_metric([name, kind], count)
        yield from (values, held, capacity, evicted, operations, faults)

    def _named(self) -> Iterator[tuple[str, Store]]:
        for name, store in self._stores.items():
            yield name, store
            for number, tier in enumerate(store.tiers):  # two tiers may be of one kind
                yield f"{name}/{number}/{tier.name}", tier
