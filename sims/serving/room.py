"""Whether blocks can be had: the scheduler's questions to the memory manager, answered without taking anything.

Needs are blocks per group, int64 `[groups]`, of all the group's tables; they add up over requests, and `fits` asks
the pool. Per-step needs are the manager's own growth. The admission gate asks for a whole sequence at once and follows
vLLM's cap: a window is charged what it can hold while steps are in flight, not the whole sequence.
"""

from __future__ import annotations

import numpy as np

from kvtide.hma import HybridMemoryManager
from kvtide.hma.groups import ManagedGroup
from kvtide.kvcache.specs import ChunkedLocal, Int64Array

from .job import Columns


class Room:
    """Questions to one manager. `in_flight_tokens` are charged to every window at admission."""

    def __init__(self, manager: HybridMemoryManager, in_flight_tokens: int, watermark: float) -> None:
        self._manager = manager
        self._caps = [self._cap(group, in_flight_tokens) for group in manager.groups]
        self._watermark_pages = int(watermark * manager.pool.num_pages)

    def none(self) -> Int64Array:
        """Needs of nothing."""
        return np.zeros(len(self._manager.groups), dtype=np.int64)

    def fits(self, needs: Int64Array, *, with_watermark: bool = False) -> bool:
        """Whether the pool has the blocks, cached ones that nothing holds included."""
        spare = -self._manager.pool.pages_short(needs.tolist())
        return spare >= (self._watermark_pages if with_watermark else 0)

    def of_step(self, columns: Columns) -> Int64Array:
        """Blocks that a step's rows lack to hold its tokens and the lookahead beyond them."""
        manager = self._manager
        rows, starts, counts = columns
        upper = starts + counts
        if manager.lookahead:
            upper += manager.lookahead
        needs = self.none()
        for group in manager.groups:
            target = manager.image_tokens[rows] if group.is_cross else upper
            needs[group.number] = group.growth(rows, target, None, manager.lookahead).total * group.fmt.tables
        return needs

    def of_sequence(self, row: int, num_tokens: int) -> Int64Array:
        """Blocks that the admission gate asks for, beyond those that the row's hit holds already."""
        needs = self.none()
        for group, cap in zip(self._manager.groups, self._caps, strict=True):
            held = int(group.table.end[row])
            if group.is_state:
                blocks = 0 if held else 1 + self._manager.lookahead
            else:
                tokens = int(self._manager.image_tokens[row]) if group.is_cross else num_tokens
                blocks = max(min(-(-tokens // group.fmt.block_size), cap) - held, 0)
            needs[group.number] = blocks * group.fmt.tables
        return needs

    def _cap(self, group: ManagedGroup, in_flight_tokens: int) -> int:
        """The most blocks of one table that the gate charges."""
        longest = self._manager.max_model_len
        spec, size = group.fmt.group.spec, group.fmt.block_size
        if spec.reach is None or not size or group.fmt.keeps_all:
            return longest
        if isinstance(spec, ChunkedLocal):
            return -(-min(spec.chunk + in_flight_tokens, longest) // size)
        # A window may start inside a block.
        return -(-min(spec.reach - 1 + in_flight_tokens, longest) // size) + 1 + group.table.sink_blocks
