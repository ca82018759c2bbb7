"""The bridge's transfers without SGLang: after a batch has returned its memory is never touched, however late."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvtide.connectors.host import HostConfig, HostConnector
from kvtide.connectors.sglang_bridge.page_io import PageTransfers
from kvtide.connectors.sglang_bridge.pages import Run, Value
from kvtide.kvcache import ConfigError
from kvtide.offload.keys import StoreKey
from kvtide.offload.store import Status

KEYS = [bytes([number]) * 32 for number in range(40)]
SIZE = 5000


class Gated(HostConnector):
    """Calls wait, before they touch any buffer, for as long as the gate is shut."""

    def __init__(self) -> None:
        super().__init__(HostConfig(max_bytes=1 << 24))
        self.gate = threading.Event()
        self.gate.set()
        self.began = threading.Event()

    def get_into(self, keys: Sequence[StoreKey], buffers: Any) -> list[Status]:
        self.began.set()
        self.gate.wait()
        return super().get_into(keys, buffers)

    def put(self, keys: Sequence[StoreKey], buffers: Any) -> list[Status]:
        self.began.set()
        self.gate.wait()
        return super().put(keys, buffers)


@pytest.fixture
def store() -> Iterator[Gated]:
    store = Gated()
    yield store
    store.gate.set()


def transfers(store: Gated, *, zero_copy: bool, staging_bytes: int = 1 << 20, timeout: float = 5.0) -> PageTransfers:
    return PageTransfers(
        store,
        zero_copy=zero_copy,
        staging_bytes=staging_bytes,
        threads=2,
        look_up_timeout_s=1.0,
        transfer_timeout_s=timeout,
    )


def memory(seed: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (len(KEYS), SIZE), dtype=np.uint8)


def values(pages: npt.NDArray[np.uint8], *, pieces: int = 1) -> list[Value]:
    """A value a row, in so many runs."""
    size = SIZE // pieces
    return [[Run(row.ctypes.data + at * size, size) for at in range(pieces)] for row in pages]


@pytest.mark.parametrize("zero_copy", [True, False])
@pytest.mark.parametrize("pieces", [1, 5])
@pytest.mark.parametrize("staging_bytes", [1 << 14, 1 << 20])
def test_values_come_back(zero_copy: bool, pieces: int, staging_bytes: int, store: Gated) -> None:
    io = transfers(store, zero_copy=zero_copy, staging_bytes=staging_bytes)
    data, back = memory(1), np.zeros((len(KEYS), SIZE), np.uint8)
    assert io.save(KEYS, values(data, pieces=pieces)) == [Status.STORED] * len(KEYS)
    assert io.look_up(KEYS) == [Status.HIT] * len(KEYS)
    assert io.load(KEYS, values(back, pieces=pieces)) == [Status.HIT] * len(KEYS)
    assert np.array_equal(back, data)
    assert io.load([], []) == io.save([], []) == io.look_up([]) == []
    assert io.counts["load_hit_bytes"] == io.counts["save_stored_bytes"] == data.nbytes
    io.close()


def test_a_late_load_writes_no_memory_that_was_given_back(store: Gated) -> None:
    io = transfers(store, zero_copy=False, timeout=0.2)
    io.save(KEYS, values(memory(1)))
    pages = np.zeros((len(KEYS), SIZE), np.uint8)
    store.gate.clear()
    assert io.load(KEYS, values(pages)) == [Status.ERROR] * len(KEYS)
    pages[:] = 7  # they are somebody else's
    store.gate.set()
    io.close()
    assert (pages == 7).all()
    assert io.counts["fault: deadline"] > 0


def test_a_late_save_stores_what_the_memory_held(store: Gated) -> None:
    io = transfers(store, zero_copy=False, timeout=0.2)
    data = memory(1)
    given = data.copy()
    store.gate.clear()
    assert io.save(KEYS, values(given)) == [Status.ERROR] * len(KEYS)
    given[:] = 7
    store.gate.set()
    deadline = time.monotonic() + 10
    while io.look_up(KEYS[:1]) != [Status.HIT] and time.monotonic() < deadline:
        time.sleep(0.01)
    back = bytearray(SIZE)
    assert store.get_into(KEYS[:1], [back]) == [Status.HIT]
    assert bytes(back) == data[0].tobytes()
    io.close()


@pytest.mark.parametrize("what", ["load", "save"])
def test_without_a_copy_the_batch_returns_when_the_store_does(what: str, store: Gated) -> None:
    io = transfers(store, zero_copy=True, timeout=0.2)
    pages = memory(1)
    if what == "load":
        io.save(KEYS, values(pages))
    store.began.clear()
    store.gate.clear()
    results: list[list[Status]] = []
    move = io.load if what == "load" else io.save
    thread = threading.Thread(target=lambda: results.append(move(KEYS, values(pages))))
    thread.start()
    assert store.began.wait(5)
    thread.join(0.6)
    assert thread.is_alive()  # three deadlines later: its memory is still lent
    store.gate.set()
    thread.join(10)
    assert results == [[Status.ERROR] * len(KEYS)]  # and late is late
    io.close()


def test_staging_that_hangs_with_a_late_call_comes_back(store: Gated) -> None:
    io = transfers(store, zero_copy=False, staging_bytes=1 << 14, timeout=0.2)
    data = memory(1)
    io.save(KEYS, values(data))
    back = np.zeros_like(data)
    store.gate.clear()
    assert Status.HIT not in io.load(KEYS, values(back))
    assert Status.HIT not in io.load(KEYS, values(back))
    store.gate.set()
    deadline = time.monotonic() + 20  # the store is left alone for a while
    while io.load(KEYS, values(back)) != [Status.HIT] * len(KEYS):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert np.array_equal(back, data)
    io.close()


def test_loads_stop_at_the_first_piece_that_is_not_whole(store: Gated) -> None:
    io = transfers(store, zero_copy=False, staging_bytes=1 << 14)  # one value a piece
    data, back = memory(1), np.zeros((len(KEYS), SIZE), np.uint8)
    io.save(KEYS, values(data))
    store.delete(KEYS[3:4])
    statuses = io.load(KEYS, values(back))
    assert statuses[:4] == [Status.HIT] * 3 + [Status.MISS]
    assert np.array_equal(back[:3], data[:3])
    assert not back[3].any()
    assert statuses[-1] is Status.ERROR
    io.close()


def test_clear_deletes_what_begins_alike_and_nothing_else(store: Gated) -> None:
    io = transfers(store, zero_copy=True)
    io.save(KEYS, values(memory(1)))
    assert io.clear({KEYS[1][:16], KEYS[2][:16], bytes(15) + b"x"})
    assert [status is Status.HIT for status in io.look_up(KEYS)] == [
        number not in (1, 2) for number in range(len(KEYS))
    ]
    io.close()
    assert not io.clear({KEYS[3][:16]})


def test_a_value_that_staging_could_never_hold(store: Gated) -> None:
    io = transfers(store, zero_copy=False, staging_bytes=1 << 14)
    with pytest.raises(ConfigError, match="staging_bytes must be at least 24576"):
        io.check_value(8193)
    io.check_value(8192)
    io.close()
