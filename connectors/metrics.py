"""Prometheus metrics of stores and of offload managers, read from their counts when Prometheus asks.

    kvtide_store_values{store}                                   values that the store holds
    kvtide_store_bytes{store}                                    bytes of them on the tier, headers included
    kvtide_store_capacity_bytes{store}                           what it may hold; absent when not bounded
    kvtide_store_evicted_total{store}                            values evicted for room
    kvtide_store_operations_total{store, operation, status}      keys by operation and what became of them
    kvtide_store_faults_total{store, kind}                       faults by kind

    kvtide_offload_hit_tokens_total{engine, tier}                tokens of requests hit on the device, and in the store
    kvtide_offload_bytes_total{engine, tier, kind}               bytes by layer kind: hit on the device, loaded from the
                                                                 store, given to puts (tier "stored")
    kvtide_offload_events_total{engine, event}                   what was dropped, given up, swapped or failed
    kvtide_offload_loading_requests{engine}                      requests that are looked up or loaded now
    kvtide_offload_held_bytes{engine}                            pool bytes that puts hold
    kvtide_offload_staging_free_bytes{engine}                    staging memory that nothing uses
    kvtide_offload_operations_queued{engine}                     store calls that wait for a worker
    kvtide_offload_operations_running{engine}                    store calls that a worker is busy with
    kvtide_offload_operation_faults_total{engine, kind}          deadlines, refusals, exceptions
    kvtide_offload_operation_seconds{engine, operation}          histogram: look up, load, store; from asking to answer

Register `StoreCollector` and `OffloadCollector` with a `prometheus_client.CollectorRegistry`. Nothing runs on the way
of a value. Needs prometheus-client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from kvtide.kvcache import MissingExtra
from kvtide.offload.manager import OffloadManager
from kvtide.offload.requests import LATENCY_BOUNDS
from kvtide.offload.store import Store

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
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


class OffloadCollector(Collector):
    """The metrics of offload managers by the engine's name. Scrapes only read; they may come from any thread."""

    def __init__(self, managers: Mapping[str, OffloadManager]) -> None:
        self._managers = dict(managers)

    def collect(self) -> Iterator[Metric]:
        def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"kvtide_offload_{name}", text, labels=["engine", *labels])

        def gauge(name: str, text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"kvtide_offload_{name}", text, labels=["engine"])

        tokens = counter("hit_tokens", "Tokens of requests that were hit.", "tier")
        num_bytes = counter("bytes", "Bytes by layer kind: hit, loaded, stored.", "tier", "kind")
        events = counter("events", "What was dropped, given up, swapped or failed.", "event")
        loading = gauge("loading_requests", "Requests that are looked up or loaded.")
        held = gauge("held_bytes", "Pool bytes that puts hold.")
        free = gauge("staging_free_bytes", "Staging memory that nothing uses.")
        queued = gauge("operations_queued", "Store calls that wait for a worker.")
        running = gauge("operations_running", "Store calls that a worker is busy with.")
        faults = counter("operation_faults", "Deadlines, refusals, exceptions.", "kind")
        seconds = HistogramMetricFamily(
            "kvtide_offload_operation_seconds", "From asking to the answer.", labels=["engine", "operation"]
        )
        for name, manager in self._managers.items():
            stats, requests = manager.stats(), manager.transfers.requests
            for tier, count in stats.tokens.items():
                tokens.add_metric([name, tier], count)
            for (tier, kind), count in stats.bytes_by_kind.items():
                num_bytes.add_metric([name, tier, kind], count)
            for event, count in stats.counts.items():
                events.add_metric([name, event], count)
            loading.add_metric([name], stats.rows_on_their_way)
            held.add_metric([name], stats.held_bytes)
            free.add_metric([name], stats.staging_bytes_free)
            queued.add_metric([name], requests.num_queued)
            running.add_metric([name], requests.num_running)
            for kind, count in dict(requests.faults).items():
                faults.add_metric([name, kind], count)
            for operation, latencies in dict(requests.latencies).items():
                totals = list(accumulate(latencies.buckets))
                bounds = [*map(str, LATENCY_BOUNDS), "+Inf"]
                seconds.add_metric(
                    [name, operation], list(zip(bounds, totals, strict=True)), sum_value=latencies.seconds
                )
        yield from (tokens, num_bytes, events, loading, held, free, queued, running, faults, seconds)
