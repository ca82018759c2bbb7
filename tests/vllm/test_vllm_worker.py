"""The worker's half with tensors laid out as vLLM lays them out, and real stores; no vLLM needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvtide.connectors.host import HostConfig, HostConnector  # noqa: E402
from kvtide.connectors.lmdb import LMDBConfig, LMDBConnector  # noqa: E402
from kvtide.connectors.slab import UNIT  # noqa: E402
from kvtide.connectors.vllm_bridge.groups import Group  # noqa: E402
from kvtide.connectors.vllm_bridge.messages import Load, LookUp, Save, Served, ToWorker  # noqa: E402
from kvtide.connectors.vllm_bridge.pages import Pages  # noqa: E402
from kvtide.connectors.vllm_bridge.worker import Part, Results, WorkerSide  # noqa: E402
from kvtide.kvcache import ConfigError  # noqa: E402
from kvtide.offload.keys import StoreKey, store_key  # noqa: E402
from kvtide.offload.store import Status, Store  # noqa: E402

BLOCKS, HEADS, TOKENS, CONTENT, LAYERS = 10, 2, 4, 6, 3
# vLLM's layouts as orders of layer, block, head, token and content in memory.
LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


def caches(layout: str, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Every layer's view; numbers say where they belong."""
    shape = (LAYERS, BLOCKS, HEADS, TOKENS, CONTENT)
    order = LAYOUTS[layout]
    memory = torch.zeros([shape[dim] for dim in order], dtype=dtype)
    logical = memory.permute([order.index(dim) for dim in range(5)])
    numbers = torch.arange(logical.numel()) % 251
    logical.copy_(numbers.view(shape).to(dtype))
    return list(logical)


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", ["LBHNC", "BLNHC", "LHBNC"])
def test_a_value_is_the_same_in_every_layout(source: str, target: str) -> None:
    one, other = caches(source), caches(target)
    for layer in other:
        layer.zero_()
    pages = Pages(one, BLOCKS)
    assert pages.is_one_row == (source == "BLHNC")
    data = np.empty(3 * pages.value_bytes, np.uint8)
    pages.read([7, 2, 5], data)
    Pages(other, BLOCKS).write([1, 9, 4], data)
    for layer, found in zip(one, other, strict=True):
        expected = torch.zeros_like(layer)
        expected[[1, 9, 4]] = layer[[7, 2, 5]]
        assert torch.equal(found, expected)


def test_blocks_that_are_cut_for_the_kernel() -> None:
    one = caches("LBHNC")
    halves = [layer.contiguous().view(BLOCKS * 2, HEADS, TOKENS // 2, CONTENT) for layer in one]
    pages = Pages(halves, BLOCKS)
    data = np.empty(pages.value_bytes, np.uint8)
    pages.read([3], data)
    pages.write([8], data)
    for layer in halves:
        assert torch.equal(layer[16:18], layer[6:8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn, torch.uint8])
def test_every_element_format(dtype: torch.dtype) -> None:
    one = [layer.to(dtype) for layer in caches("LBHNC")]
    pages = Pages(one, BLOCKS)
    data = np.empty(pages.value_bytes, np.uint8)
    pages.read([3], data)
    assert data.tobytes() == b"".join(
        bytes(layer[3].contiguous().view(torch.uint8).flatten().tolist()) for layer in one
    )


def chain(number: int) -> bytes:
    return number.to_bytes(16, "big")


def worker(store: Store, memory: Sequence[torch.Tensor], *, stores: bool = True, staging: int = 1 << 20) -> WorkerSide:
    side = WorkerSide(store, staging_bytes=staging, threads=2, look_up_timeout_s=0.2, transfer_timeout_s=0.4)
    side.register([Part(Group(0, TOKENS), b"s" * 16, Pages(memory, BLOCKS), stores)])
    return side


def until(side: WorkerSide, holds: Callable[[Results], bool]) -> Results:
    total = Results(set(), set(), set(), set())
    expires = time.monotonic() + 60
    while not holds(total):
        assert time.monotonic() < expires
        for sum_, new in zip(total, side.poll(idle=True), strict=True):
            sum_.update(new)
    return total


@pytest.fixture
def host() -> Iterator[HostConnector]:
    with HostConnector(HostConfig(max_bytes="4MiB")) as store:
        yield store


def test_round_trip(tmp_path: Path) -> None:
    memory = caches("BLHNC")
    config = LMDBConfig(path=str(tmp_path / "kv"), max_bytes="16MiB")
    side = worker(LMDBConnector(config), memory)
    blocks = [(chain(at), at + 1) for at in range(6)]
    side.save(ToWorker(saves=[Save("a", [blocks], last=True)]))
    assert until(side, lambda results: "a" in results.sent).sent == {"a"}
    side.close()

    other = caches("LBHNC")
    for layer in other:
        layer.zero_()
    side = worker(LMDBConnector(config), other)
    chains = b"".join(chain(at) for at in range(8))
    side.start(ToWorker(look_ups=[LookUp(1, "b", 0, 32, {TOKENS: chains})]))
    until(side, lambda _: bool(side._news.answers))
    news = side.news()
    assert (news.answers[1].end, news.answers[1].run) == (24, 24)
    side.start(ToWorker(loads=[Load("b", [[(chain(at), 9 - at) for at in range(6)]])]))
    results = until(side, lambda results: "b" in results.received)
    assert not results.failed
    for layer, right in zip(other, memory, strict=True):
        assert torch.equal(layer[[9, 8, 7, 6, 5, 4]], right[[1, 2, 3, 4, 5, 6]])
        assert not layer[:4].any()
    assert side.news().counts["load_hit"] == 6
    side.close()


def test_of_a_prefix_that_has_served_the_store_keeps_the_beginning() -> None:
    with HostConnector(HostConfig(max_bytes=10 * UNIT, eviction="lru")) as store:
        side = worker(store, caches("LBHNC"))
        for at in range(6):
            side.save(ToWorker(saves=[Save("a", [[(chain(at), at + 1)]])]))
            until(side, lambda _: not side._saving)
        side.save(ToWorker(served=[Served(24, [], {TOKENS: b"".join(chain(at) for at in range(6))})]))
        until(side, lambda _: not side._save_requests.num_queued and not side._save_requests.num_running)
        keys = [store_key(b"s" * 16, chain(at)) for at in range(6)]
        for at in range(20, 40):
            side.save(ToWorker(saves=[Save("b", [[(chain(at), 9)]])]))
            until(side, lambda _: not side._saving)
            found = store.contains(keys)
            assert found == sorted(found, key=[Status.HIT, Status.MISS].index)
        assert Status.MISS in found
        side.close()


def test_what_is_missing_fails_its_blocks_only(host: HostConnector) -> None:
    memory = caches("LBHNC")
    side = worker(host, memory)
    side.save(ToWorker(saves=[Save("a", [[(chain(0), 1), (chain(2), 3)]])]))
    until(side, lambda _: not side._saving)
    side.start(ToWorker(loads=[Load("b", [[(chain(0), 5), (chain(1), 6), (chain(2), 7)]])]))
    results = until(side, lambda results: "b" in results.received)
    assert results.failed == {"b"}
    assert results.failed_blocks == {6}
    assert torch.equal(memory[0][7], memory[0][3])
    assert side.news().failed == {"b"}


def test_another_rank_stores_what_is_alike(host: HostConnector) -> None:
    side = worker(host, caches("LBHNC"), stores=False)
    side.save(ToWorker(saves=[Save("a", [[(chain(0), 1)]], last=True)]))
    assert until(side, lambda results: "a" in results.sent).sent == {"a"}
    assert host.stats().num_values == 0


class Hanging(HostConnector):
    """Hangs in every call until it is let go."""

    def __init__(self) -> None:
        super().__init__(HostConfig(max_bytes="4MiB"))
        self.go = threading.Event()

    def contains(self, keys: Sequence[StoreKey]) -> list[Status]:
        self.go.wait()
        return super().contains(keys)

    def get_into(self, keys: Sequence[StoreKey], buffers: Sequence[object]) -> list[Status]:
        self.go.wait()
        return super().get_into(keys, buffers)  # type: ignore[arg-type]


def test_a_hung_store_costs_its_deadline_and_never_writes_late() -> None:
    memory = caches("LBHNC")
    store = Hanging()
    side = worker(store, memory)
    side.save(ToWorker(saves=[Save("a", [[(chain(0), 1)]])]))
    until(side, lambda _: not side._saving)
    before = [layer.clone() for layer in memory]
    start = time.monotonic()
    side.start(ToWorker(loads=[Load("b", [[(chain(0), 5)]])]))
    results = until(side, lambda results: "b" in results.received)
    assert time.monotonic() - start < 60
    assert results.failed == {"b"}
    store.go.set()
    until(side, lambda _: not side._ending)
    assert all(torch.equal(one, other) for one, other in zip(memory, before, strict=True))
    assert side.news().counts["fault: deadline"] == 1
    side.close()


def test_saves_without_room_are_dropped_and_counted(host: HostConnector) -> None:
    side = worker(host, caches("LBHNC"), staging=2 * 4096)  # a page for saves and one for loads
    side.save(ToWorker(saves=[Save(name, [[(chain(at), at)]]) for at, name in ((1, "a"), (2, "b"))]))
    assert side.news().counts["save_dropped"] == 1
    until(side, lambda _: not side._saving)
    assert side.news().counts["save_stored"] == 1
    side.save(ToWorker(saves=[Save("b", [[(chain(2), 2)]])]))
    until(side, lambda _: not side._saving)
    side.start(ToWorker(loads=[Load(name, [[(chain(at), at)]]) for at, name in ((1, "c"), (2, "d"))]))
    results = until(side, lambda results: results.received == {"c", "d"})  # loads take turns instead
    assert not results.failed


def test_staging_must_hold_a_value(host: HostConnector) -> None:
    large = [torch.zeros(2, 2, 64, 64)]
    side = WorkerSide(host, staging_bytes=8192, threads=1, look_up_timeout_s=1, transfer_timeout_s=1)
    with pytest.raises(ConfigError, match="staging_bytes must be at least 65536"):
        side.register([Part(Group(0, 64), b"s" * 16, Pages(large, 2), True)])
