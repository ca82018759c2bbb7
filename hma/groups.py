"""One group inside the manager: its block format, its table, and the arithmetic of which blocks a position needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.kvcache import ConfigError
from kvtide.kvcache.geometry import BlockFormat, PageGeometry
from kvtide.kvcache.specs import Int64Array, Kind, SinkWindow

from .tables import NO_BLOCK, GroupTable


class Growth(NamedTuple):
    """Blocks that rows will take: sink blocks first, then a gap of dead-on-arrival blocks, then the rest; per row.

    None where no row has any. `total` counts the logical blocks taken; each takes one block of every table.
    """

    counts: Int64Array
    total: int
    sinks: Int64Array | None = None
    gaps: Int64Array | None = None


@dataclass(frozen=True)
class ManagedGroup:
    """Frozen description; `table` is what changes. `number` is the group's place in the geometry's formats.

    `base` is the tokens per key. A key covers `blocks_per_key` blocks of this group, or, where the group's block is
    larger, only every `keys_per_block`-th key ends a block.
    """

    number: int
    fmt: BlockFormat
    table: GroupTable
    base: int
    draft_only: bool

    @property
    def name(self) -> str:
        """The group's name in the layout."""
        return self.fmt.group.name

    @cached_property
    def is_state(self) -> bool:
        """Whether the group holds one recurrent state per sequence."""
        return self.fmt.block_size == 0

    @cached_property
    def is_cross(self) -> bool:
        """Whether the group holds image tokens, all of them from the first step on."""
        return self.fmt.group.spec.kind is Kind.CROSS_ATTENTION

    @cached_property
    def is_bounded(self) -> bool:
        """Whether tokens go out of reach."""
        return self.fmt.group.spec.has_bounded_reach and not self.fmt.keeps_all

    @cached_property
    def blocks_per_key(self) -> int:
        """Blocks of one table that end inside one base block."""
        return 1 if self.is_state else max(1, self.base // self.fmt.block_size)

    @cached_property
    def keys_per_block(self) -> int:
        """Keys per block where the block is larger than the base, else 1."""
        return 1 if self.is_state else max(1, self.fmt.block_size // self.base)

    @cached_property
    def cells_per_key(self) -> int:
        """Cells of a node in the prefix index; cross attention is not cached, since text does not determine it."""
        return 0 if self.is_cross else self.blocks_per_key * self.fmt.tables

    def first_block(self, committed: Int64Array) -> Int64Array:
        """First logical block, sinks apart, that the query at position `committed` can reach."""
        first = self.fmt.group.spec.first_needed(committed + 1) // self.fmt.block_size
        return np.maximum(first, self.table.sink_blocks) if self.table.sink_blocks else first

    def growth(self, rows: Int64Array, upper: Int64Array, after: Int64Array | None, lookahead: int) -> Growth:
        """Blocks to take so that each row can hold `upper` tokens (image tokens for cross attention).

        `after` are the least committed lengths once the step is done, given when tokens dead by then need no slot.
        """
        table = self.table
        end = table.end[rows]
        if self.is_state:
            counts = np.where(end == 0, 1 + lookahead, 0)
            return Growth(counts, int(counts.sum()))
        counts = np.maximum((upper + (self.fmt.block_size - 1)) // self.fmt.block_size - end, 0)
        sinks = gaps = None
        total = int(counts.sum())
        if table.sink_blocks and total:
            sinks = np.clip(table.sink_blocks - end, 0, counts)
            counts, end = counts - sinks, end + sinks
        if after is not None and self.is_bounded and total:
            gaps = np.clip(self.first_block(after) - end, 0, counts)
            if gaps.any():
                counts = counts - gaps
                total -= int(gaps.sum())
            else:
                gaps = None
        return Growth(counts, total, sinks, gaps)

    def append(self, rows: Int64Array, growth: Growth, ids: Int64Array) -> Int64Array:
        """Put taken blocks `[growth.total * tables]` at the end of the rows; returns the rows that changed."""
        ids = ids.reshape(self.fmt.tables, growth.total)
        if growth.sinks is None and growth.gaps is None:
            grows = growth.counts.nonzero()[0]
            rows = rows[grows]
            self.table.append(rows, growth.counts[grows], ids)
            return rows
        grown = growth.counts
        if growth.sinks is not None:
            split = int(growth.sinks.sum())
            growing = growth.sinks.nonzero()[0]
            self.table.append(rows[growing], growth.sinks[growing], ids[:, :split])
            ids, grown = ids[:, split:], grown + growth.sinks
        if growth.gaps is not None:
            self.table.skip(rows, growth.gaps)
            grown = grown + growth.gaps
        if ids.shape[1]:
            grows = growth.counts.nonzero()[0]
            self.table.append(rows[grows], growth.counts[grows], ids)
        return rows[grown.nonzero()[0]]

    def slots(self, rows: Int64Array, positions: Int64Array) -> Int64Array:
        """Slot `entry * block_size + offset` of each token, `[tables, n]`; -1 where the token has no block."""
        logical, offsets = np.divmod(positions, self.fmt.block_size)
        in_row = (logical >= self.table.first[rows]) | (logical < self.table.sink_blocks)
        columns = np.where(in_row, self.table.columns(rows, logical), 0)
        entries = self.table.entries[:, rows, columns].astype(np.int64)
        return np.where(in_row & (entries != NO_BLOCK), entries * self.fmt.block_size + offsets, NO_BLOCK)

    def cells_of_keys(self, rows: Int64Array, keys: Int64Array) -> tuple[npt.NDArray[np.intp], Int64Array]:
        """The blocks that the rows hold and that end inside the base blocks `keys[i]` of `rows[i]`.

        Returns index into `rows` of the keys at which a block can end, and for each the ids `[n, cells_per_key]`, -1
        where the row holds none.
        """
        table, size = self.table, self.keys_per_block
        which = np.arange(len(keys)) if size == 1 else np.flatnonzero((keys + 1) % size == 0)
        last = (keys[which] + 1) * self.blocks_per_key // size
        logical = last[:, None] - np.arange(self.blocks_per_key, 0, -1)
        owners = rows[which][:, None]
        shape = (len(which), self.cells_per_key)
        if not self.is_bounded:
            return which, table.to_ids(table.entries[:, owners, logical].transpose(1, 2, 0).reshape(shape))
        in_row = (logical >= table.first[owners]) | (logical < table.sink_blocks)
        columns = np.where(in_row, table.columns(owners, logical), 0)
        entries = np.where(in_row, table.entries[:, owners, columns], NO_BLOCK).transpose(1, 2, 0).reshape(shape)
        return which, np.where(entries == NO_BLOCK, NO_BLOCK, table.to_ids(entries))

    def check(self, row: int, committed: int, owners: npt.NDArray[np.int8], stride: int) -> None:
        """A running row holds blocks of this group alone, from the first that its next query can reach."""
        ids = self.table.ids_of(row)
        assert (owners[ids // stride] == self.number).all(), "a table holds another group's block"
        if self.is_bounded:
            first = int(self.first_block(np.array(committed)))
            assert int(self.table.first[row]) == first, "a window has slid too far, or not far enough"


def base_block(geometry: PageGeometry) -> int:
    """Tokens per key: the smallest block of the groups that need every token, or of all when there are none."""
    paged = [fmt for fmt in geometry.formats if fmt.block_size and not fmt.group.spec.per_image]
    whole = [fmt.block_size for fmt in paged if fmt.keeps_all or not fmt.group.spec.has_bounded_reach]
    base = min(whole or [fmt.block_size for fmt in paged], default=16)
    for fmt in paged:
        if fmt.block_size % base and base % fmt.block_size:
            raise ConfigError(
                f"the block of group {fmt.group.name} has {fmt.block_size} tokens, which neither divides the base "
                f"block of {base} tokens nor is a multiple of it"
            )
    return base


def make_groups(
    geometry: PageGeometry,
    *,
    base: int,
    stride: int,
    max_requests: int,
    max_tokens: int,
    max_new_tokens: int,
    lookahead: int,
    pin_memory: bool,
) -> tuple[ManagedGroup, ...]:
    """Groups with empty tables. `max_new_tokens` is the most tokens of one row that can be in flight."""
    drafts = {layer.index for layer in geometry.layout.layers if layer.draft}
    groups = []
    for number, fmt in enumerate(geometry.formats):
        spec, size = fmt.group.spec, fmt.block_size
        sinks = -(-spec.sinks // size) if isinstance(spec, SinkWindow) and not fmt.keeps_all else 0
        longest = max_tokens + lookahead
        if spec.reach is not None and not fmt.keeps_all:
            longest = min(longest, spec.reach + max_new_tokens + lookahead)
        # A span that starts inside a block can touch one block more than its length alone.
        width = sinks + -(-longest // size) + 1 if size else 1 + lookahead
        table = GroupTable(
            fmt,
            max_requests,
            width,
            sink_blocks=sinks,
            is_compact=spec.reach is not None and not fmt.keeps_all,
            stride=stride,
            page_units=geometry.page_bytes // geometry.unit,
            unit=geometry.unit,
            pin_memory=pin_memory,
        )
        groups.append(ManagedGroup(number, fmt, table, base, draft_only=set(fmt.group.layers) <= drafts))
    return tuple(groups)
