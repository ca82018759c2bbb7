"""HostConnector: the suite of all stores, and what only a store in memory promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvtide.connectors.host import HostConfig, HostConnector
from kvtide.offload.conformance import StoreConformance
from kvtide.offload.store import Store


class TestHostConformance(StoreConformance):
    codec = "raw"
    knows_prefixes = True

    def open_store(self, place: Path) -> Store:
        return HostConnector(HostConfig(max_bytes="32MiB", codec=self.codec))

    def open_small(self, place: Path, num_bytes: int) -> Store:
        return HostConnector(HostConfig(max_bytes=num_bytes, codec=self.codec))

    def stored(self, store: Any, place: Path, key: bytes) -> bytes:
        value = store._values[key]
        return b"".join(store._memory[start:end].tobytes() for start, end in value.extents)[: value.num_bytes]

    def overwrite(self, store: Any, place: Path, key: bytes, data: bytes) -> None:
        value = store._values[key]
        left = data.ljust(value.held_bytes, b"\0")
        for start, end in value.extents:
            store._memory[start:end] = np.frombuffer(left[: end - start], np.uint8)
            left = left[end - start :]
