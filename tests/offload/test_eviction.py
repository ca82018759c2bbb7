"""Eviction policies against plain lists, their invariants under random traffic, and what a prefix's order is worth."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.kvcache import ConfigError
from kvtide.offload.eviction import POLICIES, make_policy
from kvtide.offload.quota import Quotas


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


class SlowLRU:
    """Least recently used, in one list."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []

    def insert(self, key: bytes) -> None:
        self.keys.append(key)

    def hit(self, key: bytes) -> None:
        self.keys.remove(key)
        self.keys.append(key)

    def next(self) -> bytes:
        return self.keys.pop(0)


class SlowS3FIFO:
    """The algorithm of the paper for values of one size, in lists: (key, uses)."""

    def __init__(self) -> None:
        self.small: list[list[object]] = []
        self.main: list[list[object]] = []
        self.ghosts: list[bytes] = []

    def insert(self, key: bytes) -> None:
        known = key in self.ghosts
        if known:
            self.ghosts.remove(key)
        (self.main if known else self.small).append([key, 0])

    def hit(self, key: bytes) -> None:
        (entry,) = [entry for entry in (*self.small, *self.main) if entry[0] == key]
        entry[1] = min(int(str(entry[1])) + 1, 3)

    def next(self) -> bytes:
        while True:
            if self.small and (len(self.small) >= 0.1 * (len(self.small) + len(self.main)) or not self.main):
                key, uses = self.small.pop(0)
                if uses:
                    self.main.append([key, 0])
                    continue
            else:
                key, uses = self.main.pop(0)
                if uses:
                    self.main.append([key, int(str(uses)) - 1])
                    continue
            assert isinstance(key, bytes)
            self.ghosts.append(key)
            self.ghosts = self.ghosts[-(len(self.small) + len(self.main)) :] if self.small or self.main else []
            return key

    @property
    def keys(self) -> list[bytes]:
        return [bytes(entry[0]) for entry in (*self.small, *self.main)]  # type: ignore[call-overload]


@pytest.mark.parametrize(("name", "slow"), [("lru", SlowLRU), ("s3fifo", SlowS3FIFO)])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["insert", "insert", "hit", "evict"]), st.integers(0, 30)), max_size=200))
def test_a_policy_is_its_algorithm(name: str, slow: type, operations: list[tuple[str, int]]) -> None:
    policy, oracle = make_policy(name), slow()
    for operation, number in operations:
        key = key_of(number)
        there = key in oracle.keys
        assert (key in policy) == there
        if operation == "insert" and not there:
            policy.on_insert(key, 10)
            oracle.insert(key)
        elif operation == "hit" and there:
            policy.on_hit(key)
            oracle.hit(key)
        elif operation == "evict" and oracle.keys:
            assert policy.victims(10) == [oracle.next()]
        assert len(policy) == len(oracle.keys)
        assert policy.num_bytes == 10 * len(oracle.keys)


NUMBERS = st.integers(0, 20)
OPERATIONS = st.one_of(
    st.tuples(st.just("insert"), NUMBERS, st.integers(1, 50)),
    st.tuples(st.sampled_from(["hit", "cool", "remove"]), NUMBERS, st.just(0)),
    st.tuples(st.just("prefix"), NUMBERS, st.integers(1, 8)),
    st.tuples(st.just("evict"), st.integers(1, 100), NUMBERS),
)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(OPERATIONS, max_size=120))
def test_nothing_is_lost_given_twice_or_taken_from_its_holder(
    name: str, operations: list[tuple[str, int, int]]
) -> None:
    policy, there = make_policy(name), dict[bytes, int]()
    for operation, number, more in operations:
        key = key_of(number)
        if operation == "insert" and key not in there:
            there[key] = more
            policy.on_insert(key, more)
        elif operation == "hit":
            policy.on_hit(key)
        elif operation == "cool":
            policy.on_cool(key)
        elif operation == "remove":
            policy.on_remove(key)
            there.pop(key, None)
        elif operation == "prefix":
            policy.on_prefix([key_of(number + at) for at in range(more)])
        elif operation == "evict":
            held = {key_of(more), key_of(more + 1)}
            gone = policy.victims(number, held)
            assert len(set(gone)) == len(gone)
            assert not held & set(gone)
            freed = sum(there.pop(each) for each in gone)
            assert freed >= number or set(there) <= held
        assert len(policy) == len(there)
        assert policy.num_bytes == sum(there.values())
        assert all(each in policy for each in there)


@pytest.mark.parametrize("name", POLICIES)
def test_of_a_prefix_the_last_go_first(name: str) -> None:
    policy = make_policy(name)
    prefix = [key_of(number) for number in range(10)]
    for key in prefix:
        policy.on_insert(key, 1)
    policy.on_prefix([*prefix, key_of(99)])
    assert policy.victims(10) == prefix[::-1]


@pytest.mark.parametrize("name", POLICIES)
def test_the_order_of_a_prefix_counts_as_no_use(name: str) -> None:
    """What came once and was never used again stays what a scan is."""
    policy, told = make_policy(name), make_policy(name)
    for number in range(20):
        policy.on_insert(key_of(number), 1)
        told.on_insert(key_of(number), 1)
        told.on_prefix([key_of(number)])
    assert policy.victims(20) == told.victims(20)


@pytest.mark.parametrize("name", POLICIES)
def test_conversations_that_do_not_all_fit_keep_their_beginnings(name: str) -> None:
    """Without the order a prompt's first block goes first, and takes the use of all the others with it."""
    assert hits(name, in_order=True) > hits(name, in_order=False) + 0.03


def hits(name: str, *, in_order: bool) -> float:
    """Share of hit blocks of 8 growing conversations in turn, in a store of two thirds of their blocks."""
    policy, there, rng = make_policy(name), OrderedDict[bytes, None](), random.Random(1)
    hit = total = 0
    lengths = [20] * 8
    for _ in range(400):
        which = rng.randrange(8)
        lengths[which] = 20 + (lengths[which] - 18) % 40
        prompt = [key_of(1000 * which + at) for at in range(lengths[which])]
        found = next((at for at, key in enumerate(prompt) if key not in there), len(prompt))
        hit, total = hit + found, total + len(prompt)
        for key in prompt[:found]:
            policy.on_hit(key)
        for key in prompt[found:]:
            if key not in there:
                if len(there) >= 160:
                    for victim in policy.victims(1):
                        del there[victim]
                policy.on_insert(key, 1)
                there[key] = None
        if in_order:
            policy.on_prefix(prompt)
    return hit / total


def test_of_a_prefix_an_account_gives_up_the_last() -> None:
    quotas = Quotas({"a": 10}, None)
    prefix = [key_of(number) for number in range(10)]
    for key in prefix:
        assert quotas.charge("a", key, 1) == []
    quotas.order(prefix)
    assert quotas.charge("a", key_of(50), 3) == prefix[:6:-1]


def test_a_policy_that_is_not_known_is_an_error() -> None:
    with pytest.raises(ConfigError, match="eviction 'fifo' is not known; allowed are lru, s3fifo, arc"):
        make_policy("fifo")
