"""What a rank's blocks are in the store: keys, byte ranges, and how long a prefix store and device can serve together.

    block of a group   | layer 0: K [token, head, dim], V [token, head, dim] | layer 1: ... |
    value, own cut     | all of it, without padding                                         |
    values, finer cut  | heads 0..h/2 of every array and token, in that order | heads h/2..h |

A block is one value under its own cut of the heads: its layers in their order, however many tables the geometry has
spread them over. Ranks of a larger TP size wrote finer cuts: two or more values a block, whose bytes are scattered over
it by head. Groups that every rank holds alike (MLA latents, and heads where
there are fewer of them than ranks) have one writer. A block's key is the chain key at the end of its base block; what
else tells values apart is in their `ValueSpace`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.hma import HybridMemoryManager
from kvtide.hma.groups import ManagedGroup
from kvtide.hma.hits import servable
from kvtide.hma.loads import LoadRun, key_numbers, needed_blocks
from kvtide.kvcache import ConfigError, ModelLayout
from kvtide.kvcache.geometry import BlockFormat
from kvtide.kvcache.specs import Int64Array, LayerSpec

from .keys import HeadPart, StoreKey, ValueSpace
from .store import Status
from .transfers import Value

NOT_THERE = -1
# `(table, byte offset in that table's block, length)`, in the value's order.
Segments = tuple[tuple[int, int, int], ...]
# Per group number `[blocks]`: the cut under which the store has a block, or NOT_THERE.
Found = dict[int, npt.NDArray[np.int8]]


class _Cut(NamedTuple):
    """One way in which blocks of a group are cut into values.

    `spaces[part]` has a digest per value; `segments` has per value its byte ranges inside the block.
    """

    factor: int
    spaces: list[list[bytes]]
    segments: list[Segments]


class Question(NamedTuple):
    """What the store is asked about a row: keys, and per group the logical blocks that they stand for."""

    keys: list[StoreKey]
    blocks: dict[int, Int64Array]
    limit: int


class Serves(NamedTuple):
    """The longest prefix that store and device serve together; the longest that groups which keep everything serve."""

    num_tokens: int
    junction: int


class BlockPlan:
    """One rank's blocks. `full_layout` is the layout of all ranks; `read_tp_sizes` are TP sizes of other writers."""

    def __init__(
        self,
        manager: HybridMemoryManager,
        *,
        model: str,
        revision: str,
        full_layout: ModelLayout | None,
        tp_rank: int,
        tp_size: int,
        read_tp_sizes: Sequence[int],
    ) -> None:
        if not 0 <= tp_rank < tp_size:
            raise ConfigError(f"tp_rank {tp_rank} must be from 0 to {tp_size - 1}")
        self._manager = manager
        full = {layer.index: layer.spec for layer in (full_layout or manager.geometry.layout).layers}
        self.groups = [group for group in manager.groups if group.cells_per_key]
        self._writes: set[int] = set()
        self._cuts: dict[int, list[_Cut]] = {}
        for group in self.groups:
            spec = full.get(group.fmt.group.layers[0])
            if spec is None:
                raise ConfigError(f"full_layout has no layer {group.fmt.group.layers[0]} that stores KV")
            parts = _num_parts(spec, group.fmt.group.spec)
            if tp_size % parts or (tp_size > 1 and spec.shard(tp_size) != group.fmt.group.spec):
                raise ConfigError(
                    f"{group.name} of the manager's layout is not the share of one of {tp_size} ranks of full_layout"
                )
            if tp_rank % (tp_size // parts) == 0:
                self._writes.add(group.number)
            own = HeadPart(tp_rank * parts // tp_size, parts)
            factors = [1]
            for other in read_tp_sizes:
                finer = _num_parts(spec, spec.shard(other))
                if finer % parts:
                    raise ConfigError(f"read_tp_sizes has {other}, whose values are coarser than those of {tp_size}")
                if finer // parts not in factors:
                    factors.append(finer // parts)
            self._cuts[group.number] = [_make_cut(group, spec, own, factor, model, revision) for factor in factors]

    def is_writer(self, group: ManagedGroup) -> bool:
        """Whether this rank is the one that stores a group's blocks."""
        return group.number in self._writes

    def length(self, num_tokens: int) -> int:
        """The longest length up to `num_tokens` where a block of every group ends."""
        return num_tokens // self._manager.load_step * self._manager.load_step

    def num_bytes(self, row: int, length: int) -> int:
        """Bytes that the row would load to get to a length: what the device lacks."""
        total = 0
        for group in self.groups:
            entries = self._manager.blocks_of(row, group.name, needed_blocks(group, length)[0])
            total += int((entries < 0).any(axis=0).sum()) * group.fmt.block_bytes * group.fmt.tables
        return total

    # -- asking the store ---------------------------------------------------------------------------------------------

    def question(self, row: int, hit: int) -> Question:
        """Keys of all blocks behind a hit that the device lacks, up to the most tokens that may be cached."""
        base = self._manager.base
        limit = self._manager.most_cached(row) // base * base
        first = hit // base
        chain = self._manager.keys(row, first, limit // base)
        keys: list[StoreKey] = []
        blocks: dict[int, Int64Array] = {}
        for group in self.groups:
            size = group.fmt.block_size or base
            logical = np.arange(hit // size, limit // size)
            lacks = (self._manager.blocks_of(row, group.name, logical) < 0).any(axis=0)
            blocks[group.number] = logical = logical[lacks]
            places = zip(logical.tolist(), (key_numbers(group, logical) - first).tolist(), strict=True)
            cuts, shared = self._cuts[group.number], group.blocks_per_key
            spaces = [[space for cut in cuts for space in cut.spaces[part]] for part in range(shared)]
            keys += [space + chain[number] for block, number in places for space in spaces[block % shared]]
        return Question(keys, blocks, limit)

    def prefix(self, row: int, ends: Sequence[int]) -> list[StoreKey]:
        """Keys of all that a row of its committed length stands on in the store, by where each block ends.

        Of windows and states those that complete a hit at one of `ends`, in tokens.
        """
        committed, base = int(self._manager.committed[row]), self._manager.base
        chain = self._manager.keys(row, 0, committed // base)
        parts = []
        for group in self.groups:
            if group.is_bounded or group.is_state:
                blocks = [needed_blocks(group, end)[0] for end in ends]
                logical = np.unique(np.concatenate([*blocks, np.empty(0, dtype=np.int64)]))
            else:
                logical = np.arange(committed // group.fmt.block_size)
            parts.append(logical)
        stops = [(part + 1) * (group.fmt.block_size or base) for group, part in zip(self.groups, parts, strict=True)]
        numbers = [key_numbers(group, part) for group, part in zip(self.groups, parts, strict=True)]
        which = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        order = np.argsort(np.concatenate(stops), kind="stable")
        places = (which[order], np.concatenate(parts)[order], np.concatenate(numbers)[order])
        spaces = [self._cuts[group.number][0].spaces for group in self.groups]
        return [
            space + chain[number]
            for at, block, number in zip(*(place.tolist() for place in places), strict=True)
            for space in spaces[at][block % len(spaces[at])]
        ]

    def found(self, question: Question, statuses: Sequence[Status]) -> Found:
        """Which cut of each block the store has whole."""
        hits = np.array([status is Status.HIT for status in statuses], dtype=np.bool_)
        start, found = 0, Found()
        for group in self.groups:
            factors = [cut.factor for cut in self._cuts[group.number]]
            logical = question.blocks[group.number]
            part = hits[start : start + len(logical) * sum(factors)].reshape(-1, sum(factors))
            start += part.size
            ends = np.cumsum(factors)
            whole = np.stack([part[:, end - n : end].all(axis=1) for end, n in zip(ends, factors, strict=True)], axis=1)
            cuts = np.full(question.limit // (group.fmt.block_size or group.base), NOT_THERE, np.int8)
            cuts[logical] = np.where(whole.any(axis=1), whole.argmax(axis=1), NOT_THERE)
            found[group.number] = cuts
        return found

    def serves(self, row: int, found: Found, limit: int) -> Serves:
        """How far the row could get by what is on the device now and what was found, up to `limit` tokens."""
        base = self._manager.base
        lengths = np.arange(1, limit // base + 1) * base
        common = keeping = np.ones(len(lengths), dtype=np.bool_)
        for group in self.groups:
            here = self._manager.blocks_of(row, group.name, np.arange(limit // (group.fmt.block_size or base))) >= 0
            there = here.all(axis=0) | (found[group.number] != NOT_THERE)
            cells = np.where(there, 0, NOT_THERE)[:, None].repeat(group.fmt.tables, axis=1)
            can = servable(group, cells, lengths)
            common = common & can
            if not (group.is_bounded or group.is_state):
                keeping = keeping & can
        agreed = lengths[common]
        if self._manager.drop_last_block:
            agreed = agreed[:-1]
        return Serves(int(agreed.max(initial=0)), int(lengths[keeping].max(initial=0)))

    # -- values -------------------------------------------------------------------------------------------------------

    def values(self, row: int, run: LoadRun, found: Found | None = None) -> tuple[list[Value], list[int]]:
        """Values that make up blocks, block by block, and the logical block of each.

        In the rank's own cut, or in the one that was found.
        """
        group = self._manager.group(run.group)
        numbers = key_numbers(group, run.logical)
        low = int(numbers.min(initial=0))
        chain = self._manager.keys(row, low, int(numbers.max(initial=0)) + 1)
        keys = [chain[number - low] for number in numbers.tolist()]
        cuts = self._cuts[group.number]
        # What was never found is asked for in the own cut, and is a miss.
        which = None if found is None else np.maximum(found[group.number][run.logical], 0).tolist()
        values = self.values_of(group, keys, run.logical % group.blocks_per_key, run.entries, which)
        blocks = run.logical.tolist()
        if which is not None:
            blocks = [block for block, cut in zip(blocks, which, strict=True) for _ in range(cuts[cut].factor)]
        return values, blocks

    def values_of(
        self,
        group: ManagedGroup,
        keys: Sequence[bytes],
        parts: Int64Array,
        entries: npt.NDArray[np.int32],
        which: Sequence[int] | None = None,
    ) -> list[Value]:
        """Values of blocks by chain key, part of what the key stands for, and entries `[tables, n]`; in a cut each."""
        cuts, layers = self._cuts[group.number], group.fmt.group.layers
        starts = (entries.T.astype(np.int64) * self._manager.geometry.unit).tolist()
        values: list[Value] = []
        for at, (key, part, start) in enumerate(zip(keys, parts.tolist(), starts, strict=True)):
            cut = cuts[0 if which is None else which[at]]
            for space, segments in zip(cut.spaces[part], cut.segments, strict=True):
                placed = tuple([(start[table] + offset, length) for table, offset, length in segments])
                values.append(Value(space + key, placed, layers))
        return values


def _num_parts(full: LayerSpec, share: LayerSpec) -> int:
    """How many different shares of a layer there are."""
    return (full.bytes_per_token or full.state_bytes) // (share.bytes_per_token or share.state_bytes)


def _make_cut(group: ManagedGroup, spec: LayerSpec, own: HeadPart, factor: int, model: str, revision: str) -> _Cut:
    heads = own.finer(factor)

    def digest(part: int, head: HeadPart) -> bytes:
        # Where several blocks share a key, each is a part of what the key stands for.
        return ValueSpace(
            model=model,
            revision=revision,
            layer_spec=f"{spec!r} part {part} of {group.blocks_per_key}",
            layers=group.fmt.group.layers,
            heads=head,
            block_tokens=group.fmt.block_size,
        ).digest()

    spaces = [[digest(part, head) for head in heads] for part in range(group.blocks_per_key)]
    return _Cut(factor, spaces, _segments(group.fmt, factor))


def _segments(fmt: BlockFormat, factor: int) -> list[Segments]:
    """Byte ranges of a block of each of `factor` equal cuts of its heads; padding is in none."""
    cuts: list[list[tuple[int, int, int]]] = [[] for _ in range(factor)]
    for layer in fmt.group.layers:
        table, layer_start = fmt.place(layer)
        for component in fmt.group.spec.components():
            share = component.num_bytes // factor
            first = layer_start + fmt.component_offset(component.name)
            for token in range(max(fmt.block_size, 1)):
                for number, cut in enumerate(cuts):
                    start = first + token * component.num_bytes + number * share
                    if cut and cut[-1][0] == table and cut[-1][1] + cut[-1][2] == start:
                        cut[-1] = (table, cut[-1][1], cut[-1][2] + share)
                    else:
                        cut.append((table, start, share))
    return [tuple(cut) for cut in cuts]
