"""MooncakeConnector: values in Mooncake Store, the distributed engine for those who outgrow one machine's memory.

Every client brings a segment of its memory (`global_segment_size`, which may be 0) and the master places and evicts
values over all of them. A value is one object, header and payload together, under `prefix` + the key in hex. It passes
through a lane's registered memory: one copy, which buys RDMA without registering the caller's memory, and a time limit
on a library that has none (`transport.lanes`). The master's lease is a time, not a hold: a read that outlives it is
tried once more and then a MISS, never a wrong value, because the checksum is checked whatever the library says.
`num_values`, `num_bytes` and `capacity_bytes` of the stats are the master's, all its users together.
"""

from __future__ import annotations

import re
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.client import HTTPException
from importlib import import_module
from itertools import islice
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta

from kvtide.kvcache import ConfigError, KvtideError, MissingExtra
from kvtide.offload.keys import StoreKey
from kvtide.offload.store import Entry, Status, StoreStats
from kvtide.offload.values import HEADER_BYTES, Header

from .base import BaseConnector, key_of, present
from .settings import CodecName, StoreConfig
from .transport.lanes import Lane, Lanes, aligned, parts

# The library's codes.
_NO_SPACE, _INVALID, _NOT_READY, _NOT_FOUND, _EXISTS, _LEASE_EXPIRED = -200, -600, -703, -704, -705, -707
_QUOTA = -1700
_FAULTS = {-706: "held", -800: "transfer", -801: "checksum", -900: "connection", -901: "timeout"}
_BATCH_KEYS = 1024
_ANOTHERS_WRITE_SECONDS = 0.5

Result = TypeVar("Result")


class MooncakeConfig(StoreConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a `MooncakeConnector`; the names are Mooncake's own where it has one."""

    sizes = ("lane_bytes",)
    least = MappingProxyType({"lane_bytes": "8KiB"})
    sizes_or_zero = ("global_segment_size", "local_buffer_size")

    master_server_address: Annotated[
        str, Meta(description="host:port of the master.", pattern=r"^(\[[0-9a-fA-F:.]+\]|[^:\s]+):[0-9]{1,5}$")
    ]
    metadata_server: Annotated[
        str, Meta(description="P2PHANDSHAKE, or the URL of an etcd, Redis or HTTP metadata server.", min_length=1)
    ] = "P2PHANDSHAKE"
    local_hostname: Annotated[str, Meta(description="This machine's name as the others reach it.", min_length=1)] = (
        "localhost"
    )
    protocol: Annotated[Literal["tcp", "rdma"], Meta(description="How values travel.")] = "tcp"
    device_name: Annotated[str, Meta(description="RDMA devices, separated by commas; found when empty.")] = ""
    global_segment_size: Annotated[
        int | str, Meta(description="Memory that this client gives to the store, such as 4GiB; 0 gives none.")
    ] = "1GiB"
    local_buffer_size: Annotated[int | str, Meta(description="Memory of the library's own for transfers.")] = "64MiB"
    prefix: Annotated[
        str, Meta(description="What the names of all values begin with.", pattern="^[A-Za-z0-9_.:/-]*$", max_length=200)
    ] = "kvtide/"
    metrics_port: Annotated[
        int, Meta(description="The master's port for metrics, from which values are listed.", ge=1, le=65535)
    ] = 9003
    codec: CodecName = "raw"
    lanes: Annotated[int, Meta(description="Calls at a time, each through memory of its own.", ge=1, le=64)] = 4
    lane_bytes: Annotated[
        int | str, Meta(description="Memory of one call, registered; no value is longer. At least 8KiB.")
    ] = "64MiB"
    timeout_seconds: Annotated[float, Meta(description="A call that takes longer is an error.", gt=0, le=600)] = 10.0


class MooncakeConnector(BaseConnector):
    """The store; see the module. Raises `ConfigError` when the master cannot be reached or refuses the client."""

    Config = MooncakeConfig
    name = "mooncake"

    def __init__(self, config: MooncakeConfig) -> None:
        super().__init__(config.codec)
        self._prefix = config.prefix
        self._timeout = config.timeout_seconds
        host = config.master_server_address.rpartition(":")[0]
        self._metrics = f"http://{host}:{config.metrics_port}"
        self._evicted_before: int | None = None
        store = _library()()
        _reach(config)
        self._lanes = Lanes(config.lanes, config.num_bytes("lane_bytes"), config.timeout_seconds, "kvtide-mooncake")
        self.max_value_bytes = self._lanes.max_value_bytes
        try:
            with self._lanes.take() as lane:
                code = lane.run(partial(_set_up, store, config))
        except TimeoutError:
            code = -1
        if code:
            self._lanes.close()
            raise ConfigError(
                f"Mooncake does not take this client at master_server_address {config.master_server_address!r} "
                f"with protocol {config.protocol!r} and metadata_server {config.metadata_server!r} (code {code})"
            )
        self.library = store  # of use beside the store, as in benchmarks
        for lane in self._lanes.all:
            if store.register_buffer(lane.address, len(lane.memory)):
                self._shut()
                raise ConfigError(f"lane_bytes {config.lane_bytes!r}: the memory cannot be registered")
        self.stats()  # evictions count from here on

    def scan(self) -> Iterator[Entry]:
        if not self._enter():
            return
        try:
            names = (name for name in self._fetch("get_all_keys").split("\n") if name.startswith(self._prefix))
            while batch := list(islice(names, _BATCH_KEYS)):
                found = self._call(partial(self.library.batch_get_replica_desc, batch))
                for name, replicas in found.items():
                    key = key_of(name.removeprefix(self._prefix))
                    sizes = [size for replica in replicas if (size := _size(replica)) is not None]
                    if key is not None and sizes:
                        yield Entry(key, sizes[0])
        except (TimeoutError, OSError, HTTPException) as error:
            self._fault_of(error)
        finally:
            self._leave()

    def stats(self) -> StoreStats:
        stats = super().stats()
        if self._enter():
            try:
                counts = dict(re.findall(r"^(master_\w+) (\d+)", self._fetch("metrics"), re.MULTILINE))
                stats.num_values = int(counts.get("master_key_count", 0))
                stats.num_bytes = int(counts.get("master_allocated_bytes", 0))
                stats.capacity_bytes = int(counts.get("master_total_capacity_bytes", 0))
                evicted = int(counts.get("master_evicted_key_count", 0))
                if self._evicted_before is None:
                    self._evicted_before = evicted
                stats.evicted = max(0, evicted - self._evicted_before)
            except (OSError, HTTPException) as error:
                self._fault_of(error)
            finally:
                self._leave()
        return stats

    def _contains(self, keys: Sequence[StoreKey]) -> list[Status]:
        names = self._names(keys)
        codes = self._codes(len(keys), partial(self.library.batch_is_exist, names))
        return [self._status(code, {1: Status.HIT, 0: Status.MISS}) for code in codes]

    def _get(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        statuses = [Status.ERROR] * len(keys)
        sizes = [HEADER_BYTES + view.nbytes for view in views]
        for part in parts(sizes, self._lanes.lane_bytes):
            try:
                with self._lanes.take() as lane:
                    self._read(lane, part, keys, views, statuses)
            except TimeoutError as error:
                self._fault_of(error, statuses.count(Status.ERROR))
                break
        self._remove_corrupt(keys, statuses)
        return statuses

    def _read(
        self,
        lane: Lane,
        part: list[tuple[int, int]],
        keys: Sequence[StoreKey],
        views: Sequence[memoryview],
        statuses: list[Status],
    ) -> None:
        left = part
        for _ in range(2):
            names = self._names([keys[at] for at, _ in left])
            places = [lane.address + offset for _, offset in left]
            sizes = [HEADER_BYTES + views[at].nbytes for at, _ in left]
            codes = lane.run(partial(self.library.batch_get_into, names, places, sizes))
            expired = []
            for (at, offset), code in zip(left, codes, strict=True):
                if code >= 0:
                    statuses[at] = self._unseal(keys[at], lane.memory[offset : offset + code], views[at])
                elif code == _INVALID:  # the object is longer than the value that is asked for
                    self._fault("length differs")
                    statuses[at] = Status.CORRUPT
                elif code == _LEASE_EXPIRED:
                    expired.append((at, offset))
                    self._fault("lease expired")
                    statuses[at] = Status.MISS
                else:
                    statuses[at] = self._status(code, {_NOT_FOUND: Status.MISS, _NOT_READY: Status.MISS})
            left = expired
            if not left:
                return

    def _put(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        # The library says 0 for a key that is there, and keeps the old value: look first.
        statuses = present(self._contains(keys))
        absent = [at for at, status in enumerate(statuses) if status is Status.MISS]
        sizes = [HEADER_BYTES + views[at].nbytes for at in absent]
        for at in absent:
            statuses[at] = Status.ERROR
        for part in parts(sizes, self._lanes.lane_bytes):
            try:
                with self._lanes.take() as lane:
                    lengths = []
                    for number, offset in part:
                        header, payload = self._seal(keys[absent[number]], views[absent[number]])
                        lengths.append(HEADER_BYTES + payload.nbytes)
                        lane.memory[offset : offset + HEADER_BYTES] = header
                        lane.memory[offset + HEADER_BYTES : offset + lengths[-1]] = payload
                    names = self._names([keys[absent[number]] for number, _ in part])
                    places = [lane.address + offset for _, offset in part]
                    codes = lane.run(partial(self.library.batch_put_from, names, places, lengths))
            except TimeoutError as error:
                self._fault_of(error, statuses.count(Status.ERROR))
                break
            meanings = {0: Status.STORED, _EXISTS: Status.PRESENT, _NO_SPACE: Status.FULL, _QUOTA: Status.REFUSED}
            for (number, _), code in zip(part, codes, strict=True):
                statuses[absent[number]] = self._status(code, meanings)
        self._confirm(keys, statuses)
        return statuses

    def _confirm(self, keys: Sequence[StoreKey], statuses: list[Status]) -> None:
        """Look whether what was stored is there: the library also says 0 where another client writes it, or died so."""
        stored = [at for at, status in enumerate(statuses) if status is Status.STORED]
        there = self._contains([keys[at] for at in stored]) if stored else []
        for at, status in zip(stored, there, strict=True):
            if status is not Status.HIT:
                statuses[at] = self._settled(keys[at]) if status is Status.MISS else status

    def _settled(self, key: StoreKey) -> Status:
        """STORED if it was stored and has gone since; PRESENT if another client stores it now; ERROR if none does."""
        (name,) = self._names([key])
        deadline = time.monotonic() + _ANOTHERS_WRITE_SECONDS
        while True:
            (code,) = self._codes(1, lambda: [self.library.get_size(name)])
            if code == _NOT_READY and time.monotonic() < deadline:
                time.sleep(0.005)
            elif code == _NOT_READY:
                self._fault("held by another writer")
                return Status.ERROR
            else:
                return self._status(
                    code if code is None or code < 0 else 0, {0: Status.PRESENT, _NOT_FOUND: Status.STORED}
                )

    def _delete(self, keys: Sequence[StoreKey]) -> list[Status]:
        names = self._names(keys)
        codes = self._codes(len(keys), partial(self.library.batch_remove, names, True))
        meanings = {0: Status.DELETED, _NOT_FOUND: Status.MISS, _NOT_READY: Status.MISS}  # being written: not there yet
        return [self._status(code, meanings) for code in codes]

    def _headers(self, keys: Sequence[StoreKey]) -> list[Header | None]:
        each = aligned(HEADER_BYTES)
        found: list[Header | None] = []
        for start in range(0, len(keys), self._lanes.lane_bytes // each):
            batch = keys[start : start + self._lanes.lane_bytes // each]
            names = [[name] for name in self._names(batch)]
            begin, length = [[[0]]] * len(batch), [[[HEADER_BYTES]]] * len(batch)
            try:
                with self._lanes.take() as lane:
                    places = [lane.address + each * number for number in range(len(batch))]
                    read = lane.run(partial(self.library.get_into_ranges, places, names, begin, begin, length))
                    for number, (key, ((code,),)) in enumerate(zip(batch, read, strict=True)):
                        head = lane.memory[each * number : each * number + HEADER_BYTES]
                        found.append(self._header(key, head) if code == HEADER_BYTES else None)
            except TimeoutError as error:
                self._fault_of(error, len(batch))
                break
        return found + [None] * (len(keys) - len(found))

    def _shut(self) -> None:
        self._lanes.close()
        if not any(lane.hung for lane in self._lanes.all):  # a call that still runs in the library must find it there
            self.library.close()

    def _names(self, keys: Sequence[StoreKey]) -> list[str]:
        return [self._prefix + key.hex() for key in keys]

    def _call(self, call: Callable[[], Result]) -> Result:
        with self._lanes.take() as lane:
            return lane.run(call)

    def _codes(self, count: int, call: Callable[[], list[int]]) -> Sequence[int | None]:
        try:
            return self._call(call)
        except TimeoutError as error:
            self._fault_of(error, count)
            return [None] * count

    def _status(self, code: int | None, meanings: dict[int, Status]) -> Status:
        if code in meanings:
            return meanings[code]
        if code is not None:
            self._fault(_FAULTS.get(code, f"code {code}"))
        return Status.ERROR

    def _fault_of(self, error: Exception, count: int = 1) -> None:
        self._fault("timeout" if isinstance(error, TimeoutError) else "connection", count)

    def _fetch(self, page: str) -> str:
        """A page of the master's HTTP server."""
        with urllib.request.urlopen(f"{self._metrics}/{page}", timeout=self._timeout) as answer:
            return str(answer.read(), "utf-8", "replace")


def _library() -> Any:
    try:
        return import_module("mooncake.store").MooncakeDistributedStore
    except ModuleNotFoundError:
        raise MissingExtra("MooncakeConnector", "mooncake-transfer-engine-non-cuda", "mooncake") from None
    except ImportError as error:
        raise KvtideError(
            f"MooncakeConnector needs a system library that is missing ({error}); "
            "on Debian and Ubuntu: apt-get install libibverbs1 libnuma1"
        ) from None


def _reach(config: MooncakeConfig) -> None:
    """`ConfigError` unless something listens at the master's address: the library would take 90 seconds to say so."""
    host, _, port = config.master_server_address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), config.timeout_seconds).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"master_server_address {config.master_server_address!r} cannot be reached: {error}"
        ) from None


def _set_up(store: Any, config: MooncakeConfig) -> int:
    return int(
        store.setup(
            {
                "local_hostname": config.local_hostname,
                "metadata_server": config.metadata_server,
                "global_segment_size": str(config.num_bytes("global_segment_size")),
                "local_buffer_size": str(config.num_bytes("local_buffer_size")),
                "protocol": config.protocol,
                "rdma_devices": config.device_name,
                "master_server_addr": config.master_server_address,
            }
        )
    )


def _size(replica: Any) -> int | None:
    if replica.is_memory_replica():
        return int(replica.get_memory_descriptor().buffer_descriptor.size)
    return None
