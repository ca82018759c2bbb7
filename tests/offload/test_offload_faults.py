"""Offload under faults, end to end: what attention reads, and so what is generated, is the same with and without it.

Random traffic on models of every kind, with little device memory, shared prefixes, preemption, aborts at every stage,
exhausted staging, copies that are late, and a store that fails in every way that it may. Whatever happens, every query
reads the bytes that its own history wrote, and in the end no block, lease or staging byte is held.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
from awkward import host
from faulty import FaultyStore, LateCopies
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from offload_engine import Engine, prompt
from offload_layouts import LAYOUTS
from offload_traffic import IMAGES, Traffic, policy

from kvtide.connectors.config import make_store
from kvtide.offload.policies import StorePolicy


@pytest.fixture(autouse=True)
def short_rests(monkeypatch):
    """The breaker leaves a failing store alone for milliseconds, not for seconds."""
    monkeypatch.setattr("kvtide.offload.breaker._FIRST_REST_S", 0.002)
    monkeypatch.setattr("kvtide.offload.breaker._LONGEST_REST_S", 0.01)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_with_faults(layout, seed):
    rng = random.Random(f"{layout} {seed}")
    before = threading.active_count()
    store = FaultyStore(host(2 << 20), seed)
    engine = Engine(
        LAYOUTS[layout],
        store,
        pages=40,
        staging_bytes=rng.choice([1 << 20, 100_000]),
        deadline=0.2,
        drop_last_block=seed == 2,
        ahead=seed > 0,
        store_policy=StorePolicy() if seed == 0 else policy(rng),
        max_held_bytes=rng.choice([None, 20_000]),
    )
    if seed == 1:
        engine.transfers._copies = LateCopies(engine.transfers._copies, layout)
    traffic = Traffic(engine, store, rng)
    for step in range(160):
        if step % 4 == 0:
            traffic.upset()
        if len(traffic.running) + len(traffic.waiting) < 4 and rng.random() < 0.5:
            traffic.admit()
        if traffic.waiting and rng.random() < 0.4:
            traffic.resume()
        action = rng.random()
        if traffic.running and action < 0.07:
            traffic.preempt()
        elif (traffic.running or traffic.waiting) and action < 0.2:
            traffic.release()
        elif action < 0.25:
            engine.manager.reset_cache()
        engine.offload.poll()
        engine.manager.check()
        traffic.step()
        engine.manager.check()
        time.sleep(0.0003 if step % 5 else 0.002)
    traffic.end()
    store.close()
    assert store.faults > 0
    assert engine.queries > 100
    assert threading.active_count() <= before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_text_is_generated_with_and_without_offload(layout):
    """Nobody checks the bytes here: tokens are sampled from what attention reads, so a wrong byte shows in the text."""
    store = FaultyStore(host(4 << 20), layout)
    texts, loaded = [], 0
    for offloaded in (False, True):
        rng = random.Random(layout)
        for life in range(3):  # a new process each time, with the same store
            options = {"stores": offloaded, "loads": offloaded, "max_held_bytes": 1 << 20}
            engine = Engine(LAYOUTS[layout], store, checks=False, pages=30, **options)
            store.rate, store.latency_s = (0.02, 0.0005) if offloaded else (0, 0)
            for number in range(4):
                tokens = prompt(rng.randrange(2), 40 + rng.randrange(80)) + prompt(50 + number, rng.randrange(5))
                row = engine.admit(f"{life} {number}", tokens, **IMAGES[number % 3])
                engine.settle(row)
                upto = len(tokens) + 20
                engine.run(row, upto - 10, most=16)
                engine.offload.preempt(row)
                engine.flush()
                engine.manager.reset_cache()
                engine.resume(row)
                engine.settle(row)
                engine.run(row, upto, most=16)
                engine.offload.release(row)
            engine.flush()
            loaded += engine.offload.stats().tokens.get("store", 0)
            texts.append(engine.texts)
            engine.close()
    assert texts[:3] == texts[3:]
    assert all(len(text) == 20 for life in texts for text in life.values())
    assert loaded > 300
    store.close()


@pytest.mark.parametrize("layout", ["gemma", "states"])
def test_damaged_files_are_computed_again(layout, tmp_path: Path):
    """Bytes flipped and files cut short on a real file system, in a store that keeps one file per value."""
    options = {"shared_storage_path": str(tmp_path / "kv")}
    store = make_store("SharedStorageConnector", options)
    first = Engine(LAYOUTS[layout], store)
    first.run(first.admit("a", prompt(1, 300)), 300, most=16)
    first.offload.release(0)
    first.flush()
    first.close()
    files = sorted(path for path in (tmp_path / "kv").rglob("*") if path.is_file() and path.stat().st_size > 200)
    rng = random.Random(7)
    for path in rng.sample(files, len(files) // 8):
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.chmod(0o600)
        path.write_bytes(bytes(data[: rng.choice([len(data), len(data) // 2])]))
    second = Engine(LAYOUTS[layout], store)
    row = second.admit("b", prompt(1, 300))
    second.settle(row)
    counts = second.offload.stats().counts
    assert counts.get("load_corrupt", 0) + counts.get("load_miss", 0) > 0
    second.run(row, 310)
    second.close()
    store.close()


def test_values_evicted_while_they_are_loaded_are_computed(tmp_path: Path):
    """A store too small for two prompts: what one engine puts pushes out what another is about to load."""
    store = host(60_000)
    engine = Engine(LAYOUTS["gemma"], store, pages=400)
    for number in range(12):
        row = engine.admit(f"r{number}", prompt(number % 3, 250))
        engine.settle(row)
        engine.run(row, 255)
        engine.offload.release(row)
        engine.offload.poll()
        engine.manager.reset_cache()
    engine.flush()
    assert store.stats().evicted > 0
    engine.close()
    store.close()


class OffloadMachine(RuleBasedStateMachine):
    """The same traffic, in the order that hypothesis likes."""

    loads = 0

    @initialize(
        layout=st.sampled_from(sorted(LAYOUTS)),
        seed=st.integers(0, 1 << 16),
        pages=st.sampled_from([12, 40, 200]),
        staging_bytes=st.sampled_from([1 << 15, 100_000, 1 << 20]),
        max_held_bytes=st.sampled_from([None, 0, 20_000]),
        drop_last_block=st.sampled_from([False, False, True]),
        plain=st.booleans(),
        ahead=st.booleans(),
        late=st.booleans(),
    )
    def begin(self, layout: str, seed: int, plain: bool, late: bool, **options) -> None:
        rng = random.Random(seed)
        self.store = FaultyStore(host(2 << 20), seed)
        store_policy = StorePolicy() if plain else policy(rng)
        self.engine = Engine(LAYOUTS[layout], self.store, deadline=0.2, store_policy=store_policy, **options)
        if late:
            self.engine.transfers._copies = LateCopies(self.engine.transfers._copies, seed)
        self.traffic = Traffic(self.engine, self.store, rng)

    @precondition(lambda self: len(self.traffic.running) + len(self.traffic.waiting) < 4)
    @rule()
    def admit(self) -> None:
        self.traffic.admit()

    @precondition(lambda self: self.traffic.running)
    @rule()
    def preempt(self) -> None:
        self.traffic.preempt()

    @precondition(lambda self: self.traffic.waiting)
    @rule()
    def resume(self) -> None:
        self.traffic.resume()

    @precondition(lambda self: self.traffic.running)
    @rule(rate=st.sampled_from([0, 0, 0.05]))
    def swap(self, rate: float) -> None:
        """A row goes and comes back while the device forgets everything and the store mostly works."""
        self.traffic.calm()
        for _ in range(4):
            self.traffic.step()
        if self.traffic.running:
            self.traffic.preempt()
            self.engine.flush()
            self.engine.manager.reset_cache()
            self.store.rate = rate
            self.traffic.resume()
            self.engine.settle(self.traffic.running[-1])

    @precondition(lambda self: self.traffic.running or self.traffic.waiting)
    @rule()
    def release(self) -> None:
        self.traffic.release()

    @rule(times=st.integers(1, 4), pause=st.sampled_from([0, 0.001]))
    def step(self, times: int, pause: float) -> None:
        for _ in range(times):
            self.traffic.step()
            time.sleep(pause)
            self.engine.offload.poll()

    @rule(waits=st.booleans())
    def poll(self, waits: bool) -> None:
        time.sleep(0.002 if waits else 0)
        self.engine.offload.poll()
        self.engine.manager.check()

    @rule()
    def upset(self) -> None:
        self.traffic.upset()

    @rule()
    def reset_cache(self) -> None:
        self.engine.manager.reset_cache()

    def teardown(self) -> None:
        if hasattr(self, "traffic"):
            type(self).loads += self.engine.offload.stats().tokens.get("store", 0)
            self.traffic.end()
            self.store.close()


def test_any_order_of_operations():
    long = settings().max_examples > 1000

    class Machine(OffloadMachine):
        loads = 0

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=2_000 if long else 40,
            stateful_step_count=40,
            deadline=None,
            derandomize=not long,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert Machine.loads > 100


def test_a_reader_that_is_lied_to_would_be_seen():
    """The proof itself: a store that serves one wrong byte as a HIT is noticed by the first query that reads it."""
    store = host(4 << 20)
    engine = Engine(LAYOUTS["full"], store)
    engine.run(engine.admit("a", prompt(1, 200)), 200)
    engine.offload.release(0)
    engine.flush()
    engine.manager.reset_cache()
    honest = store.get_into

    def lies(keys, buffers):
        statuses = honest(keys, buffers)
        memoryview(buffers[0]).cast("B")[5] ^= 1
        return statuses

    store.get_into = lies
    row = engine.admit("b", prompt(1, 200))
    assert engine.settle(row) == 192
    with pytest.raises(AssertionError, match="the query at 192"):
        engine.run(row, 200)
    assert engine.offload.close()
    store.close()
