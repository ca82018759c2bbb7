"""Plain file I/O that the file stores share: whole reads and writes, private directories, a bounded set of open files.

A short write is an error here and a short read is a length, so that no caller takes part of a value for all of it.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

WritableBytes = bytearray | memoryview
Bytes = bytes | bytearray | memoryview  # whose length is their bytes: views are cast to "B"

PAGE = 4096
# What the kernel says when bytes find no place: the disk, a quota, or the process's limit on a file's size.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE})


def write_all(fd: int, parts: Sequence[Bytes], offset: int) -> None:
    """Write the parts one after the other at `offset`, all of them; `OSError` where that cannot be."""
    total = sum(map(len, parts))
    while (written := os.pwritev(fd, parts, offset)) != total:
        if written == 0:
            raise OSError(errno.EIO, "wrote nothing")
        offset, total = offset + written, total - written
        parts = _after(parts, written)


def read_all(fd: int, parts: Sequence[WritableBytes], offset: int) -> int:
    """Fill the parts one after the other from `offset`; the bytes read, fewer than they hold only at the file's end."""
    done = read = os.preadv(fd, parts, offset)
    total = sum(map(len, parts))
    while read and done < total:
        parts = _after(parts, read)
        read = os.preadv(fd, parts, offset + done)
        done += read
    return done


def fault_kind(error: OSError) -> str:
    """What a counter calls an error of the system."""
    return (os.strerror(error.errno) if error.errno is not None else str(error)).lower()


def make_private(directory: Path) -> None:
    """Make a directory that only its owner may enter, and what it lies in."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def sync_directory(directory: Path) -> None:
    """Make names made or removed in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class OpenFiles:
    """Open files by number, shared by threads: at most `limit` of them stay open while nobody uses them.

    `take` opens or reuses one and `give` hands it back; `opener` opens a number. Running out of descriptors closes
    the idle ones and tries once more.
    """

    def __init__(self, opener: Callable[[int], int], limit: int) -> None:
        self._opener = opener
        self._limit = limit
        self._lock = threading.Lock()
        self._idle: OrderedDict[int, int] = OrderedDict()  # number -> descriptor, the longest idle first
        self._busy: dict[int, list[int]] = {}  # number -> [descriptor, users]
        self._forgotten: set[int] = set()  # busy ones to close after their last user

    def take(self, number: int) -> int:
        """A descriptor for reading or writing at offsets, until `give`; `OSError` where it cannot be opened."""
        with self._lock:
            busy = self._busy.get(number)
            if busy is not None:
                busy[1] += 1
                return busy[0]
            fd = self._idle.pop(number, -1)
            if fd < 0:
                fd = self._open(number)
            self._busy[number] = [fd, 1]
            return fd

    def give(self, number: int, fd: int) -> None:
        """Hand back what `take` gave."""
        with self._lock:
            busy = self._busy[number]
            busy[1] -= 1
            if busy[1]:
                return
            del self._busy[number]
            if number in self._forgotten:
                self._forgotten.discard(number)
                os.close(fd)
                return
            self._idle[number] = fd
            while len(self._idle) > self._limit:
                os.close(self._idle.popitem(last=False)[1])

    def forget(self, number: int) -> None:
        """Close a file as soon as nobody uses it; the next `take` after that opens it anew."""
        with self._lock:
            fd = self._idle.pop(number, -1)
            if fd >= 0:
                os.close(fd)
            elif number in self._busy:
                self._forgotten.add(number)

    def close(self) -> None:
        """Close what is idle."""
        with self._lock:
            while self._idle:
                os.close(self._idle.popitem()[1])

    def _open(self, number: int) -> int:
        try:
            return self._opener(number)
        except OSError as error:
            if error.errno not in _OUT_OF_FILES or not self._idle:
                raise
            while self._idle:
                os.close(self._idle.popitem()[1])
            return self._opener(number)


def _after(parts: Sequence[Bytes], count: int) -> list[memoryview]:
    """What is left of the parts after their first `count` bytes."""
    left = []
    for part in parts:
        if count < len(part):
            left.append(memoryview(part)[count:])
        count = max(0, count - len(part))
    return left
