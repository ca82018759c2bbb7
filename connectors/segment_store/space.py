"""Who lies in which slot, what is free, and who goes when room is needed: the memory of a segment store's writer.

The store's lock guards all of it. The index stays the truth: a value is out of the index before its slot is given to
another, and before its segment is deleted.

    size class ── policy                    the order in which its values go
       └── segments ── free slots           a slot that one value leaves fits every other of the class

A class that needs a slot takes a free one, then makes a segment if `max_bytes` and the file system have room for it,
then lets its own next value go. After a segment's worth of those it looks whether another class has a segment whose
values have been unused for longer than those of its own, and takes that segment's room instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.connectors.disk.files import NO_ROOM, PAGE
from kvtide.connectors.disk.leases import Holds
from kvtide.offload.eviction import EvictionPolicy
from kvtide.offload.keys import StoreKey
from kvtide.offload.values import HEADER_BYTES

from .index import Index, Place
from .segments import Segment, Segments, now, slot_bytes

# What the index is taken to need at least: for itself, and per slot an entry in pages half full that are written twice.
_INDEX_BYTES = 1 << 17
_INDEX_SLOT_BYTES = 256


@dataclass
class _Class:
    slot_bytes: int
    policy: EvictionPolicy
    segments: list[Segment] = field(default_factory=list)
    evicted: int = 0  # since it last looked at the other classes

    def with_free_slot(self) -> Segment | None:
        return next((segment for segment in reversed(self.segments) if segment.free), None)


@dataclass(frozen=True)
class Limits:
    """What bounds a store: bytes on the disk in all, bytes that stay free beside it, and the length of a segment."""

    max_bytes: int
    min_free_bytes: int
    segment_bytes: int


class Move(NamedTuple):
    """A value on its way from its place to a slot of another segment."""

    key: StoreKey
    segment: Segment
    place: Place
    target: Segment
    slot: int

    @property
    def new_place(self) -> Place:
        """Where it will be."""
        return self.place._replace(segment=self.target.number, slot=self.slot)


class Space:
    """The slots of one store. Methods may raise `lmdb.Error`, and then nothing has changed."""

    def __init__(
        self,
        segments: Segments,
        index: Index,
        limits: Limits,
        make_policy: Callable[[], EvictionPolicy],
        *,
        durable: bool,
    ) -> None:
        self.num_bytes = 0
        self.evicted = 0
        self.no_room = 0  # times that the file system refused a segment
        self.holds = Holds()
        self._segments = segments
        self._index = index
        self._limits = limits
        self._make_policy = make_policy
        self._durable = durable
        self._classes: dict[int, _Class] = {}
        self._resident: dict[StoreKey, Segment] = {}
        self._segment_bytes = 0  # of all files
        self._num_slots = 0

    def __len__(self) -> int:
        return len(self._resident)

    def __contains__(self, key: StoreKey) -> bool:
        return key in self._resident

    def load(self, keys: Sequence[StoreKey], entries: npt.NDArray[np.void]) -> None:
        """Take up the values of an index, whose slots are claimed, the longest unused first."""
        uses = np.zeros(len(entries), np.uint32)
        numbers, slots = entries["segment"].copy(), entries["slot"].copy()
        by_segment = np.argsort(numbers, kind="stable")
        for segment in self._segments.by_number.values():
            self._segments.load_uses(segment)
            self._class(segment.slot_bytes).segments.append(segment)
            self._count(segment, 1)
            start, stop = np.searchsorted(numbers, [segment.number, segment.number + 1], sorter=by_segment)
            there = by_segment[start:stop]
            uses[there] = np.frombuffer(segment.uses, np.uint32)[slots[there]]
        order = np.argsort(uses, kind="stable")
        owners = {
            number: (segment, self._classes[segment.slot_bytes].policy.on_insert)
            for number, segment in self._segments.by_number.items()
        }
        for at, number in zip(order.tolist(), numbers[order].tolist(), strict=True):
            segment, insert = owners[number]
            self._resident[keys[at]] = segment
            insert(keys[at], segment.slot_bytes)
        self.num_bytes = HEADER_BYTES * len(keys) + int(entries["stored_bytes"].sum())

    def take(self, sizes: Sequence[int]) -> list[tuple[Segment, int] | None]:
        """A free slot, now taken, for each payload; None where there is no room and nothing that may go."""
        while self._room() < 0 and self._drop_coldest(None):
            pass
        wanted: dict[int, list[int]] = {}
        for at, size in enumerate(sizes):
            wanted.setdefault(slot_bytes(size), []).append(at)
        slots: list[tuple[Segment, int] | None] = [None] * len(sizes)
        for size, places in wanted.items():
            found = self._take(self._class(size), len(places))
            for at, slot in zip(places, found, strict=False):
                slots[at] = slot
        return slots

    def settle(self, key: StoreKey, place: Place) -> None:
        """A value is in the index now: it counts, and may go."""
        segment = self._segments.by_number[place.segment]
        self._resident[key] = segment
        self._classes[segment.slot_bytes].policy.on_insert(key, segment.slot_bytes)
        self.num_bytes += HEADER_BYTES + place.stored_bytes
        segment.pending -= 1
        segment.use(place.slot, now())

    def release(self, segment: Segment, slot: int) -> None:
        """Give back a slot that was taken and did not come to hold a value."""
        segment.pending -= 1
        segment.release(slot)

    def use(self, key: StoreKey, place: Place, when: int) -> None:
        """A value was used."""
        segment = self._resident.get(key)
        if segment is not None and segment.number == place.segment:
            self._classes[segment.slot_bytes].policy.on_hit(key)
            segment.use(place.slot, when)

    def order(self, keys: Sequence[StoreKey]) -> None:
        """Values are one prefix: of those of one size the last go first."""
        by_size: dict[int, list[StoreKey]] = {}
        for key in keys:
            segment = self._resident.get(key)
            if segment is not None:
                by_size.setdefault(segment.slot_bytes, []).append(key)
        for size, part in by_size.items():
            self._classes[size].policy.on_prefix(part)

    def remove(self, keys: Iterable[StoreKey]) -> int:
        """Remove values, from the index first; how many were there."""
        there = {key: self._resident[key] for key in keys if key in self._resident}
        self._remove(list(there))
        for key, segment in there.items():
            self._classes[segment.slot_bytes].policy.on_remove(key)
        return len(there)

    def remove_if(self, key: StoreKey, place: Place) -> None:
        """Remove a value that is still where it was found damaged."""
        if self._index.lookup([key]) == [place] and key in self._resident:
            self.remove([key])

    def give_back(self, spare: Container[Segment] = ()) -> bool:
        """Let the coldest segment go as a whole, file and all; False if every one holds what is held, or is spared."""
        return self._drop_coldest(None, spare)

    def compact(self, max_moved_bytes: int, copy: Callable[[Sequence[Move]], None]) -> int:
        """Empty sparse segments into the free slots of others and delete them; the bytes of files given back.

        `copy` brings values to their new slots and makes them as durable as they were. May raise `OSError` too.
        """
        given_back = 0
        for size_class in self._classes.values():
            for segment in sorted(size_class.segments, key=lambda each: each.num_taken):
                room = sum(len(each.free) for each in size_class.segments if each is not segment)
                size = segment.num_taken * segment.slot_bytes
                if segment.num_taken > room or size > max_moved_bytes or segment.pending:
                    break
                max_moved_bytes -= size
                self._move_out(size_class, segment, copy)
                given_back += segment.file_bytes
                self._delete(size_class, segment)
        return given_back

    def _class(self, size: int) -> _Class:
        found = self._classes.get(size)
        if found is None:
            found = self._classes[size] = _Class(size, self._make_policy())
        return found

    def _take(self, size_class: _Class, count: int) -> list[tuple[Segment, int]]:
        slots: list[tuple[Segment, int]] = []
        if _INDEX_BYTES + PAGE + size_class.slot_bytes + 4 + _INDEX_SLOT_BYTES > self._limits.max_bytes:
            return slots  # not if everything else went
        while len(slots) < count:
            segment = size_class.with_free_slot()
            if segment is not None:
                while segment.free and len(slots) < count:
                    slots.append((segment, segment.take()))
                    segment.pending += 1
            elif not self._grow(size_class) and not self._evict(size_class, count - len(slots)):
                break
        return slots

    def _grow(self, size_class: _Class) -> bool:
        """Make another segment, if there is room for one that is worth it."""
        size = size_class.slot_bytes
        usual = max(1, self._limits.segment_bytes // size)
        count = min(usual, (self._room() - PAGE) // (size + 4 + _INDEX_SLOT_BYTES))
        if count < 1 or (size_class.segments and count < usual // 4):
            return False
        if self._limits.min_free_bytes:
            disk = os.statvfs(self._segments.directory)
            if disk.f_bavail * disk.f_frsize - count * size < self._limits.min_free_bytes:
                self.no_room += 1
                return False
        try:
            segment = self._segments.create(size, count, durable=self._durable)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self.no_room += 1
            return False
        size_class.segments.append(segment)
        self._count(segment, 1)
        return True

    def _evict(self, size_class: _Class, count: int) -> bool:
        """Free a slot or more for the class; False if nothing may go."""
        if size_class.evicted >= max(1, self._limits.segment_bytes // size_class.slot_bytes):
            size_class.evicted = 0
            if self._drop_coldest(size_class) and self._grow(size_class):
                return True
        victims = size_class.policy.victims(count * size_class.slot_bytes, self.holds)
        if not victims:
            # Room that is not enough for one slot calls for more of it.
            return self._drop_coldest(None) and (self._grow(size_class) or self._evict(size_class, count))
        try:
            self._remove(victims)
        except Exception:
            for key in victims:
                size_class.policy.on_insert(key, size_class.slot_bytes)
            raise
        size_class.evicted += len(victims)
        self.evicted += len(victims)
        return True

    def _drop_coldest(self, than: _Class | None, spare: Container[Segment] = ()) -> bool:
        """Delete the segment that was unused the longest; only one of another class that is colder than all of its."""
        held = {self._resident[key] for key in self.holds if key in self._resident}
        candidates = [
            (segment.mean_use(), segment.number, size_class, segment)
            for size_class in self._classes.values()
            for segment in size_class.segments
            if segment not in held and segment not in spare and not segment.pending
        ]
        if not candidates:
            return False
        _, _, owner, coldest = min(candidates, key=lambda each: each[:2])
        if owner is than:
            return False
        keys = self._keys_in(coldest)
        self._remove(keys)
        for key in keys:
            owner.policy.on_remove(key)
        self.evicted += len(keys)
        self._delete(owner, coldest)
        return True

    def _keys_in(self, segment: Segment) -> list[StoreKey]:
        return [key for key, where in self._resident.items() if where is segment]

    def _remove(self, keys: Sequence[StoreKey]) -> None:
        """Out of the index, then out of memory; policies are the caller's."""
        places = self._index.lookup(keys)
        found = [(key, place) for key, place in zip(keys, places, strict=True) if place is not None]
        self._index.remove(found)
        for key in keys:
            del self._resident[key]
        for _, place in found:
            self._segments.by_number[place.segment].release(place.slot)
            self.num_bytes -= HEADER_BYTES + place.stored_bytes

    def _move_out(self, size_class: _Class, segment: Segment, copy: Callable[[Sequence[Move]], None]) -> None:
        moves = []
        try:
            keys = self._keys_in(segment)
            for key, place in zip(keys, self._index.lookup(keys), strict=True):
                if place is not None:
                    target = next(each for each in size_class.segments if each is not segment and each.free)
                    moves.append(Move(key, segment, place, target, target.take()))
            copy(moves)
            self._index.add([(move.key, move.new_place) for move in moves])
        except Exception:
            for move in moves:
                move.target.release(move.slot)
            raise
        for move in moves:
            move.target.use(move.slot, segment.uses[move.place.slot])
            self._resident[move.key] = move.target

    def _delete(self, size_class: _Class, segment: Segment) -> None:
        size_class.segments.remove(segment)
        self._segments.remove(segment)
        self._count(segment, -1)

    def _count(self, segment: Segment, sign: int) -> None:
        self._segment_bytes += sign * segment.file_bytes
        self._num_slots += sign * segment.num_slots

    def _room(self) -> int:
        """Bytes that are left for segments; less than none where readers that hold old pages made the index grow."""
        index = max(_INDEX_BYTES + _INDEX_SLOT_BYTES * self._num_slots, self._index.file_bytes())
        return self._limits.max_bytes - self._segment_bytes - index
