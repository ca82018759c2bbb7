"""Where `NixlConnector` keeps values: files of a directory, or objects of a bucket.

Only `read` and `write` go through NIXL, on the thread of the agent that they are given, and only for bytes; names,
lengths, publishing, listing and deleting are plain file calls and S3 requests.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol
from urllib.parse import urlsplit

from kvtide.connectors.disk.files import sync_directory
from kvtide.connectors.s3 import S3Config, S3Connector
from kvtide.connectors.shared_files.room import Room
from kvtide.connectors.shared_files.tree import Tree
from kvtide.offload.keys import StoreKey
from kvtide.offload.store import Entry, Status
from kvtide.offload.values import HEADER_BYTES, BadValue

from .lanes import ALIGNMENT
from .nixl_agent import Agent, Piece

_LEFTOVER_SECONDS = 24 * 3600.0


# Bytes of a value; None where there is none; or what went wrong.
Answer = int | None | Exception


class Moved(NamedTuple):
    """One value on its way: its key, and the memory that holds it, or has room for it."""

    key: StoreKey
    address: int
    num_bytes: int


class Medium(Protocol):
    """Where values lie. Answers are one per key or value, and an exception in an answer is that key's fault."""

    remote_kind: Literal["FILE", "OBJ"]
    parameters: Mapping[str, str]

    def sizes(self, keys: Sequence[StoreKey]) -> Sequence[Answer]:
        """Bytes stored."""

    def read(self, agent: Agent, values: Sequence[Moved]) -> Sequence[Answer]:
        """Bytes read into each value's memory; `BadValue` for one that is longer than its room."""

    def write(self, agent: Agent, values: Sequence[Moved]) -> Sequence[Exception | None]:
        """Store values; None for those that are there now, complete."""

    def delete(self, keys: Sequence[StoreKey]) -> Sequence[Status | Exception]:
        """DELETED or MISS."""

    def set_aside(self, keys: Sequence[StoreKey]) -> None:
        """Take damaged values out of sight."""

    def starts(self, keys: Sequence[StoreKey]) -> Sequence[bytes | None]:
        """The first bytes of each value, as many as a header has."""

    def scan(self) -> Iterator[Entry]:
        """Every value; may raise `OSError`."""

    def gc(self) -> int:
        """Remove leftovers; the bytes given back. May raise `OSError`."""

    def touch(self, keys: Sequence[StoreKey]) -> None:
        """Note that values were used."""

    def room(self) -> Room | None:
        """The accounts of values that are bounded here; None where somebody else bounds them."""

    def close(self) -> None:
        """Let go of connections."""


class Files:
    """A directory of files, one per value, laid out as `shared_files.tree` says. May raise `OSError` when made.

    With `max_bytes` the longest unused go when it is reached, as in `shared_files.room`.
    """

    remote_kind: Literal["FILE", "OBJ"] = "FILE"

    def __init__(
        self,
        path: Path,
        parameters: Mapping[str, str],
        *,
        direct: bool,
        fsync: bool,
        max_bytes: int | None = None,
    ) -> None:
        self.parameters = parameters
        self._direct = direct
        self._fsync = fsync
        self._tree = _Tree(path / "nixl", read_only=False)
        self._room = Room(self._tree, (), max_bytes, 0)

    def sizes(self, keys: Sequence[StoreKey]) -> Sequence[Answer]:
        return [self._size(key) for key in keys]

    def read(self, agent: Agent, values: Sequence[Moved]) -> Sequence[Answer]:
        answers: list[Answer] = [self._open(value) for value in values]
        # An open file's answer is its descriptor until its bytes are there.
        opened = {at: fd for at, fd in enumerate(answers) if isinstance(fd, int)}
        try:
            lengths = {at: os.fstat(fd).st_size for at, fd in opened.items()}
            pieces = [Piece(values[at].address, lengths[at], 0, fd) for at, fd in opened.items()]
            for at, error in zip(opened, agent.move("READ", pieces), strict=True):
                answers[at] = lengths[at] if error is None else error
        finally:
            for fd in opened.values():
                os.close(fd)
        return answers

    def write(self, agent: Agent, values: Sequence[Moved]) -> Sequence[Exception | None]:
        answers: list[Exception | None] = [None] * len(values)
        begun: dict[int, tuple[int, str]] = {}
        reserved = []
        for at, value in enumerate(values):
            try:
                if not self._room.reserve(value.num_bytes):
                    answers[at] = OSError(errno.ENOSPC, "max_bytes is reached")
                    continue
                reserved.append(at)
                begun[at] = self._tree.begin(value.key)
                self._past_the_cache(begun[at][0])
            except OSError as refused:
                answers[at] = refused
        pieces = [Piece(values[at].address, values[at].num_bytes, 0, fd) for at, (fd, _) in begun.items()]
        for (at, (fd, part)), error in zip(begun.items(), agent.move("WRITE", pieces), strict=True):
            try:
                answers[at] = self._finish(values[at], fd, part, error)
            except OSError as failed:
                answers[at] = failed
                with contextlib.suppress(OSError):
                    os.unlink(part)  # noqa: PTH108
        for at in reserved:
            self._room.settle(values[at].num_bytes, stored=answers[at] is None)
        return answers

    def delete(self, keys: Sequence[StoreKey]) -> Sequence[Status | Exception]:
        answers: list[Status | Exception] = []
        for key in keys:
            try:
                size = self._tree.size(key)
                removed = size is not None and self._tree.remove(key)
                if size is not None and removed:
                    self._room.changed(-1, -size)
                answers.append(Status.DELETED if removed else Status.MISS)
            except OSError as error:
                answers.append(error)
        return answers

    def set_aside(self, keys: Sequence[StoreKey]) -> None:
        for key in keys:
            with contextlib.suppress(OSError):
                fd = self._tree.open(key)
                if fd is not None:
                    try:
                        if self._tree.set_aside(key, fd):
                            self._room.changed(-1, -os.fstat(fd).st_size)
                    finally:
                        os.close(fd)

    def starts(self, keys: Sequence[StoreKey]) -> Sequence[bytes | None]:
        return [self._start(key) for key in keys]

    def scan(self) -> Iterator[Entry]:
        return (Entry(found.key, found.num_bytes) for found in self._tree.walk())

    def gc(self) -> int:
        return self._tree.sweep(_LEFTOVER_SECONDS, _LEFTOVER_SECONDS) + self._room.trim()

    def touch(self, keys: Sequence[StoreKey]) -> None:
        if self._room.capacity is not None:
            self._tree.touch(keys)

    def room(self) -> Room | None:
        return self._room if self._room.capacity is not None else None

    def close(self) -> None:
        pass

    def _size(self, key: StoreKey) -> Answer:
        try:
            return self._tree.size(key)
        except OSError as error:
            return error

    def _open(self, value: Moved) -> Answer:
        try:
            fd = self._tree.open(value.key)
            if fd is None:
                return None
            size = os.fstat(fd).st_size
            if not HEADER_BYTES <= size <= value.num_bytes or (self._direct and size % ALIGNMENT):
                os.close(fd)
                return BadValue("length differs")
            self._past_the_cache(fd)
        except OSError as error:
            return error
        return fd

    def _past_the_cache(self, fd: int) -> None:
        if self._direct:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)

    def _finish(self, value: Moved, fd: int, part: str, error: Exception | None) -> Exception | None:
        """Publish what was written, or remove it; may raise `OSError`."""
        try:
            size = os.fstat(fd).st_size
            if error is None and size == value.num_bytes and self._fsync:
                os.fsync(fd)
        finally:
            os.close(fd)
        if error is None and size == value.num_bytes:
            self._tree.finish(value.key, part, value.num_bytes)
            if self._fsync:
                sync_directory(Path(part).parent)
            return None
        full = self._tree.free_bytes() < value.num_bytes - size  # NIXL says no more than that it failed
        os.unlink(part)  # noqa: PTH108
        return OSError(errno.ENOSPC, "no room") if full else error or BadValue("short write")

    def _start(self, key: StoreKey) -> bytes | None:
        try:
            fd = self._tree.open(key)
            if fd is None:
                return None
            try:
                return os.pread(fd, HEADER_BYTES, 0)
            finally:
                os.close(fd)
        except OSError:
            return None


class Objects:
    """Objects of a bucket; what NIXL cannot do is asked of S3. `ConfigError` for a bucket that is not there."""

    remote_kind: Literal["FILE", "OBJ"] = "OBJ"

    def __init__(self, config: S3Config) -> None:
        self._s3 = S3Connector(config)
        endpoint = config.endpoint_url or ""
        self.parameters: Mapping[str, str] = {
            "bucket": config.bucket,
            "region": self._s3.region,
            "use_virtual_addressing": "false" if endpoint else "true",
        }
        if endpoint:
            service = {"endpoint_override": endpoint, "scheme": urlsplit(endpoint).scheme}
            self.parameters = {**self.parameters, **service}

    def sizes(self, keys: Sequence[StoreKey]) -> Sequence[Answer]:
        return self._s3.sizes(keys)

    def read(self, agent: Agent, values: Sequence[Moved]) -> Sequence[Answer]:
        answers: list[Answer] = list(self.sizes([value.key for value in values]))
        pieces = {}
        for at, (size, value) in enumerate(zip(answers, values, strict=True)):
            if isinstance(size, int):
                if HEADER_BYTES <= size <= value.num_bytes:
                    pieces[at] = self._piece(at, value._replace(num_bytes=size))
                else:
                    answers[at] = BadValue("length differs")
        failed = {
            at: error
            for at, error in zip(pieces, agent.move("READ", list(pieces.values())), strict=True)
            if error is not None
        }
        # NIXL does not say that an object went meanwhile.
        for at, size in zip(failed, self.sizes([values[at].key for at in failed]), strict=True):
            answers[at] = failed[at] if isinstance(size, int) else size
        return answers

    def write(self, agent: Agent, values: Sequence[Moved]) -> Sequence[Exception | None]:
        return agent.move("WRITE", [self._piece(at, value) for at, value in enumerate(values)])

    def delete(self, keys: Sequence[StoreKey]) -> Sequence[Status | Exception]:
        return self._s3.delete(keys)

    def set_aside(self, keys: Sequence[StoreKey]) -> None:
        if keys:
            self._s3.delete(keys)

    def starts(self, keys: Sequence[StoreKey]) -> Sequence[bytes | None]:
        return self._s3.starts(keys)

    def scan(self) -> Iterator[Entry]:
        return self._s3.scan()

    def gc(self) -> int:
        return self._s3.gc()

    def touch(self, keys: Sequence[StoreKey]) -> None:
        pass

    def room(self) -> Room | None:
        return None

    def close(self) -> None:
        self._s3.close()

    def _piece(self, at: int, value: Moved) -> Piece:
        # The device number tells the objects of one call apart.
        return Piece(value.address, value.num_bytes, 0, at + 1, self._s3.object_name(value.key))


class _Tree(Tree):
    """The tree with publishing in two steps, so that the bytes of many values can be under way at once."""

    def begin(self, key: StoreKey) -> tuple[int, str]:
        """A new file to write a value to: its descriptor and name."""
        directory, _, name = self.path(key).rpartition("/")
        part = f"{directory}/.{name.removesuffix('.kv')}.{time.time_ns():x}-{os.getpid():x}-{os.urandom(6).hex()}.part"
        return self._create(part, directory), part

    def finish(self, key: StoreKey, part: str, num_bytes: int) -> None:
        """Let the file be the key's value."""
        self._rename(part, self.path(key), num_bytes)
