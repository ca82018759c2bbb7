"""What `kvtide store bench` measures: one store, one value size, batches put, looked up, and got.

Values are random bytes under keys of a space of their own, so that nothing of an engine's is touched; they are deleted
afterwards. Times are per call of `batch` values. Rates count what was served alone; MB are 10**6 bytes of raw value, of
which a look-up moves none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvtide.kvcache import ConfigError
from kvtide.offload.keys import CHAIN_BYTES, SPACE_BYTES, StoreKey, store_key
from kvtide.offload.store import Status, Store


def bench_store(store: Store, *, value_bytes: int, total_bytes: int, batch: int) -> dict[str, Any]:
    """Figures of `put`, `contains` and `get` for values of one size."""
    if not 1 <= value_bytes <= store.max_value_bytes:
        raise ConfigError(f"value size {value_bytes} must be from 1 to {store.max_value_bytes} bytes")
    count = max(batch, total_bytes // value_bytes // batch * batch)
    space = os.urandom(SPACE_BYTES)
    keys = [store_key(space, number.to_bytes(CHAIN_BYTES, "little")) for number in range(count)]
    # As many different buffers as one batch holds: a few MiB of real noise, whatever the total.
    sources = [bytearray(os.urandom(value_bytes)) for _ in range(batch)]
    targets = [bytearray(value_bytes) for _ in range(batch)]
    try:
        operations = [
            _measure("put", keys, batch, value_bytes, lambda part: store.put(part, sources), Status.STORED),
            _measure("lookup", keys, batch, value_bytes, store.contains, Status.HIT),
            _measure("get", keys, batch, value_bytes, lambda part: store.get_into(part, targets), Status.HIT),
        ]
        wrong = sum(target != source for target, source in zip(targets, sources, strict=True))
        if wrong and not operations[-1]["not_served"]:
            raise AssertionError(f"{wrong} values of the last batch came back changed")
    finally:
        for start in range(0, count, batch):
            store.delete(keys[start : start + batch])
    return {"value_bytes": value_bytes, "batch": batch, "operations": operations}


def _measure(
    name: str,
    keys: Sequence[StoreKey],
    batch: int,
    value_bytes: int,
    call: Callable[[Sequence[StoreKey]], list[Status]],
    served: Status,
) -> dict[str, Any]:
    seconds = []
    not_served = 0
    for start in range(0, len(keys), batch):
        begin = time.perf_counter()
        statuses = call(keys[start : start + batch])
        seconds.append(time.perf_counter() - begin)
        not_served += sum(status is not served for status in statuses)
    total = sum(seconds)
    return {
        "operation": name,
        "values": len(keys),
        "values_per_second": (len(keys) - not_served) / total,
        "megabytes_per_second": None if name == "lookup" else (len(keys) - not_served) * value_bytes / total / 1e6,
        "p50_ms": float(np.percentile(seconds, 50)) * 1e3,
        "p99_ms": float(np.percentile(seconds, 99)) * 1e3,
        "not_served": not_served,
    }
