"""The conformance suite: what `store` promises, as tests that any store's own pytest can run. Needs pytest.

    import pytest
    pytest.register_assert_rewrite("kvtide.offload.conformance")        # before the import, for readable failures
    from kvtide.offload.conformance import StoreConformance

    class TestAcmeStore(StoreConformance):
        persistent = True                                       # what the store can do; see the attributes below
        def open_store(self, place): return AcmeStore(AcmeConfig(path=str(place)))
        def stored(self, store, place, key): ...                # optional: a value as its bytes lie on the tier,
        def overwrite(self, store, place, key, data): ...       # and, behind the store's back, others in their stead
        def open_small(self, place, num_bytes): ...             # optional: the store, bounded to about `num_bytes`

`place` is what two openings share: a new empty directory for every test; override the fixture for a store that needs
something else (a key prefix, a bucket). The store must be opened with a lossless codec and must be empty. Tests of what
the class does not claim, or has no hooks for, are not collected; `pytest -rP -k test_claims` lists them. A test that
does not fit is left out by `test_its_name = None`. Values are 1 byte or longer. Beyond the promises in `store`:

- a value of another length than the buffer is CORRUPT and is removed: it would otherwise stay in the way for ever;
- the first of two values for one key in a batch is STORED, the second PRESENT;
- after `close`, batches answer ERROR, `headers` None, `scan` nothing, and leases may still be closed.
"""

from __future__ import annotations

import array
import gc
import mmap
import os
import random
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
import xxhash

from kvtide.kvcache import KvtideError

from .keys import KEY_BYTES, StoreKey
from .store import Status, Store
from .values import HEADER_BYTES

HIT, MISS, CORRUPT, ERROR = Status.HIT, Status.MISS, Status.CORRUPT, Status.ERROR
STORED, PRESENT, FULL, REFUSED = Status.STORED, Status.PRESENT, Status.FULL, Status.REFUSED
DELETED = Status.DELETED

# The header's fields (see `values`): offset and format.
_FIELDS = {
    "magic": (0, "<4s"),
    "version": (4, "<H"),
    "codec": (6, "<H"),
    "raw_bytes": (8, "<Q"),
    "stored_bytes": (16, "<Q"),
    "generation": (24, "<Q"),
    "key": (32, "<32s"),
    "digest": (64, "<16s"),
    "reserved": (80, "<Q"),
    "checksum": (88, "<Q"),
}


def key_of(number: int) -> StoreKey:
    """The `number`-th key of the suite."""
    return xxhash.xxh3_128_digest(b"space") + xxhash.xxh3_128_digest(number.to_bytes(8, "little"))


def value_of(key: StoreKey, size: int) -> bytes:
    """The one right value of a key at a length; of another key, or at another length, it is another."""
    return np.random.default_rng([size, *key]).bytes(size)


_CLAIMS = ("persistent", "shared", "holds", "scans", "exact_stats", "knows_prefixes")
_HOOKS = ("open_small", "stored", "overwrite")
Test = TypeVar("Test", bound=Callable[..., None])


def _needs(*names: str) -> Callable[[Test], Test]:
    """Have a test collected only for classes that claim these attributes, and define these hooks."""

    def note(test: Test) -> Test:
        test.needs = names  # type: ignore[attr-defined]
        return test

    return note


class StoreConformance:
    """Subclass it as a pytest class, and say what the store can do."""

    persistent = False
    """Values survive `close` and a new opening of the same place."""
    shared = False
    """Several stores may be open on one place at once, and find what the others stored."""
    holds = True
    """Leases keep values from eviction (matters with `open_small`)."""
    scans = True
    """`scan` finds every value."""
    exact_stats = True
    """`num_values` and `num_bytes` are those of this place, at any time."""
    knows_prefixes = False
    """Of a prefix the last values are evicted first (matters with `open_small`)."""
    patience_s = 5.0
    """Seconds after `close` in which files and threads may still go."""
    sizes: Sequence[int] = (1, 2, 3, 63, 4095, 4096, 4097, 65_537, (1 << 20) + 13, (3 << 20) - 1)
    """Lengths of values that are tried."""

    _left_out: ClassVar[dict[str, list[str]]] = {}  # tests that a class does not have, and what they need

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        inherited, left_out = cls._left_out, dict[str, list[str]]()
        for name, test in vars(StoreConformance).items():
            if name in vars(cls):
                continue  # the class has its own, or none
            lacks = [need for need in getattr(test, "needs", ()) if not cls._claims(need)]
            if lacks:
                left_out[name] = lacks
                setattr(cls, name, None)
            elif name in inherited:
                setattr(cls, name, test)  # its parent could not, and it can
        cls._left_out = left_out

    @classmethod
    def _claims(cls, name: str) -> bool:
        mine = getattr(cls, name)
        return mine if isinstance(mine, bool) else mine is not getattr(StoreConformance, name)

    @pytest.fixture
    def place(self, tmp_path: Path) -> Any:
        """What is opened: new and empty for every test."""
        return tmp_path

    @pytest.fixture
    def store(self, place: Any) -> Iterator[Store]:
        """The store, open; closed at the end."""
        with self.open_store(place) as store:
            yield store

    def open_store(self, place: Any) -> Store:
        """The store on a place."""
        raise NotImplementedError

    def open_small(self, place: Any, num_bytes: int) -> Store:
        """The store on a place, holding about `num_bytes` at most."""
        raise NotImplementedError

    def stored(self, store: Store, place: Any, key: StoreKey) -> bytes:
        """A value as it lies on the tier: header and payload."""
        raise NotImplementedError

    def overwrite(self, store: Store, place: Any, key: StoreKey, data: bytes) -> None:
        """Put other bytes in the place of a value that is there; zeros follow shorter ones where lengths are fixed."""
        raise NotImplementedError

    def test_claims(self) -> None:
        """Print what the class claims, and what is therefore not tested."""
        names = [*_CLAIMS, *_HOOKS]
        claimed = [name for name in names if self._claims(name)]
        print(f"claimed: {', '.join(claimed)}; not claimed: {', '.join(sorted(set(names) - set(claimed)))}")
        for name in vars(StoreConformance):
            if name in self._left_out:
                print(f"not tested, for want of {' and '.join(self._left_out[name])}: {name}")
            elif name.startswith("test_") and getattr(self, name) is None:
                print(f"not tested, left out by the class: {name}")
        assert all(isinstance(getattr(self, name), bool) for name in _CLAIMS), "a claim is True or False"
        assert self._claims("stored") is self._claims("overwrite"), "stored and overwrite come together"

    # What goes in comes out.

    def test_values_come_back_at_every_length(self, store: Store) -> None:
        keys = [key_of(i) for i in range(len(self.sizes))]
        values = [value_of(key, size) for key, size in zip(keys, self.sizes, strict=True)]
        assert store.contains(keys) == [MISS] * len(keys)
        assert store.put(keys, values) == [STORED] * len(keys)
        assert store.contains(keys) == [HIT] * len(keys)
        assert _get(store, keys, self.sizes) == values
        found = store.headers(keys)
        assert [header and (header.key, header.raw_bytes) for header in found] == list(
            zip(keys, self.sizes, strict=True)
        )
        assert store.verify(keys) == [HIT] * len(keys)

    def test_batches_answer_per_key_in_order(self, store: Store) -> None:
        there = [key_of(i) for i in range(150)]
        _put(store, there, 1000)
        mixed = [key_of(i * 7 % 300) for i in range(300)]
        expected = [HIT if key in set(there) else MISS for key in mixed]
        assert store.contains(mixed) == expected
        buffers = [bytearray(1000) for _ in mixed]
        assert store.get_into(mixed, buffers) == expected
        for key, buffer, status in zip(mixed, buffers, expected, strict=True):
            assert status is MISS or buffer == value_of(key, 1000)
        assert [header is not None for header in store.headers(mixed)] == [status is HIT for status in expected]
        assert store.delete(mixed) == [DELETED if status is HIT else MISS for status in expected]
        for call in (store.contains, store.delete, store.headers, store.verify):
            assert call([]) == []
        assert store.get_into([], []) == store.put([], []) == []

    def test_a_key_may_be_in_a_batch_more_than_once(self, store: Store) -> None:
        key, other = key_of(1), key_of(2)
        assert store.put([key, other, key], [b"first", b"other", b"again"]) == [STORED, STORED, PRESENT]
        buffers = [bytearray(5) for _ in range(3)]
        assert store.get_into([key, key, other], buffers) == [HIT] * 3
        assert buffers == [b"first", b"first", b"other"]
        assert store.delete([key, other, key]) == [DELETED, DELETED, MISS]

    def test_a_value_that_is_there_is_kept(self, store: Store) -> None:
        key = key_of(1)
        assert store.put([key], [b"old"]) == [STORED]
        assert store.put([key], [b"new"]) == [PRESENT]
        assert store.put([key], [b"longer"]) == [PRESENT]
        assert _get(store, [key], [3]) == [b"old"]

    def test_a_deleted_value_is_gone_and_can_be_stored_again(self, store: Store) -> None:
        key = key_of(1)
        _put(store, [key], 5000)
        assert store.delete([key]) == [DELETED]
        assert store.delete([key]) == store.contains([key]) == store.get_into([key], [bytearray(5000)]) == [MISS]
        assert store.headers([key]) == [None]
        assert store.put([key], [b"of another length"]) == [STORED]
        assert _get(store, [key], [17]) == [b"of another length"]

    def test_buffers_of_every_kind(self, store: Store) -> None:
        value = value_of(key_of(0), 4096)
        readable: list[Any] = [
            value,
            bytearray(value),
            memoryview(value),
            array.array("h", value),
            np.frombuffer(value, np.uint8),
            np.frombuffer(value, np.float16).reshape(2, 4, 256),
        ]
        writable: list[Callable[[], Any]] = [
            lambda: bytearray(4096),
            lambda: memoryview(bytearray(8192))[1000:5096],
            lambda: array.array("q", bytes(4096)),
            lambda: np.zeros((4, 1024), np.uint8),
            lambda: np.zeros(1024, np.float32),
            lambda: mmap.mmap(-1, 4096),
        ]
        keys = [key_of(i) for i in range(len(readable))]
        assert store.put(keys, readable) == [STORED] * len(keys)
        for make in writable:
            buffers = [make() for _ in keys]
            assert store.get_into(keys, buffers) == [HIT] * len(keys)
            assert all(bytes(memoryview(buffer).cast("B")) == value for buffer in buffers)

    def test_buffers_are_the_callers_again_when_a_call_returns(self, store: Store) -> None:
        key, source = key_of(1), bytearray(value_of(key_of(1), 70_000))
        store.put([key], [source])
        source[:] = bytes(len(source))
        around = bytearray(b"\xa5" * 70_200)
        assert store.get_into([key], [memoryview(around)[100:70_100]]) == [HIT]
        assert around[100:70_100] == value_of(key, 70_000)
        assert around[:100] + around[70_100:] == b"\xa5" * 200
        with pytest.raises((TypeError, ValueError, BufferError, KvtideError)):
            store.get_into([key], [bytes(70_000)])  # nothing can be read into bytes

    # What is refused.

    def test_a_wrong_call_raises(self, store: Store) -> None:
        for wrong in (b"", bytes(KEY_BYTES - 1), bytes(KEY_BYTES + 1)):
            for call in (store.contains, store.delete, store.headers, store.lease):
                with pytest.raises(KvtideError):
                    call([wrong])
            with pytest.raises(KvtideError):
                store.put([wrong], [b"value"])
            with pytest.raises(KvtideError):
                store.get_into([wrong], [bytearray(5)])
        with pytest.raises(KvtideError):
            store.put([key_of(1), key_of(2)], [b"value"])
        with pytest.raises(KvtideError):
            store.get_into([key_of(1)], [bytearray(5), bytearray(5)])
        assert store.contains([key_of(1), key_of(2)]) == [MISS, MISS]

    def test_a_value_above_the_bound_is_refused(self, store: Store) -> None:
        store.max_value_bytes = 4096
        keys = [key_of(i) for i in range(3)]
        assert store.put(keys, [bytes(4096), bytes(4097), b"small"]) == [STORED, REFUSED, STORED]
        assert store.contains(keys) == [HIT, MISS, HIT]

    def test_a_value_of_another_length_is_never_served(self, store: Store) -> None:
        for at, wrong in enumerate((999, 1001, 1, 70_000)):
            key = key_of(at)
            _put(store, [key], 1000)
            assert store.get_into([key], [bytearray(wrong)]) == [CORRUPT]
            assert store.put([key], [value_of(key, wrong)]) == [STORED]
            assert _get(store, [key], [wrong]) == [value_of(key, wrong)]
        assert store.stats().faults.total() >= 4

    # What is damaged.

    @_needs("stored", "overwrite")
    def test_a_flipped_bit_anywhere_is_found(self, store: Store, place: Any) -> None:
        key, size = key_of(1), 5003
        places = [offset for offset, _ in _FIELDS.values()] + [
            HEADER_BYTES - 1,
            HEADER_BYTES,
            HEADER_BYTES + size // 2,
            HEADER_BYTES + size - 1,
        ]
        for count, offset in enumerate(places, 1):
            _put(store, [key], size)
            data = bytearray(self.stored(store, place, key))
            assert len(data) == HEADER_BYTES + size
            data[offset] ^= 1 << offset % 8
            self.overwrite(store, place, key, bytes(data))
            self._expect_corrupt(store, key, size, count)

    @_needs("stored", "overwrite")
    def test_forged_headers_are_refused(self, store: Store, place: Any) -> None:
        key, size = key_of(1), 5003
        forged = {
            "version": 2,
            "codec": 1,
            "raw_bytes": size - 1,
            "stored_bytes": 1 << 62,
            "key": key_of(2),
            "digest": bytes(16),
            "magic": b"KVTW",
        }
        cases = [[item] for item in forged.items()]
        cases += [[("codec", 0xFFFF)], [("raw_bytes", 1 << 62), ("stored_bytes", 1 << 62)], [("codec", 3)]]
        cases += [[("raw_bytes", size - 1), ("stored_bytes", size - 1)], [("raw_bytes", 0), ("stored_bytes", 0)]]
        for count, changes in enumerate(cases, 1):
            _put(store, [key], size)
            self.overwrite(store, place, key, _forge(self.stored(store, place, key), changes))
            self._expect_corrupt(store, key, size, count)

    @_needs("stored", "overwrite")
    def test_truncated_values_are_found(self, store: Store, place: Any) -> None:
        key, size = key_of(1), 5003
        for count, left in enumerate((0, 1, 50, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + size - 1), 1):
            _put(store, [key], size)
            self.overwrite(store, place, key, self.stored(store, place, key)[:left])
            self._expect_corrupt(store, key, size, count)

    @_needs("stored", "overwrite")
    def test_a_value_under_anothers_key_is_never_served(self, store: Store, place: Any) -> None:
        keys = [key_of(1), key_of(2)]
        _put(store, keys, 5003)
        self.overwrite(store, place, keys[0], self.stored(store, place, keys[1]))
        self._expect_corrupt(store, keys[0], 5003, 1)
        assert _get(store, [keys[1]], [5003]) == [value_of(keys[1], 5003)]

    @_needs("stored", "overwrite")
    def test_one_keys_fault_stays_its_own(self, store: Store, place: Any) -> None:
        keys = [key_of(i) for i in range(6)]
        _put(store, keys[:5], 3000)
        data = self.stored(store, place, keys[1])
        self.overwrite(store, place, keys[1], data[:-1] + bytes([data[-1] ^ 1]))
        buffers = [bytearray(3000) for _ in keys]
        buffers[3] = bytearray(2999)
        assert store.get_into(keys, buffers) == [HIT, CORRUPT, HIT, CORRUPT, HIT, MISS]
        for at in (0, 2, 4):
            assert buffers[at] == value_of(keys[at], 3000)
        outcomes = store.stats().outcomes
        assert [outcomes["get", status] for status in (HIT, CORRUPT, MISS)] == [3, 2, 1]

    @_needs("stored", "overwrite")
    def test_verify_finds_and_removes_what_is_damaged(self, store: Store, place: Any) -> None:
        keys = [key_of(i) for i in range(4)]
        _put(store, keys[:3], 3000)
        data = self.stored(store, place, keys[0])
        self.overwrite(store, place, keys[0], bytes([data[0] ^ 1]) + data[1:])
        data = self.stored(store, place, keys[1])
        self.overwrite(store, place, keys[1], data[:-1] + bytes([data[-1] ^ 1]))
        assert store.verify(keys) == [CORRUPT, CORRUPT, HIT, MISS]
        assert store.contains(keys) == [MISS, MISS, HIT, MISS]

    def _expect_corrupt(self, store: Store, key: StoreKey, size: int, count: int) -> None:
        """Its read is CORRUPT, counted, and leaves room for the right value."""
        assert store.get_into([key], [bytearray(size)]) == [CORRUPT]
        stats = store.stats()
        assert stats.outcomes["get", CORRUPT] == count
        assert stats.faults.total() >= count
        assert store.contains([key]) == store.get_into([key], [bytearray(size)]) == [MISS]
        _put(store, [key], size)
        assert _get(store, [key], [size]) == [value_of(key, size)]
        assert store.delete([key]) == [DELETED]

    # What is counted.

    @_needs("scans")
    def test_scan_finds_what_is_there(self, store: Store) -> None:
        keys = [key_of(i) for i in range(60)]
        _put(store, keys, 2000)
        store.delete(keys[40:])
        entries = list(store.scan())
        assert sorted(entry.key for entry in entries) == sorted(keys[:40])
        assert all(entry.num_bytes >= 2000 + HEADER_BYTES for entry in entries)
        walk = store.scan()
        seen = {next(walk).key}
        store.delete(keys[30:40])
        _put(store, keys[40:], 2000)
        rest = [entry.key for entry in walk]
        assert set(keys[:30]) <= seen | set(rest) <= set(keys)
        assert len(rest) == len(set(rest))

    def test_outcomes_are_counted_and_looking_is_not(self, store: Store) -> None:
        keys = [key_of(i) for i in range(3)]
        _put(store, keys[:2], 100)
        store.put(keys[:1], [bytes(100)])
        store.contains(keys)
        store.get_into(keys, [bytearray(100) for _ in keys])
        expected = Counter(
            {("put", STORED): 2, ("put", PRESENT): 1, ("contains", HIT): 2, ("contains", MISS): 1}
            | {("get", HIT): 2, ("get", MISS): 1}
        )
        assert store.stats().outcomes == expected
        store.headers(keys)
        list(store.scan())
        assert store.stats().outcomes == expected
        store.delete(keys)
        assert store.stats().outcomes == expected + Counter({("delete", DELETED): 2, ("delete", MISS): 1})
        assert not store.stats().faults

    @_needs("exact_stats")
    def test_accounting_is_exact_and_returns_to_nothing(self, store: Store) -> None:
        rng, there = random.Random(5), dict[StoreKey, int]()
        for _ in range(200):
            key, size = key_of(rng.randrange(40)), rng.choice((1, 700, 5000, 40_000))
            if rng.random() < 0.6:
                expected = PRESENT if key in there else STORED
                assert store.put([key], [value_of(key, size)]) == [expected]
                there.setdefault(key, size)
            else:
                assert store.delete([key]) == [DELETED if there.pop(key, 0) else MISS]
        stats = store.stats()
        assert stats.num_values == len(there)
        assert stats.num_bytes >= sum(there.values()) + HEADER_BYTES * len(there)
        if self.scans:
            assert stats.num_bytes == sum(entry.num_bytes for entry in store.scan())
        store.delete(list(there))
        assert (store.stats().num_values, store.stats().num_bytes) == (0, 0)

    # Who else is there.

    def test_threads_on_the_same_keys_never_read_a_wrong_value(self, store: Store) -> None:
        sizes = (100, 4096, 150_000)

        def work(seed: int) -> Counter[tuple[str, Status]]:
            rng, seen = random.Random(seed), Counter[tuple[str, Status]]()
            for _ in range(40):
                numbers = rng.sample(range(12), 3)
                keys = [key_of(number) for number in numbers]
                lengths = [sizes[number % 3] for number in numbers]
                what = rng.choice(("put", "put", "get", "get", "delete", "contains"))
                if what == "put":
                    statuses = store.put(keys, [value_of(*pair) for pair in zip(keys, lengths, strict=True)])
                elif what == "get":
                    buffers = [bytearray(length) for length in lengths]
                    with store.lease(keys):
                        statuses = store.get_into(keys, buffers)
                    for key, buffer, status in zip(keys, buffers, statuses, strict=True):
                        assert status is not HIT or buffer == value_of(key, len(buffer))
                else:
                    statuses = (store.delete if what == "delete" else store.contains)(keys)
                seen.update((what, status) for status in statuses)
            return seen

        seen = sum(_in_threads(work, 4), Counter[tuple[str, Status]]())
        assert set(seen) <= {
            *(("put", status) for status in (STORED, PRESENT)),
            *((what, status) for what in ("get", "contains") for status in (HIT, MISS)),
            *(("delete", status) for status in (DELETED, MISS)),
        }
        keys = [key_of(number) for number in range(12)]
        store.delete(keys)
        assert store.contains(keys) == [MISS] * 12
        if self.exact_stats:
            assert (store.stats().num_values, store.stats().num_bytes) == (0, 0)

    def test_two_writers_of_one_key(self, store: Store, place: Any) -> None:
        values = [bytes([writer]) * 300_000 for writer in range(4)]
        other = self.open_store(place) if self.shared else store
        stores = [store, other, store, other]
        for number in range(8):
            key = key_of(number)
            statuses = _in_threads(lambda writer, key=key: stores[writer].put([key], [values[writer]])[0], 4)  # type: ignore[misc]
            assert STORED in statuses
            assert set(statuses) <= {STORED, PRESENT}
            for each in stores[:2]:
                buffer = bytearray(300_000)
                assert each.get_into([key], [buffer]) == [HIT]
                assert buffer in values
        other.close()

    @_needs("shared")
    def test_another_store_on_the_same_place(self, store: Store, place: Any) -> None:
        keys = [key_of(i) for i in range(20)]
        _put(store, keys, 3000)
        with self.open_store(place) as other:
            assert _get(other, keys, [3000] * 20) == [value_of(key, 3000) for key in keys]
            other.delete(keys[:10])
            assert store.contains(keys) == [MISS] * 10 + [HIT] * 10

    @_needs("persistent")
    def test_values_survive_a_new_opening(self, place: Any) -> None:
        keys = [key_of(i) for i in range(50)]
        with self.open_store(place) as store:
            _put(store, keys, 9000)
            store.delete(keys[:10])
            before = store.stats()
        with self.open_store(place) as store:
            assert store.contains(keys) == [MISS] * 10 + [HIT] * 40
            assert _get(store, keys[10:], [9000] * 40) == [value_of(key, 9000) for key in keys[10:]]
            if self.exact_stats:
                after = store.stats()
                assert (after.num_values, after.num_bytes) == (before.num_values, before.num_bytes)
            assert store.put(keys, [value_of(key, 9000) for key in keys]) == [STORED] * 10 + [PRESENT] * 40

    # What is full.

    @_needs("open_small")
    def test_a_full_store_evicts_and_stays_within_its_bound(self, place: Any) -> None:
        with self.open_small(place, 1 << 20) as store:
            capacity = store.stats().capacity_bytes
            for number in range(100):
                _put(store, [key_of(number)], 50_000)
                if self.exact_stats and capacity is not None:
                    assert store.stats().num_bytes <= capacity
            found = _served(store, range(100), 50_000)
            assert 0 < found < 100
            assert not self.exact_stats or store.stats().num_values == found
            assert store.put([key_of(200)], [bytes(8 << 20)]) in ([FULL], [REFUSED])
            assert _served(store, range(100), 50_000) > 0

    @_needs("open_small", "holds")
    def test_a_lease_holds_values_until_it_is_closed(self, place: Any) -> None:
        with self.open_small(place, 1 << 20) as store:
            held = [key_of(number) for number in range(4)]
            _put(store, held, 50_000)
            outer = store.lease([*held, key_of(999)])
            assert outer.statuses == [HIT] * 4 + [MISS]
            with pytest.raises(ZeroDivisionError), store.lease(held):
                _ = 1 / 0
            for number in range(100, 200):
                _put(store, [key_of(number)], 50_000)
            assert _get(store, held, [50_000] * 4) == [value_of(key, 50_000) for key in held]
            outer.close()
            with store.lease(held) as inner:
                outer.close()
                for number in range(200, 300):
                    _put(store, [key_of(number)], 50_000)
                assert store.contains(held) == [HIT] * 4
            inner.close()
            for number in range(300, 500):  # used, so that no policy takes them for a scan
                _put(store, [key_of(number)], 50_000)
                _get(store, [key_of(number)] * 2, [50_000] * 2)
            assert MISS in store.contains(held)

    @_needs("open_small", "holds")
    def test_a_store_whose_values_are_all_held_is_full_and_recovers(self, place: Any) -> None:
        with self.open_small(place, 1 << 20) as store:
            _put(store, [key_of(number) for number in range(100)], 50_000)
            keys = [key_of(number) for number in range(100)]
            leases = [store.lease(keys)]
            held = [key for key, status in zip(keys, leases[0].statuses, strict=True) if status is HIT]
            while store.put([key_of(1000 + len(held))], [bytes(50_000)]) == [STORED]:
                held.append(key_of(1000 + len(held)))
                leases.append(store.lease(held[-1:]))
                assert len(held) < 100
            assert store.put([key_of(2000)], [bytes(50_000)]) == [FULL]
            assert store.contains(held) == [HIT] * len(held)
            leases[0].close()
            assert store.put([key_of(2000)], [bytes(50_000)]) == [STORED]

    @_needs("open_small", "knows_prefixes")
    def test_of_a_prefix_the_last_values_go_first(self, place: Any) -> None:
        with self.open_small(place, 1 << 20) as store:
            prefix = [key_of(number) for number in range(12)]
            for at in (0, 4, 8):
                _put(store, prefix[at : at + 4], 50_000)
            store.touch_prefix([*prefix, key_of(999)])
            seen = set()
            for number in range(100, 140):
                _put(store, [key_of(number)], 50_000)
                found = store.contains(prefix)
                assert found == sorted(found, key=[HIT, MISS].index)
                seen.add(found.count(HIT))
            assert len(seen) > 3

    @_needs("open_small", "knows_prefixes")
    def test_of_a_batch_the_last_values_go_first(self, place: Any) -> None:
        with self.open_small(place, 1 << 20) as store:
            prefix = [key_of(number) for number in range(12)]
            _put(store, prefix, 50_000)
            first = store.contains(prefix)
            for number in range(100, 112):
                _put(store, [key_of(number)], 50_000)
                found = store.contains(prefix)
                assert found == sorted(found, key=[HIT, MISS].index)
            assert first == [HIT] * 12
            assert MISS in found

    # What ends.

    def test_leases_are_harmless_at_every_end(self, place: Any) -> None:
        store = self.open_store(place)
        _put(store, [key_of(1)], 100)
        lease = store.lease([key_of(1), key_of(2), key_of(1)])
        assert lease.statuses == [HIT, MISS, HIT]
        store.delete([key_of(1)])
        assert store.get_into([key_of(1)], [bytearray(100)]) in ([HIT], [MISS])
        store.close()
        lease.close()
        lease.close()
        assert store.lease([key_of(1)]).statuses == [ERROR]

    def test_a_closed_store_answers_error(self, place: Any) -> None:
        store = self.open_store(place)
        _put(store, [key_of(1)], 100)
        store.close()
        store.close()
        keys = [key_of(1), key_of(2)]
        assert store.contains(keys) == store.delete(keys) == store.verify(keys) == [ERROR] * 2
        assert store.get_into(keys, [bytearray(100)] * 2) == store.put(keys, [bytes(100)] * 2) == [ERROR] * 2
        assert store.headers(keys) == [None, None]
        assert list(store.scan()) == []
        assert store.stats().outcomes["get", ERROR] >= 2
        store.touch(keys)
        store.gc()

    def test_closing_waits_for_running_calls(self, place: Any) -> None:
        store = self.open_store(place)
        keys = [key_of(number) for number in range(8)]
        _put(store, keys, 300_000)

        def work(number: int) -> None:
            if number == 0:
                time.sleep(0.02)
                store.close()
                return
            for _ in range(60):
                buffers = [bytearray(300_000) for _ in keys]
                for key, buffer, status in zip(keys, buffers, store.get_into(keys, buffers), strict=True):
                    assert status in (HIT, ERROR)
                    assert status is ERROR or buffer == value_of(key, 300_000)

        _in_threads(work, 3)
        assert store.contains(keys) == [ERROR] * 8

    def test_closing_leaves_no_files_and_no_threads(self, place: Any) -> None:
        def cycle() -> None:
            with self.open_store(place) as store:
                keys = [key_of(number) for number in range(20)]
                store.put(keys, [value_of(key, 10_000) for key in keys])
                with store.lease(keys):
                    store.get_into(keys, [bytearray(10_000) for _ in keys])
                list(store.scan())
                store.delete(keys)

        cycle()  # what a library keeps for the process is there from now on
        cycle()
        before = _open_files(), threading.active_count()
        for _ in range(3):
            cycle()
        deadline = time.monotonic() + self.patience_s
        while (_open_files(), threading.active_count()) > before and time.monotonic() < deadline:
            time.sleep(0.02)
        assert _open_files() <= before[0]
        assert threading.active_count() <= before[1]


def _put(store: Store, keys: Sequence[StoreKey], size: int) -> None:
    assert store.put(keys, [value_of(key, size) for key in keys]) == [STORED] * len(keys)


def _get(store: Store, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[bytes]:
    buffers = [bytearray(b"\x5a" * size) for size in sizes]
    assert store.get_into(keys, buffers) == [HIT] * len(keys)
    return [bytes(buffer) for buffer in buffers]


def _served(store: Store, numbers: Sequence[int], size: int) -> int:
    keys, buffers = [key_of(number) for number in numbers], [bytearray(size) for _ in numbers]
    statuses = store.get_into(keys, buffers)
    assert set(statuses) <= {HIT, MISS}
    for key, buffer, status in zip(keys, buffers, statuses, strict=True):
        assert status is MISS or buffer == value_of(key, size)
    return statuses.count(HIT)


def _forge(data: bytes, changes: Sequence[tuple[str, Any]]) -> bytes:
    """A value with other fields in its header and a header checksum that is right for them."""
    forged = bytearray(data)
    for name, value in changes:
        offset, form = _FIELDS[name]
        struct.pack_into(form, forged, offset, value)
    offset, form = _FIELDS["checksum"]
    struct.pack_into(form, forged, offset, xxhash.xxh3_64_intdigest(forged[:offset]))
    return bytes(forged)


def _in_threads(work: Callable[[int], Any], count: int) -> list[Any]:
    """What `work(0)` to `work(count - 1)` return, all started at once; raises what any of them raises."""
    start, results, errors = threading.Barrier(count), [None] * count, list[BaseException]()

    def run(number: int) -> None:
        start.wait()
        try:
            results[number] = work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def _open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208
