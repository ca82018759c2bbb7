"""The embedded store: the conformance suite, and what only it promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("kvtide.offload.conformance")

from kvtide.connectors.lmdb import LMDBConfig, LMDBConnector  # noqa: E402
from kvtide.offload.conformance import StoreConformance  # noqa: E402
from kvtide.offload.keys import StoreKey  # noqa: E402
from kvtide.offload.store import Store  # noqa: E402
from kvtide.offload.values import HEADER_BYTES  # noqa: E402


class TestLMDBConnector(StoreConformance):
    persistent = True

    def open_store(self, place: Any) -> Store:
        return LMDBConnector(LMDBConfig(path=str(place), max_bytes="1GiB"))

    def open_small(self, place: Any, num_bytes: int) -> Store:
        return LMDBConnector(LMDBConfig(path=str(place), max_bytes=num_bytes))

    def stored(self, store: Store, place: Path, key: StoreKey) -> bytes:
        assert isinstance(store, LMDBConnector)
        path, offset, length = slot_of(store, place, key)
        return path.read_bytes()[offset : offset + length]

    def overwrite(self, store: Store, place: Path, key: StoreKey, data: bytes) -> None:
        assert isinstance(store, LMDBConnector)
        path, offset, length = slot_of(store, place, key)
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(data.ljust(length, b"\0"))


def slot_of(store: LMDBConnector, place: Path, key: StoreKey) -> tuple[Path, int, int]:
    """The file of a value, its offset and its length with header."""
    (found,) = store._index.lookup([key])
    assert found is not None
    segment = store._segments.by_number[found.segment]
    return place / "segments" / segment.name, found.slot * segment.slot_bytes, HEADER_BYTES + found.stored_bytes
