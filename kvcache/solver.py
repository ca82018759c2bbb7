"""kvtide's own geometry: pick the page size, and per group the block size and the split, that waste the least.

The page is not a least common multiple. Any size may be the page; a group's layers may be split into sub-blocks (a
divisor of the layer count, one block table each) until they pack, and a group that reaches back only a window or a
chunk may use smaller blocks than the others, since its table stays narrow. For every page size the groups are
independent, so the search is exact over its candidates: minimise

    wasted bytes / needed bytes   averaged over reference lengths, whole pages charged to each sequence, plus
    TABLE_COST                    for every block table, since each costs kernel metadata on every step.

Bound: no page is larger than `max_page_bytes`, unless one layer of one block (or state) is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import ConfigError
from .geometry import BlockFormat, PageGeometry, block_sizes, ceil_div
from .layout import Group, ModelLayout
from .specs import Int64Array

MAX_PAGE_BYTES = 8 * 2**20
MIN_BLOCK_SIZE = 8
# One more table must save at least this share of the bytes.
TABLE_COST = 0.0005
# Lengths are odd on purpose: a geometry must not look good only at multiples of its block.
REFERENCE_TOKENS = np.array(sorted({int(n) | 1 for n in np.geomspace(2048, 32768, 33)}), dtype=np.int64)
REFERENCE_IMAGE_TOKENS = 4 * 1601  # four tiles of a mllama picture
# Multiples of a block that are tried as page sizes; beyond that a page is many small blocks and nothing is gained.
MAX_MULTIPLE = 512


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


class _Cut(NamedTuple):
    """One way to cut a group: tokens per block, block tables, and bytes of one layer in a block."""

    block_size: int
    tables: int
    layer_bytes: int


def _cuts(group: Group, block_size: int, min_block_size: int) -> list[_Cut]:
    sizes = [block_size]
    if group.spec.has_bounded_reach:
        while sizes[-1] % 2 == 0 and sizes[-1] // 2 >= min_block_size:
            sizes.append(sizes[-1] // 2)
    return [
        _Cut(size, tables, group.spec.state_bytes or group.spec.bytes_per_token * size)
        for size in sizes
        for tables in _divisors(len(group.layers))
    ]


def _page_candidates(cuts: dict[Group, list[_Cut]], max_page_bytes: int) -> Int64Array:
    """Multiples of every possible sub-block, as they are and rounded up to a whole number of every group's layers."""
    smallest = {group: min(cut.layer_bytes for cut in options) for group, options in cuts.items()}
    largest = max(max_page_bytes, *smallest.values())
    multiples: set[int] = set()
    for group, options in cuts.items():
        for cut in options:
            block = len(group.layers) // cut.tables * cut.layer_bytes
            multiples.update(block * m for m in range(1, min(largest // block, MAX_MULTIPLE) + 1))
    sizes = np.array(sorted(multiples), dtype=np.int64)
    sizes = np.unique(np.concatenate([-(-sizes // layer) * layer for layer in set(smallest.values())]))
    return sizes[(sizes >= max(smallest.values())) & (sizes <= largest)]


def _reference_tokens(group: Group) -> Int64Array:
    return np.full_like(REFERENCE_TOKENS, REFERENCE_IMAGE_TOKENS) if group.spec.per_image else REFERENCE_TOKENS


def _needed_bytes(group: Group) -> Int64Array:
    return group.spec.needed(_reference_tokens(group)).num_tokens * group.bytes_per_token + group.state_bytes


def _wasted_bytes(group: Group, cut: _Cut, pages: Int64Array) -> npt.NDArray[np.float64]:
    """Mean bytes beyond the needed ones over the reference lengths, for each candidate page; inf where none fits."""
    block = len(group.layers) // cut.tables * cut.layer_bytes
    # A page as large as the block describes the blocks alone; pages are charged here, for all candidates at once.
    fmt = BlockFormat(group, cut.block_size, cut.tables, cut.layer_bytes, page_bytes=block)
    tokens = _reference_tokens(group)
    blocks = fmt.live_blocks(tokens, tokens) * cut.tables
    per_page = np.maximum(pages // block, 1)
    held = ceil_div(blocks[None, :], per_page[:, None]) * pages[:, None]
    wasted = (held - _needed_bytes(group)[None, :]).mean(axis=1)
    return np.where(pages < block, np.inf, wasted)


def solve_geometry(
    layout: ModelLayout,
    block_size: int | Mapping[str, int] = 16,
    *,
    min_block_size: int = MIN_BLOCK_SIZE,
    max_page_bytes: int = MAX_PAGE_BYTES,
) -> PageGeometry:
    """The geometry of least expected waste.

    `block_size` is in tokens, one for all groups or one per group name. Groups of bounded reach may get blocks of a
    half, a quarter and so on of it, down to `min_block_size` (set it to the smallest page that the engine's kernels
    take). `max_page_bytes` bounds the page, and with it the memory that a sparsely used page can hold back.
    `ConfigError` for a block size out of range or an unknown group name.
    """
    if min_block_size < 1:
        raise ConfigError(f"min_block_size {min_block_size} must be at least 1 token")
    sizes = block_sizes(layout, block_size)
    cuts = {group: _cuts(group, sizes[group.name], min_block_size) for group in layout.groups}
    pages = _page_candidates(cuts, max_page_bytes)
    needed = float(sum(_needed_bytes(group).mean() for group in layout.groups))

    costs = {}
    for group, options in cuts.items():
        # A state's table is one entry wide: splitting it costs nothing per step.
        table_cost = 0.0 if group.spec.state_bytes else TABLE_COST
        costs[group] = np.stack(
            [_wasted_bytes(group, cut, pages) / needed + cut.tables * table_cost for cut in options]
        )
    best_page = int(np.sum([cost.min(axis=0) for cost in costs.values()], axis=0).argmin())
    page = int(pages[best_page])
    chosen = {group: cuts[group][int(cost[:, best_page].argmin())] for group, cost in costs.items()}
    formats = (BlockFormat(group, *cut, page_bytes=page) for group, cut in chosen.items())
    return PageGeometry("kvtide", layout, page, tuple(formats))
