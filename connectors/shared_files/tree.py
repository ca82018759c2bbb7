"""The tree of files of `SharedStorageConnector`: names, publishing, walking, setting aside.

    <root>/kvtide-1/<space, 32 hex>/<chain, first 3 hex>/<chain, 32 hex>.kv            header + payload
                                                        /.<chain>.<unique>.part        being written
    <root>/kvtide-1/quarantine/<key>.<unique>                                          found damaged

The number is the version of this layout: another one lies beside it and is never read. Every call may raise `OSError`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from kvtide.connectors.base import key_of
from kvtide.connectors.disk.files import make_private, sync_directory
from kvtide.offload.keys import SPACE_BYTES, StoreKey

_FORMAT = "kvtide-1"
_FAN_OUT = 3
_SPACE_HEX = 2 * SPACE_BYTES
_TICK_NS = 1000  # between uses that are noted at once: file systems' own clocks tick in milliseconds

Result = TypeVar("Result")


class Stored(NamedTuple):
    """A value's file as a walk finds it; `used` is when it was last written or touched, by the server's clock."""

    key: StoreKey
    num_bytes: int
    used: float


class Tree:
    """The files below one root. Holds no state about them, and may be used by several threads."""

    def __init__(self, root: Path, *, read_only: bool) -> None:
        self._top = root / _FORMAT
        self._quarantine = self._top / "quarantine"
        if not read_only:
            for directory in (root, self._top, self._quarantine):
                make_private(directory)

    def path(self, key: StoreKey) -> str:
        """Where a value lies."""
        name = key.hex()
        chain = name[_SPACE_HEX:]
        return f"{self._top}/{name[:_SPACE_HEX]}/{chain[:_FAN_OUT]}/{chain}.kv"

    def has(self, key: StoreKey) -> bool:
        """Whether a value is published."""
        return self.size(key) is not None

    def size(self, key: StoreKey) -> int | None:
        """Length of a value's file, None without one."""
        try:
            return _again(lambda: os.stat(self.path(key))).st_size  # noqa: PTH116  (hot)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def open(self, key: StoreKey) -> int | None:
        """A descriptor for reading, None where there is no value."""
        try:
            return _again(lambda: os.open(self.path(key), os.O_RDONLY | os.O_CLOEXEC))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def publish(self, key: StoreKey, write: Callable[[int], None], size: int, *, durable: bool) -> None:
        """Have a value of `size` bytes written under a name of its own, then rename it; on `OSError` nothing is left.

        `write` is given the descriptor.
        """
        path = self.path(key)
        directory, _, name = path.rpartition("/")
        part = f"{directory}/.{name.removesuffix('.kv')}.{_unique()}.part"
        fd = self._create(part, directory)
        try:
            try:
                write(fd)
                if durable:
                    os.fsync(fd)
            finally:
                os.close(fd)  # NFS tells of a full disk only here
            self._rename(part, path, size)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(part)  # noqa: PTH108
            raise
        if durable:
            sync_directory(Path(directory))

    def remove(self, key: StoreKey) -> bool:
        """Remove a value; False if there was none."""
        try:
            os.unlink(self.path(key))  # noqa: PTH108
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def touch(self, keys: Sequence[StoreKey]) -> None:
        """Note a use of values, by the server's clock: of the first now, of each of the others a little earlier."""
        now: int | None = None
        for at, key in enumerate(keys):
            path = self.path(key)
            with contextlib.suppress(OSError):
                if now is None:
                    os.utime(path)
                    now = os.stat(path).st_mtime_ns  # noqa: PTH116
                    continue
                try:
                    os.utime(path, ns=(now - at * _TICK_NS, now - at * _TICK_NS))
                except PermissionError:  # only who has written a file may set a time of its choice
                    os.utime(path)

    def set_aside(self, key: StoreKey, fd: int) -> bool:
        """Move a damaged value to the quarantine, if it is still the file that `fd` reads."""
        path = self.path(key)
        try:
            if not os.path.samestat(os.stat(path), os.fstat(fd)):  # noqa: PTH116
                return False
            os.rename(path, self._quarantine / f"{key.hex()}.{_unique()}")  # noqa: PTH104
        except FileNotFoundError:
            return False
        return True

    def walk(self) -> Iterator[Stored]:
        """Every published value; those that come or go meanwhile may or may not be among them."""
        for directory in self._directories():
            with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
                for entry in entries:
                    key = key_of(f"{directory.parent.name}{entry.name[:-3]}") if entry.name.endswith(".kv") else None
                    if key is not None:
                        with contextlib.suppress(FileNotFoundError):
                            found = entry.stat(follow_symlinks=False)
                            yield Stored(key, found.st_size, found.st_mtime)

    def sweep(self, part_age_s: float, quarantine_age_s: float) -> int:
        """Remove what writers that died left unpublished, and what was set aside long ago; the bytes given back."""
        now = self._server_time()
        given_back = _remove_old(self._top, lambda name: name.endswith(".clock"), now - part_age_s)
        for directory in self._directories():
            given_back += _remove_old(directory, lambda name: name.endswith(".part"), now - part_age_s)
        return given_back + _remove_old(self._quarantine, lambda name: True, now - quarantine_age_s)

    def free_bytes(self) -> int:
        """What the file system has left for this user."""
        found = os.statvfs(self._top)
        return found.f_bavail * found.f_frsize

    def _directories(self) -> Iterator[Path]:
        for space in _directories_in(self._top):
            if len(space.name) == _SPACE_HEX:
                yield from _directories_in(space)

    def _create(self, part: str, directory: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return _again(lambda: os.open(part, flags, 0o600))
        except FileNotFoundError:
            make_private(Path(directory).parent)
            make_private(Path(directory))
            return os.open(part, flags, 0o600)

    def _rename(self, part: str, path: str, num_bytes: int) -> None:
        try:
            os.rename(part, path)  # noqa: PTH104
        except FileNotFoundError:
            # A repeated NFS request whose first answer was lost fails like this although it was done.
            if os.stat(path).st_size != num_bytes:  # noqa: PTH116
                raise

    def _server_time(self) -> float:
        probe = self._top / f".{_unique()}.clock"
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, b"t")
            os.fsync(fd)
            return os.fstat(fd).st_mtime
        finally:
            os.close(fd)
            probe.unlink(missing_ok=True)


def _again(call: Callable[[], Result]) -> Result:
    """The call's result, tried twice where NFS says that what it knew of the name is stale."""
    try:
        return call()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return call()


def _directories_in(directory: Path) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def _remove_old(directory: Path, chosen: Callable[[str], bool], before: float) -> int:
    given_back = 0
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            if chosen(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if found.st_mtime <= before:
                        os.unlink(entry.path)  # noqa: PTH108
                        given_back += found.st_size
    return given_back


def _unique() -> str:
    return f"{time.time_ns():x}-{os.getpid():x}-{os.urandom(6).hex()}"
