"""The conformance suite itself: a plain right store passes it, and every store that breaks one promise fails it."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from kvtide.kvcache import KvtideError
from kvtide.offload.conformance import StoreConformance
from kvtide.offload.eviction import LRU
from kvtide.offload.keys import KEY_BYTES, StoreKey
from kvtide.offload.sealing import seal, unseal
from kvtide.offload.store import Entry, Lease, Status, Store, StoreStats
from kvtide.offload.values import HEADER_BYTES, BadValue, Header, parse_header


class HoldingLease(Lease):
    def __init__(self, statuses: list[Status], keys: list[StoreKey], held: list[StoreKey], lock: Any) -> None:
        super().__init__(statuses)
        self._keys, self._held, self._lock = keys, held, lock

    def close(self) -> None:
        with self._lock:
            for key in self._keys:
                self._held.remove(key)
            self._keys = []


class PlainStore(Store):
    """Values in a dict, one lock around everything: the promises in the fewest lines."""

    def __init__(self, values: dict[StoreKey, bytes], capacity: int | None = None) -> None:
        self.values = values
        self.capacity = capacity
        self.policy = LRU()
        for key, value in values.items():
            self.policy.on_insert(key, len(value))
        self.held: list[StoreKey] = []
        self.lock = threading.RLock()
        self.counts = StoreStats()
        self.closed = False

    def answer(self, operation: str, keys: Sequence[StoreKey], one: Any, *buffers: Sequence[Any]) -> list[Status]:
        if any(len(key) != KEY_BYTES for key in keys) or any(len(keys) != len(each) for each in buffers):
            raise KvtideError("wrong call")
        with self.lock:
            rows = zip(keys, *buffers, strict=True)
            statuses = [Status.ERROR if self.closed else one(*row) for row in rows]
            self.counts.outcomes.update((operation, status) for status in statuses)
        return statuses

    def contains(self, keys: Sequence[StoreKey]) -> list[Status]:
        return self.answer("contains", keys, lambda key: Status.HIT if key in self.values else Status.MISS)

    def get_into(self, keys: Sequence[StoreKey], buffers: Sequence[Any]) -> list[Status]:
        return self.answer("get", keys, self.get_one, [memoryview(buffer).cast("B") for buffer in buffers])

    def get_one(self, key: StoreKey, view: memoryview) -> Status:
        if key not in self.values:
            return Status.MISS
        try:
            self.read(key, self.values[key], view)
        except BadValue as error:
            self.counts.faults[str(error)] += 1
            self.remove(key)
            return Status.CORRUPT
        self.policy.on_hit(key)
        return Status.HIT

    def read(self, key: StoreKey, value: bytes, view: memoryview) -> None:
        header = parse_header(value, key, max_value_bytes=self.max_value_bytes)
        unseal(header, memoryview(value)[HEADER_BYTES:], view)

    def put(self, keys: Sequence[StoreKey], buffers: Sequence[Any]) -> list[Status]:
        statuses = self.answer("put", keys, self.put_one, [memoryview(buffer).cast("B") for buffer in buffers])
        self.touch_prefix(keys)
        return statuses

    def put_one(self, key: StoreKey, view: memoryview) -> Status:
        if view.nbytes > self.max_value_bytes:
            return Status.REFUSED
        if key in self.values:
            return Status.PRESENT
        value = b"".join(seal(key, view))
        if self.capacity is not None:
            short = len(value) + self.policy.num_bytes - self.capacity
            held = sum(len(self.values[each]) for each in set(self.held) if each in self.values)
            if short > self.policy.num_bytes - held:
                return Status.FULL
            for victim in self.policy.victims(short, self.held):
                del self.values[victim]
        self.values[key] = value
        self.policy.on_insert(key, len(value))
        return Status.STORED

    def touch_prefix(self, keys: Sequence[StoreKey]) -> None:
        with self.lock:
            self.policy.on_prefix(keys)

    def delete(self, keys: Sequence[StoreKey]) -> list[Status]:
        return self.answer("delete", keys, lambda key: Status.DELETED if self.remove(key) else Status.MISS)

    def remove(self, key: StoreKey) -> bool:
        self.policy.on_remove(key)
        return self.values.pop(key, None) is not None

    def headers(self, keys: Sequence[StoreKey]) -> list[Header | None]:
        found: list[Header | None] = []
        for key in keys:
            if len(key) != KEY_BYTES:
                raise KvtideError("wrong call")
            try:
                value = b"" if self.closed else self.values.get(key, b"")
                found.append(parse_header(value, key, max_value_bytes=self.max_value_bytes))
            except BadValue:
                found.append(None)
        return found

    def scan(self) -> Iterator[Entry]:
        with self.lock:
            entries = [] if self.closed else [Entry(key, len(value)) for key, value in self.values.items()]
        yield from entries

    def stats(self) -> StoreStats:
        with self.lock:
            stats = deepcopy(self.counts)
            stats.num_values, stats.num_bytes = len(self.values), sum(map(len, self.values.values()))
            stats.capacity_bytes = self.capacity
            return stats

    def lease(self, keys: Sequence[StoreKey]) -> Lease:
        with self.lock:
            statuses = self.contains(keys)
            found = [key for key, status in zip(keys, statuses, strict=True) if status is Status.HIT]
            self.held += found
            return HoldingLease(statuses, found, self.held, self.lock)

    def close(self) -> None:
        with self.lock:
            self.closed = True


class PlainConformance(StoreConformance):
    persistent = True
    knows_prefixes = True
    kind: type[PlainStore] = PlainStore

    @pytest.fixture
    def place(self) -> dict[StoreKey, bytes]:
        return {}

    def open_store(self, place: Any) -> Store:
        return self.kind(place)

    def open_small(self, place: Any, num_bytes: int) -> Store:
        return self.kind(place, num_bytes)

    def stored(self, store: Store, place: Any, key: StoreKey) -> bytes:
        return place[key]

    def overwrite(self, store: Store, place: Any, key: StoreKey, data: bytes) -> None:
        place[key] = data


class TestPlainStore(PlainConformance):
    pass


# One broken promise each.


class TrustsPayload(PlainStore):
    def read(self, key: StoreKey, value: bytes, view: memoryview) -> None:
        header = parse_header(value, key, max_value_bytes=self.max_value_bytes)
        if header.raw_bytes != view.nbytes or len(value) != HEADER_BYTES + view.nbytes:
            raise BadValue("length differs")
        view[:] = value[HEADER_BYTES:]


class TrustsHeader(PlainStore):
    def read(self, key: StoreKey, value: bytes, view: memoryview) -> None:
        if len(value) != HEADER_BYTES + view.nbytes:
            raise BadValue("length differs")
        view[:] = value[HEADER_BYTES:]


class TrustsKey(PlainStore):
    def read(self, key: StoreKey, value: bytes, view: memoryview) -> None:
        header = parse_header(value, None, max_value_bytes=self.max_value_bytes)
        unseal(header, memoryview(value)[HEADER_BYTES:], view)


class ServesParts(PlainStore):
    def read(self, key: StoreKey, value: bytes, view: memoryview) -> None:
        length = min(len(value) - HEADER_BYTES, view.nbytes)
        view[:length] = value[HEADER_BYTES:][:length]


class KeepsDamaged(PlainStore):
    def get_one(self, key: StoreKey, view: memoryview) -> Status:
        value = self.values.get(key)
        status = super().get_one(key, view)
        if status is Status.CORRUPT and value is not None:
            self.values[key] = value
        return status


class CountsNoFaults(PlainStore):
    def get_one(self, key: StoreKey, view: memoryview) -> Status:
        status = super().get_one(key, view)
        self.counts.faults.clear()
        return status


class RaisesForDamage(PlainStore):
    def get_one(self, key: StoreKey, view: memoryview) -> Status:
        if key in self.values:
            self.read(key, self.values[key], view)
        return super().get_one(key, view)


class Overwrites(PlainStore):
    def put_one(self, key: StoreKey, view: memoryview) -> Status:
        self.remove(key)
        return super().put_one(key, view)


class TakesAnything(PlainStore):
    def put_one(self, key: StoreKey, view: memoryview) -> Status:
        self.max_value_bytes = 1 << 40
        return super().put_one(key, view)


class KeepsTheBuffer(PlainStore):
    def read(self, key: StoreKey, value: bytes, view: memoryview) -> None:
        super().read(key, value, view)
        view.obj[:1] = b"\0" if isinstance(view.obj, bytearray) and len(view.obj) > view.nbytes else view.obj[:1]


class DeleteIsLazy(PlainStore):
    def delete(self, keys: Sequence[StoreKey]) -> list[Status]:
        return self.answer("delete", keys, lambda key: Status.DELETED if key in self.values else Status.MISS)


class LeaksAccounting(PlainStore):
    lost = 0

    def remove(self, key: StoreKey) -> bool:
        self.lost += len(self.values.get(key, b"")) // 1000
        return super().remove(key)

    def stats(self) -> StoreStats:
        stats = super().stats()
        stats.num_bytes += self.lost
        return stats


class CountsLooking(PlainStore):
    def headers(self, keys: Sequence[StoreKey]) -> list[Header | None]:
        self.contains(keys)
        return super().headers(keys)


class ShowsTooEarly(PlainStore):
    def put(self, keys: Sequence[StoreKey], buffers: Sequence[Any]) -> list[Status]:
        for key, buffer in zip(keys, buffers, strict=True):
            if key not in self.values:
                data = b"".join(seal(key, buffer))
                self.values[key] = data[:-1] + bytes([data[-1] ^ 1])
                time.sleep(0.0005)
                with self.lock:
                    self.remove(key)
        return super().put(keys, buffers)


class HoldsNothing(PlainStore):
    def lease(self, keys: Sequence[StoreKey]) -> Lease:
        return Lease(self.contains(keys))


class NeverLetsGo(PlainStore):
    def lease(self, keys: Sequence[StoreKey]) -> Lease:
        return Lease(super().lease(keys).statuses)


class EvictsBeginnings(PlainStore):
    def touch_prefix(self, keys: Sequence[StoreKey]) -> None:
        pass


class ForgetsItsBound(PlainStore):
    def put_one(self, key: StoreKey, view: memoryview) -> Status:
        capacity, self.capacity = self.capacity, None
        status = super().put_one(key, view)
        self.capacity = capacity
        return status


class ForgetsOnClosing(PlainStore):
    def close(self) -> None:
        self.values.clear()
        super().close()


class WorksAfterClosing(PlainStore):
    def close(self) -> None:
        pass


class LeaksFiles(PlainStore):
    def close(self) -> None:
        if not self.closed:
            self.fd = os.open("/dev/null", os.O_RDONLY)
        super().close()


class LeaksThreads(PlainStore):
    stop = threading.Event()

    def close(self) -> None:
        if not self.closed:
            threading.Thread(target=self.stop.wait, daemon=True).start()
        super().close()


BROKEN = {
    TrustsPayload: "test_a_flipped_bit_anywhere_is_found",
    TrustsHeader: "test_forged_headers_are_refused",
    TrustsKey: "test_a_value_under_anothers_key_is_never_served",
    ServesParts: "test_a_value_of_another_length_is_never_served",
    KeepsDamaged: "test_truncated_values_are_found",
    CountsNoFaults: "test_a_flipped_bit_anywhere_is_found",
    RaisesForDamage: "test_one_keys_fault_stays_its_own",
    Overwrites: "test_a_value_that_is_there_is_kept",
    TakesAnything: "test_a_value_above_the_bound_is_refused",
    KeepsTheBuffer: "test_buffers_are_the_callers_again_when_a_call_returns",
    DeleteIsLazy: "test_a_deleted_value_is_gone_and_can_be_stored_again",
    LeaksAccounting: "test_accounting_is_exact_and_returns_to_nothing",
    CountsLooking: "test_outcomes_are_counted_and_looking_is_not",
    ShowsTooEarly: "test_threads_on_the_same_keys_never_read_a_wrong_value",
    HoldsNothing: "test_a_lease_holds_values_until_it_is_closed",
    NeverLetsGo: "test_a_store_whose_values_are_all_held_is_full_and_recovers",
    EvictsBeginnings: "test_of_a_prefix_the_last_values_go_first",
    ForgetsItsBound: "test_a_full_store_evicts_and_stays_within_its_bound",
    ForgetsOnClosing: "test_values_survive_a_new_opening",
    WorksAfterClosing: "test_a_closed_store_answers_error",
    LeaksFiles: "test_closing_leaves_no_files_and_no_threads",
    LeaksThreads: "test_closing_leaves_no_files_and_no_threads",
}


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_store_that_breaks_a_promise_fails(kind: type[PlainStore]) -> None:
    suite, place = PlainConformance(), dict[StoreKey, bytes]()
    suite.kind, suite.patience_s = kind, 0.1
    test = getattr(suite, BROKEN[kind])
    with suite.open_store(place) as store:
        wanted = inspect.signature(test).parameters
        arguments = {name: value for name, value in (("store", store), ("place", place)) if name in wanted}
        try:
            with pytest.raises((AssertionError, BadValue)):
                test(**arguments)
        finally:
            if kind is LeaksThreads:
                LeaksThreads.stop.set()
            if isinstance(store, LeaksFiles):
                store.close()
                os.close(store.fd)


class BareConformance(StoreConformance):
    """Claims as little as can be."""

    holds = scans = exact_stats = False

    def open_store(self, place: Any) -> Store:
        return PlainStore({})


class FullerConformance(BareConformance):
    persistent = True
    test_values_come_back_at_every_length = None

    def open_small(self, place: Any, num_bytes: int) -> Store:
        return PlainStore({}, num_bytes)

    def test_scan_finds_what_is_there(self) -> None:  # type: ignore[override]
        """A test of its own in the place of one that it does not claim."""


def kept_by(suite: type[StoreConformance]) -> set[str]:
    return {name for name in dir(suite) if name.startswith("test_") and getattr(suite, name) is not None}


def test_what_is_not_claimed_is_not_tested() -> None:
    bare, fuller, plain = map(kept_by, (BareConformance, FullerConformance, PlainConformance))
    assert plain == kept_by(StoreConformance) - {"test_another_store_on_the_same_place"}
    assert len(plain - bare) == 14
    assert fuller - bare == {
        "test_values_survive_a_new_opening",
        "test_a_full_store_evicts_and_stays_within_its_bound",
        "test_scan_finds_what_is_there",
    }
    assert bare - fuller == {"test_values_come_back_at_every_length"}
    assert FullerConformance.test_scan_finds_what_is_there is not StoreConformance.test_scan_finds_what_is_there


def test_claims_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    FullerConformance().test_claims()
    said = capsys.readouterr().out
    assert "claimed: persistent, open_small; not claimed: exact_stats, holds, knows_prefixes, " in said
    assert "overwrite, scans, shared, stored" in said
    assert "for want of holds: test_a_lease_holds_values_until_it_is_closed" in said
    assert "for want of stored and overwrite: test_forged_headers_are_refused" in said
    assert "left out by the class: test_values_come_back_at_every_length" in said


def test_a_claim_that_is_none_is_refused() -> None:
    class Unclear(BareConformance):
        persistent = "yes"  # type: ignore[assignment]

    class Half(BareConformance):
        def stored(self, store: Store, place: Any, key: StoreKey) -> bytes:
            return b""

    with pytest.raises(AssertionError, match="a claim is True or False"):
        Unclear().test_claims()
    with pytest.raises(AssertionError, match="stored and overwrite come together"):
        Half().test_claims()


def test_a_class_of_another_package_is_collected_without_skips(tmp_path: Path) -> None:
    (tmp_path / "test_acme.py").write_text(
        "from kvtide.connectors.host import HostConfig, HostConnector\n"
        "from kvtide.offload.conformance import StoreConformance\n"
        "class TestAcme(StoreConformance):\n"
        "    def open_store(self, place):\n"
        "        return HostConnector(HostConfig(max_bytes='32MiB'))\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rsP", "--rootdir", tmp_path, tmp_path]
    done = subprocess.run(
        [*command, "-k", "claims or batches or truncated or survive"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
    assert "skipped" not in done.stdout
    assert "for want of persistent: test_values_survive_a_new_opening" in done.stdout
