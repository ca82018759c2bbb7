"""What the connectors share: arguments checked, outcomes counted, closing in order.

A subclass answers for one batch in `_contains`, `_get`, `_put`, `_delete` and `_headers`, with one status per key and
without raising; a fault it meets it counts with `_fault`. No call runs any more when `_shut` is called.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING

from kvtide.kvcache import KvtideError
from kvtide.offload.codecs import codec_named
from kvtide.offload.keys import KEY_BYTES, StoreKey
from kvtide.offload.sealing import landing, seal, unseal
from kvtide.offload.store import Entry, Status, Store, StoreStats
from kvtide.offload.values import HEADER_BYTES, BadValue, Header, parse_header

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


class BaseConnector(Store):
    """A store that answers batch by batch. `codec` packs the values that it stores; it reads those of any codec."""

    def __init__(self, codec: str = "raw") -> None:
        self._codec = codec_named(codec)
        self._state = threading.Condition()
        self._counts = StoreStats()
        self._running = 0
        self._closed = False

    def contains(self, keys: Sequence[StoreKey]) -> list[Status]:
        return self._answer("contains", keys, lambda: self._contains(keys))

    def get_into(self, keys: Sequence[StoreKey], buffers: Sequence[WriteableBuffer]) -> list[Status]:
        views = _views(keys, buffers)
        return self._answer("get", keys, lambda: self._get(keys, views))

    def put(self, keys: Sequence[StoreKey], buffers: Sequence[ReadableBuffer]) -> list[Status]:
        views = _views(keys, buffers)
        return self._answer("put", keys, lambda: self._put_fitting(keys, views))

    def delete(self, keys: Sequence[StoreKey]) -> list[Status]:
        return self._answer("delete", keys, lambda: self._delete_once(keys))

    def headers(self, keys: Sequence[StoreKey]) -> list[Header | None]:
        _check_keys(keys)
        if not self._enter():
            return [None] * len(keys)
        try:
            return self._headers(keys)
        finally:
            self._leave()

    def stats(self) -> StoreStats:
        with self._state:
            return deepcopy(self._counts)

    def close(self) -> None:
        with self._state:
            if self._closed:
                return
            self._closed = True
            self._state.wait_for(lambda: self._running == 0)
        self._shut()

    @abstractmethod
    def _contains(self, keys: Sequence[StoreKey]) -> list[Status]: ...

    @abstractmethod
    def _get(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]: ...

    @abstractmethod
    def _put(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]: ...

    @abstractmethod
    def _delete(self, keys: Sequence[StoreKey]) -> list[Status]: ...

    @abstractmethod
    def _headers(self, keys: Sequence[StoreKey]) -> list[Header | None]: ...

    @abstractmethod
    def _shut(self) -> None:
        """Let go of connections and threads; no call runs any more."""

    def _put_fitting(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        fits = [view.nbytes <= self.max_value_bytes for view in views]
        if not all(fits):
            self._fault("value too large", fits.count(False))
        wanted = [at for at, fit in enumerate(fits) if fit]
        stored = _once(
            [keys[at] for at in wanted],
            lambda places: self._put([keys[wanted[at]] for at in places], [views[wanted[at]] for at in places]),
            {Status.STORED: Status.PRESENT},
        )
        statuses = [Status.REFUSED] * len(keys)
        for at, status in zip(wanted, stored, strict=True):
            statuses[at] = status
        return statuses

    def _delete_once(self, keys: Sequence[StoreKey]) -> list[Status]:
        return _once(keys, lambda places: self._delete([keys[at] for at in places]), {Status.DELETED: Status.MISS})

    def _seal(self, key: StoreKey, view: memoryview) -> tuple[bytes, memoryview]:
        """The header and the payload that are stored for a value: never longer than header and value."""
        return seal(key, view, self._codec)

    def _unseal(self, key: StoreKey, value: ReadableBuffer, view: memoryview) -> Status:
        """Check a whole stored value and leave what it holds in the caller's buffer: HIT, or CORRUPT with its count."""
        data = memoryview(value).cast("B")
        try:
            header = parse_header(data, key, max_value_bytes=self.max_value_bytes)
            unseal(header, data[HEADER_BYTES : HEADER_BYTES + header.stored_bytes], view)
        except BadValue as error:
            return self._bad(error)
        return Status.HIT

    def _unseal_stream(
        self, key: StoreKey, read_into: Callable[[memoryview], int], length: int, view: memoryview
    ) -> Status:
        """As `_unseal`, reading a stored value of `length` bytes straight into the caller's buffer where it is raw.

        `ConnectionError` when the stream ends before `length`: that is the service's fault, and not the value's.
        """
        try:
            if length < HEADER_BYTES:
                raise BadValue("short header")
            start = bytearray(HEADER_BYTES)
            _fill(read_into, memoryview(start))
            header = parse_header(start, key, max_value_bytes=self.max_value_bytes)
            place = landing(header, view)
            if length != HEADER_BYTES + header.stored_bytes:
                raise BadValue("length differs")
            _fill(read_into, place)
            unseal(header, place, view)
        except BadValue as error:
            return self._bad(error)
        return Status.HIT

    def _counted(self, entries: Iterator[Entry]) -> Iterator[Entry]:
        """A whole walk's entries; `num_values` and `num_bytes` of the stats are what the last whole walk found."""
        num_values = num_bytes = 0
        for entry in entries:
            num_values += 1
            num_bytes += entry.num_bytes
            yield entry
        with self._state:
            self._counts.num_values, self._counts.num_bytes = num_values, num_bytes

    def _bad(self, error: BadValue) -> Status:
        self._fault(str(error))
        # A value whose codec is not installed here is sound, and others read it: it is not to be removed.
        return Status.ERROR if str(error) == "codec not installed" else Status.CORRUPT

    def _header(self, key: StoreKey, start: ReadableBuffer) -> Header | None:
        """The header at the start of a value, if it is one of this key."""
        try:
            return parse_header(start, key, max_value_bytes=self.max_value_bytes)
        except BadValue:
            return None

    def _remove_corrupt(self, keys: Sequence[StoreKey], statuses: Sequence[Status]) -> None:
        corrupt = [key for key, status in zip(keys, statuses, strict=True) if status is Status.CORRUPT]
        if corrupt:
            self._delete(corrupt)

    def _answer(self, operation: str, keys: Sequence[StoreKey], call: Callable[[], list[Status]]) -> list[Status]:
        _check_keys(keys)
        if not keys:
            return []
        if self._enter():
            try:
                statuses = call()
            finally:
                self._leave()
        else:
            statuses = [Status.ERROR] * len(keys)
            self._fault("closed")
        with self._state:
            found = bytes(statuses)  # counting bytes takes a hundredth of the time of counting enums
            for status in set(found):
                self._counts.outcomes[operation, Status(status)] += found.count(status)
        return statuses

    def _fault(self, kind: str, count: int = 1) -> None:
        with self._state:
            self._counts.faults[kind] += count

    def _enter(self) -> bool:
        with self._state:
            self._running += not self._closed
            return not self._closed

    def _leave(self) -> None:
        with self._state:
            self._running -= 1
            self._state.notify_all()


def _fill(read_into: Callable[[memoryview], int], view: memoryview) -> None:
    done = 0
    while done < view.nbytes:
        read = read_into(view[done:])
        if not read:
            raise ConnectionError("the answer ended early")
        done += read


def _once(
    keys: Sequence[StoreKey], call: Callable[[Sequence[int]], list[Status]], again: dict[Status, Status]
) -> list[Status]:
    """`call` for the first place of every key; at its other places, what that answer means the second time."""
    first: dict[StoreKey, int] = {}
    for at, key in enumerate(keys):
        first.setdefault(key, at)
    places = list(first.values())
    by_place = dict(zip(places, call(places) if places else [], strict=True))
    statuses = []
    for at, key in enumerate(keys):
        status = by_place[first[key]]
        statuses.append(status if at in by_place else again.get(status, status))
    return statuses


def present(looked_up: Sequence[Status]) -> list[Status]:
    """What `contains` found, as a put says it: PRESENT for what is there."""
    return [Status.PRESENT if status is Status.HIT else status for status in looked_up]


def key_of(name: str) -> StoreKey | None:
    """The key that `name` is the hex of; None when it is something else."""
    try:
        key = bytes.fromhex(name)
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES and key.hex() == name else None


def _check_keys(keys: Sequence[StoreKey]) -> None:
    for key in keys:
        if len(key) != KEY_BYTES:
            raise KvtideError(f"a store key is {KEY_BYTES} bytes, not {len(key)}")


def _views(keys: Sequence[StoreKey], buffers: Sequence[ReadableBuffer]) -> list[memoryview]:
    if len(keys) != len(buffers):
        raise KvtideError(f"{len(keys)} keys need as many buffers, not {len(buffers)}")
    return [memoryview(buffer).cast("B") for buffer in buffers]
