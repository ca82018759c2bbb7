"""Offload in the simulated engine: conservation under every policy, links and latencies, tiers against plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import layout_of

from kvtide.kvcache import ConfigError, FullAttention, SlidingWindow
from kvtide.offload.policies import StorePolicy
from kvtide.offload.store import Status
from kvtide.offload.transfers import Value
from kvtide.offload.values import HEADER_BYTES
from kvtide.sims.serving.build import Deployment
from kvtide.sims.serving.engine import Engine, Run
from kvtide.sims.serving.gpus import GPUS
from kvtide.sims.serving.offloading import Offload, store_policy_of
from kvtide.sims.serving.tiers import TierSpec, TierStack, parse_tier
from kvtide.sims.serving.transfers import VirtualTransfers
from kvtide.sims.serving.work import estimate_work
from kvtide.sims.traces import Request

LAYOUT = replace(
    layout_of("tiny", (2, FullAttention(2, 64, 64)), (4, SlidingWindow(2, 64, 64, window=128))), max_model_len=2048
)
FULL = replace(layout_of("full", (4, FullAttention(2, 64, 64))), max_model_len=2048)
HOST = TierSpec("host", 1 << 30, 20e9, 1e-5)
BLOCK = 16


def deployment(**changes: Any) -> Deployment:
    base = Deployment(
        LAYOUT,
        estimate_work(LAYOUT, 1e9),
        GPUS["l4"],
        max_num_seqs=8,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=10 << 20,
    )
    return replace(base, **changes)


def prompts(shapes: Sequence[tuple[float, int, int, int]]) -> list[Request]:
    """Requests of (arrival, prefix number, prompt, output): equal numbers share three quarters of the shorter one."""
    return [
        Request(
            str(i),
            arrival,
            prompt,
            output,
            hash_ids=tuple(range(1000 * prefix, 1000 * prefix + prompt * 3 // 4 // BLOCK)),
            hash_block=BLOCK,
        )
        for i, (arrival, prefix, prompt, output) in enumerate(shapes)
    ]


def check(engine: Engine, run: Run, plan: Deployment, requests: Sequence[Request]) -> None:
    """What holds after any run."""
    assert sorted((item.request_id, item.input_tokens, item.output_tokens) for item in run.served) == sorted(
        (request.request_id, request.input_tokens, request.output_tokens) for request in requests
    )
    for item in run.served:
        assert item.arrival_s <= item.admitted_s < item.first_token_s <= item.last_token_s
        assert 0 <= item.loaded_tokens <= item.hit_tokens < item.input_tokens
    times = [sample.time_s for sample in run.samples]
    assert times == sorted(times)
    pool = plan.pool_bytes() // plan.geometry().page_bytes * plan.geometry().page_bytes
    assert {sum(sample.memory) for sample in run.samples} == {pool}
    for use in (*(use for sample in run.samples for use in sample.offload), *run.offload):
        for tier in use.tiers:
            assert sum(tier.bytes_by_kind.values()) + tier.free_bytes == tier.capacity
            assert min(tier.bytes_by_kind.values(), default=0) >= 0
            assert tier.free_bytes >= 0
            assert tier.written_bytes - tier.evicted_bytes == tier.capacity - tier.free_bytes
        assert sum(use.tier_tokens) == pytest.approx(use.loaded_tokens)
    for scheduler in engine.schedulers:
        scheduler.manager.check()
        offload = scheduler.offload
        assert offload is not None
        offload.transfers.now = float("inf")
        offload.poll()
        assert offload.transfers.staging_bytes_free == offload.transfers.staging_bytes
        assert offload.usage().held_bytes == 0
        assert not offload.transfers.stack.in_use
        assert sum(scheduler.manager.stats()[:2]) == 0  # nothing is held any more


tiers = st.lists(
    st.builds(
        TierSpec,
        st.just("x"),
        st.sampled_from([1, 100_000, 1 << 20, 8 << 20, 1 << 30]),
        st.sampled_from([1e8, 2e9, 50e9]),
        st.sampled_from([0.0, 1e-5, 0.02]),
        st.sampled_from(["lru", "s3fifo", "arc"]),
        st.sampled_from([1, 2]),
    ),
    min_size=1,
    max_size=2,
).map(lambda specs: tuple(replace(spec, name=f"t{number}") for number, spec in enumerate(specs)))
shapes = st.lists(
    st.tuples(st.floats(0, 2), st.integers(0, 3), st.integers(1, 900), st.integers(1, 60)), min_size=1, max_size=14
)


@given(
    shapes=shapes,
    tiers=tiers,
    preemption=st.sampled_from(["recompute", "swap", "auto"]),
    only_swap=st.booleans(),
    write=st.sampled_from(["write_through", "write_on_evict"]),
    windows=st.sampled_from([None, "none", "every:64", "prompt_ends,junctions"]),
    rules=st.sampled_from([(), ("evicted:full_attention=store", "committed:full_attention=keep")]),
    layout=st.sampled_from([LAYOUT, FULL]),
    ahead=st.booleans(),
    scheduling=st.sampled_from(["fcfs", "priority"]),
)
@settings(max_examples=60)
def test_what_goes_in_comes_out_under_every_policy(
    shapes: list[tuple[float, int, int, int]],
    tiers: tuple[TierSpec, ...],
    preemption: str,
    only_swap: bool,
    write: str,
    windows: str | None,
    rules: tuple[str, ...],
    layout: Any,
    ahead: bool,
    scheduling: str,
) -> None:
    offload = Offload(
        tiers, store_policy_of(windows, rules), write, preemption, only_swap and preemption != "recompute"
    )
    plan = deployment(
        layout=layout,
        offload=offload,
        async_scheduling=ahead,
        scheduling_policy=scheduling,
        kv_cache_memory_bytes=(6 if layout is LAYOUT else 5) << 20,
    )
    requests = prompts(shapes)
    engine = plan.engine(seed=3)
    check(engine, engine.run(requests), plan, requests)


def serve(plan: Deployment, requests: Sequence[Request]) -> Run:
    engine = plan.engine()
    run = engine.run(requests)
    if plan.offload:
        check(engine, run, plan, requests)
    return run


# Three prompts that flush each other out of the device, then all of them again; far enough apart to run alone.
AGAIN = prompts([(20.0 * i, i % 3, 1800, 20) for i in range(6)])


def test_what_the_device_lost_is_loaded() -> None:
    """Five MiB hold 2,560 tokens; a prompt that comes again hits its shared part in host memory."""
    plan = deployment(layout=FULL, kv_cache_memory_bytes=5 << 20)
    without = serve(plan, AGAIN)
    assert sum(item.hit_tokens for item in without.served) == 0
    run = serve(replace(plan, offload=Offload((HOST,))), AGAIN)
    shared = 1800 * 3 // 4 // BLOCK * BLOCK
    assert [item.loaded_tokens for item in run.served] == [0] * 3 + [shared] * 3
    for before, after in zip(without.served[3:], run.served[3:], strict=True):
        assert after.ttft_s < before.ttft_s / 2
    assert run.computed_tokens == without.computed_tokens - 3 * shared
    (use,) = run.offload
    assert use.loaded_tokens == 3 * shared
    assert use.tiers[0].read_bytes == 3 * shared // BLOCK * (BLOCK * FULL.bytes_per_token + HEADER_BYTES)


def test_a_load_takes_its_time_and_others_run_meanwhile() -> None:
    """2.6 MiB at 10 MB/s take a quarter of a second; the latency comes on top; a request behind it is not kept."""
    slow = replace(HOST, bandwidth=10e6, latency_s=0.25)
    plan = deployment(layout=FULL, kv_cache_memory_bytes=5 << 20, offload=Offload((slow,), preemption="swap"))
    requests = [*AGAIN[:4], Request("other", 60.01, 100, 2)]
    run = serve(plan, requests)
    loaded, other = run.served[-1], run.served[-2]
    size = loaded.loaded_tokens * FULL.bytes_per_token
    assert loaded.loaded_tokens > 1000
    assert loaded.admitted_s - loaded.arrival_s == pytest.approx(size / 10e6 + 0.25, rel=0.01)
    assert other.request_id == "other"
    assert other.last_token_s < loaded.admitted_s


def test_a_producer_only_stores() -> None:
    plan = deployment(layout=FULL, kv_cache_memory_bytes=5 << 20, offload=Offload((HOST,), loads=False))
    (use,) = serve(plan, AGAIN).offload
    assert use.stored_bytes > 0
    assert use.loaded_tokens == 0
    with pytest.raises(ConfigError, match="must be kv_both"):
        Offload((HOST,), preemption="swap", loads=False)


def test_what_is_faster_to_compute_is_not_loaded() -> None:
    slow = replace(HOST, bandwidth=10e6)
    plan = deployment(layout=FULL, kv_cache_memory_bytes=5 << 20, offload=Offload((slow,)))
    run = serve(plan, AGAIN)
    assert sum(item.loaded_tokens for item in run.served) == 0
    assert run.offload[0].counts["load_not_worth_it"] >= 3


PREEMPTING = prompts([(0.01 * i, i, 300, 700) for i in range(8)])


@pytest.mark.parametrize("bandwidth", [20e9, 1e6])
def test_swapping_and_recomputation(bandwidth: float) -> None:
    """A fast link makes swapping the better one, and `auto` takes it; a slow one the worse, and `auto` does not."""
    plan = deployment(layout=FULL, kv_cache_memory_bytes=10 << 20)
    tier = (TierSpec("swap", 1 << 30, bandwidth),)
    again = serve(plan, PREEMPTING)
    swap = serve(replace(plan, offload=Offload(tier, preemption="swap", only_swap=True)), PREEMPTING)
    auto = serve(replace(plan, offload=Offload(tier, preemption="auto", only_swap=True)), PREEMPTING)
    assert again.preemptions
    assert swap.offload[0].swapped_out == swap.preemptions > 0
    assert swap.computed_tokens < again.computed_tokens
    assert swap.offload[0].stalled_s > 0
    is_fast = bandwidth > 1e9
    assert (swap.makespan_s < again.makespan_s) is is_fast
    assert (auto.offload[0].swapped_out > 0) is is_fast
    assert auto.makespan_s <= min(swap.makespan_s, again.makespan_s) * 1.01


def test_a_latent_is_stored_once_and_heads_by_every_rank() -> None:
    """The size of a tier is for the whole engine: four ranks have a quarter of it each for their heads."""
    wide = replace(layout_of("wide", (2, FullAttention(4, 64, 64))), max_model_len=2048)
    plan = deployment(layout=wide, parallel=replace(deployment().parallel, tensor=4), offload=Offload((HOST,)))
    (use,) = serve(plan, AGAIN).offload
    assert use.tiers[0].capacity == HOST.capacity // 4


def test_where_windows_are_stored_decides_where_prefixes_are_hit() -> None:
    """Prompts that share 768 tokens part there. Stored at junctions it is hit from the third on, else never."""
    requests = prompts([(20.0 * i + 1, 0, 1024, 20) for i in range(4)])
    flushers = [replace_id(request) for request in prompts([(5.0 * i, 100 + i, 1900, 1) for i in range(16)])]
    both = sorted([*requests, *flushers], key=lambda request: request.arrival_s)
    hits = {}
    for windows in ("none", "prompt_ends", "junctions", "every:256"):
        plan = deployment(kv_cache_memory_bytes=6 << 20, offload=Offload((HOST,), store_policy_of(windows)))
        run = serve(plan, both)
        hits[windows] = [item.hit_tokens for item in run.served if not item.request_id.startswith("f")]
    assert hits["none"] == hits["prompt_ends"] == [0] * 4
    assert hits["junctions"] == [0, 0, 768, 768]
    assert hits["every:256"] == [0, 768, 768, 768]


def replace_id(request: Request) -> Request:
    return request._replace(request_id="f" + request.request_id)


# -- tiers and transfers ----------------------------------------------------------------------------------------------


def values_of(*sizes: int, start: int = 0) -> list[Value]:
    return [Value((start + i).to_bytes(32, "big"), ((0, size),), (0,)) for i, size in enumerate(sizes)]


def stack_of(*specs: TierSpec, write: str = "write_through") -> TierStack:
    return TierStack(specs, [spec.capacity for spec in specs], {0: "full_attention"}, write)


def test_links_carry_one_transfer_after_another() -> None:
    """100 MB at 1 GB/s are 0.1 s; the second put waits for the first, a get does not: the other way is free."""
    moves = VirtualTransfers(stack_of(TierSpec("a", 10**9, 1e9, 0.01)))
    first, second = moves.put(values_of(10**8)), moves.put(values_of(10**8, start=1))
    assert first is not None
    assert second is not None
    assert moves.next_event_s == pytest.approx(0.11)
    moves.now = 0.12
    moves.poll()
    assert first.released
    assert first.statuses == [Status.STORED]
    assert not second.released
    got, count = moves.get(values_of(10**8))
    assert count == 1
    assert got is not None
    assert got.done_s == pytest.approx(0.12 + 0.1 + 0.01)
    moves.now = 0.3
    moves.poll()
    assert got.statuses == [Status.HIT]
    assert second.statuses == [Status.STORED]
    assert moves.next_event_s is None


def test_a_put_is_released_before_the_lower_tier_has_it() -> None:
    moves = VirtualTransfers(stack_of(TierSpec("a", 10**9, 1e9), TierSpec("b", 10**9, 1e8)), staging_bytes=10**8)
    put = moves.put(values_of(10**7))
    assert put is not None
    moves.now = 0.05
    moves.poll()
    assert put.released
    assert put.statuses is None
    assert moves.put(values_of(95 * 10**6, start=1)) is None  # staging is still taken
    moves.now = 0.1
    moves.poll()
    assert put.statuses == [Status.STORED]
    assert moves.staging_bytes_free == 10**8


def test_waiting_for_copies_stalls_the_next_step() -> None:
    moves = VirtualTransfers(stack_of(TierSpec("a", 10**9, 1e9)))
    with moves.waiting():
        put = moves.put(values_of(10**8))
    assert put is not None
    assert put.released
    assert moves.stalled_until == pytest.approx(0.1)


def test_what_a_lease_holds_is_not_evicted() -> None:
    size = 1000 + HEADER_BYTES
    stack = stack_of(TierSpec("a", 2 * size, 1e9, eviction="lru"))
    moves = VirtualTransfers(stack)
    stack.write(values_of(1000, 1000))
    look = moves.look_up([value.key for value in values_of(1000)])
    assert look.statuses == [Status.HIT]
    stack.write(values_of(1000, start=2))
    assert [stack.where(value.key) for value in values_of(1, 1, 1)] == [0, None, 0]
    look.close()
    look.close()
    stack.write(values_of(1000, start=3))
    assert stack.where(values_of(1)[0].key) is None  # now it is the oldest
    assert not stack.in_use


operations = st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=80)


@given(operations=operations, room=st.integers(1, 6), below=st.integers(1, 6))
def test_two_lru_tiers_against_lists(operations: list[tuple[bool, int]], room: int, below: int) -> None:
    """Write on evict, as two plain lists: the oldest of the first goes to the second; a read copies back up."""
    size = 100 + HEADER_BYTES
    specs = (
        TierSpec("a", room * size, 1e9, eviction="lru"),
        TierSpec("b", below * size, 1e9, eviction="lru"),
    )
    stack = stack_of(*specs, write="write_on_evict")
    upper: list[int] = []
    lower: list[int] = []

    def insert(key: int) -> None:
        if key in upper:
            return
        if len(upper) == room:
            gone = upper.pop(0)
            if gone not in lower:
                if len(lower) == below:
                    lower.pop(0)
                lower.append(gone)
        upper.append(key)

    for is_read, key in operations:
        (value,) = values_of(100, start=key)
        if not is_read:
            stack.write([value])
            insert(key)
            continue
        stack.read([value.key])
        if key in upper:
            upper.remove(key)
            upper.append(key)
        elif key in lower:
            lower.remove(key)
            lower.append(key)
            insert(key)
    names = [value.key for value in values_of(*[1] * 13)]
    assert [key for key in range(13) if names[key] in stack.tiers[0]] == sorted(upper)
    assert [key for key in range(13) if names[key] in stack.tiers[1]] == sorted(lower)


def test_admission_keeps_out_what_is_used_once() -> None:
    stack = stack_of(TierSpec("a", 10**6, 1e9, min_uses=2))
    assert stack.write(values_of(10)) == [Status.REFUSED]
    assert stack.write(values_of(10)) == [Status.STORED]
    assert stack.write(values_of(10)) == [Status.PRESENT]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host:64GB:50GB/s", TierSpec("host", 64 * 10**9, 50e9)),
        ("host:64GiB:50GiB/s:10us", TierSpec("host", 64 * 2**30, 50 * 2**30, 10 * 1e-6)),
        ("disk:1TB:7GB/s:2ms:eviction=arc:min_uses=2", TierSpec("disk", 10**12, 7e9, 2e-3, "arc", 2)),
    ],
)
def test_tiers_are_written_like_this(text: str, expected: TierSpec) -> None:
    found = parse_tier(text)
    assert found == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host", "must be NAME:SIZE"),
        ("host:1GB:1GB/s:1us:2us", "must be NAME:SIZE"),
        ("host:1GB:1GB/s:size=3", "must be NAME:SIZE"),
        ("host:1GB:1GB", "must be bytes per second"),
        ("host:1GB:1GB/m", "must be bytes per second"),
        ("host:many:1GB/s", "is not a size"),
        ("host:1GB:1GB/s:soon", "must be a time"),
        ("host:1GB:1GB/s:99s", "latency of 99"),
        ("host:1GB:1GB/s:eviction=x", "is not one of lru, s3fifo, arc"),
        ("host:1GB:1GB/s:min_uses=x", "must be a whole number"),
        ("host:1GB:1GB/s:min_uses=17", "from 1 to 16"),
        ("a b:1GB:1GB/s", "must be named"),
    ],
)
def test_bad_tiers(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_tier(text)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Offload((HOST,), preemption="x"), "recompute, swap, auto"),
        (lambda: Offload((HOST,), only_swap=True), "give --preemption swap"),
        (lambda: store_policy_of("prompt_ends,every:x"), "every:x"),
        (lambda: store_policy_of(None, ["evicted:full_attention"]), "EVENT:KIND=ACTION"),
        (lambda: stack_of(), "at least one tier"),
        (lambda: stack_of(HOST, HOST), "different names"),
        (lambda: stack_of(HOST, write="x"), "write policy"),
        (lambda: deployment(offload=Offload((HOST,)), enable_prefix_caching=False).engine(), "prefix caching"),
    ],
)
def test_bad_offload(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_window_stores_as_text() -> None:
    assert store_policy_of(None) == StorePolicy()
    assert store_policy_of("none") == StorePolicy(prompt_ends=False, turn_ends=False, junctions=False)
    assert store_policy_of("turn_ends, every:512") == StorePolicy(prompt_ends=False, junctions=False, every_tokens=512)
