"""What `OffloadManager` does, case by case, with real bytes: what comes back, from where, and what is computed."""

from __future__ import annotations

import numpy as np
import pytest
from awkward import AwkwardStore, host
from layouts import layout_of
from offload_engine import Engine, prompt
from offload_layouts import LAYOUTS

from kvtide.connectors.config import make_store
from kvtide.connectors.host import HostConfig, HostConnector
from kvtide.hma import Item
from kvtide.kvcache import MLA, Component, ConfigError, FullAttention, RecurrentState, SlidingWindow
from kvtide.kvcache.specs import Kind
from kvtide.offload.copies import Copied
from kvtide.offload.policies import DEFAULT_RULES, Action, Event, LoadPolicy, StorePolicy
from kvtide.offload.store import Status

WHOLE = ("full", "images")
IMAGE = {"items": [Item(0, b"cat")], "image_tokens": 20}


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
    first = Engine(LAYOUTS[layout], store)
    row = first.admit("a", prompt(1, 300), **IMAGE)
    assert first.settle(row) == 0
    first.run(row, 310, most=16)
    first.offload.release(row)
    first.flush()
    first.close()
    if kind != "HostConnector":
        store.close()
        store = make_store(kind, settings)

    second = Engine(LAYOUTS[layout], store)
    row = second.admit("b", prompt(1, 300), **IMAGE)
    end = 299 // second.manager.load_step * second.manager.load_step
    assert second.settle(row) == end
    assert second.offload.stats().tokens == {"device": 0, "store": end}
    second.run(row, 305)
    # A prompt that parts from it: groups that keep everything serve any length, the others none that was not stored.
    other = second.admit("c", prompt(1, 200) + prompt(2, 50), **IMAGE)
    hit = second.settle(other)
    assert hit == (200 // second.manager.load_step * second.manager.load_step if layout in WHOLE else hit)
    second.run(other, 255)
    # Another salt, and another image, never hit.
    assert second.settle(second.admit("d", prompt(1, 300), salt="other", **IMAGE)) == 0
    assert second.settle(second.admit("e", prompt(1, 300), **{**IMAGE, "items": [Item(0, b"dog")]})) == 0
    second.close()
    store.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_load_brings_only_what_a_row_of_that_length_holds(layout):
    store = host(16 << 20)
    first = Engine(LAYOUTS[layout], store)
    first.run(first.admit("a", prompt(1, 320)), 321, most=16)
    first.offload.release(0)
    first.flush()
    first.close()
    second = Engine(LAYOUTS[layout], store)
    length = second.settle(second.admit("b", prompt(1, 320)))
    assert length == 319 // second.manager.load_step * second.manager.load_step
    expected = 0
    for group in second.manager.groups:
        fmt = group.fmt
        if group.is_state:
            expected += fmt.block_bytes * fmt.tables
        elif not group.is_cross:
            reach = fmt.group.spec.needed(np.array(length + 1))
            reached = {t // fmt.block_size for t in (*range(int(reach.sinks)), *range(int(reach.first), length))}
            expected += len(reached) * fmt.block_bytes * fmt.tables
    assert second.transfers.counts["get_hit_bytes"] == expected
    assert sum(n for (tier, _), n in second.offload.stats().bytes_by_kind.items() if tier == "store") == expected
    second.close()
    store.close()


@pytest.mark.parametrize("layout", ["gemma", "latents", "states"])
def test_a_preempted_request_comes_back_by_loading(layout):
    store = host(16 << 20)
    engine = Engine(LAYOUTS[layout], store)
    row = engine.admit("a", prompt(3, 200))
    engine.settle(row)
    engine.run(row, 192, most=16)
    engine.run(row, 230, checkpoints=False)
    engine.offload.preempt(row)
    engine.flush()
    engine.manager.reset_cache()  # nothing is left on the device
    engine.resume(row)
    step = engine.manager.load_step
    assert engine.settle(row) == (192 if layout == "states" else 230 // step * step)
    engine.run(row, 240)
    engine.close()
    store.close()


def test_what_is_not_worth_loading_is_neither_loaded_nor_swapped_out():
    store = host(16 << 20)
    slow = LoadPolicy(min_tokens=16, bytes_per_second=1.0)
    policy = StorePolicy(rules={(Event.COMMITTED, kind): Action.KEEP for kind in Kind if "cross" not in kind})
    engine = Engine(LAYOUTS["gemma"], store, load_policy=slow, store_policy=policy)
    engine.run(engine.admit("a", prompt(1, 200)), 200)
    engine.offload.preempt(0)
    engine.flush()
    assert store.stats().num_values == 0
    engine.resume(0)
    engine.settle(0)
    engine.run(0, 200)
    engine.offload.release(0)  # it has ended: others may want its prompt
    engine.flush()
    assert store.stats().num_values > 0
    engine.manager.reset_cache()
    row = engine.admit("b", prompt(1, 200))
    assert engine.settle(row) == 0
    engine.run(row, 200)
    counts = engine.offload.stats().counts
    assert (counts["swap_not_worth_it"], counts["load_not_worth_it"]) == (1, 1)
    engine.close()
    store.close()


def test_roles():
    store = host(16 << 20)
    consumer = Engine(LAYOUTS["full"], store, stores=False)
    consumer.run(consumer.admit("a", prompt(1, 200)), 200)
    consumer.offload.release(0)
    consumer.flush()
    assert store.stats().num_values == 0
    consumer.close()
    producer = Engine(LAYOUTS["full"], store, loads=False)
    row = producer.admit("a", prompt(1, 200))
    assert producer.offload.ready(row)
    producer.run(row, 200)
    producer.flush()
    assert store.stats().num_values > 0
    producer.manager.reset_cache()
    producer.offload.release(row)
    producer.manager.reset_cache()
    assert producer.settle(producer.admit("b", prompt(1, 200))) == 0
    producer.close()
    store.close()


def test_generated_text_is_stored_so_many_tokens_at_a_time():
    store = host(16 << 20)
    engine = Engine(LAYOUTS["gemma"], store, store_policy=StorePolicy(generated_tokens=64), loads=False)
    block_bytes = sum(g.fmt.block_bytes * g.fmt.tables for g in engine.manager.groups if not g.is_bounded)

    def blocks():
        engine.flush()
        return engine.offload.stats().bytes_by_kind["stored", Kind.FULL_ATTENTION] // block_bytes

    row = engine.admit("a", prompt(1, 200))
    seen = {}
    for upto in (64, 199, 200, 255, 256, 319, 320):
        engine.run(row, upto)
        seen[upto] = blocks()
    # Of the prompt every whole block at once, then 64 tokens at a time: 192, 256, 320.
    assert seen == {64: 4, 199: 12, 200: 12, 255: 12, 256: 16, 319: 16, 320: 20}
    engine.run(row, 340)
    engine.offload.release(row)
    assert blocks() == 21
    engine.close()


def test_every_event_and_kind_is_stored_kept_or_dropped_as_the_rules_say():
    gemma, window, full = LAYOUTS["gemma"], Kind.SLIDING_WINDOW, Kind.FULL_ATTENTION

    def stored(rules, **options):
        """Bytes stored by kind while a prompt of 200 runs, after its end, and what a second one hits on the device."""
        store = host(16 << 20)
        engine = Engine(gemma, store, store_policy=StorePolicy(rules=rules, generated_tokens=1, **options), loads=False)
        engine.run(engine.admit("a", prompt(1, 200)), 210)
        engine.flush()
        running = dict(engine.offload.stats().bytes_by_kind)
        engine.offload.release(0)
        engine.flush()
        ended = dict(engine.offload.stats().bytes_by_kind)
        hit = engine.settle(engine.admit("b", prompt(1, 200)))
        engine.close()
        return [(by.get(("stored", full), 0), by.get(("stored", window), 0)) for by in (running, ended)], hit

    ((whole, one_window), (same, two_windows)), hit = stored({})
    assert hit == 192
    assert whole == same > 0
    assert one_window < two_windows < 2 * one_window  # what they have in common is put once
    assert stored({(Event.COMMITTED, full): Action.KEEP})[0] == [(0, one_window), (whole, two_windows)]
    assert stored({(Event.COMMITTED, window): Action.KEEP})[0] == [(whole, 0), (whole, one_window)]
    assert stored({(Event.FINISHED, window): Action.KEEP})[0] == [(whole, one_window), (whole, one_window)]
    assert stored({}, prompt_ends=False, junctions=False)[0] == [(whole, 0), (whole, one_window)]
    assert stored({}, every_tokens=64)[0] == [(whole, 3 * one_window), (whole, 2 * one_window + two_windows)]
    ((_, slid), _), hit = stored({(Event.OUT_OF_WINDOW, window): Action.STORE}, prompt_ends=False)
    assert slid > 3 * one_window
    dropped = {(Event.FINISHED, full): Action.DROP}
    assert stored(dropped)[1] == 0
    assert stored({(Event.OUT_OF_WINDOW, window): Action.DROP})[1] == 0
    for rules, message in (
        ({(Event.OUT_OF_WINDOW, full): Action.STORE}, "full_attention block has no event out_of_window"),
        ({(Event.FINISHED, Kind.CROSS_ATTENTION): Action.STORE}, "cross_attention block has no event finished"),
        ({(Event.COMMITTED, full): Action.DROP}, "cannot be dropped when it is committed"),
        ({(Event.EVICTED, full): Action.KEEP}, "evicted cannot be kept"),
    ):
        with pytest.raises(ConfigError, match=message):
            StorePolicy(rules=rules)


@pytest.mark.parametrize("layerwise", [False, True])
def test_compute_waits_for_what_is_still_being_copied(layerwise, monkeypatch):
    """With a device copies go on after the row is ready: each layer is waited for, or all of them at once."""
    store = host(16 << 20)
    first = Engine(LAYOUTS["gemma"], store)
    first.run(first.admit("a", prompt(1, 200)), 200)
    first.offload.release(0)
    first.flush()
    first.close()
    waits = []
    engine = Engine(LAYOUTS["gemma"], store, layerwise=layerwise)
    into = engine.transfers._copies.into

    class Late(Copied):
        def wait(self, part=None):
            waits.append(part)

    monkeypatch.setattr(engine.transfers._copies, "into", lambda parts: (into(parts), Late())[1])
    row = engine.admit("b", prompt(1, 200))
    assert engine.settle(row) == 192
    if not layerwise:
        assert set(waits) == {None}
        engine.offload.wait_layer(0)
        assert set(waits) == {None}
    else:
        assert not waits
        layers = sorted(layer.index for layer in LAYOUTS["gemma"].layers)
        for layer in layers:
            engine.offload.wait_layer(layer)
        assert None not in waits
        assert len(waits) >= len(layers)  # every layer was waited for, in each transfer that has it
        engine.offload.preempt(row)  # its blocks may go to a row whose step waits for other layers
        assert waits[-1] is None
    engine.close()
    store.close()


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "images"])
def test_blocks_can_be_stored_when_the_device_evicts_them(name):
    store = host(16 << 20)
    kinds = {layer.spec.kind for layer in LAYOUTS[name].layers if layer.spec is not None} - {Kind.CROSS_ATTENTION}
    on_evict = {
        (event, kind): Action.STORE if event is Event.EVICTED else Action.KEEP
        for event, kind in DEFAULT_RULES
        if kind in kinds and event is not Event.OUT_OF_WINDOW
    }
    engine = Engine(LAYOUTS[name], store, store_policy=StorePolicy(rules=on_evict), pages=80, loads=False)
    engine.run(engine.admit("a", prompt(1, 200)), 210)
    engine.offload.release(0)
    engine.flush()
    assert store.stats().num_values == 0
    hit = engine.settle(engine.admit("again", prompt(1, 200)))
    engine.offload.release(0)
    assert hit > 100
    for seed in range(2, 50):  # others, until nothing of the first prompt is left
        row = engine.admit("b", prompt(seed, 150))
        engine.run(row, 150)
        engine.offload.release(row)
        engine.flush()
    assert engine.manager.admit("c", prompt(1, 200)).num_cached_tokens == 0
    assert not engine.offload.stats().counts.get("evicted_dropped")
    engine.close()
    another = Engine(LAYOUTS[name], store)
    row = another.admit("a", prompt(1, 200))
    assert another.settle(row) == hit
    another.run(row, 200)
    another.close()
    store.close()


def test_what_was_stored_before_is_not_stored_again_when_it_is_evicted():
    store = host(16 << 20)
    rules = {(Event.EVICTED, kind): Action.STORE for kind in (Kind.FULL_ATTENTION, Kind.SLIDING_WINDOW)}
    engine = Engine(LAYOUTS["gemma"], store, store_policy=StorePolicy(rules=rules), pages=40, loads=False)
    engine.run(engine.admit("a", prompt(1, 200)), 200)
    engine.offload.release(0)
    engine.flush()
    before = engine.offload.stats().bytes_by_kind["stored", Kind.FULL_ATTENTION]
    engine.manager.on_evict(lambda blocks: (seen.extend(blocks), engine.offload._storing.evicted(blocks)))
    seen = []
    row = engine.admit("b", prompt(2, 400))
    engine.run(row, 400)
    assert any(blocks.group == "full_attention" for blocks in seen)
    engine.flush()
    stored = engine.offload.stats().bytes_by_kind["stored", Kind.FULL_ATTENTION]
    assert stored - before == before * 25 // 12  # the second prompt's 25 blocks, and none of the first one's 12
    engine.close()
    store.close()


def test_groups_that_are_stored_at_different_events_are_each_stored_whole():
    layout = layout_of("mixed", (2, MLA(32, 16, "float16")), (2, FullAttention(2, 16, 16)))
    store = host(16 << 20)
    policy = StorePolicy(rules={(Event.COMMITTED, Kind.MLA): Action.KEEP})
    first = Engine(layout, store, store_policy=policy)
    first.run(first.admit("a", prompt(1, 200)), 200)
    first.flush()
    assert ("stored", Kind.MLA) not in first.offload.stats().bytes_by_kind
    first.offload.release(0)
    first.flush()
    first.close()
    second = Engine(layout, store)
    assert second.settle(second.admit("b", prompt(1, 200))) == 192
    second.close()
    store.close()


def test_what_a_store_did_not_take_is_put_again(monkeypatch):
    monkeypatch.setattr("kvtide.offload.breaker._FIRST_REST_S", 0.0)
    store = AwkwardStore(host(16 << 20))
    rules = {(Event.COMMITTED, kind): Action.KEEP for kind in (Kind.FULL_ATTENTION, Kind.SLIDING_WINDOW)}
    first = Engine(LAYOUTS["gemma"], store, store_policy=StorePolicy(rules=rules))
    first.run(first.admit("a", prompt(1, 200)), 200)
    store.failing = True
    first.offload.preempt(0)
    first.flush()
    store.failing = False
    first.resume(0)  # the device still has it
    first.settle(0)
    first.run(0, 205)
    first.offload.release(0)
    first.flush()
    first.close()
    second = Engine(LAYOUTS["gemma"], store)
    assert second.settle(second.admit("b", prompt(1, 200))) == 192
    second.close()
    store.close()


@pytest.mark.parametrize("eviction", ["lru", "s3fifo", "arc"])
def test_a_full_store_keeps_the_beginnings_of_prompts(eviction):
    """The prompt that lost half of itself to the others lost its end, so that the rest is still of use."""

    def run_four(store):
        for seed in range(4):
            engine = Engine(LAYOUTS["full"], store)
            row = engine.admit(f"{seed}", prompt(seed, 200))
            engine.settle(row)
            engine.run(row, 200)
            engine.flush()
            engine.offload.release(row)
            engine.flush()
            engine.close()

    large = host(64 << 20)
    run_four(large)
    store = HostConnector(HostConfig(max_bytes=large.stats().num_bytes * 7 // 8, eviction=eviction))
    run_four(store)
    served = []
    for seed in range(4):
        engine = Engine(LAYOUTS["full"], store, stores=False)
        served.append(engine.settle(engine.admit(f"{seed}", prompt(seed, 200))))
        engine.close()
    assert sorted(served)[1:] == [192] * 3
    assert 64 <= min(served) <= 128
    large.close()
    store.close()


@pytest.mark.parametrize("restarts", [False, True])
def test_windows_are_stored_where_prompts_part(restarts):
    """Two prompts begin with the same 100 tokens; where they parted, the third one hits."""
    store = host(16 << 20)
    engine = Engine(LAYOUTS["gemma"], store)
    for number, name in enumerate("ab"):
        row = engine.admit(name, prompt(1, 100) + prompt(10 + number, 100))
        engine.settle(row)
        engine.run(row, 200)
        engine.offload.release(row)
        engine.flush()
        if restarts:
            engine.close()
            engine = Engine(LAYOUTS["gemma"], store)
    third = Engine(LAYOUTS["gemma"], store)
    assert third.settle(third.admit("c", prompt(1, 100) + prompt(12, 100))) == 96
    third.close()
    engine.close()
    store.close()


def test_windows_are_stored_where_the_engine_says_that_turns_end():
    store = host(16 << 20)
    engine = Engine(LAYOUTS["gemma"], store)
    engine.run(engine.admit("a", prompt(2, 100) + prompt(20, 100), turn_ends=[100]), 200)
    engine.flush()
    second = Engine(LAYOUTS["gemma"], store)
    assert second.settle(second.admit("b", prompt(2, 100) + prompt(21, 100))) == 96
    second.close()
    engine.close()
    store.close()


def test_what_the_device_still_has_is_not_loaded():
    store = host(16 << 20)
    engine = Engine(LAYOUTS["gemma"], store)
    engine.run(engine.admit("a", prompt(1, 200)), 200)
    engine.offload.release(0)
    engine.flush()
    full, window = (engine.manager.group(name) for name in ("full_attention", "sliding_window"))
    engine.manager.forget(window.name, window.table.to_entries(engine.manager.pool.evictable_blocks(window.number)))
    row = engine.admit("b", prompt(1, 200))
    assert engine.settle(row) == 192
    by_kind = engine.offload.stats().bytes_by_kind
    assert by_kind["store", Kind.SLIDING_WINDOW] > 0
    assert ("store", full.fmt.group.spec.kind) not in by_kind
    engine.run(row, 205)
    engine.close()
    store.close()


def test_prompts_with_images_that_nobody_named_share_nothing_across_processes():
    store = host(16 << 20)
    for name in "ab":
        engine = Engine(LAYOUTS["images"], store)
        row = engine.admit(name, prompt(1, 200), image_tokens=20)
        assert engine.settle(row) == 0
        engine.run(row, 205)
        engine.offload.release(row)
        engine.flush()
        engine.close()
    store.close()


def test_a_drafter_that_recomputes_the_last_block_gets_a_hit_one_block_shorter():
    for layout in ("full", "gemma"):
        store = host(16 << 20)
        first = Engine(LAYOUTS[layout], store, drop_last_block=True)
        first.run(first.admit("a", prompt(1, 200)), 200)
        first.offload.release(0)
        first.flush()
        first.close()
        second = Engine(LAYOUTS[layout], store, drop_last_block=True)
        row = second.admit("b", prompt(1, 200))
        assert second.settle(row) == 192 - second.manager.load_step
        second.run(row, 205)
        second.close()
        store.close()


def test_requests_for_the_same_prefix_load_it_once():
    store = host(16 << 20)
    first = Engine(LAYOUTS["gemma"], store)
    first.run(first.admit("a", prompt(1, 200)), 200)
    first.offload.release(0)
    first.flush()
    first.close()
    second = Engine(LAYOUTS["gemma"], store)
    rows = [second.admit(name, prompt(1, 200)) for name in "bcd"]
    assert [second.settle(row) for row in rows] == [192, 192, 192]
    assert second.offload.stats().tokens["store"] == 192
    for row in rows:
        second.run(row, 205)
    second.close()
    # Also when the one that loads is aborted, and when there is nothing to load.
    gate = AwkwardStore(store)
    third = Engine(LAYOUTS["gemma"], gate)
    gate.gate.clear()
    rows = [third.admit(name, prompt(1, 200)) for name in "bcd"]
    third.offload.poll()
    third.offload.abort("b")
    gate.gate.set()
    assert [third.settle(row) for row in rows[1:]] == [192, 192]
    rows = [third.admit(name, prompt(5, 200)) for name in "ef"]
    assert [third.settle(row) for row in rows] == [0, 0]
    third.close()
    assert gate.open_leases == 0
    store.close()


def test_a_load_and_a_window_larger_than_staging_go_through_it_in_turns():
    store = host(16 << 20)
    staging = 16 << 12
    first = Engine(LAYOUTS["gemma"], store, staging_bytes=staging)
    first.run(first.admit("a", prompt(1, 500)), 500)
    first.offload.release(0)
    first.flush()
    first.close()
    second = Engine(LAYOUTS["gemma"], store, staging_bytes=staging)
    row = second.admit("b", prompt(1, 500))
    assert second.settle(row) == 496
    assert second.transfers.counts["get_hit_bytes"] > staging
    second.run(row, 505)
    second.close()
    store.close()


def test_no_more_is_held_than_allowed_and_the_rest_is_stored_later():
    store = AwkwardStore(host(16 << 20))
    engine = Engine(LAYOUTS["full"], store, max_held_bytes=40_000, staging_bytes=1 << 14)
    store.gate.clear()  # nothing leaves staging
    row = engine.admit("a", prompt(1, 500))
    engine.offload._loads = False
    engine.run(row, 300) if engine.offload.ready(row) else None
    store.gate.set()
    engine.settle(row)
    store.gate.clear()
    engine.run(row, 400)
    assert 0 < engine.offload.stats().held_bytes <= 40_000
    assert engine.offload.stats().counts["put_over_hold_bound"] > 0
    store.gate.set()
    while int(engine.manager.committed[row]) < 550:
        engine.flush()
        engine.run(row, int(engine.manager.committed[row]) + 5)
    engine.flush()
    engine.offload.release(row)
    engine.flush()
    engine.close()
    second = Engine(LAYOUTS["full"], store)
    assert second.settle(second.admit("b", prompt(1, 500))) == 496
    second.close()
    store.close()


@pytest.mark.parametrize("lost", ["full_attention", "sliding_window"])
def test_what_did_not_arrive_is_computed_and_no_more(lost):
    """Values vanish between look-up and load."""
    store = host(16 << 20)
    first = Engine(LAYOUTS["gemma"], store, store_policy=StorePolicy(every_tokens=64))
    first.run(first.admit("a", prompt(1, 200)), 200)
    first.offload.release(0)
    first.flush()
    first.close()
    second = Engine(LAYOUTS["gemma"], store)
    row = second.admit("b", prompt(1, 200))
    load = second.offload._active[row]
    while load.look_up.statuses is None:
        pass
    # The last block of the group, of the longest length.
    group = second.manager.group(lost)
    (chain,) = second.manager.keys(row, 11, 12)
    space = second.offload._plan._cuts[group.number][0].spaces[0][0]
    load.look_up.close()
    assert store.delete([space + chain]) == [Status.DELETED]
    # The windows at 128 are the longest that are left; full attention up to 192 stays on the device.
    assert second.settle(row) == 128
    assert second.offload.stats().counts["load_miss"] == 1
    again = second.manager.blocks_of(row, "full_attention", np.arange(11 * 16 // 16))
    assert (again >= 0).all()
    second.run(row, 205)
    second.close()
    store.close()


def test_close_in_the_middle_of_everything_and_release_afterwards():
    store = AwkwardStore(host(16 << 20))
    engine = Engine(LAYOUTS["gemma"], store)
    engine.run(engine.admit("a", prompt(1, 200)), 200)
    engine.flush()
    store.gate.clear()
    engine.admit("b", prompt(1, 100) + prompt(2, 100))
    engine.run(0, 230)
    engine.offload.poll()
    assert not engine.offload.close(0.05)  # the store hangs
    assert engine.offload.stats().held_bytes == 0
    store.gate.set()
    engine.offload.abort("b")
    engine.offload.release(0)
    engine.manager.check()
    assert engine.manager.pool.refs.sum() == 0


def four_headed_state():
    return RecurrentState((Component("conv", (4, 4), "float32"), Component("ssm", (4, 8), "float32")), max_shards=4)


# -- ranks ------------------------------------------------------------------------------------------------------------


def rank_of(layout, store, rank, size, **options):
    share = layout.shard(size) if size > 1 else layout
    return Engine(share, store, full_layout=layout, tp_rank=rank, tp_size=size, **options)


def write_from(layout, store, size, tokens):
    """All ranks of a TP size compute a prompt; returns the bytes that each stored."""
    written = []
    for rank in range(size):
        engine = rank_of(layout, store, rank, size)
        engine.settle(engine.admit("a", tokens))
        engine.run(0, len(tokens) + 1, most=16)
        engine.offload.release(0)
        engine.flush()
        written.append(
            {kind: n for (tier, kind), n in engine.offload.stats().bytes_by_kind.items() if tier == "stored"}
        )
        engine.close()
    return written


def test_ranks_share_what_every_rank_holds_and_keep_their_heads_apart():
    layout = layout_of("mixed", (2, MLA(32, 16, "float16")), (2, FullAttention(2, 16, 16)))
    store = host(16 << 20)
    first, second = write_from(layout, store, 2, prompt(1, 200))
    assert first[Kind.MLA] > 0
    assert Kind.MLA not in second
    assert first[Kind.FULL_ATTENTION] == second[Kind.FULL_ATTENTION] > 0
    for rank in range(2):
        engine = rank_of(layout, store, rank, 2)
        assert engine.settle(engine.admit("a", prompt(1, 200))) == 192
        engine.run(0, 205)
        engine.close()
    store.close()


def test_of_ranks_that_hold_the_same_heads_one_writes():
    layout = layout_of("few-heads", (2, FullAttention(2, 16, 16)))
    store = host(16 << 20)
    written = write_from(layout, store, 4, prompt(1, 100))
    assert [bool(rank) for rank in written] == [True, False, True, False]
    # Two ranks of the same model hold the same shares, so they read the same values.
    for rank in range(2):
        engine = rank_of(layout, store, rank, 2)
        assert engine.settle(engine.admit("a", prompt(1, 100))) == 96
        engine.close()
    store.close()


@pytest.mark.parametrize("name", ["heads", "states"])
def test_what_four_ranks_wrote_two_ranks_and_one_read_head_by_head(name):
    spec = SlidingWindow(4, 8, 16, window=40)
    layout = layout_of("heads", (2, FullAttention(4, 8, 16)), (3, spec), (1, MLA(32, 16, "float16")))
    if name == "states":
        layout = layout_of("state-heads", (1, FullAttention(4, 8, 16)), (2, four_headed_state()))
    store = host(16 << 20)
    write_from(layout, store, 4, prompt(1, 200))
    for size in (2, 1):
        for rank in range(size):
            engine = rank_of(layout, store, rank, size, stores=False)
            assert engine.settle(engine.admit("a", prompt(1, 200))) == 0  # nobody told it
            engine.close()
            engine = rank_of(layout, store, rank, size, read_tp_sizes=[4])
            assert engine.settle(engine.admit("a", prompt(1, 200))) == 192
            engine.run(0, 205)
            engine.close()
    # Some blocks in the own cut, some in the finer one.
    write_from(layout, store, 2, prompt(1, 100))
    engine = rank_of(layout, store, 1, 2, read_tp_sizes=[4])
    assert engine.settle(engine.admit("a", prompt(1, 200))) == 192
    engine.run(0, 205)
    engine.close()
    with pytest.raises(ConfigError, match="read_tp_sizes has 1, whose values are coarser than those of 2"):
        rank_of(layout, store, 0, 2, read_tp_sizes=[1])
    store.close()


def test_a_share_that_is_none_of_the_whole_is_an_error():
    layout = layout_of("heads", (2, FullAttention(4, 8, 16)))
    store = host()
    with pytest.raises(ConfigError, match="is not the share of one of 4 ranks"):
        Engine(layout.shard(2), store, full_layout=layout, tp_rank=0, tp_size=4)
    with pytest.raises(ConfigError, match="tp_rank 2 must be from 0 to 1"):
        Engine(layout.shard(2), store, full_layout=layout, tp_rank=2, tp_size=2)
    store.close()
