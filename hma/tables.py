"""Block tables of one group: int32 unit indices, as kernels read them.

    logical block   0 .. sinks-1 | sinks .. first-1 | first ............ end-1
    column          0 .. sinks-1 |   (not held)     | sinks ............ sinks + end-1-first

A group that forgets tokens has a *compact* row: it starts at the first block still held, so it is as wide as the
window, not as the context. Column 0 onward holds the sink blocks, if the kind has any. Entries are -1 where a block was
never taken because its tokens were dead on arrival. One row per sequence, one plane per table.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtide.kvcache import ConfigError, MissingExtra
from kvtide.kvcache.geometry import BlockFormat
from kvtide.kvcache.specs import Int64Array

NO_BLOCK = -1


class GroupTable:
    """`entries[table, row, column]`, int32; `first[row]` and `end[row]` are logical block numbers."""

    def __init__(
        self,
        fmt: BlockFormat,
        max_requests: int,
        width: int,
        *,
        sink_blocks: int,
        is_compact: bool,
        stride: int,
        page_units: int,
        unit: int,
        pin_memory: bool,
    ) -> None:
        self.fmt = fmt
        self.sink_blocks = sink_blocks
        self.width = width
        self._is_compact = is_compact
        self._stride = stride
        self._page_units = page_units
        self._block_units = fmt.block_bytes // unit
        self._is_page = fmt.blocks_per_page == 1
        shape = (fmt.tables, max_requests, width)
        self.entries: npt.NDArray[np.int32] = _pinned(shape) if pin_memory else np.empty(shape, dtype=np.int32)
        self.first = np.full(max_requests, sink_blocks, dtype=np.int64)
        self.end = np.zeros(max_requests, dtype=np.int64)

    def to_entries(self, ids: Int64Array) -> npt.NDArray[np.int32]:
        """Unit indices of block ids."""
        # Not divmod: floor division by a number is vectorised, and ten times faster.
        pages = ids // self._stride
        units: Int64Array = pages * self._page_units
        if not self._is_page:
            units += (ids - pages * self._stride) * self._block_units
        return units.astype(np.int32)

    def to_ids(self, entries: npt.NDArray[np.int32]) -> Int64Array:
        """Block ids of unit indices."""
        pages = entries // np.int32(self._page_units)
        ids = pages * np.int32(self._stride)
        if not self._is_page:
            ids += (entries - pages * np.int32(self._page_units)) // np.int32(self._block_units)
        return ids.astype(np.int64)

    def columns(self, rows: Int64Array, logical: Int64Array) -> Int64Array:
        """Columns of logical blocks that the rows hold."""
        if not self._is_compact:
            return logical
        columns: Int64Array = logical - self.first[rows]
        if self.sink_blocks:
            columns = np.where(logical < self.sink_blocks, logical, columns + self.sink_blocks)
        return columns

    def append(self, rows: Int64Array, counts: Int64Array, ids: Int64Array) -> None:
        """Add `counts[i]` blocks at the end of each row; `ids` is `[tables, counts.sum()]`, row by row."""
        end = self.end[rows]
        if len(rows) == 1:
            row, column = int(rows[0]), int(self.columns(rows, end)[0])  # one prompt, as in many prefill steps
            self.entries[:, row, column : column + ids.shape[1]] = self.to_entries(ids)
            self.end[row] += ids.shape[1]
            return
        if len(rows) == ids.shape[1]:
            owners, logical = rows, end  # one block each, as in most decode steps
        else:
            owners = np.repeat(rows, counts)
            logical = np.repeat(end, counts) + ranges(counts)
        self.entries[:, owners, self.columns(owners, logical)] = self.to_entries(ids)
        self.end[rows] = end + counts

    def skip(self, rows: Int64Array, gaps: Int64Array) -> None:
        """Move the end of each row past `gaps[i]` blocks that are never taken."""
        owners = np.repeat(rows, gaps)
        logical = np.repeat(self.end[rows], gaps) + ranges(gaps)
        self.entries[:, owners, self.columns(owners, logical)] = NO_BLOCK
        self.end[rows] += gaps

    def place(self, row: int, first: int, end: int, ids: Int64Array) -> None:
        """Fill an empty row: sink blocks, then logical blocks `first` to `end`; ids `[tables, n]` in that order."""
        self.first[row] = max(first, self.sink_blocks)
        self.end[row] = end
        self.entries[:, row, : ids.shape[1]] = self.to_entries(ids)

    def slide(self, rows: Int64Array, new_first: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Let go of the blocks before `new_first[i]` of each row (ascending it).

        Returns row, logical number and ids `[tables, n]` of the blocks let go; blocks never taken are not among them.
        """
        first = self.first[rows]
        steps = new_first - first
        left = self.sink_blocks
        held = self.end[rows] - new_first
        self.first[rows] = new_first
        if steps.max() == 1:
            owners, logical = rows, first  # one block each, as in most decode steps
            gone = self.entries[:, rows, left]
            self._shift(rows, 1, int(held.max()))
        else:
            owners = np.repeat(rows, steps)
            offsets = ranges(steps)
            logical = np.repeat(first, steps) + offsets
            gone = self.entries[:, owners, left + offsets]
            for step in np.flatnonzero(np.bincount(steps)).tolist():
                same = steps == step
                self._shift(rows[same], step, int(held[same].max()))
        taken = gone[0] != NO_BLOCK
        if not taken.all():
            owners, logical, gone = owners[taken], logical[taken], gone[:, taken]
        return owners, logical, self.to_ids(gone)

    def _shift(self, rows: Int64Array, step: int, count: int) -> None:
        """Move `count` entries of each row `step` columns to the left, up to the sinks."""
        left = self.sink_blocks
        for plane in self.entries:
            plane[rows, left : left + count] = plane[rows, left + step : left + step + count]

    def clear(self, row: int) -> tuple[Int64Array, Int64Array]:
        """Empty a row. Returns logical numbers, last first, and ids `[tables, n]` of the blocks it held."""
        logical, entries = self.held(row)
        self.first[row], self.end[row] = self.sink_blocks, 0
        taken = entries[0] != NO_BLOCK
        if not taken.all():
            logical, entries = logical[taken], entries[:, taken]
        return logical[::-1], self.to_ids(entries)[:, ::-1]

    def swap_to_front(self, rows: Int64Array, columns: Int64Array) -> None:
        """Exchange each row's entry in column 0 with the one in `columns[i]`."""
        front = self.entries[:, rows, 0].copy()
        self.entries[:, rows, 0] = self.entries[:, rows, columns]
        self.entries[:, rows, columns] = front

    def ids_of(self, row: int) -> Int64Array:
        """Ids `[tables, n]` of the blocks that a row holds."""
        _, entries = self.held(row)
        return self.to_ids(entries[:, entries[0] != NO_BLOCK])

    def held(self, row: int) -> tuple[Int64Array, npt.NDArray[np.int32]]:
        """Logical numbers and entries `[tables, n]` of a row, in order; -1 entries included."""
        end, first, sinks = int(self.end[row]), int(self.first[row]), self.sink_blocks
        logical = np.concatenate([np.arange(min(end, sinks)), np.arange(first, max(end, first))])
        return logical, self.entries[:, row, : len(logical)]

    def held_by(self, rows: Int64Array) -> tuple[Int64Array, Int64Array, npt.NDArray[np.int32]]:
        """`held` of many rows, one after the other: row and logical number of each block, and entries `[tables, n]`."""
        end, first = self.end[rows], self.first[rows]
        sinks = np.minimum(end, self.sink_blocks)
        counts = sinks + np.maximum(end - first, 0)
        owners, columns = np.repeat(rows, counts), ranges(counts)
        behind = np.repeat(first - sinks, counts)
        logical = np.where(columns < np.repeat(sinks, counts), columns, columns + behind)
        return owners, logical, self.entries[:, owners, columns]


def _pinned(shape: tuple[int, ...]) -> npt.NDArray[np.int32]:
    try:
        import torch
    except ImportError:
        raise MissingExtra("a block table in pinned memory", "torch", "torch") from None
    try:
        pinned: npt.NDArray[np.int32] = torch.empty(shape, dtype=torch.int32, pin_memory=True).numpy()
    except RuntimeError as error:
        raise ConfigError(f"pin_memory is not possible here: {str(error).splitlines()[0]}") from None
    return pinned


def ranges(counts: Int64Array) -> Int64Array:
    """`0 .. counts[0]-1, 0 .. counts[1]-1, ...` in one array."""
    stops = counts.cumsum()
    total = int(stops[-1]) if len(stops) else 0
    return np.arange(total) - (stops - counts).repeat(counts)
