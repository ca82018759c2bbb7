"""What the vLLM bridge counts, for vLLM's own log and its Prometheus metrics.

    vllm:kvtide_total{event="load_hit"}, ..., {event="save_stored_bytes"}, {event="fault: deadline"}

Events that end in `_bytes` count bytes; the others values, look-ups or faults.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (  # type: ignore[import-not-found]
    KVConnectorPromMetrics,
    KVConnectorStats,
)

NAME = "vllm:kvtide"


@dataclass
class KvtideStats(KVConnectorStats):  # type: ignore[misc]
    """What happened since the last report, by name."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KvtideStats) -> KvtideStats:
        return KvtideStats(dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class KvtideMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One counter, labelled by event; several connectors of one engine share it."""

    _shared: Any = None

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        try:
            KvtideMetrics._shared = self._counter_cls(
                name=NAME, documentation="What KvtideConnector did, by event.", labelnames=[*labelnames, "event"]
            )
        except ValueError:  # the second one of a MultiConnector
            if KvtideMetrics._shared is None:
                raise
        self._counter: prometheus_client.Counter = KvtideMetrics._shared

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for event, count in transfer_stats_data.items():
            self._counter.labels(*self.per_engine_labelvalues[engine_idx], event).inc(count)
