"""Geometries of the published allocators that kvtide is compared with.

`uniform`: PagedAttention, one block table for all layers, every layer holds every token (vLLM without its hybrid
manager). `grouped`: vLLM's hybrid manager, equal-sized groups filled up with padding layers, one page size, one shared
free list. `lcm`: Jenga, a page of the least common multiple of all block sizes, filled by one group at a time. Where a
model has recurrent states, `uniform` and `grouped` follow vLLM: the attention block grows until it covers a state.
"""

from __future__ import annotations

from math import lcm
from typing import NamedTuple

from .errors import ConfigError
from .geometry import BlockFormat, PageGeometry, block_sizes
from .layout import Group, ModelLayout
from .specs import MLA, ChunkedLocal, FullAttention, LayerSpec, SinkWindow, SlidingWindow, SlidingWindowMLA

MAX_LCM_PAGE_BYTES = 2**40


class Grouping(NamedTuple):
    """Equal-sized groups: layers per group, and per spec the number of groups and of padding layers."""

    size: int
    groups: tuple[int, ...]
    padding: tuple[int, ...]

    def worst_padding(self, counts: list[int]) -> float:
        """Largest share of padding layers against the real layers of one spec."""
        return max(pad / count for pad, count in zip(self.padding, counts, strict=True))


def equal_groups(counts: list[int], *, allow_larger: bool = True) -> Grouping:
    """vLLM's rule for layers per group: the smallest count, or the largest if that is below 1.5 times the smallest.

    `allow_larger=False` is the rule before vLLM #29303, always the smallest count.
    """
    smallest, largest = min(counts), max(counts)
    size = largest if allow_larger and largest < 1.5 * smallest else smallest
    groups = tuple(-(-count // size) for count in counts)
    return Grouping(size, groups, tuple(n * size - count for n, count in zip(groups, counts, strict=True)))


def power_of_two_waste(num_layers: int) -> float:
    """Share of a buddy (power-of-two) partition that `num_layers` equal layer pages leave empty."""
    return 1 - num_layers / (1 << (num_layers - 1).bit_length())


def _attention_type(spec: LayerSpec) -> tuple[object, ...]:
    """vLLM's notion of a type: specs of one type may share a group although their sizes differ."""
    if isinstance(spec, SinkWindow):
        return ("sinks", spec.window, spec.sinks)
    if isinstance(spec, SlidingWindow | SlidingWindowMLA):
        return ("window", type(spec), spec.window)
    if isinstance(spec, ChunkedLocal):
        return ("chunk", spec.chunk)
    if spec.per_image:
        return ("cross",)
    if isinstance(spec, MLA | FullAttention):
        return ("full",)
    return ("state", spec)


def _aligned_block(groups: tuple[Group, ...], block_size: int) -> int:
    """Tokens per attention block so that one layer's block covers one layer's state; `block_size` without states."""
    states = [group.spec.state_bytes for group in groups if group.spec.state_bytes]
    token_bytes = [group.spec.bytes_per_token for group in groups if group.spec.bytes_per_token]
    if not states or not token_bytes:
        return block_size
    step = max(block_size, 128) if any(isinstance(group.spec, MLA) for group in groups) else block_size
    return step * -(-max(states) // (step * max(token_bytes)))


def _page_of_layer(groups: tuple[Group, ...], block_size: int) -> int:
    attention = max(group.spec.bytes_per_token for group in groups) * block_size
    return max(attention, max(group.spec.state_bytes for group in groups))


def uniform_geometry(layout: ModelLayout, block_size: int = 16) -> PageGeometry:
    """One block table: every layer stores every token; a state fills one block of its layer."""
    groups = layout.groups
    block_sizes(layout, block_size)
    tokens = _aligned_block(groups, block_size)
    formats = []
    for group in groups:
        layer = _page_of_layer(groups, tokens) if group.spec.state_bytes else tokens * group.spec.bytes_per_token
        # All groups take blocks together, so each is charged its slice of the one page.
        formats.append(
            BlockFormat(
                group,
                0 if group.spec.state_bytes else tokens,
                tables=1,
                layer_bytes=layer,
                page_bytes=layer * len(group.layers),
                keeps_all=True,
            )
        )
    return PageGeometry("uniform", layout, sum(fmt.page_bytes for fmt in formats), tuple(formats), one_table=True)


def grouped_geometry(layout: ModelLayout, block_size: int = 16) -> PageGeometry:
    """Equal-sized groups with padding layers, all blocks of one size."""
    groups = layout.groups
    block_sizes(layout, block_size)
    tokens = _aligned_block(groups, block_size)
    layer_page = _page_of_layer(groups, tokens)
    latents = [group.spec for group in groups if isinstance(group.spec, MLA)]
    # vLLM does not pad MLA pages: beside one that does not divide, window layers are allocated as full ones.
    windows_as_full = any(layer_page % (spec.bytes_per_token * tokens) for spec in latents)
    kinds = {("full",) if windows_as_full and not g.spec.state_bytes else _attention_type(g.spec) for g in groups}
    if len(kinds) == 1:
        # One type: one group, whose block is the sum of all layers whatever their sizes.
        formats = tuple(
            BlockFormat(
                group,
                block_size=0 if group.spec.state_bytes else tokens,
                tables=1,
                layer_bytes=group.spec.state_bytes or tokens * group.spec.bytes_per_token,
                page_bytes=group.state_bytes or tokens * group.bytes_per_token,
                keeps_all=windows_as_full,
            )
            for group in groups
        )
        return PageGeometry("grouped", layout, sum(fmt.page_bytes for fmt in formats), formats, one_table=True)
    grouping = equal_groups([len(group.layers) for group in groups])
    page = grouping.size * layer_page
    return PageGeometry(
        "grouped",
        layout,
        page,
        tuple(
            BlockFormat(
                group,
                block_size=_unified_block(group.spec, tokens, layer_page),
                tables=tables,
                layer_bytes=layer_page,
                page_bytes=page,
                padding_layers=padding,
                keeps_all=windows_as_full and not group.spec.state_bytes,
            )
            for group, tables, padding in zip(groups, grouping.groups, grouping.padding, strict=True)
        ),
    )


def _unified_block(spec: LayerSpec, tokens: int, layer_page: int) -> int:
    """Tokens per block after page sizes are unified: smaller pages take more tokens if they divide, else are padded."""
    if spec.state_bytes:
        return 0
    page = spec.bytes_per_token * tokens
    return tokens * (layer_page // page) if layer_page % page == 0 else tokens


def lcm_geometry(layout: ModelLayout, block_size: int = 16) -> PageGeometry:
    """Pages of the least common multiple of all blocks; a state is first padded to whole attention layer-blocks."""
    sizes = block_sizes(layout, block_size)
    step = max((g.spec.bytes_per_token * sizes[g.name] for g in layout.groups), default=0) or 1
    layer_bytes = {
        g.name: -(-g.spec.state_bytes // step) * step if g.spec.state_bytes else g.spec.bytes_per_token * sizes[g.name]
        for g in layout.groups
    }
    page = lcm(*(len(g.layers) * layer_bytes[g.name] for g in layout.groups))
    if page > MAX_LCM_PAGE_BYTES:
        raise ConfigError(
            f"the LCM page of {layout.name} would be {page} bytes, more than {MAX_LCM_PAGE_BYTES}; "
            "leave the policy lcm out"
        )
    formats = tuple(BlockFormat(g, sizes[g.name], 1, layer_bytes[g.name], page) for g in layout.groups)
    return PageGeometry("lcm", layout, page, formats)
