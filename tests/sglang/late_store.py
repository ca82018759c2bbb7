"""A shared store whose calls hang for as long as a file named `hang-look`, `hang-get` or `hang-put` lies beside it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from kvtide.connectors.shared_storage import SharedStorageConfig, SharedStorageConnector
from kvtide.offload.keys import StoreKey
from kvtide.offload.store import Status


class LateStore(SharedStorageConnector):
    Config = SharedStorageConfig

    def __init__(self, config: SharedStorageConfig) -> None:
        super().__init__(config)
        self._beside = Path(config.shared_storage_path).parent

    def _contains(self, keys: Sequence[StoreKey]) -> list[Status]:
        self._wait("look")
        return super()._contains(keys)

    def _get(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        self._wait("get")
        return super()._get(keys, views)

    def _put(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        self._wait("put")
        return super()._put(keys, views)

    def _wait(self, what: str) -> None:
        while (self._beside / f"hang-{what}").exists():
            time.sleep(0.01)
