"""Offload end to end on a CPU arena: every byte that a query reads is the byte that its own history wrote.

An engine of arrays: a token's bytes in a table are a digest of the table and of all tokens up to it. Requests share
prefixes, little device memory makes the store matter, and the store fails, hangs, lies and forgets. Before every step
each running row reads all tokens that its next query can reach, through the manager's tables.
"""

from __future__ import annotations

import random
import threading
import time
from hashlib import blake2b

import numpy as np
import pytest
from awkward import AwkwardStore, host
from layouts import layout_of

from kvtide.connectors.config import make_store
from kvtide.hma import HybridMemoryManager
from kvtide.kvcache import MLA, Exhausted, FullAttention, SinkWindow, SlidingWindow, SlidingWindowMLA
from kvtide.kvcache.solver import solve_geometry
from kvtide.offload.manager import OffloadManager
from kvtide.offload.policies import LoadPolicy, StorePolicy
from kvtide.offload.transfers import Transfers

LAYOUTS = {
    "full": layout_of("full", (3, FullAttention(1, 16, 16))),
    "gemma": layout_of("gemma", (2, FullAttention(1, 16, 16)), (5, SlidingWindow(1, 16, 16, window=40))),
    "latents": layout_of("mla", (2, MLA(32, 16, "float16")), (3, SlidingWindowMLA(32, 16, "float16", window=50))),
    "sinks": layout_of("sinks", (2, FullAttention(1, 16, 16)), (2, SinkWindow(1, 16, 16, window=33, sinks=4))),
}
EAGER = LoadPolicy(min_tokens=16, seconds_per_token=1.0)


class Engine:
    """One process: manager, arena, transfers, offload; and the token history of every row."""

    def __init__(self, layout, store, *, pages=24, max_requests=4, staging_bytes=1 << 20, **options):
        geometry = solve_geometry(layout)
        self.manager = HybridMemoryManager(
            geometry,
            pages * geometry.page_bytes,
            max_requests=max_requests,
            max_model_len=600,
            max_step_tokens=64,
            key_space=b"test",
        )
        self.arena = np.full(pages * geometry.page_bytes, 0xAA, dtype=np.uint8)
        self.transfers = Transfers(self.arena, store, staging_bytes=staging_bytes, threads=2, deadline=0.2)
        self.offload = OffloadManager(
            self.manager, self.transfers, model="test", load_policy=options.pop("load_policy", EAGER), **options
        )
        self.tokens: dict[int, list[int]] = {}
        self.digests: dict[int, list[bytes]] = {}

    def admit(self, name, tokens, **options):
        row = self.offload.admit(name, tokens, **options).row
        self.tokens[row], self.digests[row] = [], []
        self.learn(row, tokens)
        return row

    def learn(self, row, tokens):
        for token in tokens:
            before = self.digests[row][-1] if self.digests[row] else b""
            self.digests[row].append(blake2b(before + int(token).to_bytes(4, "little"), digest_size=16).digest())
        self.tokens[row] += list(tokens)

    def places(self, row, group, positions):
        """Byte offsets `[tables, n]` of tokens, -1 where they have no block, and bytes a token."""
        size, num_bytes = group.fmt.block_size, group.fmt.block_bytes
        slots = group.slots(np.full(len(positions), row), positions)
        entries, offsets = np.divmod(slots, size)
        width = num_bytes // size
        return np.where(slots < 0, -1, entries * self.manager.geometry.unit + offsets * width), width

    def content(self, row, position, group, table, width):
        seed = blake2b(self.digests[row][position], salt=bytes([group.number, table]), digest_size=16).digest()
        return np.frombuffer((seed * (width // 16 + 1))[:width], dtype=np.uint8)

    def check_reads(self, row):
        """All tokens that the next query reaches hold what this row's history wrote."""
        committed = int(self.manager.committed[row])
        for group in self.manager.groups:
            reach = group.fmt.group.spec.needed(np.array(committed + 1))
            positions = np.concatenate([np.arange(int(reach.sinks)), np.arange(int(reach.first), committed)])
            places, width = self.places(row, group, positions)
            assert (places >= 0).all()
            for table in range(group.fmt.tables):
                for at, position in zip(places[table].tolist(), positions.tolist(), strict=True):
                    expected = self.content(row, position, group, table, width)
                    assert (self.arena[at : at + width] == expected).all(), (group.name, row, position)

    def step(self, rows, most, rng):
        """Compute up to `most` tokens of every row that is ready. True if it fitted."""
        rows = [row for row in rows if self.offload.ready(row)]
        counts = [min(most, max(1, len(self.tokens[row]) - int(self.manager.committed[row]))) for row in rows]
        if not rows:
            return True
        for row in rows:
            self.check_reads(row)
        try:
            plan = self.manager.reserve(rows, counts)
        except Exhausted:
            return False
        new = []
        for row, start, count in zip(rows, plan.start.tolist(), counts, strict=True):
            if start + count > len(self.tokens[row]):
                self.learn(row, [rng.randrange(1000)])
                new.append(self.tokens[row][-1])
            positions = np.arange(start, start + count)
            for group in self.manager.groups:
                places, width = self.places(row, group, positions)
                for table in range(group.fmt.tables):
                    for at, position in zip(places[table].tolist(), positions.tolist(), strict=True):
                        self.arena[at : at + width] = self.content(row, position, group, table, width)
        self.offload.commit(rows, counts, new)
        self.manager.check()
        return True

    def settle(self, row, timeout=10.0):
        """Poll until the row is ready."""
        expires = time.monotonic() + timeout
        while not self.offload.ready(row):
            self.offload.poll()
            assert time.monotonic() < expires
            time.sleep(0.0005)

    def compute(self, row, upto):
        rng = random.Random(row)
        while int(self.manager.committed[row]) < upto:
            assert self.step([row], 64, rng)
            self.offload.poll()

    def flush(self):
        assert self.transfers.drain(10)
        self.offload.poll()

    def close(self):
        assert self.offload.close(10)
        assert self.offload.held_bytes == 0
        assert self.transfers.staging_bytes_free == self.transfers.staging_bytes
        for row in self.manager.running_rows.tolist():
            self.manager.release(row)
        self.manager.check()
        assert self.manager.pool.refs.sum() == 0


def prompt(seed, count):
    return [random.Random(seed * 1000 + i).randrange(1000) for i in range(count)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["HostConnector", "LMDBConnector", "SharedStorageConnector", "MultiConnector"])
def test_a_prompt_comes_back_from_the_store_in_a_new_process(layout, kind, tmp_path):
    lmdb = {"path": str(tmp_path / "kv"), "max_bytes": "16MiB", "segment_bytes": "4MiB"}
    settings = {
        "HostConnector": {"max_bytes": "16MiB"},
        "LMDBConnector": lmdb,
        "SharedStorageConnector": {"shared_storage_path": str(tmp_path / "kv")},
        "MultiConnector": {
            "connectors": [
                {"kv_connector": "HostConnector", "kv_connector_extra_config": {"max_bytes": "1MiB"}},
                {"kv_connector": "LMDBConnector", "kv_connector_extra_config": lmdb},
            ]
        },
    }[kind]
    store = make_store(kind, settings)
    first = Engine(LAYOUTS[layout], store, pages=200)
    row = first.admit("a", prompt(1, 300))
    first.settle(row)
    assert first.manager.committed[row] == 0
    first.compute(row, 310)
    first.flush()
    first.offload.release(row)
    first.flush()
    first.close()
    if kind != "HostConnector":
        store.close()
        store = make_store(kind, settings)

    second = Engine(LAYOUTS[layout], store, pages=200)
    row = second.admit("b", prompt(1, 300))
    second.settle(row)
    step = second.manager.load_step
    assert second.manager.committed[row] == 299 // step * step
    assert second.offload.counts["tokens_store"] == 299 // step * step
    second.manager.check()
    second.compute(row, 305)
    # A prompt that parts from it: full attention alone can serve any length.
    other = second.admit("c", prompt(1, 200) + prompt(2, 50))
    second.settle(other)
    if layout == "full":
        assert second.manager.committed[other] == 200 // step * step
    second.compute(other, 255)
    # Another salt never hits.
    third = second.admit("d", prompt(1, 300), salt="other")
    second.settle(third)
    assert second.manager.committed[third] == 0
    second.close()
    store.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_window_loads_only_its_last_blocks(layout):
    store = host(16 << 20)
    first = Engine(LAYOUTS[layout], store, pages=200)
    row = first.admit("a", prompt(1, 320))
    first.settle(row)
    first.compute(row, 321)
    first.offload.release(row)
    first.flush()
    first.close()
    second = Engine(LAYOUTS[layout], store, pages=200)
    row = second.admit("b", prompt(1, 320))
    second.settle(row)
    length = int(second.manager.committed[row])
    assert length == 319 // second.manager.load_step * second.manager.load_step
    expected = 0
    for group in second.manager.groups:
        tokens = (
            length - int(group.first_block(np.array(length))) * group.fmt.block_size if group.is_bounded else length
        )
        sinks = group.table.sink_blocks * group.fmt.block_size if group.is_bounded else 0
        expected += (tokens + sinks) // group.fmt.block_size * group.fmt.block_bytes * group.fmt.tables
    assert second.transfers.counts["get_hit_bytes"] == expected
    second.close()
    store.close()


def test_a_preempted_request_comes_back_by_loading():
    store = host(16 << 20)
    engine = Engine(LAYOUTS["gemma"], store, pages=200)
    row = engine.admit("a", prompt(3, 200))
    engine.settle(row)
    engine.compute(row, 230)
    engine.offload.preempt(row)
    engine.flush()
    engine.manager.reset_cache()  # nothing is left on the device
    assert engine.offload.resume(row).num_cached_tokens == 0
    engine.settle(row)
    step = engine.manager.load_step
    assert engine.manager.committed[row] == 230 // step * step
    engine.compute(row, 240)
    engine.close()
    store.close()


def test_what_is_not_worth_loading_is_computed():
    store = host(16 << 20)
    engine = Engine(LAYOUTS["full"], store, pages=200)
    row = engine.admit("a", prompt(1, 200))
    engine.settle(row)
    engine.compute(row, 200)
    engine.offload.release(row)
    engine.flush()
    engine.manager.reset_cache()
    engine.offload._load_policy = LoadPolicy(min_tokens=16, bytes_per_second=1.0)
    row = engine.admit("b", prompt(1, 200))
    engine.settle(row)
    assert engine.manager.committed[row] == 0
    engine.compute(row, 200)
    engine.close()
    store.close()


def test_roles():
    store = host(16 << 20)
    consumer = Engine(LAYOUTS["full"], store, pages=200, stores=False)
    row = consumer.admit("a", prompt(1, 200))
    consumer.settle(row)
    consumer.compute(row, 200)
    consumer.offload.release(row)
    consumer.flush()
    assert store.stats().num_values == 0
    consumer.close()
    producer = Engine(LAYOUTS["full"], store, pages=200, loads=False, store_policy=StorePolicy(while_running=False))
    row = producer.admit("a", prompt(1, 200))
    assert producer.offload.ready(row)
    producer.compute(row, 100)
    producer.flush()
    assert store.stats().num_values == 0  # the prompt's end has not come
    producer.compute(row, 200)
    producer.flush()
    assert store.stats().num_values > 0
    producer.close()
    store.close()


def test_ranks_share_what_every_rank_holds_and_keep_their_heads_apart():
    """Two ranks: latents are stored once, by rank 0; heads under keys of their own. Both ranks hit."""
    whole = layout_of("mixed", (2, MLA(32, 16, "float16")), (2, FullAttention(2, 16, 16)))
    store = host(16 << 20)
    num_bytes = []
    for rank in range(2):
        engine = Engine(whole.shard(2), store, pages=200, full_layout=whole, tp_rank=rank, tp_size=2)
        row = engine.admit("a", prompt(1, 200))
        engine.settle(row)
        if rank:  # its heads are not there yet, and a hit needs all groups
            assert engine.manager.committed[row] == 0
        engine.compute(row, 200)
        engine.offload.release(row)
        engine.flush()
        num_bytes.append(engine.transfers.counts["put_stored_bytes"])
        engine.close()
    groups = {group.fmt.group.spec.kind: group for group in engine.manager.groups}
    latents = next(g for kind, g in groups.items() if "mla" in kind)
    assert num_bytes[0] - num_bytes[1] == 192 // latents.fmt.block_size * latents.fmt.block_bytes * latents.fmt.tables
    for rank in range(2):
        engine = Engine(whole.shard(2), store, pages=200, full_layout=whole, tp_rank=rank, tp_size=2)
        row = engine.admit("a", prompt(1, 200))
        engine.settle(row)
        assert engine.manager.committed[row] == 192
        engine.check_reads(row)
        engine.close()
    store.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_with_faults(layout, seed, monkeypatch):
    monkeypatch.setattr("kvtide.offload.breaker._FIRST_REST_S", 0.002)
    monkeypatch.setattr("kvtide.offload.breaker._LONGEST_REST_S", 0.01)
    rng = random.Random(f"{layout} {seed}")
    before = threading.active_count()
    store = AwkwardStore(host(2 << 20))
    engine = Engine(LAYOUTS[layout], store, pages=40, staging_bytes=rng.choice([1 << 20, 100_000]))
    running, waiting, asked, count = [], [], [], 0
    for step in range(300):
        store.failing, store.lying = rng.random() < 0.03, rng.random() < 0.01
        (store.gate.clear if rng.random() < 0.04 else store.gate.set)()
        if len(running) + len(waiting) < 4 and rng.random() < 0.3:
            # Half are new prompts that share a beginning; half are asked again, or go on from an earlier one.
            tokens = prompt(rng.randrange(3), rng.randrange(20, 180)) + prompt(100 + count, rng.randrange(1, 30))
            if asked and rng.random() < 0.5:
                tokens = rng.choice(asked)[:250] + prompt(100 + count, rng.choice([0, 0, 20]))
            asked.append(tokens)
            running.append(engine.admit(f"r{count}", tokens))
            count += 1
        if waiting and rng.random() < 0.3:
            row = waiting.pop()
            engine.offload.resume(row)
            running.append(row)
        action = rng.random()
        if running and action < 0.06:
            row = running.pop(rng.randrange(len(running)))
            engine.offload.preempt(row)
            waiting.append(row)
        elif running and action < 0.16:
            engine.offload.release(running.pop(rng.randrange(len(running))))
        elif waiting and action < 0.18:
            engine.offload.release(waiting.pop())
        elif action < 0.22:
            engine.manager.reset_cache()
        engine.offload.poll()
        if running and not engine.step(running, rng.choice([1, 30, 64]), rng):
            engine.offload.preempt(row := running.pop())
            waiting.append(row)
        engine.manager.check()
        time.sleep(0.0003 if step % 5 else 0.002)
    store.gate.set()
    store.failing = store.lying = False
    for row in running + waiting:
        engine.offload.release(row)
    engine.flush()
    assert engine.offload.counts["tokens_store"] > 0
    engine.close()
    assert store.open_leases == 0
    store.close()
    assert threading.active_count() == before
