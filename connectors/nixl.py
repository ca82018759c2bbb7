"""NixlConnector: values in files or objects that NIXL moves, by the plug-in POSIX, GDS, GDS_MT or OBJ.

What NIXL lacks is done here: names, lengths, publishing, listing, deleting, time limits. A file is written under a name
of its own and renamed when all of it is there; an object is there whole or not at all, and S3 is asked for its length
before a read, because NIXL calls a read beyond an object's end done. A value passes through a lane's registered memory
(`transport.lanes`), one agent and thread per lane: one copy, and a hung transfer never writes to the caller's buffer
late. Against a cached file plain reads are as fast; NIXL pays with `direct` and small values, with GDS, for objects.
Files beyond `max_bytes` are evicted, the longest unused first; without it they fill the file system (then FULL).
Objects are the bucket's business. `num_values` and `num_bytes` of the stats are what the last whole `scan` found, or
what the last count for `max_bytes` did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from kvtide.kvcache import ConfigError
from kvtide.offload.keys import StoreKey
from kvtide.offload.store import Entry, Status, StoreStats
from kvtide.offload.values import HEADER_BYTES, BadValue, Header

from .base import BaseConnector, present
from .disk.files import NO_ROOM
from .s3 import HttpUrl, S3Config
from .settings import CodecName, StoreConfig
from .transport.lanes import Lane, Lanes, aligned, parts
from .transport.nixl_agent import Agent
from .transport.nixl_media import Files, Medium, Moved, Objects


class NixlConfig(StoreConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a `NixlConnector`."""

    sizes = ("lane_bytes", "max_bytes")

    plugin: Annotated[Literal["POSIX", "GDS", "GDS_MT", "OBJ"], Meta(description="NIXL's plug-in.")] = "POSIX"
    path: Annotated[str | None, Meta(description="Directory of the files; for every plug-in but OBJ.")] = None
    direct: Annotated[bool, Meta(description="Past the page cache (O_DIRECT); files are padded to 4 KiB.")] = False
    max_bytes: Annotated[
        int | str | None, Meta(description="What the files may hold, such as 1TiB; the longest unused go.")
    ] = None
    fsync: Annotated[bool, Meta(description="Files survive a power failure, not only a crash of the engine.")] = False
    io: Annotated[Literal["aio", "uring"], Meta(description="How POSIX asks the kernel.")] = "aio"
    bucket: Annotated[str | None, Meta(description="OBJ: the bucket; it must exist.")] = None
    prefix: Annotated[
        str, Meta(description="OBJ: what names of values begin with.", pattern="^[A-Za-z0-9_.:/-]*$", max_length=200)
    ] = "kvtide/"
    endpoint_url: Annotated[HttpUrl | None, Meta(description="OBJ: the service; AWS when absent.")] = None
    region: Annotated[str | None, Meta(description="OBJ: the region.")] = None
    package: Annotated[
        Literal["nixl", "nixl_cu12", "nixl_cu13"],
        Meta(description="NIXL's build; nixl chooses by the CUDA it finds. OBJ of nixl_cu13 needs CUDA's libraries."),
    ] = "nixl"
    codec: CodecName = "raw"
    lanes: Annotated[int, Meta(description="Calls at a time, each with an agent and memory.", ge=1, le=64)] = 2
    lane_bytes: Annotated[
        int | str, Meta(description="Memory of one call, registered; no value is longer. At least 8KiB.")
    ] = "64MiB"
    timeout_seconds: Annotated[
        float, Meta(description="A transfer that takes longer is an error; OBJ itself waits 25 s.", gt=0, le=600)
    ] = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        lane_bytes = self.num_bytes("lane_bytes")
        if lane_bytes < 2 * aligned(1) or lane_bytes % aligned(1):
            raise ConfigError(f"lane_bytes {self.lane_bytes!r} must be a multiple of 4KiB, and at least 8KiB")
        objects = {"bucket": self.bucket, "endpoint_url": self.endpoint_url, "region": self.region}
        files = {
            "path": self.path,
            "direct": self.direct or None,
            "fsync": self.fsync or None,
            "max_bytes": self.max_bytes,
        }
        needed, allowed, others = ("bucket", objects, files) if self.plugin == "OBJ" else ("path", files, objects)
        if allowed[needed] is None:
            raise ConfigError(f"plugin {self.plugin!r} needs the key {needed!r}")
        for key, value in others.items():
            if value is not None:
                raise ConfigError(f"plugin {self.plugin!r} has no use for the key {key!r}, which is {value!r}")


class NixlConnector(BaseConnector):
    """The store; see the module. Raises `ConfigError` when the plug-in cannot be created on this machine."""

    Config = NixlConfig
    name = "nixl"

    def __init__(self, config: NixlConfig) -> None:
        super().__init__(config.codec)
        self._pad = aligned if config.direct else int
        self._lanes = Lanes(config.lanes, config.num_bytes("lane_bytes"), config.timeout_seconds, "kvtide-nixl")
        self.max_value_bytes = self._lanes.max_value_bytes
        self._medium: Medium | None = None
        try:
            self._medium = _medium(config)
            for lane in self._lanes.all:
                lane.context = lane.run(partial(_agent, config, self._medium, lane))
        except TimeoutError:
            self._shut()
            raise ConfigError(f"plugin {config.plugin!r} cannot be created within timeout_seconds") from None
        except BaseException:
            self._shut()
            raise

    def scan(self) -> Iterator[Entry]:
        if not self._enter():
            return
        try:
            yield from self._counted(self._where.scan())
        except OSError:
            self._fault("listing")
        finally:
            self._leave()

    def touch(self, keys: Sequence[StoreKey]) -> None:
        self._where.touch(keys)

    def touch_prefix(self, keys: Sequence[StoreKey]) -> None:
        self._where.touch(keys)

    def stats(self) -> StoreStats:
        stats = super().stats()
        if (room := self._where.room()) is not None:
            try:
                stats.num_values, stats.num_bytes = room.totals()
            except OSError:
                self._fault("listing")
            stats.capacity_bytes, stats.evicted = room.capacity, room.evicted
        return stats

    def gc(self) -> int:
        """Remove what dead writers and damaged values left; the bytes given back."""
        if not self._enter():
            return 0
        try:
            return self._where.gc()
        except OSError:
            self._fault("listing")
            return 0
        finally:
            self._leave()

    @property
    def _where(self) -> Medium:
        assert self._medium is not None
        return self._medium

    def _contains(self, keys: Sequence[StoreKey]) -> list[Status]:
        return [Status.HIT if isinstance(size, int) else self._outcome(size) for size in self._where.sizes(keys)]

    def _get(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        statuses = [Status.ERROR] * len(keys)
        sizes = [self._pad(HEADER_BYTES + view.nbytes) for view in views]
        for part in parts(sizes, self._lanes.lane_bytes):
            try:
                with self._lanes.take() as lane:
                    values = [Moved(keys[at], lane.address + offset, sizes[at]) for at, offset in part]
                    read = lane.run(partial(self._where.read, lane.context, values))
                    for (at, offset), length in zip(part, read, strict=True):
                        if isinstance(length, int):
                            statuses[at] = self._unseal(keys[at], lane.memory[offset : offset + length], views[at])
                        else:
                            statuses[at] = self._outcome(length)
            except TimeoutError:
                self._fault("timeout", statuses.count(Status.ERROR))
                break
        self._where.set_aside([key for key, status in zip(keys, statuses, strict=True) if status is Status.CORRUPT])
        self._where.touch([key for key, status in zip(keys, statuses, strict=True) if status is Status.HIT])
        return statuses

    def _put(self, keys: Sequence[StoreKey], views: Sequence[memoryview]) -> list[Status]:
        statuses = present(self._contains(keys))
        absent = [at for at, status in enumerate(statuses) if status is Status.MISS]
        room = [self._pad(HEADER_BYTES + views[at].nbytes) for at in absent]
        for at in absent:
            statuses[at] = Status.ERROR
        for part in parts(room, self._lanes.lane_bytes):
            try:
                with self._lanes.take() as lane:
                    values = [self._place(lane, offset, keys[absent[at]], views[absent[at]]) for at, offset in part]
                    written = lane.run(partial(self._where.write, lane.context, values))
            except TimeoutError:
                self._fault("timeout", statuses.count(Status.ERROR))
                break
            for (at, _), error in zip(part, written, strict=True):
                statuses[absent[at]] = self._outcome(error or Status.STORED)
        self._where.touch([keys[at] for at in absent if statuses[at] is Status.STORED])
        return statuses

    def _place(self, lane: Lane, offset: int, key: StoreKey, view: memoryview) -> Moved:
        """Lay a value and its header out in the lane."""
        header, payload = self._seal(key, view)
        end = offset + HEADER_BYTES + payload.nbytes
        padded = offset + self._pad(end - offset)
        lane.memory[offset : offset + HEADER_BYTES] = header
        lane.memory[offset + HEADER_BYTES : end] = payload
        lane.memory[end:padded] = bytes(padded - end)
        return Moved(key, lane.address + offset, padded - offset)

    def _delete(self, keys: Sequence[StoreKey]) -> list[Status]:
        return [self._outcome(answer) for answer in self._where.delete(keys)]

    def _headers(self, keys: Sequence[StoreKey]) -> list[Header | None]:
        return [
            self._header(key, start) if start else None
            for key, start in zip(keys, self._where.starts(keys), strict=True)
        ]

    def _shut(self) -> None:
        self._lanes.close(Agent.close)
        if self._medium is not None:
            self._medium.close()

    def _outcome(self, answer: Status | Exception | None) -> Status:
        if answer is None:
            return Status.MISS
        if isinstance(answer, Status):
            return answer
        if isinstance(answer, BadValue):
            return self._bad(answer)
        if isinstance(answer, OSError) and answer.errno in NO_ROOM:
            return Status.FULL
        self._fault(type(answer).__name__)
        return Status.ERROR


def _medium(config: NixlConfig) -> Medium:
    """Where the plug-in's values lie."""
    if config.plugin == "OBJ":
        assert config.bucket is not None
        return Objects(
            S3Config(
                bucket=config.bucket,
                prefix=config.prefix,
                endpoint_url=config.endpoint_url,
                region=config.region,
                timeout_seconds=config.timeout_seconds,
                retries=0,
            )
        )
    assert config.path is not None
    parameters = {f"use_{config.io}": "true"} if config.plugin == "POSIX" else {}
    max_bytes = config.num_bytes("max_bytes") or None
    try:
        return Files(Path(config.path), parameters, direct=config.direct, fsync=config.fsync, max_bytes=max_bytes)
    except OSError as error:
        raise ConfigError(f"path {config.path!r} cannot be used: {error.strerror}") from None


def _agent(config: NixlConfig, medium: Medium, lane: Lane) -> Agent:
    agent = Agent(config.plugin, medium.parameters, medium.remote_kind, config.package)
    agent.register(lane.address, len(lane.memory))
    return agent
