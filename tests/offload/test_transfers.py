"""The transfer engine on a CPU arena: bytes arrive whole or not at all, nothing waits, nothing leaks, late writes hit
nothing."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from awkward import AwkwardStore, host, key

from kvtide.kvcache import KvtideError
from kvtide.offload.copies import Copied, make_copies
from kvtide.offload.store import Status
from kvtide.offload.transfers import PIECE_VALUES, Transfers, Value

BLOCK = 5000


@pytest.fixture
def store():
    store = AwkwardStore(host(64 << 20))
    yield store
    store.gate.set()
    store.close()


@pytest.fixture
def arena():
    return np.frombuffer(random.Random(1).randbytes(100 * BLOCK), dtype=np.uint8).copy()


@pytest.fixture
def transfers(arena, store):
    before = threading.active_count()
    transfers = Transfers(arena, store, staging_bytes=1 << 20, threads=2, deadline=5.0)
    yield transfers
    store.gate.set()
    assert transfers.close()
    assert transfers.staging_bytes_free == transfers.staging_bytes
    assert threading.active_count() <= before
    assert store.open_leases == 0


def blocks(numbers, **options):
    return [Value(key(number), ((number * BLOCK, BLOCK),), **options) for number in numbers]


def stored(transfers, numbers):
    transfer = transfers.put(blocks(numbers))
    assert transfers.wait(transfer, 10)
    assert transfer.statuses == [Status.STORED] * len(transfer.values)


def test_what_was_put_comes_back_into_other_blocks(transfers, arena):
    stored(transfers, range(10))
    was = arena.copy()
    values = [Value(key(n), (((50 + n) * BLOCK, BLOCK),)) for n in range(12)]
    transfer, count = transfers.get(values)
    assert count == 12
    assert (arena == was).all()  # the arena changes in poll, never before
    assert transfers.wait(transfer, 10)
    assert transfer.statuses == [Status.HIT] * 10 + [Status.MISS] * 2
    assert transfer.progress == (12, 12)
    was[50 * BLOCK : 60 * BLOCK] = was[: 10 * BLOCK]
    assert (arena == was).all()
    assert transfers.counts["get_hit_bytes"] == 10 * BLOCK


def test_a_value_may_be_scattered_and_gathered(transfers, arena):
    """Two half-head values become one block, as when 2 ranks read what 4 ranks wrote."""
    whole = arena[:4096].copy().reshape(8, 2, 256)  # [token, head, dim]
    arena[BLOCK : BLOCK + 2048], arena[2 * BLOCK : 2 * BLOCK + 2048] = whole[:, 0].ravel(), whole[:, 1].ravel()
    halves = [Value(key(n), ((n * BLOCK, 2048),)) for n in (1, 2)]
    assert transfers.wait(transfers.put(halves), 10)
    arena[:4096] = 0
    scattered = [Value(key(n), tuple((token * 512 + (n - 1) * 256, 256) for token in range(8))) for n in (1, 2)]
    transfer, _ = transfers.get(scattered)
    assert transfers.wait(transfer, 10)
    assert (arena[:4096] == whole.ravel()).all()
    gathered = Value(key(3), scattered[1].segments)
    assert transfers.wait(transfers.put([gathered]), 10)
    transfer, _ = transfers.get([Value(key(3), ((9 * BLOCK, 2048),))])
    assert transfers.wait(transfer, 10)
    assert (arena[9 * BLOCK : 9 * BLOCK + 2048] == whole[:, 1].ravel()).all()


def test_blocks_of_a_put_are_released_at_once_and_may_change_meanwhile(transfers, arena, store):
    store.gate.clear()
    content = arena[:BLOCK].tobytes()
    transfer = transfers.put(blocks([0]))
    assert transfers.poll().released == [transfer]
    arena[:BLOCK] = 0
    store.gate.set()
    assert transfers.wait(transfer, 10)
    buffer = bytearray(BLOCK)
    assert store.get_into([key(0)], [buffer]) == [Status.HIT]
    assert buffer == content


def test_a_load_that_hangs_never_writes_into_the_arena(arena, store):
    transfers = Transfers(arena, store, staging_bytes=1 << 20, threads=1, deadline=0.05)
    stored(transfers, [1])
    store.gate.clear()
    was = arena.copy()
    transfer, _ = transfers.get([Value(key(1), ((70 * BLOCK, BLOCK),))])
    assert transfers.wait(transfer, 10)
    assert transfer.statuses == [Status.ERROR]
    assert transfer.released  # the block may be given to somebody else
    assert transfers.staging_bytes_free < transfers.staging_bytes  # but not its staging bytes
    store.gate.set()
    assert transfers.drain(10)
    assert (arena == was).all()
    assert transfers.staging_bytes_free == transfers.staging_bytes
    assert transfers.close()


@pytest.mark.parametrize("kind", ["put", "get"])
def test_cancelling(transfers, arena, store, kind):
    stored(transfers, [1])
    store.gate.clear()
    was = arena.copy()
    value = Value(key(1 if kind == "get" else 2), ((70 * BLOCK, BLOCK),))
    transfer = transfers.put([value]) if kind == "put" else transfers.get([value])[0]
    transfer.cancel()
    polled = transfers.poll()
    assert polled.finished == polled.released == [transfer]
    assert transfer.statuses == [Status.ERROR]
    assert transfers.poll() == ([], [])
    store.gate.set()
    assert transfers.drain(10)
    assert (arena == was).all()


def test_exhausted_staging_drops_puts_and_cuts_gets_short(transfers, store):
    room = transfers.staging_bytes // 8192
    store.gate.clear()
    assert transfers.put(blocks(range(room % 97))) is not None
    taken = transfers.staging_bytes_free
    # All or nothing for puts: a window's block without its neighbour is of no use.
    assert transfers.put([Value(key(n), ((0, BLOCK),)) for n in range(room)]) is None
    assert transfers.counts["put_dropped"] == room
    assert transfers.staging_bytes_free == taken
    transfer, count = transfers.get([Value(key(n), ((0, BLOCK),)) for n in range(room)])
    assert count == taken // 8192 == len(transfer.values)
    assert transfers.get(blocks([1])) == (None, 0)
    store.gate.set()
    assert transfers.drain(10)


def test_large_transfers_are_cut_into_pieces_that_workers_share(transfers, store):
    stored(transfers, range(90))
    assert store.calls == -(-90 // PIECE_VALUES)
    transfer, count = transfers.get(blocks(range(90)))
    assert count == 90
    assert transfers.wait(transfer, 10)
    assert transfer.statuses == [Status.HIT] * 90


def test_a_failing_store_fails_the_values_and_nothing_else(transfers, arena, store):
    stored(transfers, [1])
    store.failing = True
    was = arena.copy()
    transfer, _ = transfers.get([Value(key(1), ((70 * BLOCK, BLOCK),))])
    assert transfers.wait(transfer, 10)
    assert transfer.statuses == [Status.ERROR]
    put = transfers.put(blocks([2]))
    assert transfers.wait(put, 10)
    assert put.statuses == [Status.ERROR]
    assert (arena == was).all()


def test_looking_up_holds_what_is_there(transfers, store):
    stored(transfers, [1])
    look = transfers.look_up([key(1), key(2)])
    while look.statuses is None:
        time.sleep(0.001)
    assert look.statuses == [Status.HIT, Status.MISS]
    assert store.open_leases == 1
    look.close()


class _Recorded(Copied):
    def __init__(self, log):
        self.log = log

    def wait(self, part=None):
        self.log.append(part)


def test_loads_arrive_layer_by_layer(transfers, monkeypatch):
    stored(transfers, [0, 1])
    log, seen = [], []
    into = transfers._copies.into

    def recording(parts):
        into(parts)
        seen.extend(parts)
        return _Recorded(log)

    monkeypatch.setattr(transfers._copies, "into", recording)
    values = [
        Value(key(0), ((0, BLOCK),), layers=(0, 5)),
        Value(key(1), ((2500, 2500), (90 * BLOCK, 2500)), layers=(5, 9)),
    ]
    transfer, _ = transfers.get(values)
    assert transfers.wait(transfer, 10)
    half = BLOCK // 2
    assert transfer.layers == [0, 5, 9]
    assert [[(run.arena, run.num_bytes) for run in part] for part in seen] == [
        [(0, half)],
        [(half, half), (2500, half)],
        [(90 * BLOCK, half)],
    ]
    transfer.wait_layer(5)
    transfer.wait_layer(7)  # no value has it
    assert log == [1]


def test_closing_finishes_puts_and_cancels_gets(arena, store):
    transfers = Transfers(arena, store, staging_bytes=1 << 20, threads=1)
    stored(transfers, [1])
    store.gate.clear()
    put, (get, _) = transfers.put(blocks([2])), transfers.get(blocks([1]))
    threading.Timer(0.05, store.gate.set).start()
    assert transfers.close(10)
    assert put.statuses == [Status.STORED]
    assert get.statuses == [Status.ERROR]
    assert transfers.close()
    with pytest.raises(KvtideError, match="closed"):
        transfers.put(blocks([3]))


def test_closing_leaves_a_hung_store_behind(arena, store):
    transfers = Transfers(arena, store, staging_bytes=1 << 20, threads=1)
    store.gate.clear()
    transfers.put(blocks([2]))
    begin = time.monotonic()
    assert not transfers.close(0.1)
    assert time.monotonic() - begin < 60


def test_a_torch_arena_is_the_same_memory(store):
    torch = pytest.importorskip("torch")
    arena = torch.arange(100 * BLOCK, dtype=torch.int64).to(torch.uint8)
    transfers = Transfers(arena, store, staging_bytes=1 << 20)
    stored(transfers, [3])
    transfer, _ = transfers.get([Value(key(3), ((0, BLOCK),))])
    assert transfers.wait(transfer, 10)
    assert torch.equal(arena[:BLOCK], arena[3 * BLOCK : 4 * BLOCK])
    assert transfers.close()


def test_arenas_that_are_no_row_of_bytes():
    with pytest.raises(KvtideError, match="one row of uint8, not float32"):
        make_copies(np.zeros(10, dtype=np.float32), 8192)


def test_random_traffic_with_faults(arena, store):
    """Every HIT holds the bytes of its key, whatever fails, hangs or is cancelled; nothing leaks."""
    rng = random.Random(7)
    transfers = Transfers(arena, store, staging_bytes=300_000, threads=3, deadline=0.2)
    content = {n: rng.randbytes(BLOCK) for n in range(40)}
    free = list(range(100))
    active: list = []
    hits = rounds = 0
    until = time.monotonic() + 60
    while rounds < 600 or (hits <= 50 and time.monotonic() < until):  # a busy machine takes more of them
        rounds += 1
        store.failing, store.lying = rng.random() < 0.1, rng.random() < 0.05
        (store.gate.clear if rng.random() < 0.1 else store.gate.set)()
        action = rng.random()
        if action < 0.6 and len(free) >= 6:
            numbers = rng.sample(range(40), rng.randint(1, 6))
            slots = [free.pop(rng.randrange(len(free))) for _ in numbers]
            values = [Value(key(n), ((slot * BLOCK, BLOCK),)) for n, slot in zip(numbers, slots, strict=True)]
            if action < 0.3:
                for n, slot in zip(numbers, slots, strict=True):
                    arena[slot * BLOCK : (slot + 1) * BLOCK] = np.frombuffer(content[n], dtype=np.uint8)
                transfer = transfers.put(values)
                taken = len(values) if transfer else 0
            else:
                transfer, taken = transfers.get(values)
            free += slots[taken:]
            if transfer is not None:
                active.append((transfer, numbers[:taken], slots[:taken]))
        elif active and action > 0.9:
            rng.choice(active)[0].cancel()
        transfers.poll()
        time.sleep(0.0005)
        for item in list(active):
            transfer, numbers, slots = item
            if transfer.statuses is None or not transfer.released:
                continue
            active.remove(item)
            for n, slot, status in zip(numbers, slots, transfer.statuses, strict=True):
                if transfer.kind == "get" and status is Status.HIT:
                    hits += 1
                    assert arena[slot * BLOCK : (slot + 1) * BLOCK].tobytes() == content[n]
            free += slots
    store.gate.set()
    assert hits > 50
    assert transfers.drain(10)
    assert transfers.staging_bytes_free == transfers.staging_bytes
    assert transfers.close(10)
