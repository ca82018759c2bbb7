"""What users steer in the prefix cache: pins, priorities, quotas per salt, resets; and the events that routers follow.

Two slow models judge. `Router` follows the event stream alone, as a request router would, and must know at every moment
exactly what a lookup can find. `NaiveCache` is a dictionary of cached prefixes that is sorted whenever one has to go;
the manager must have kept what it kept.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvtide.hma import AllBlocksCleared, BlockRemoved, BlockStored, HybridMemoryManager, KvEvent
from kvtide.kvcache import ConfigError, Exhausted, FullAttention, KvtideError, SlidingWindow
from kvtide.kvcache.geometry import PageGeometry
from kvtide.kvcache.specs import Component, RecurrentState

sys.path.insert(0, str(Path(__file__).parent))

from layouts import layout_of
from machine import geometries
from oracle import geometry_of
from test_accounting import OPERATIONS, OPTIONS, Traffic, operations

BLOCK = 4
BLOCK_BYTES = 16
FULL = FullAttention(1, 1, 1)  # 4 bytes per token
WINDOW = SlidingWindow(1, 1, 1, window=5)
Prefix = tuple[int, ...]


def manager_of(*specs: Any, pages: int, per_page: int = 1, **options: Any) -> HybridMemoryManager:
    """One layer of each spec, blocks of 4 tokens and 16 bytes."""
    layout = layout_of("small", *((1, spec) for spec in specs))
    names = [group.name for group in layout.groups]
    geometry = geometry_of(layout, dict.fromkeys(names, BLOCK), dict.fromkeys(names, 1), per_page)
    return HybridMemoryManager(geometry, pages * geometry.page_bytes, max_requests=4, max_model_len=256, **options)


def serve(manager: HybridMemoryManager, name: str, tokens: Sequence[int], **options: Any) -> int:
    """Admit a prompt, compute all of it, release it; returns the tokens that were cached."""
    row, hit, _ = manager.admit(name, tokens, **options)
    try:
        compute(manager, row, len(tokens) - hit)
    finally:
        manager.release(row)
    return hit


def compute(manager: HybridMemoryManager, row: int, count: int) -> None:
    manager.reserve([row], [count])
    manager.commit([row], [count])


def prompt(stem: int, blocks: int) -> list[int]:
    """Whole blocks that only this stem has, and one more token."""
    return [stem] * (BLOCK * blocks) + [0]


def hit_of(manager: HybridMemoryManager, tokens: Sequence[int], **options: Any) -> int:
    """Cached tokens of a prompt; admitted and released at once."""
    row, hit, _ = manager.admit("probe", tokens, **options)
    manager.release(row)
    return hit


# -- pins --------------------------------------------------------------------------------------------------------------


def test_a_pinned_prefix_survives_any_pressure_until_it_is_let_go() -> None:
    manager = manager_of(FULL, pages=8)
    serve(manager, "system", prompt(1, 3), priority=-3)
    pin = manager.pin(prompt(1, 3))
    assert pin.num_tokens == 12
    for stem in range(2, 30):
        serve(manager, f"r{stem}", prompt(stem, 4), priority=3)
        assert hit_of(manager, prompt(1, 3)) == 12
    with pytest.raises(Exhausted):
        serve(manager, "too long", prompt(99, 5))
    manager.check()
    manager.unpin(pin)
    serve(manager, "long", prompt(99, 7))
    assert hit_of(manager, prompt(1, 3)) == 0


def test_what_is_pinned_twice_is_held_until_both_are_let_go() -> None:
    manager = manager_of(FULL, pages=4)
    serve(manager, "a", prompt(1, 2))
    first, second = manager.pin(prompt(1, 2)), manager.pin(prompt(1, 1))
    assert (first.num_tokens, second.num_tokens) == (8, 4)
    manager.unpin(first)
    serve(manager, "b", prompt(2, 2))
    assert hit_of(manager, prompt(1, 2)) == 4
    manager.unpin(second)
    serve(manager, "c", prompt(3, 3))
    assert hit_of(manager, prompt(1, 2)) == 0


def test_letting_go_twice_is_an_error_and_changes_nothing() -> None:
    manager = manager_of(FULL, pages=8)
    serve(manager, "a", prompt(1, 2))
    pin = manager.pin(prompt(1, 2))
    manager.unpin(pin)
    with pytest.raises(KvtideError, match=f"pin {pin.number} is not held"):
        manager.unpin(pin)
    manager.check()
    assert hit_of(manager, prompt(1, 2)) == 8


def test_a_pin_of_what_is_not_cached_holds_nothing() -> None:
    manager = manager_of(FULL, pages=8)
    serve(manager, "a", prompt(1, 2), salt="tenant")
    for options in ({}, {"salt": "other"}, {"salt": "tenant", "adapter": "lora"}):
        pin = manager.pin(prompt(1, 2), **options)
        assert pin.num_tokens == 0
        assert not len(manager.pinned_blocks())
        manager.unpin(pin)
    assert manager.pin(prompt(1, 2), salt="tenant").num_tokens == 8
    assert len(manager.pinned_blocks()) == 2
    uncached = manager_of(FULL, pages=8, prefix_caching=False)
    serve(uncached, "a", prompt(1, 2))
    assert uncached.pin(prompt(1, 2)).num_tokens == 0


def test_an_unpinned_prefix_goes_from_its_tail() -> None:
    manager = manager_of(FULL, pages=8)
    serve(manager, "a", prompt(1, 4))
    manager.unpin(manager.pin(prompt(1, 4)))
    serve(manager, "b", prompt(2, 4))  # 5 blocks, of which 4 are free
    assert hit_of(manager, prompt(1, 4)) == 12


def test_a_pin_holds_what_its_length_needs_and_no_more() -> None:
    """All of the full layer, the last blocks of the window, the checkpoint."""
    state = RecurrentState((Component("s", (4,), "float32"),))
    manager = manager_of(FULL, WINDOW, state, pages=30)
    row = manager.admit("a", prompt(1, 4)).row
    compute(manager, row, 16)
    assert manager.checkpoint(row)
    manager.release(row)
    pin = manager.pin(prompt(1, 4))
    assert pin.num_tokens == 16
    assert len(manager.pinned_blocks()) == 4 + 1 + 1
    for stem in range(2, 12):
        serve(manager, f"r{stem}", prompt(stem, 10))
        assert hit_of(manager, prompt(1, 4)) == 16
    manager.check()


# -- priority ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_page", [1, 2])
@pytest.mark.parametrize("evicted", range(8))
def test_lower_priorities_go_first_whatever_their_age(evicted: int, per_page: int) -> None:
    order = [0, 3, -3, 1, -1, 2, -2]
    manager = manager_of(FULL, pages=16 // per_page, per_page=per_page)
    for priority in order:
        serve(manager, f"p{priority}", prompt(10 + priority, 2), priority=priority)
    assert manager.stats().idle_cached == 14 * BLOCK_BYTES
    row = manager.admit("pressure", [99] * 100).row
    manager.reserve([row], [BLOCK * (2 + 2 * evicted)])  # what is free, and two blocks of each that is to go
    left = [priority for priority in order if hit_of(manager, prompt(10 + priority, 2)) == 8]
    assert left == [priority for priority in order if priority >= -3 + evicted]


def test_priorities_out_of_range_are_refused() -> None:
    manager = manager_of(FULL, pages=8)
    for priority in (-4, 4):
        with pytest.raises(ConfigError, match="must be from -3 to 3"):
            manager.admit("a", [1], priority=priority)


# -- quotas ------------------------------------------------------------------------------------------------------------


def test_a_salt_over_its_quota_loses_its_own_oldest_blocks_and_nobody_else_any() -> None:
    manager = manager_of(FULL, pages=64)
    manager.set_quota("greedy", 5 * BLOCK_BYTES)
    for stem in range(4):
        serve(manager, f"other{stem}", prompt(50 + stem, 3), salt="other")
        serve(manager, f"greedy{stem}", prompt(stem, 3), salt="greedy")
    assert [hit_of(manager, prompt(stem, 3), salt="greedy") for stem in range(4)] == [0, 0, 8, 12]
    assert [hit_of(manager, prompt(50 + stem, 3), salt="other") for stem in range(4)] == [12] * 4


def test_a_quota_of_nothing_keeps_nothing_and_lifting_it_keeps_all() -> None:
    manager = manager_of(FULL, pages=64)
    manager.set_quota("a", 0)
    serve(manager, "1", prompt(1, 3), salt="a")
    assert manager.stats().free == 64 * BLOCK_BYTES
    manager.set_quota("a", None)
    serve(manager, "2", prompt(1, 3), salt="a")
    serve(manager, "3", prompt(2, 3), salt="a")
    assert manager.stats().idle_cached == 6 * BLOCK_BYTES
    manager.set_quota("a", "1KiB")
    serve(manager, "4", prompt(3, 3), salt="a")
    assert manager.stats().idle_cached == 9 * BLOCK_BYTES
    with pytest.raises(ConfigError):
        manager.set_quota("a", "much")


def test_a_block_that_another_salt_took_over_is_no_longer_counted() -> None:
    manager = manager_of(FULL, pages=4)
    manager.set_quota("a", 4 * BLOCK_BYTES)
    serve(manager, "1", prompt(1, 3), salt="a")  # three cached blocks
    serve(manager, "2", prompt(2, 3), salt="b")  # the same three, now another's
    assert hit_of(manager, prompt(2, 3), salt="b") == 12
    manager.set_quota("a", BLOCK_BYTES)
    serve(manager, "3", [7, 7], salt="a")  # caches nothing: nobody has reason to lose anything
    assert hit_of(manager, prompt(2, 3), salt="b") == 12


def test_running_requests_and_pins_do_not_count_until_they_let_go() -> None:
    manager = manager_of(FULL, pages=32)
    manager.set_quota("a", 2 * BLOCK_BYTES)
    row = manager.admit("1", prompt(1, 3), salt="a").row
    compute(manager, row, 13)
    pin = manager.pin(prompt(1, 3), salt="a")
    manager.release(row)
    assert hit_of(manager, prompt(1, 3), salt="a") == 12
    manager.unpin(pin)
    assert hit_of(manager, prompt(1, 3), salt="a") == 8


def test_window_blocks_that_die_count_too() -> None:
    manager = manager_of(FULL, WINDOW, pages=64)
    manager.set_quota("a", 2 * BLOCK_BYTES)
    rows = [manager.admit(f"{salt}", prompt(1, 8), salt=salt).row for salt in ("a", "b")]
    manager.reserve(rows, [32, 32])
    manager.commit(rows, [32, 32])
    # 7 of 8 window blocks of each row are dead, and cached.
    assert manager.stats().idle_cached == (2 + 7) * BLOCK_BYTES


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(geometry=geometries(), traffic=operations, options=st.fixed_dictionaries(OPTIONS), quota=st.integers(0, 600))
def test_idle_bytes_never_exceed_the_quota_and_only_the_salt_itself_loses(
    geometry: PageGeometry, traffic: list[tuple[str, int, int, int]], options: dict[str, Any], quota: int
) -> None:
    """A pool so large that nothing is ever evicted: what goes, goes for the quota."""
    machine = traffic_of(geometry, **{**options, "pages": 2_000}, events=True)
    manager = machine.manager
    manager.set_quota("s0", quota)
    mine: set[bytes] = set()
    for name, *numbers in traffic:
        OPERATIONS[name](machine, *numbers)
        for row in machine.rows:
            mine.update(manager._sequences.chain(row.row).keys if row.salt == "s0" else ())
        counted = sum(
            geometry.formats[manager.pool.owner[block // manager.pool.stride]].block_bytes
            for block in np.flatnonzero(manager.pool.cached & (manager.pool.refs == 0)).tolist()
            if key_of(manager, block) in mine
        )
        assert counted <= quota
        removed = [event.key for event in manager.take_events() if isinstance(event, BlockRemoved)]
        assert set(removed) <= mine
        manager.check()


def traffic_of(geometry: PageGeometry, **options: Any) -> Traffic:
    try:
        return Traffic(geometry, **options)
    except ConfigError:
        assume(False)
        raise


def key_of(manager: HybridMemoryManager, block: int) -> bytes:
    index = manager._cache.index
    return index.key_of(int(index.node_of(np.array([block]))[0]))


# -- reset -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_page", [1, 3])
def test_a_reset_forgets_what_nobody_holds(per_page: int) -> None:
    manager = manager_of(FULL, WINDOW, pages=40, per_page=per_page)
    serve(manager, "gone", prompt(1, 3))
    serve(manager, "pinned", prompt(2, 3))
    manager.pin(prompt(2, 3))
    row = manager.admit("running", prompt(3, 3)).row
    compute(manager, row, 13)
    manager.reset_cache()
    manager.check()
    assert manager.stats().idle_cached == (3 + 1) * BLOCK_BYTES  # the pin's
    assert hit_of(manager, prompt(1, 3)) == 0
    assert hit_of(manager, prompt(2, 3)) == 12
    assert hit_of(manager, prompt(3, 3)) == 12
    manager.release(row)
    assert hit_of(manager, prompt(3, 3)) == 12
    serve(manager, "again", prompt(1, 3))
    assert hit_of(manager, prompt(1, 3)) == 12
    manager.check()


# -- all of it, against a dictionary -----------------------------------------------------------------------------------


class NaiveCache:
    """A full-attention cache of one block per page, for requests that come one after another.

    `idle` maps a prefix of whole blocks, with its salt, to the class and the moment of its last release: the order in
    which it is to go.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.idle: dict[tuple[str, Prefix], tuple[int, int]] = {}
        self.pins: list[tuple[str, list[tuple[str, Prefix]]]] = []
        self.quotas: dict[str, tuple[int, int]] = {}  # bytes, and the moment since when releases count
        self.now = 0

    @property
    def pinned(self) -> set[tuple[str, Prefix]]:
        return {key for _, keys in self.pins for key in keys}

    @property
    def cached(self) -> set[tuple[str, Prefix]]:
        return self.pinned | set(self.idle)

    def hit(self, tokens: Prefix, salt: str, most: int) -> list[tuple[str, Prefix]]:
        keys = []
        for end in range(BLOCK, most + 1, BLOCK):
            if (salt, tokens[:end]) not in self.cached:
                break
            keys.append((salt, tokens[:end]))
        return keys

    def serve(self, tokens: Prefix, salt: str, priority: int) -> tuple[int, bool]:
        """Hit in tokens, and whether the rest fitted."""
        held = self.hit(tokens, salt, len(tokens) - 1)
        hit = len(held)
        need = -(-len(tokens) // BLOCK) - hit
        fits = need + len(self.pinned | set(held)) <= self.capacity
        if fits:
            others = sorted((when, key) for key, when in self.idle.items() if key not in held)
            free = self.capacity - len(self.pinned | set(held)) - len(others)
            for _, key in others[: max(need - free, 0)]:
                del self.idle[key]
            keys = [(salt, tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
            held += [key for key in keys[hit:] if key not in self.cached]
        self.release(held, salt, priority)
        return hit * BLOCK, fits

    def release(self, keys: list[tuple[str, Prefix]], salt: str, priority: int) -> None:
        for key in sorted(keys, key=lambda key: -len(key[1])):
            self.now += 1
            if key not in self.pinned:
                self.idle[key] = (priority, self.now)
        if salt in self.quotas:
            limit, since = self.quotas[salt]
            counted = sorted((when[1], key) for key, when in self.idle.items() if key[0] == salt and when[1] > since)
            while len(counted) * BLOCK_BYTES > limit:
                del self.idle[counted.pop(0)[1]]

    def pin(self, tokens: Prefix, salt: str) -> int:
        keys = self.hit(tokens, salt, len(tokens))
        self.pins.append((salt, keys))
        for key in keys:
            self.idle.pop(key, None)
        return len(keys) * BLOCK

    def unpin(self, number: int) -> None:
        salt, keys = self.pins.pop(number)
        self.release(keys, salt, 0)

    def set_quota(self, salt: str, limit: int | None) -> None:
        if limit is None:
            self.quotas.pop(salt, None)
        else:
            since = self.quotas[salt][1] if salt in self.quotas else self.now
            self.quotas[salt] = (limit, since)


class Router:
    """What a router knows of the cache from its events alone. `content` remembers the tokens behind every key."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.known: set[tuple[bytes, str]] = set()
        self.content: dict[bytes, Prefix] = {}
        self.seen: Counter[str] = Counter()

    def follow(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            self.seen[type(event).__name__] += 1
            assert event.tier == "device"
            if isinstance(event, AllBlocksCleared):
                self.known.clear()
            elif isinstance(event, BlockRemoved):
                assert (event.key, event.group) in self.known, "removed, and never stored"
                self.known.remove((event.key, event.group))
            else:
                assert (event.key, event.group) not in self.known, "stored twice"
                self.known.add((event.key, event.group))
                self._learn(event)

    def _learn(self, event: BlockStored) -> None:
        assert len(event.token_ids) == self.base
        if event.parent is None or event.parent in self.content:
            prefix = (() if event.parent is None else self.content[event.parent]) + event.token_ids
            assert self.content.setdefault(event.key, prefix) == prefix

    def prefixes(self) -> Counter[Prefix]:
        return Counter(self.content[key] for key, _ in self.known)


moves = st.lists(
    st.one_of(
        st.tuples(
            st.just("serve"), st.integers(0, 3), st.integers(1, 20), st.sampled_from(["", "x", "y"]), st.integers(-3, 3)
        ),
        st.tuples(st.just("serve"), st.integers(0, 3), st.integers(12, 20), st.just("x"), st.just(0)),
        st.tuples(st.just("pin"), st.integers(0, 3), st.integers(1, 20), st.sampled_from(["", "x", "y"])),
        st.tuples(st.just("unpin"), st.integers(0, 5)),
        st.tuples(st.just("quota"), st.sampled_from(["x", "y"]), st.sampled_from([None, 0, 40, 64, 100])),
        st.tuples(st.just("reset")),
    ),
    min_size=10,
    max_size=60,
)


def test_the_cache_keeps_what_a_dictionary_would_keep() -> None:
    total: Counter[str] = Counter()

    @settings(max_examples=4 * settings().max_examples)
    @given(capacity=st.integers(3, 20), traffic=moves)
    def check(capacity: int, traffic: list[tuple[Any, ...]]) -> None:
        manager = manager_of(FULL, pages=capacity, events=True)
        naive, router, pins = NaiveCache(capacity), Router(BLOCK), []
        for number, (move, *how) in enumerate(traffic):
            if move == "serve":
                tokens = tokens_of(how[0], how[1])
                hit, fits = naive.serve(tokens, how[2], how[3])
                row, cached, _ = manager.admit(str(number), tokens, salt=how[2], priority=how[3])
                assert cached == hit
                if fits:
                    compute(manager, row, len(tokens) - hit)
                else:
                    with pytest.raises(Exhausted):
                        manager.reserve([row], [len(tokens) - hit])
                manager.release(row)
                total.update({"hits": hit > 0, "exhausted": not fits})
            elif move == "pin":
                pins.append(manager.pin(tokens_of(how[0], how[1]), salt=how[2]))
                assert pins[-1].num_tokens == naive.pin(tokens_of(how[0], how[1]), how[2])
                total["pins"] += pins[-1].num_tokens > 0
            elif move == "unpin" and pins:
                manager.unpin(pins.pop(how[0] % len(pins)))
                naive.unpin(how[0] % len(naive.pins))
            elif move == "quota":
                manager.set_quota(*how)
                naive.set_quota(*how)
            elif move == "reset":
                manager.reset_cache()
                naive.idle.clear()
            router.follow(manager.take_events())
            assert router.prefixes() == Counter(prefix for _, prefix in naive.cached)
            assert manager.stats().idle_cached == len(naive.cached) * BLOCK_BYTES
            manager.check()
        total.update(router.seen)

    check()
    assert min(total[kind] for kind in ("hits", "exhausted", "pins", "BlockRemoved", "AllBlocksCleared")) > 0, total


def tokens_of(stem: int, length: int) -> Prefix:
    """Stems 0 and 1 share two blocks, and 2 and 3 nothing with anybody."""
    return tuple(0 if p < 2 * BLOCK and stem < 2 else 1 + stem for p in range(length))


# -- events ------------------------------------------------------------------------------------------------------------


def test_events_are_off_unless_asked_for() -> None:
    manager = manager_of(FULL, pages=8)
    serve(manager, "a", prompt(1, 2))
    manager.reset_cache()
    with pytest.raises(KvtideError, match="events are off"):
        manager.take_events()
    assert manager._sequences._tokens is None


def test_the_events_of_a_few_requests_by_hand() -> None:
    manager = manager_of(FULL, WINDOW, pages=10, events=True)
    assert manager.take_events() == []
    row = manager.admit("a", [1, 2, 3, 4, 5]).row
    assert manager.take_events() == []
    compute(manager, row, 5)
    first, other = manager.take_events()
    assert (first.parent, first.token_ids, first.group) == (None, (1, 2, 3, 4), "full_attention")
    assert other == first._replace(group="sliding_window")
    assert len(first.key) == 16
    manager.reserve([row], [3])
    assert manager.take_events() == []
    manager.commit([row], [3], [6, 7, 8])
    second, other = manager.take_events()
    assert (second.parent, second.token_ids, second.group) == (first.key, (5, 6, 7, 8), "full_attention")
    assert other == second._replace(group="sliding_window")
    assert manager.take_events() == []
    manager.release(row)
    serve(manager, "hit", [1, 2, 3, 4, 9])
    assert manager.take_events() == []  # nothing new is cached, and nothing goes
    row = manager.admit("other", [9] * 20).row
    manager.reserve([row], [16])
    assert set(manager.take_events()) == {BlockRemoved(second.key, g) for g in ("full_attention", "sliding_window")}
    manager.release(row)
    manager.commit([], [])
    manager.reset_cache()
    assert manager.take_events() == [AllBlocksCleared()]


def test_rows_that_compute_one_prefix_at_once_announce_it_once() -> None:
    manager = manager_of(FULL, pages=20, events=True)
    rows = [manager.admit(name, prompt(1, 2)).row for name in "abc"]
    manager.reserve(rows, [9, 9, 9])
    manager.commit(rows, [9, 9, 9])
    assert [event.token_ids for event in manager.take_events()] == [(1,) * 4] * 2
    for row in rows:
        manager.release(row)
    assert manager.take_events() == []


def test_a_reset_while_a_prefix_is_held_names_what_goes() -> None:
    manager = manager_of(FULL, pages=20, events=True)
    router = Router(BLOCK)
    serve(manager, "gone", prompt(1, 2))
    row = manager.admit("stays", prompt(2, 2)).row
    compute(manager, row, 9)
    router.follow(manager.take_events())
    manager.reset_cache()
    router.follow(manager.take_events())
    assert set(router.prefixes()) == {(2,) * 4, (2,) * 8}
    manager.release(row)
    assert hit_of(manager, prompt(2, 2)) == 8
    manager.reset_cache()
    assert manager.take_events() == [AllBlocksCleared()]


def findable(manager: HybridMemoryManager) -> set[tuple[bytes, str]]:
    """Keys and groups that a lookup finds complete, by walking all cached blocks."""
    found: Counter[tuple[bytes, int]] = Counter()
    for block in np.flatnonzero(manager.pool.cached).tolist():
        found[key_of(manager, block), int(manager.pool.owner[block // manager.pool.stride])] += 1
    whole = set()
    for (key, group), count in found.items():
        fmt = manager.geometry.formats[group]
        parts = 1 if not fmt.block_size else max(manager.base // fmt.block_size, 1)
        if count == parts * fmt.tables:
            whole.add((key, fmt.group.name))
    return whole


def test_a_router_knows_exactly_what_a_lookup_can_find() -> None:
    total: Counter[str] = Counter()

    @settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
    @given(
        geometry=geometries(),
        traffic=operations,
        options=st.fixed_dictionaries(OPTIONS),
        resets=st.sets(st.integers(0, 50), max_size=3),
        quota=st.sampled_from([None, None, 100]),
    )
    def check(
        geometry: PageGeometry,
        traffic: list[tuple[str, int, int, int]],
        options: dict[str, Any],
        resets: set[int],
        quota: int | None,
    ) -> None:
        machine = traffic_of(geometry, **options, events=True)
        manager, router = machine.manager, Router(machine.manager.base)
        manager.set_quota("s1", quota)
        everything = []
        for number, (name, *numbers) in enumerate(traffic):
            OPERATIONS[name](machine, *numbers)
            if number in resets:
                manager.reset_cache()
            everything += [row for row in machine.rows if row not in everything]
            before = len(router.content)
            router.follow(manager.take_events())
            assert router.known == findable(manager)
            for content in list(router.content.values())[before:]:
                assert any(tuple(row.tokens[: len(content)]) == content for row in everything)
        total.update(router.seen)

    check()
    assert min(total[kind] for kind in ("BlockStored", "BlockRemoved", "AllBlocksCleared")) > 0, total
