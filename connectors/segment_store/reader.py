"""Reading from a segment store, in the process that writes it or in any other.

A read looks up the places of its keys, reads the slots in their order on the disk, and checks everything. The writer
may have given a slot to another value meanwhile: what does not check out is looked up again, and is damaged only if its
entry is still the same, generation included; then the slot cannot have been written since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from kvtide.connectors.disk.files import fault_kind
from kvtide.connectors.disk.parallel import Parallel
from kvtide.connectors.disk.value_io import read_value
from kvtide.offload.keys import StoreKey
from kvtide.offload.store import Status
from kvtide.offload.values import HEADER_BYTES, BadValue, Header, parse_header

from .index import Index, Place
from .segments import Segment, Segments

_LOOKS = 4


class _Job(NamedTuple):
    place: Place
    at: int


class Outcome(NamedTuple):
    """What a batch came to: a status per key, the places of the hits, and what is damaged for certain."""

    statuses: list[Status]
    hits: list[tuple[StoreKey, Place]]
    damaged: list[tuple[int, Place, BadValue]]


class SegmentReader:
    """Reads values and headers. May raise `lmdb.Error`; counts what else goes wrong with `fault`."""

    def __init__(
        self,
        segments: Segments,
        index: Index,
        parallel: Parallel,
        fault: Callable[[str], None],
        *,
        discover: bool,
    ) -> None:
        self._segments = segments
        self._index = index
        self._parallel = parallel
        self._fault = fault
        self._discover = discover

    def get(self, keys: Sequence[StoreKey], views: Sequence[memoryview], max_value_bytes: int) -> Outcome:
        """Read values into the views."""
        result = Outcome([Status.MISS] * len(keys), [], [])
        suspects: dict[int, tuple[Place, BadValue]] = {}

        def read(jobs: Sequence[_Job]) -> None:
            for number, part in groupby(jobs, key=lambda job: job.place.segment):
                self._read(number, list(part), keys, views, max_value_bytes, result, suspects)

        todo = list(range(len(keys)))
        for _ in range(_LOOKS):
            places = self._index.lookup([keys[at] for at in todo])
            jobs = []
            for place, at in zip(places, todo, strict=True):
                if place is not None and at in suspects and suspects[at][0] == place:
                    result.statuses[at] = Status.CORRUPT
                    result.damaged.append((at, place, suspects[at][1]))
                elif place is not None:
                    jobs.append(_Job(place, at))
            suspects.clear()
            jobs.sort(key=itemgetter(0))
            self._parallel.run(read, jobs, sum(job.place.stored_bytes for job in jobs))
            todo = list(suspects)
            if not todo:
                break
        return result

    def headers(self, keys: Sequence[StoreKey], max_value_bytes: int) -> list[Header | None]:
        """The checked headers of values, None where there is none."""
        places = self._index.lookup(keys)
        return [self._header(key, place, max_value_bytes) for key, place in zip(keys, places, strict=True)]

    def _read(
        self,
        number: int,
        jobs: Sequence[_Job],
        keys: Sequence[StoreKey],
        views: Sequence[memoryview],
        max_value_bytes: int,
        result: Outcome,
        suspects: dict[int, tuple[Place, BadValue]],
    ) -> None:
        """Read values of one segment."""
        try:
            segment = self._segment(number)
            with self._segments.opened(segment) as fd:
                for place, at in jobs:
                    try:
                        offset = segment.offset(place.slot)
                        header = read_value(fd, offset, place.stored_bytes, keys[at], views[at], max_value_bytes)
                        if header.generation != place.generation:
                            raise BadValue("other generation")
                    except BadValue as error:
                        suspects[at] = place, error
                    except OSError as error:
                        self._fault(fault_kind(error))
                        result.statuses[at] = Status.ERROR
                    else:
                        result.statuses[at] = Status.HIT
                        result.hits.append((keys[at], place))
        except FileNotFoundError:
            suspects.update({at: (place, BadValue("no segment")) for place, at in jobs})
        except OSError as error:
            self._fault(fault_kind(error))
            for _, at in jobs:
                result.statuses[at] = Status.ERROR

    def _header(self, key: StoreKey, place: Place | None, max_value_bytes: int) -> Header | None:
        if place is None:
            return None
        start = bytearray(HEADER_BYTES)
        try:
            self._segments.read(self._segment(place.segment), place.slot, (start,))
            return parse_header(start, key, max_value_bytes=max_value_bytes)
        except OSError as error:
            self._fault(fault_kind(error))
        except BadValue:
            pass
        return None

    def _segment(self, number: int) -> Segment:
        if number not in self._segments.by_number and self._discover:
            self._segments.discover()
        segment = self._segments.by_number.get(number)
        if segment is None:
            raise FileNotFoundError(f"no segment {number:08x}")
        return segment
