"""Loads: a row jumps to a length that it has not computed. What it then holds is what a device hit would have given it;
misuse and refusals change nothing. That the loaded bytes are read rightly is proved in tests/offload."""

from __future__ import annotations

import numpy as np
import pytest
from layouts import layout_of
from oracle import Engine, geometry_of

from kvtide.hma import HybridMemoryManager, Item, hashing, prefix_index
from kvtide.kvcache import (
    Component,
    CrossAttention,
    Exhausted,
    FullAttention,
    KvtideError,
    RecurrentState,
    SinkWindow,
    SlidingWindow,
)

HYBRID = layout_of("hybrid", (1, FullAttention(1, 8, 8)), (2, SlidingWindow(1, 8, 8, window=40)))
FULL = layout_of("full", (1, FullAttention(1, 8, 8)))
SINKS = layout_of("sinks", (1, FullAttention(1, 8, 8)), (2, SinkWindow(1, 8, 8, window=40, sinks=4)))

STATES = layout_of("states", (1, FullAttention(1, 8, 8)), (2, RecurrentState((Component("ssm", (4, 8), "float32"),))))
IMAGES = layout_of("images", (1, FullAttention(1, 8, 8)), (1, CrossAttention(1, 8, 8)))


def window(size):
    return SlidingWindow(1, 1, 1, window=size)


def manager_of(layout, memory="4MiB", **options):
    options = {"max_requests": 4, "max_model_len": 1000, "max_step_tokens": 500, **options}
    return HybridMemoryManager(layout, memory, **options)


def state(manager):
    manager.check()
    tables = [(t.entries.copy(), t.first.copy(), t.end.copy()) for t in manager.tables.values()]
    return repr((manager.stats(), manager.committed.tolist(), manager.pool.refs.tolist(), [t[1:] for t in tables]))


@pytest.mark.parametrize("layout", [HYBRID, FULL, SINKS], ids=lambda layout: layout.name)
def test_a_loaded_row_holds_what_a_hit_of_that_length_holds(layout):
    prompt = np.arange(301)
    loaded, computed = manager_of(layout), manager_of(layout)
    row = loaded.admit("a", prompt).row
    runs = loaded.reserve_load(row, 288)
    loaded.check()
    assert loaded.settle_load(row).num_cached_tokens == 288
    loaded.check()
    computed.admit("a", prompt)
    computed.reserve([0], [288])
    computed.commit([0], [288])
    for name, table in loaded.tables.items():
        assert table.held(row)[0].tolist() == computed.tables[name].held(0)[0].tolist()
        (run,) = [run for run in runs if run.group == name]
        assert run.logical.tolist() == table.held(row)[0].tolist()
        assert (run.entries == table.held(row)[1]).all()
    # The loaded prefix is cached like a computed one.
    assert loaded.admit("b", prompt).num_cached_tokens == 288
    loaded.reserve([row], [13])
    loaded.commit([row], [13])
    for each in (0, 1):
        loaded.release(each)
    loaded.check()


def test_a_load_goes_on_from_a_hit_and_lets_go_of_what_is_out_of_reach():
    manager = manager_of(HYBRID)
    manager.admit("a", np.arange(100))
    manager.reserve([0], [100])
    manager.commit([0], [100])
    row = manager.admit("b", np.arange(400)).row
    hit = int(manager.committed[row])
    assert hit == 96
    runs = {run.group: run.logical.tolist() for run in manager.reserve_load(row, 384)}
    assert min(runs["full_attention"]) * manager.group("full_attention").fmt.block_size == 96
    manager.check()
    manager.cancel_load(row)
    assert manager.committed[row] == hit
    manager.check()
    manager.reserve([row], [10])


def test_what_arrived_of_a_load_is_kept_and_the_longest_whole_prefix_of_it_is_the_hit():
    manager = manager_of(FULL)
    row = manager.admit("a", np.arange(300)).row
    manager.reserve_load(row, 288)
    size = manager.group("full_attention").fmt.block_size
    assert manager.settle_load(row, {"full_attention": [128 // size, 160 // size]}).num_cached_tokens == 128
    manager.check()
    assert manager.committed[row] == 128
    # What arrived beyond the gap needs no second load.
    runs = manager.reserve_load(row, 288)
    assert [run.logical.tolist() for run in runs] == [[128 // size, 160 // size]]
    manager.settle_load(row)
    manager.reserve([row], [12])
    manager.commit([row], [12])
    manager.check()


def test_a_window_that_lacks_a_block_leaves_what_keeps_everything_on_the_device():
    manager = manager_of(HYBRID)
    row = manager.admit("a", np.arange(300)).row
    runs = {run.group: run for run in manager.reserve_load(row, 288)}
    assert manager.settle_load(row, {"sliding_window": runs["sliding_window"].logical[:1]}).num_cached_tokens == 0
    manager.check()
    again = {run.group: run for run in manager.reserve_load(row, 288)}
    assert set(again) == {"sliding_window"}
    assert again["sliding_window"].logical.tolist() == runs["sliding_window"].logical[:1].tolist()
    manager.cancel_load(row)
    manager.check()


def test_a_state_is_loaded_as_a_checkpoint_and_restored_like_a_hit():
    manager = manager_of(STATES)
    row = manager.admit("a", np.arange(300)).row
    runs = {run.group: run for run in manager.reserve_load(row, 288)}
    checkpoint = runs["recurrent_state"]
    assert checkpoint.logical.tolist() == [288 // manager.base - 1]
    manager.settle_load(row)
    (copy,) = manager.reserve([row], [12]).copies
    assert copy.source.tolist() == checkpoint.entries[:, 0].tolist()
    manager.commit([row], [12])
    manager.check()
    other = manager.admit("b", np.arange(300))
    assert other.num_cached_tokens == 288
    manager.check()


def test_cross_attention_is_left_to_the_first_step():
    manager = manager_of(IMAGES)
    row = manager.admit("a", np.arange(300), image_tokens=40, items=[Item(3, b"cat")]).row
    assert {run.group for run in manager.reserve_load(row, 288)} == {"full_attention"}
    manager.settle_load(row)
    assert manager.tables["cross_attention"].end[row] == 0
    manager.reserve([row], [12])
    assert manager.tables["cross_attention"].end[row] > 0
    with pytest.raises(KvtideError, match="cross_attention have no keys"):
        manager.blocks_of(row, "cross_attention", np.arange(1))
    manager.check()


def test_a_load_replaces_a_block_that_is_not_committed_to_its_end():
    manager = manager_of(FULL)
    row = manager.admit("a", np.arange(300)).row
    manager.reserve([row], [100])
    manager.commit([row], [100])
    size = manager.group("full_attention").fmt.block_size
    (run,) = manager.reserve_load(row, 288)
    assert run.logical[0] == 100 // size
    manager.check()
    manager.release(row)
    manager.check()


def test_a_row_looks_again_at_what_another_has_brought():
    manager = manager_of(HYBRID)
    first, second = (manager.admit(name, np.arange(300)).row for name in "ab")
    manager.reserve_load(first, 288)
    with pytest.raises(KvtideError, match="only a row at rest can look again"):
        manager.look_again(first)
    assert manager.look_again(second).num_cached_tokens == 0
    manager.settle_load(first)
    assert manager.look_again(second).num_cached_tokens == 288
    manager.check()


def test_forgotten_blocks_are_free_at_once():
    manager = manager_of(FULL)
    row = manager.admit("a", np.arange(100)).row
    manager.reserve([row], [100])
    manager.commit([row], [100])
    entries = manager.blocks_of(row, "full_attention", np.arange(6))
    manager.forget("full_attention", entries)  # held: nothing happens
    manager.release(row)
    assert manager.admit("b", np.arange(100)).num_cached_tokens == 96
    manager.release(0)
    manager.forget("full_attention", entries)
    manager.check()
    assert manager.admit("c", np.arange(100)).num_cached_tokens == 0


def test_a_load_that_does_not_fit_is_refused_and_changes_nothing():
    manager = manager_of(HYBRID, memory=4 * manager_of(HYBRID).geometry.page_bytes)
    row = manager.admit("a", np.arange(900)).row
    before = state(manager)
    with pytest.raises(Exhausted, match="need"):
        manager.reserve_load(row, 896)
    assert state(manager) == before


def test_a_load_takes_its_blocks_before_it_lets_go_of_others():
    """Found by the state machine: the page that a load gives back comes too late to spare a cached one."""
    layout = layout_of("small", (1, FullAttention(1, 1, 1)), (1, window(1)), (1, window(2)))
    blocks = {"full_attention": 1, "sliding_window": 1, "sliding_window_2": 2}
    engine = Engine(geometry_of(layout, blocks, dict.fromkeys(blocks, 1)), 6, max_requests=5, max_model_len=56)
    engine.admit("a", [0, 1, 0, 1, 1, 0, 1, 0])
    engine.reserve(["a"], [3])
    engine.commit()
    cached, pool = len(engine.cached), engine.manager.pool
    assert cached == 7
    assert pool.free_pages == 0
    assert engine.start_load("a", 6)
    assert pool.free_pages == 1
    assert len(engine.cached) < cached


def test_a_refused_load_changes_nothing_but_that_keys_are_made(monkeypatch):
    """Found by the state machine: the keys of a span that was looked up as one are made when a load asks for them."""
    for module in (hashing, prefix_index):
        monkeypatch.setattr(module, "SPAN", 2)
    layout = layout_of("small", (1, FullAttention(1, 1, 1)), (1, window(1)))
    blocks = {"full_attention": 1, "sliding_window": 4}
    engine = Engine(geometry_of(layout, blocks, dict.fromkeys(blocks, 1)), 2, max_requests=5, max_model_len=56)
    engine.admit("a", [0, 1])
    engine.reserve(["a"], [2])
    engine.commit()
    engine.release("a")
    engine.admit("b", [0, 1] * 6 + [0])
    assert engine.requests["b"].committed == 0
    assert not engine.start_load("b", 12)


def test_a_load_completes_a_base_block_that_the_row_began():
    """Found by the state machine: a small block waits for the end of the base block before it is under a key."""
    layout = layout_of("small", (1, SinkWindow(1, 1, 1, window=1, sinks=1)), (1, FullAttention(1, 1, 1)))
    blocks = {"sink_window": 1, "full_attention": 2}
    for fails, hit in ([False], 6), ([False, False, True], 4), ([True, False, False], 0):
        engine = Engine(geometry_of(layout, blocks, dict.fromkeys(blocks, 1)), 6, max_requests=5, max_model_len=56)
        engine.admit("a", [1, 0, 0, 0, 0, 1, 1, 1])
        engine.reserve(["a"], [1])
        engine.commit()
        assert engine.start_load("a", 6)
        engine.end_load("a", fails)
        assert engine.requests["a"].committed == hit


@pytest.mark.parametrize("layout", [HYBRID, FULL, SINKS, STATES], ids=lambda layout: layout.name)
def test_what_is_being_loaded_is_in_flight(layout):
    manager = manager_of(layout)
    row = manager.admit("a", np.arange(301)).row
    empty = manager.stats()
    runs = manager.reserve_load(row, 288)
    during = manager.stats()
    blocks = sum(run.entries.size * manager.group(run.group).fmt.block_bytes for run in runs)
    assert during.in_flight_reserve == blocks
    assert (during.needed, during.block_tail) == (empty.needed, empty.block_tail)
    assert sum(during) == sum(empty)
    manager.settle_load(row)
    if layout is not STATES:  # whose checkpoint waits for the step that restores it
        assert manager.stats().in_flight_reserve == 0


def test_misuse_is_named_and_changes_nothing():
    manager = manager_of(HYBRID)
    row = manager.admit("a", np.arange(320)).row
    before = state(manager)
    for length in (0, 100, 320, 336):
        with pytest.raises(
            KvtideError, match=f"must end at a multiple of 16 tokens above 0 and up to 319, not at {length}"
        ):
            manager.reserve_load(row, length)
    with pytest.raises(KvtideError, match="row 0 is not being loaded"):
        manager.cancel_load(row)
    with pytest.raises(KvtideError, match="row 3 is not running"):
        manager.reserve_load(3, 16)
    uncached = manager_of(FULL, prefix_caching=False)
    uncached.admit("a", np.arange(100))
    with pytest.raises(KvtideError, match="loads need prefix caching"):
        uncached.reserve_load(0, 16)
    assert state(manager) == before
    manager.reserve_load(row, 304)
    before = state(manager)
    with pytest.raises(KvtideError, match="row 0 is being loaded; settle or cancel its load first"):
        manager.reserve([row], [1])
    with pytest.raises(KvtideError, match="a load starts from a row at rest"):
        manager.reserve_load(row, 304)
    assert state(manager) == before
    manager.release(row)
    manager.check()
    assert manager.pool.refs.sum() == 0


def test_holds_keep_blocks_beyond_their_row():
    manager = manager_of(HYBRID)
    row = manager.admit("a", np.arange(100)).row
    manager.reserve([row], [100])
    manager.commit([row], [100])
    entries = manager.blocks_of(row, "sliding_window", np.arange(0, 12))
    assert (entries >= 0).all()  # those that slid out are still cached
    hold = manager.hold(row, "sliding_window", entries)
    manager.check()
    manager.release(row)
    manager.reset_cache()
    manager.check()
    assert manager.pool.refs.sum() == entries.size
    manager.unhold(hold)
    with pytest.raises(KvtideError, match="has ended already"):
        manager.unhold(hold)
    manager.check()
    assert manager.pool.refs.sum() == 0


def test_managers_with_one_key_space_agree_on_keys():
    keys = []
    for layout in (HYBRID, FULL):
        manager = manager_of(layout, key_space=b"one model")
        manager.admit("a", np.arange(100))
        keys.append(manager.keys(0, 0, 6))
    assert keys[0] == keys[1]
    apart = manager_of(FULL)
    apart.admit("a", np.arange(100))
    assert apart.keys(0, 0, 6) != keys[0]
