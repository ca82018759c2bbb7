"""Page geometry: how the blocks of every group are cut, how they pack into pages, and what a sequence is charged.

    page   |<------------------------- page_bytes ------------------------->|
    blocks |  block 0   |  block 1   |  ...  | block k-1  | tail (no block)  |
    block  | layer 0: K tokens, V tokens | layer 1: K ... | ... |

A `BlockFormat` describes one group; a group's layers may be split into `tables` sub-blocks of equal size, each with a
block table of its own. kvtide's solver and the published baselines all produce the same `PageGeometry`, so that
`charge` compares them in one run: it says, by cause, where the bytes of a sequence of a given length go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import ConfigError
from .layout import Group, ModelLayout
from .specs import ChunkedLocal, Int64Array

INT32_MAX = 2**31 - 1


class Charge(NamedTuple):
    """Bytes a sequence is charged, by cause; int64 arrays of one shape. Their sum is what it allocates.

    `needed`: the last token's query reads it. `out_of_window`: stored, and no query can reach it again.
    `group_padding`: empty layers that make groups equal. `page_padding`: bytes of a block or page that no block can
    use. `block_tail`: slots of the last block that no token fills yet. `free`: blocks of the sequence's pages that it
    does not use.
    """

    needed: Int64Array
    out_of_window: Int64Array
    group_padding: Int64Array
    page_padding: Int64Array
    block_tail: Int64Array
    free: Int64Array

    @property
    def allocated(self) -> Int64Array:
        """All bytes of the pages that the sequence holds."""
        total: Int64Array = np.add.reduce(self)
        return total


def ceil_div(value: Int64Array, divisor: int | Int64Array) -> Int64Array:
    """`value` / `divisor`, rounded up; int64 arrays of any shape."""
    return -(-value // divisor)


@dataclass(frozen=True)
class BlockFormat:
    """How one group's blocks are cut.

    `block_size` is in tokens, 0 for a recurrent state (its block is one state). `layer_bytes` is what one layer takes
    of a block, padding included; `padding_layers` are empty layers over all tables. `keeps_all` marks a baseline that
    holds every token of the sequence, text and image alike, whatever the layer needs.
    """

    group: Group
    block_size: int
    tables: int
    layer_bytes: int
    page_bytes: int
    padding_layers: int = 0
    keeps_all: bool = False

    def __post_init__(self) -> None:
        if self.layers_per_block * self.tables != len(self.group.layers) + self.padding_layers:
            raise ConfigError(
                f"{len(self.group.layers)} layers (and {self.padding_layers} of padding) of group {self.group.name} "
                f"cannot be split evenly over {self.tables} block tables"
            )
        if self.blocks_per_page < 1:
            raise ConfigError(
                f"a page of {self.page_bytes} bytes cannot hold a {self.block_bytes}-byte block of {self.group.name}"
            )

    @property
    def layers_per_block(self) -> int:
        """Layers side by side in one block, padding included."""
        return (len(self.group.layers) + self.padding_layers) // self.tables

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one table."""
        return self.layers_per_block * self.layer_bytes

    @property
    def blocks_per_page(self) -> int:
        """Blocks that a page holds."""
        return self.page_bytes // self.block_bytes

    @property
    def page_tail_bytes(self) -> int:
        """Bytes of every page that no block fills."""
        return self.page_bytes - self.blocks_per_page * self.block_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in the group's real layers."""
        return self.group.bytes_per_token

    def place(self, layer: int) -> tuple[int, int]:
        """The table that holds a layer (by its index in the model), and the layer's byte offset inside a block."""
        try:
            slot = self.group.layers.index(layer)
        except ValueError:
            raise ConfigError(f"layer {layer} is not in group {self.group.name}; it has {self.group.layers}") from None
        table, position = divmod(slot, self.layers_per_block)
        return table, position * self.layer_bytes

    def component_offset(self, name: str) -> int:
        """Byte offset of a component (`k`, `v`, `latent`, ...) inside a layer's part of a block."""
        offset = 0
        for component in self.group.spec.components():
            if component.name == name:
                return offset
            offset += component.num_bytes * max(self.block_size, 1)
        names = [component.name for component in self.group.spec.components()]
        raise ConfigError(f"group {self.group.name} has no component {name!r}; it has {names}")

    def live_blocks(self, own_tokens: Int64Array, stored_tokens: Int64Array) -> Int64Array:
        """Blocks per table that a sequence holds: those with a token in reach (all of them under `keeps_all`).

        `own_tokens` and `stored_tokens` are as in `charge`: int64 arrays of one shape, which the result has too.
        """
        if not self.block_size:
            return np.minimum(stored_tokens, 1)
        blocks = ceil_div(stored_tokens, self.block_size)
        if self.keeps_all:
            return blocks
        reach = self.group.spec.needed(own_tokens)
        dead = reach.first // self.block_size
        return blocks - dead + np.minimum(ceil_div(reach.sinks, self.block_size), dead)

    def peak_blocks(self, own_tokens: int, stored_tokens: int) -> int:
        """The most blocks per table that a sequence holds at any length up to the given one, written token by token."""
        if self.keeps_all or not self.block_size:
            return int(self.live_blocks(np.array(own_tokens), np.array(stored_tokens)))
        # Counts repeat with the block size once a window is full, and peak at the ends of chunks; the last of both hold
        # every case.
        step = self.block_size
        lengths = np.arange(max(0, own_tokens - step), own_tokens + 1, dtype=np.int64)
        if isinstance(self.group.spec, ChunkedLocal):
            last = own_tokens // self.group.spec.chunk
            ends = np.arange(max(0, last - step), last + 1, dtype=np.int64) * self.group.spec.chunk
            lengths = np.concatenate([lengths, ends])
        return int(self.live_blocks(lengths, lengths).max())

    def charge(self, own_tokens: Int64Array, stored_tokens: Int64Array) -> Charge:
        """Bytes by cause of sequences with `own_tokens` tokens of this group's kind.

        `stored_tokens` is what a `keeps_all` baseline stores; elsewhere it equals `own_tokens`. Pages are charged
        whole: the blocks of a sequence's last page that it does not use count as `free`.
        """
        real_layers = len(self.group.layers)
        blocks = self.live_blocks(own_tokens, stored_tokens)
        pages = ceil_div(blocks * self.tables, self.blocks_per_page)
        needed = self.group.spec.needed(own_tokens)
        if self.block_size:
            needed_bytes = needed.num_tokens * self.token_bytes
            slots = blocks * self.block_size
            tail = ceil_div(stored_tokens, self.block_size) * self.block_size - stored_tokens
            out_of_window = (slots - tail) * self.token_bytes - needed_bytes
            inner_padding = self.layer_bytes - self.block_size * self.group.spec.bytes_per_token
        else:
            needed_bytes = blocks * self.group.state_bytes
            tail = out_of_window = np.zeros_like(blocks)
            inner_padding = self.layer_bytes - self.group.spec.state_bytes
        return Charge(
            needed=needed_bytes,
            out_of_window=out_of_window,
            group_padding=blocks * (self.padding_layers * self.layer_bytes),
            page_padding=blocks * (real_layers * inner_padding) + pages * self.page_tail_bytes,
            block_tail=tail * self.token_bytes,
            free=(pages * self.blocks_per_page - blocks * self.tables) * self.block_bytes,
        )


@dataclass(frozen=True)
class PageGeometry:
    """One policy's geometry of one layout. `unit` divides every block and page; block tables hold unit indices.

    `one_table` says that all groups share a single table, as baselines without groups do: a block then spans them all,
    and each format's `page_bytes` is its slice of it.
    """

    policy: str
    layout: ModelLayout
    page_bytes: int
    formats: tuple[BlockFormat, ...]
    one_table: bool = False

    @property
    def unit(self) -> int:
        """Bytes of one unit: the greatest size that divides the page and every block."""
        return gcd(self.page_bytes, *(fmt.block_bytes for fmt in self.formats))

    @property
    def num_tables(self) -> int:
        """Block tables over all groups."""
        if self.one_table:
            return len({fmt.block_size > 0 for fmt in self.formats})  # states lie in a table of their own
        return sum(fmt.tables for fmt in self.formats)

    @property
    def max_arena_bytes(self) -> int:
        """Largest arena whose unit indices fit in int32."""
        return (INT32_MAX + 1) * self.unit

    @property
    def slack_bytes(self) -> int:
        """Worst case of free blocks in a sequence's pages, whatever its length: all but one block of a page per group.

        The tail of every page comes on top of it, since no block can use it.
        """
        return sum((fmt.blocks_per_page - 1) * fmt.block_bytes for fmt in self.formats)

    @property
    def pinned_fraction(self) -> float:
        """Worst case of a shared pool: the share of memory held back when every page keeps one live block."""
        return max(1 - fmt.block_bytes / fmt.page_bytes for fmt in self.formats)

    def format_of(self, layer: int) -> BlockFormat:
        """The block format of the group that a layer (by its index in the model) belongs to."""
        for fmt in self.formats:
            if layer in fmt.group.layers:
                return fmt
        raise ConfigError(f"layer {layer} of {self.layout.name} stores no KV of its own")

    def check_arena(self, num_bytes: int) -> None:
        """`ConfigError` when an arena of this size cannot be addressed by int32 unit indices."""
        if num_bytes > self.max_arena_bytes:
            raise ConfigError(
                f"an arena of {num_bytes} bytes needs more than 2**31 units of {self.unit} bytes; "
                f"at most {self.max_arena_bytes} bytes are possible with this geometry"
            )

    def tokens_of(
        self, fmt: BlockFormat, text_tokens: npt.ArrayLike, image_tokens: npt.ArrayLike
    ) -> tuple[Int64Array, Int64Array]:
        """Tokens of a format's kind, and tokens that it stores, for sequences of text and image tokens.

        Image tokens are part of the text sequence unless the model has cross-attention layers to keep them in.
        """
        text = np.asarray(text_tokens, dtype=np.int64)
        image = np.asarray(image_tokens, dtype=np.int64)
        own = text + image
        if self.layout.has_cross_attention:
            own = image if fmt.group.spec.per_image else text
        return own, (text + image if fmt.keeps_all else own)

    def charge(self, text_tokens: npt.ArrayLike, image_tokens: npt.ArrayLike = 0) -> dict[str, Charge]:
        """Bytes by cause, per group name, of sequences of `text_tokens` and `image_tokens` (numbers or int arrays)."""
        return {fmt.group.name: fmt.charge(*self.tokens_of(fmt, text_tokens, image_tokens)) for fmt in self.formats}


def block_sizes(layout: ModelLayout, block_size: int | Mapping[str, int]) -> dict[str, int]:
    """Tokens per block of every group (0 for states) from one number or a mapping of group names."""
    names = [group.name for group in layout.groups]
    if isinstance(block_size, Mapping):
        if unknown := set(block_size) - set(names):
            raise ConfigError(f"block_size names unknown groups {sorted(unknown)}; {layout.name} has {names}")
        given = {name: block_size.get(name, 16) for name in names}
    else:
        given = dict.fromkeys(names, block_size)
    for name, size in given.items():
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= 2**20:
            raise ConfigError(f"block_size {size!r} of group {name} must be a whole number of tokens from 1 to {2**20}")
    return {group.name: 0 if group.spec.state_bytes else given[group.name] for group in layout.groups}
