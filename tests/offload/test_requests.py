"""Operations on worker threads: deadlines, hung stores, cancellation, back-pressure, leases that arrive late."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from awkward import AwkwardStore, host, key

from kvtide.kvcache import ConfigError
from kvtide.offload.breaker import Breaker
from kvtide.offload.requests import Requests
from kvtide.offload.store import Status

KEYS = [key(n) for n in range(3)]


@pytest.fixture
def store():
    store = AwkwardStore(host())
    assert store.put(KEYS, [bytes([n]) * 100 for n in range(3)]) == [Status.STORED] * 3
    store.calls = 0
    yield store
    store.gate.set()
    store.close()


def until(holds, timeout=60.0):
    expires = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < expires, "it never happened"
        time.sleep(0.001)


def test_a_batch_is_answered_key_by_key(store):
    requests = Requests(store)
    buffers = [bytearray(100) for _ in range(3)]
    operation = requests.get_into([KEYS[1], key(9), KEYS[0]], buffers)
    assert operation.future.result(10) == [Status.HIT, Status.MISS, Status.HIT]
    assert operation.wait_settled(10)
    assert (buffers[0], buffers[2]) == (b"\1" * 100, b"\0" * 100)
    put = requests.put([key(7)], [b"x" * 50])
    assert put.future.result(10) == [Status.STORED]
    assert requests.close()


def test_the_future_can_be_awaited(store):
    requests = Requests(store)

    async def read():
        return await asyncio.wrap_future(requests.get_into(KEYS[:1], [bytearray(100)]).future)

    assert asyncio.run(read()) == [Status.HIT]
    assert requests.close()


def test_a_hung_call_is_finished_at_its_deadline_and_settled_only_when_its_thread_returns(store):
    requests = Requests(store, threads=1, deadline=0.05)
    store.gate.clear()
    buffer = bytearray(100)
    operation = requests.get_into(KEYS[1:2], [buffer])
    until(lambda: (requests.expire(), operation.statuses)[1] is not None)
    assert operation.statuses == [Status.ERROR]
    assert not operation.settled
    assert not requests.close(timeout=0.05)
    store.gate.set()
    assert operation.wait_settled(10)
    assert buffer == b"\1" * 100  # the late write: why a buffer that is not settled may not be reused
    assert operation.statuses == [Status.ERROR]
    assert requests.close()


def test_what_waits_behind_a_hung_call_expires_too_and_then_nobody_waits(store):
    requests = Requests(store, threads=1, deadline=0.05)
    store.gate.clear()
    operations = [requests.get_into(KEYS[:1], [bytearray(100)]) for _ in range(4)]
    until(lambda: (requests.expire(), all(o.statuses for o in operations))[1])
    assert [operation.settled for operation in operations] == [False, True, True, True]
    # The store is left alone now: the next operation is answered on the spot.
    operation = requests.get_into(KEYS[:1], [bytearray(100)])
    assert (operation.statuses, operation.settled) == ([Status.ERROR], True)
    assert requests.faults == {"deadline": 4, "left alone": 1}
    assert store.calls == 1
    store.gate.set()
    assert requests.close()


def test_cancelled_operations(store):
    requests = Requests(store, threads=1)
    store.gate.clear()
    running = requests.get_into(KEYS[:1], [bytearray(100)])
    until(lambda: requests.num_running == 1)
    queued = requests.get_into(KEYS[:1], [bytearray(100)])
    for operation in (queued, running):
        operation.cancel()
        operation.cancel()
        assert operation.statuses == [Status.ERROR]
    assert (queued.settled, running.settled) == (True, False)
    store.gate.set()
    assert running.wait_settled(10)
    assert requests.faults["cancelled"] == 2
    assert requests.close()


def test_a_full_queue_says_so(store):
    requests = Requests(store, threads=1, max_queued=2)
    store.gate.clear()
    first = requests.get_into(KEYS[:1], [bytearray(100)])
    until(lambda: requests.num_running == 1)
    queued = [requests.get_into(KEYS[:1], [bytearray(100)]) for _ in range(2)]
    assert requests.get_into(KEYS[:1], [bytearray(100)]) is None
    assert requests.num_queued == 2
    store.gate.set()
    for operation in (first, *queued):
        assert operation.future.result(10) == [Status.HIT]
    assert requests.close()


def test_a_store_that_raises_is_an_error_and_the_worker_lives_on(store):
    requests = Requests(store, threads=1)
    store.lying = True
    assert requests.get_into(KEYS[:1], [bytearray(100)]).future.result(10) == [Status.ERROR]
    store.lying = False
    assert requests.get_into(KEYS[:1], [bytearray(100)]).future.result(10) == [Status.HIT]
    assert requests.faults == {"OSError": 1}
    assert requests.close()


@pytest.mark.parametrize("moment", ["queued", "running", "held", "never looked up"])
def test_a_lease_is_let_go_whenever_it_is_closed(store, moment):
    requests = Requests(store, threads=1)
    if moment in ("queued", "running"):
        store.gate.clear()
    if moment == "queued":
        blocker = requests.get_into(KEYS[:1], [bytearray(100)])
        until(lambda: requests.num_running == 1)
    if moment == "never looked up":
        store.lying = True
    lease = requests.lease(KEYS)
    if moment == "running":
        until(lambda: requests.num_running == 1)
    elif moment != "queued":
        until(lambda: lease.statuses is not None)
        assert lease.statuses == ([Status.HIT] * 3 if moment == "held" else [Status.ERROR] * 3)
        assert store.open_leases == (moment == "held")
    lease.close()
    lease.close()
    store.gate.set()
    if moment == "queued":
        assert blocker.future.result(10) == [Status.HIT]
    assert requests.close()
    assert store.open_leases == 0


def test_closing_answers_everything_and_ends_the_threads(store):
    before = set(threading.enumerate())
    requests = Requests(store, threads=3)
    workers = set(threading.enumerate()) - before
    assert len(workers) == 3
    store.gate.clear()
    operations = [requests.get_into(KEYS[:1], [bytearray(100)]) for _ in range(6)]
    until(lambda: requests.num_running == 3)
    threading.Timer(0.05, store.gate.set).start()
    assert requests.close(timeout=60)
    assert all(operation.statuses is not None and operation.settled for operation in operations)
    assert not any(worker.is_alive() for worker in workers)
    after = requests.get_into(KEYS[:1], [bytearray(100)])
    assert (after.statuses, after.settled) == ([Status.ERROR], True)


def test_a_breaker_rests_longer_each_time_and_forgets_at_the_first_success():
    now = [100.0]
    breaker = Breaker(lambda: now[0])
    for _ in range(2):
        breaker.note(failed=True)
    assert breaker.allows()
    assert breaker.is_closed
    breaker.note(failed=True)
    for rest in (1.0, 2.0, 4.0):
        assert not breaker.allows()
        assert not breaker.is_closed
        now[0] += rest
        assert breaker.is_closed
        assert breaker.allows()
        assert not breaker.allows()  # one try at a time
        breaker.note(failed=True)
    now[0] += 60
    assert breaker.allows()
    breaker.note(failed=False)
    assert breaker.allows()
    assert breaker.is_closed


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"max_queued": 0}, {"deadline": 0}])
def test_arguments_out_of_range(store, wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} 0 must be"):
        Requests(store, **wrong)
