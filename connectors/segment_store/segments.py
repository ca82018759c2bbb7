"""Segment files: preallocated files of equal slots, in which values lie as header + payload.

    segments/<number>-<slot bytes>-<slots>.segment        all three in hex

    | slot 0 | slot 1 | ... | slot n-1 | uses: 4 bytes a slot |
      slot = header (96) | payload | zeros to the end of the page | not written

A value needs one slot of its size class: an eighth of a power of two, so at most 12.5 % and a page are lost, and what
one value leaves another of its class fills exactly, with no hole to close. The name says all that finding the slots
takes, so that no flipped byte can misplace them; the headers say what is in them. Whoever holds these objects says
which slots are taken (`LMDBConnector`, from its index); a slot that no index names is free whatever it contains.

`uses` are the times of last use, in tenths of a second since 2026, kept in memory and written now and then: they order
evictions after a restart, and nothing depends on them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide.connectors.disk.files import PAGE, OpenFiles, WritableBytes, read_all, sync_directory, write_all
from kvtide.offload.values import HEADER_BYTES

_NAME = re.compile(r"([0-9a-f]{1,8})-([0-9a-f]{1,16})-([0-9a-f]{1,8})\.segment")
_EPOCH = 1_767_225_600  # 2026-01-01
_OPEN_FILES = 128  # that stay open at most; and no more than a quarter of what the process may open


def slot_bytes(stored_bytes: int) -> int:
    """The size class of a payload: the slot's length, header page included."""
    size = max(stored_bytes, PAGE)
    step = max(PAGE, 1 << ((size - 1).bit_length() - 4))
    return -(-size // step) * step + PAGE


def now() -> int:
    """The time of a use, as segments keep it."""
    return max(0, int((time.time() - _EPOCH) * 10))


class Segment:
    """One file: its geometry, its free slots, and when each slot was last used."""

    def __init__(self, number: int, slot_bytes: int, num_slots: int) -> None:
        self.number = number
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self.uses = array("I", bytes(4 * num_slots))
        self.taken = bytearray(num_slots)
        self.free = array("I", range(num_slots - 1, -1, -1))
        self.pending = 0  # slots taken that hold no value yet
        self.dirty = False  # data not known to be on the disk
        self.stale = False  # uses not written

    @property
    def file_bytes(self) -> int:
        """Length of the file."""
        return _file_bytes(self.slot_bytes, self.num_slots)

    @property
    def num_taken(self) -> int:
        """Slots in use."""
        return self.num_slots - len(self.free)

    @property
    def name(self) -> str:
        """The file's name."""
        return f"{self.number:08x}-{self.slot_bytes:x}-{self.num_slots:x}.segment"

    def offset(self, slot: int) -> int:
        """Where a slot begins in the file."""
        return slot * self.slot_bytes

    def take(self) -> int:
        """A free slot, now taken; the lowest first in a fresh segment."""
        slot = self.free.pop()
        self.taken[slot] = 1
        return slot

    def claim(self, slots: npt.NDArray[np.unsignedinteger[Any]]) -> None:
        """Take exactly these slots, of a segment that was opened."""
        taken = np.zeros(self.num_slots, np.uint8)
        taken[slots] = 1
        self.taken[:] = taken.tobytes()
        self.free = array("I", np.flatnonzero(taken == 0)[::-1].astype(np.uint32).tobytes())

    def release(self, slot: int) -> None:
        """Give a slot back."""
        if not self.taken[slot]:
            raise AssertionError(f"slot {slot} of segment {self.number} is free already")
        self.taken[slot] = 0
        self.free.append(slot)

    def use(self, slot: int, when: int) -> None:
        """Note a use."""
        self.uses[slot] = when
        self.stale = True

    def mean_use(self) -> float:
        """Mean time of last use over the slots taken; 0 for an empty segment."""
        uses = np.frombuffer(self.uses, np.uint32)[np.frombuffer(self.taken, np.bool_)]
        return float(uses.mean()) if len(uses) else 0.0


class Segments:
    """All segment files of one directory. Which there are is guarded by the owner's lock; reading
    and writing needs none, and fails with `FileNotFoundError` once the segment is gone."""

    def __init__(self, directory: Path, *, read_only: bool) -> None:
        self.directory = directory
        self._mode = os.O_RDONLY if read_only else os.O_RDWR
        self.by_number: dict[int, Segment] = {}
        may_open, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        few = 0 <= may_open // 4 < _OPEN_FILES  # -1 is no limit
        self._files = OpenFiles(self._open, may_open // 4 if few else _OPEN_FILES)
        self.discover()
        self._next = max([*self.by_number, int(time.time())]) + 1  # so that numbers do not come back after a restart

    @property
    def file_bytes(self) -> int:
        """Length of all files together."""
        return sum(segment.file_bytes for segment in self.by_number.values())

    def discover(self) -> None:
        """Take up segments that the directory has and this object does not know yet."""
        with os.scandir(self.directory) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match is None:
                    continue
                number, size, count = (int(part, 16) for part in match.groups())
                if number not in self.by_number and count and size >= 2 * PAGE and size % PAGE == 0:
                    self.by_number[number] = Segment(number, size, count)

    def create(self, slot_bytes: int, num_slots: int, *, durable: bool) -> Segment:
        """Preallocate a new file; `OSError` if there is no room, and then nothing is left of it."""
        segment = Segment(self._next, slot_bytes, num_slots)
        path = self.directory / segment.name
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(fd, 0, segment.file_bytes)
            if durable:
                os.fsync(fd)
                sync_directory(self.directory)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(fd)
        self._next += 1
        self.by_number[segment.number] = segment
        return segment

    def remove(self, segment: Segment) -> None:
        """Delete a segment and what is in it."""
        del self.by_number[segment.number]
        with contextlib.suppress(FileNotFoundError):
            (self.directory / segment.name).unlink()
        self._files.forget(segment.number)

    @contextmanager
    def opened(self, segment: Segment) -> Iterator[int]:
        """A descriptor of a segment's file, for reads and writes at `slot * slot_bytes`."""
        fd = self._files.take(segment.number)
        try:
            yield fd
        finally:
            self._files.give(segment.number, fd)

    def read(self, segment: Segment, slot: int, parts: Sequence[WritableBytes]) -> int:
        """Read a slot's first bytes into the parts; the bytes read."""
        with self.opened(segment) as fd:
            return read_all(fd, parts, slot * segment.slot_bytes)

    def headers(self, segment: Segment) -> Iterator[tuple[int, bytes]]:
        """The first bytes of every slot, from the disk."""
        header = bytearray(HEADER_BYTES)
        with self.opened(segment) as fd:
            for slot in range(segment.num_slots):
                if read_all(fd, (header,), segment.offset(slot)) == HEADER_BYTES and any(header[:4]):
                    yield slot, bytes(header)

    def sync(self) -> None:
        """Make what was written so far durable. `OSError` where that fails, and it is tried again the next time."""
        for segment in list(self.by_number.values()):
            if segment.dirty:
                with contextlib.suppress(FileNotFoundError):
                    self.sync_one(segment)

    def sync_one(self, segment: Segment) -> None:
        """Make one segment durable."""
        segment.dirty = False
        try:
            with self.opened(segment) as fd:
                os.fdatasync(fd)
        except OSError:
            segment.dirty = True
            raise

    def save_uses(self) -> None:
        """Write the times of use that have changed."""
        for segment in list(self.by_number.values()):
            if segment.stale:
                segment.stale = False
                with contextlib.suppress(FileNotFoundError), self.opened(segment) as fd:
                    write_all(fd, [bytes(segment.uses)], segment.num_slots * segment.slot_bytes)

    def load_uses(self, segment: Segment) -> None:
        """Read the times of use; a file cut short leaves the rest at 0, and times to come count as now."""
        data = bytearray(4 * segment.num_slots)
        self.read(segment, segment.num_slots, [data])
        uses = np.minimum(np.frombuffer(data, np.uint32), min(now(), 0xFFFFFFFF))
        segment.uses = array("I", uses.astype(np.uint32).tobytes())

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _open(self, number: int) -> int:
        segment = self.by_number.get(number)
        if segment is None:
            raise FileNotFoundError(errno.ENOENT, f"no segment {number:08x}")
        return os.open(self.directory / segment.name, self._mode | os.O_CLOEXEC)


def _file_bytes(slot_bytes: int, num_slots: int) -> int:
    return num_slots * slot_bytes + -(-4 * num_slots // PAGE) * PAGE
