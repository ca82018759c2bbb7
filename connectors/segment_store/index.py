"""The index of a segment store: LMDB, from store key to the place of its value. It is the commit record of processes.

    key (32 bytes)  ->  segment (4) | slot (4) | stored bytes (8) | generation (8), little-endian

A value exists from the commit of its entry on, which comes after its data, and no longer after the commit of its
removal, which comes before its slot is written again. An entry that a reader finds unchanged after reading its slot
therefore still says what the slot held, and the generation tells two entries for the same slot apart.

One process writes, any number read. The map grows when it is full; readers follow, and follow too when the writer
replaces the index after a crash.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np

from kvtide.offload.keys import KEY_BYTES, StoreKey

_ENTRY = struct.Struct("<IIQQ")
ENTRY_DTYPE = np.dtype([("segment", "<u4"), ("slot", "<u4"), ("stored_bytes", "<u8"), ("generation", "<u8")])
_START_BYTES = 1 << 24
_MAX_READERS = 1024
_SCAN_STEP = 10_000


class Place(NamedTuple):
    """Where a value is: its slot, the length of its payload, and the generation in its header."""

    segment: int
    slot: int
    stored_bytes: int
    generation: int


class Index:
    """An open index. Every method may raise `lmdb.Error`; the caller makes it a status."""

    def __init__(self, directory: Path, *, read_only: bool) -> None:
        self._directory = directory
        self._read_only = read_only
        self._gate = threading.Condition()
        self._running = 0  # transactions that run; the map may only change while there are none
        self._changing = False
        self._env = self._open()

    def lookup(self, keys: Sequence[StoreKey]) -> list[Place | None]:
        """Each key's place, all as of one moment."""
        with self._transaction() as txn:
            get = txn.get
            found = [get(key) for key in keys]
        return [None if entry is None else _parse(entry) for entry in found]

    def has(self, keys: Sequence[StoreKey]) -> list[bool]:
        """Which keys have a place, all as of one moment."""
        with self._transaction() as txn:
            get = txn.get
            return [get(key) is not None for key in keys]

    def add(self, entries: Sequence[tuple[StoreKey, Place]]) -> None:
        """Commit entries, in place of those that the keys may have."""
        self._commit(entries, ())

    def remove(self, entries: Sequence[tuple[StoreKey, Place]]) -> None:
        """Commit the removal of entries, where they are still the same."""
        self._commit((), entries)

    def scan(self) -> Iterator[tuple[StoreKey, Place]]:
        """All entries in key order, read in steps so that no long transaction keeps old pages alive."""
        for keys, entries in self.steps():
            yield from zip(keys, map(_parse, entries), strict=True)

    def steps(self) -> Iterator[tuple[list[StoreKey], list[bytes]]]:
        """The same as lists of keys and of packed entries (`ENTRY_DTYPE`), some thousands at a time."""
        start = b""
        while True:
            with self._transaction() as txn:
                cursor = txn.cursor()
                found = list(islice(cursor.iternext(), _SCAN_STEP)) if cursor.set_range(start) else []
            whole = [(key, entry) for key, entry in found if len(key) == KEY_BYTES and len(entry) == _ENTRY.size]
            yield [key for key, _ in whole], [entry for _, entry in whole]
            if len(found) < _SCAN_STEP:
                return
            start = found[-1][0] + b"\0"

    def count(self) -> int:
        """Number of entries."""
        with self._transaction() as txn:
            return int(txn.stat()["entries"])

    def file_bytes(self) -> int:
        """Length of the index's files, that of its readers among them."""
        return sum(os.stat(self._directory / name).st_size for name in ("data.mdb", "lock.mdb"))  # noqa: PTH116  (hot)

    def flush(self) -> None:
        """Make what was committed durable."""
        self._env.sync(True)

    def forget_dead_readers(self) -> None:
        """Free what readers that were killed still hold."""
        self._env.reader_check()

    def close(self) -> None:
        """Wait for running transactions and close."""
        with self._alone():
            self._env.close()

    def _commit(self, added: Sequence[tuple[StoreKey, Place]], removed: Sequence[tuple[StoreKey, Place]]) -> None:
        while True:
            try:
                with self._transaction(write=True) as txn:
                    for key, place in removed:
                        if txn.get(key) == _ENTRY.pack(*place):
                            txn.delete(key)
                    for key, place in added:
                        txn.put(key, _ENTRY.pack(*place))
                return
            except lmdb.MapFullError:
                self._resize(2 * self._env.info()["map_size"])

    @contextmanager
    def _transaction(self, *, write: bool = False) -> Iterator[Any]:
        if self._read_only and self._replaced():
            self._reopen()
        self._enter()
        try:
            while True:
                try:
                    txn = self._env.begin(write=write)
                    break
                except lmdb.MapResizedError:
                    self._leave()
                    try:
                        self._resize(0)
                    finally:
                        self._enter()
            with txn:
                yield txn
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._gate:
            self._gate.wait_for(lambda: not self._changing)
            self._running += 1

    def _leave(self) -> None:
        with self._gate:
            self._running -= 1
            self._gate.notify_all()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While no transaction of this process runs, and none begins."""
        with self._gate:
            self._gate.wait_for(lambda: not self._changing)
            self._changing = True
            self._gate.wait_for(lambda: self._running == 0)
        try:
            yield
        finally:
            with self._gate:
                self._changing = False
                self._gate.notify_all()

    def _resize(self, map_bytes: int) -> None:
        """Set the map's size; 0 takes over what another process set."""
        with self._alone():
            if map_bytes == 0 or map_bytes > self._env.info()["map_size"]:
                self._env.set_mapsize(map_bytes)

    def _reopen(self) -> None:
        with self._alone():
            if self._replaced():
                old, self._env = self._env, self._open()
                old.close()

    def _open(self) -> lmdb.Environment:
        data = self._directory / "data.mdb"
        size = data.stat().st_size if data.exists() else 0
        env = lmdb.open(
            str(self._directory),
            map_size=max(_START_BYTES, size),
            mode=0o700,
            readonly=self._read_only,
            create=not self._read_only,
            sync=False,  # segments are what is synced; see `recovery`
            readahead=False,
            max_readers=_MAX_READERS,
        )
        found = data.stat()
        self._identity = found.st_dev, found.st_ino
        return env

    def _replaced(self) -> bool:
        try:
            found = os.stat(self._directory / "data.mdb")  # noqa: PTH116  (four times as fast, for every lookup)
        except FileNotFoundError:
            return False  # between two indexes: the old one still answers
        return (found.st_dev, found.st_ino) != self._identity


def _parse(entry: bytes) -> Place:
    return Place._make(_ENTRY.unpack(entry))
