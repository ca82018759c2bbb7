"""Opening a segment store: one writer at a time, a known format, and an index that may be believed.

    <path>/format-1            the version of this layout, as a name; another number is refused
    <path>/writer.lock         locked by the writer for as long as it lives; holds its pid
    <path>/state.json          whether the last writer closed, and the checksum of the index it left
    <path>/index/              LMDB
    <path>/segments/           the values

The index is believed when it is what a closing writer sealed, and when the writer died but the machine did not, so
that nothing written is lost, and `lmdb.verify` finds no fault. Otherwise, after a loss of power in particular, it is
built anew from the headers in the segments, which finds every value whose data is on the disk: commits need not be
synced. LMDB itself is never given a file that was not checked: it maps it, and a wrong page number would end the
process.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

import lmdb
import lmdb.verify
import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvtide.connectors.disk.files import make_private, sync_directory, write_all
from kvtide.kvcache import ConfigError
from kvtide.offload.keys import StoreKey
from kvtide.offload.values import BadValue, parse_header

from .index import ENTRY_DTYPE, Index, Place
from .segments import Segment, Segments

FORMAT = 1

_SCAN_THREADS = 16
_SCAN_COMMIT = 100_000


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What the last writer left behind."""

    clean: bool
    boot: str
    index_bytes: int = 0
    index_digest: str = ""


class Recovered(NamedTuple):
    """An index, its keys with the entries of each, every slot they name claimed, and how it was come by."""

    opened: Index
    keys: list[StoreKey]
    entries: npt.NDArray[np.void]
    how: Literal["new", "sealed", "checked", "rebuilt"]


def prepare(path: Path, *, read_only: bool) -> None:
    """Make or check the directory; `ConfigError` unless it is a store of this format, or empty and to be written."""
    try:
        if not read_only:
            make_private(path)
        names = {entry.name for entry in os.scandir(path)}
        formats = sorted(name for name in names if re.fullmatch(r"format-\d+", name))
        if formats and formats != [f"format-{FORMAT}"]:
            raise ConfigError(f"path {str(path)!r} holds a store of {formats[-1]}; this kvtide reads format-{FORMAT}")
        if not formats and (names or read_only):
            what = "something else than a store" if names else "no store yet"
            raise ConfigError(f"path {str(path)!r} holds {what}; give the directory of a store, or a new one to write")
        if not read_only:
            (path / f"format-{FORMAT}").touch(0o600)
            make_private(path / "segments")
            sync_directory(path)
    except OSError as error:
        raise ConfigError(f"path {str(path)!r} cannot be used: {error.strerror}") from None


def lock(path: Path) -> int:
    """Become the store's writer; the descriptor holds the lock until it is closed, or the process dies."""
    fd = os.open(path / "writer.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise ConfigError(
            f"path {str(path)!r} is being written by process {holder}; a store has one writer, and any number of "
            "processes with read_only: true"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def is_locked(path: Path) -> bool:
    """Whether a writer lives."""
    try:
        fd = os.open(path / "writer.lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def recover(path: Path, segments: Segments, max_value_bytes: int) -> Recovered:
    """The index to write to, for the holder of the lock; leaves the state marked as not closed."""
    trust = _trust(path)
    shutil.rmtree(path / "index.new", ignore_errors=True)
    for part in path.glob("state.json.*"):
        part.unlink()
    save_state(path, State(clean=False, boot=_boot()))
    if trust is not None:
        try:
            index = Index(path / "index", read_only=False)
            claimed = _claim(index, segments)
            if claimed is not None:
                return Recovered(index, *claimed, trust)
            index.close()
        except lmdb.Error:
            pass
    empty = not segments.by_number
    _write_anew(path, _scan(segments, max_value_bytes))
    index = Index(path / "index", read_only=False)
    claimed = _claim(index, segments)
    if claimed is None:
        raise AssertionError("an index that was built from headers names a slot twice")
    return Recovered(index, *claimed, "new" if empty else "rebuilt")


def is_believable(path: Path) -> bool:
    """Whether a reader may open the index: a writer lives that has checked it, or it stands a check now."""
    return is_locked(path) or _trust(path) is not None


def seal(path: Path) -> None:
    """Note that the index, closed and synced, is whole."""
    size, digest = _digest(path / "index" / "data.mdb")
    state = State(clean=True, boot=_boot(), index_bytes=size, index_digest=digest)
    save_state(path, state)


def save_state(path: Path, state: State) -> None:
    """Publish the state, whole."""
    part = path / f"state.json.{os.getpid()}"
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            write_all(fd, (msgspec.json.encode(state),), 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        part.replace(path / "state.json")
    except OSError:
        part.unlink(missing_ok=True)
        raise
    sync_directory(path)


def _trust(path: Path) -> Literal["sealed", "checked"] | None:
    data = path / "index" / "data.mdb"
    try:
        state = msgspec.json.decode((path / "state.json").read_bytes(), type=State)
        if state.clean:
            return "sealed" if (state.index_bytes, state.index_digest) == _digest(data) else None
        if state.boot != _boot():
            return None
        return None if lmdb.verify.verify(str(data)) else "checked"  # type: ignore[no-untyped-call]
    except (OSError, msgspec.MsgspecError, lmdb.verify.VerifyError):
        return None


def _claim(index: Index, segments: Segments) -> tuple[list[StoreKey], npt.NDArray[np.void]] | None:
    """Claim the slots of all entries; None if two name one slot. Entries whose segment is gone are removed."""
    keys: list[StoreKey] = []
    parts = [np.empty(0, ENTRY_DTYPE)]
    for found, packed in index.steps():
        keys += found
        parts.append(np.frombuffer(b"".join(packed), ENTRY_DTYPE))
    entries = np.concatenate(parts)
    claimed = np.zeros(len(entries), np.bool_)
    order = np.argsort(entries["segment"], kind="stable")
    numbers, starts = np.unique(entries["segment"][order], return_index=True)
    claims = []
    for number, start, stop in zip(numbers.tolist(), starts, [*starts, len(order)][1:], strict=True):
        segment = segments.by_number.get(number)
        if segment is not None:
            places = order[start:stop]
            places = places[entries["slot"][places] < segment.num_slots]
            slots = entries["slot"][places]
            if len(np.unique(slots)) != len(slots):
                return None
            claimed[places] = True
            claims.append((segment, slots))
    for segment, slots in claims:
        segment.claim(slots)
    if not claimed.all():
        lost = np.flatnonzero(~claimed).tolist()
        index.remove([(keys[at], Place(*entries[at].item())) for at in lost])
        keys = [key for key, is_claimed in zip(keys, claimed.tolist(), strict=True) if is_claimed]
        entries = entries[claimed]
    return keys, entries


def _scan(segments: Segments, max_value_bytes: int) -> list[tuple[StoreKey, Place]]:
    """Entries for all values that the segments' headers tell of; of two with one key the younger, in key order."""
    newest: dict[StoreKey, Place] = {}

    def scan(segment: Segment) -> list[tuple[StoreKey, Place]]:
        found = []
        for slot, data in segments.headers(segment):
            try:
                header = parse_header(data, None, max_value_bytes=max_value_bytes)
            except BadValue:
                continue
            if header.stored_bytes <= segment.slot_bytes - len(data):
                found.append((header.key, Place(segment.number, slot, header.stored_bytes, header.generation)))
        return found

    with ThreadPoolExecutor(_SCAN_THREADS) as pool:
        for found in pool.map(scan, list(segments.by_number.values())):
            for key, place in found:
                other = newest.get(key)
                if other is None or other.generation < place.generation:
                    newest[key] = place
    return sorted(newest.items())


def _write_anew(path: Path, entries: list[tuple[StoreKey, Place]]) -> None:
    fresh = path / "index.new"
    make_private(fresh)
    index = Index(fresh, read_only=False)
    for at in range(0, len(entries), _SCAN_COMMIT):
        index.add(entries[at : at + _SCAN_COMMIT])
    index.flush()
    index.close()
    shutil.rmtree(path / "index", ignore_errors=True)
    fresh.rename(path / "index")
    sync_directory(path)


def _digest(data: Path) -> tuple[int, str]:
    digest = xxhash.xxh3_128()
    size = 0
    with data.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
            size += len(part)
    return size, digest.hexdigest()


def _boot() -> str:
    """Names this run of the machine; what cannot be told is never the same."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"unknown-{os.getpid()}-{os.urandom(8).hex()}"
