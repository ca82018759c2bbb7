"""The store on a shared file system: the conformance suite, and what only it promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("kvtide.offload.conformance")

from kvtide.connectors.shared_storage import SharedStorageConfig, SharedStorageConnector  # noqa: E402
from kvtide.offload.conformance import StoreConformance  # noqa: E402
from kvtide.offload.keys import StoreKey  # noqa: E402
from kvtide.offload.store import Store  # noqa: E402


class TestSharedStorageConnector(StoreConformance):
    persistent = True
    shared = True

    def open_store(self, place: Any) -> Store:
        return SharedStorageConnector(SharedStorageConfig(shared_storage_path=str(place)))

    def open_small(self, place: Any, num_bytes: int) -> Store:
        return SharedStorageConnector(SharedStorageConfig(shared_storage_path=str(place), max_bytes=num_bytes))

    def stored(self, store: Store, place: Path, key: StoreKey) -> bytes:
        return file_of(store, key).read_bytes()

    def overwrite(self, store: Store, place: Path, key: StoreKey, data: bytes) -> None:
        file_of(store, key).write_bytes(data)


def file_of(store: Store, key: StoreKey) -> Path:
    assert isinstance(store, SharedStorageConnector)
    return Path(store._tree.path(key))
