"""The arena: one flat allocation of device memory, and strided views of it for kernels.

A block table entry `e` of any group means byte `e * unit`. A layer's view has `stride(0) == unit`, so `view[e]` is that
layer's part of the block at `e`: `[token, head, dim]` for attention, the state's own shape for recurrent layers. Views
of different layers and groups overlap as ranges; which entries are live is the allocator's business. Needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import ConfigError, MissingExtra
from .geometry import BlockFormat, PageGeometry

if TYPE_CHECKING:
    import torch


class Arena:
    """`num_pages` pages of a geometry on a torch device (`cpu`, `cuda`, `cuda:1`, ...), not initialised.

    `pin_memory` page-locks a CPU arena for transfers. Raises `MissingExtra` without torch, `ConfigError` when the pages
    do not fit int32 unit indices or the device cannot give them.
    """

    def __init__(
        self, geometry: PageGeometry, num_pages: int, *, device: str = "cpu", pin_memory: bool = False
    ) -> None:
        try:
            import torch
        except ImportError:
            raise MissingExtra("the arena", "torch", "torch") from None
        if num_pages < 1:
            raise ConfigError(f"num_pages {num_pages} must be at least 1")
        self.geometry = geometry
        self.num_pages = num_pages
        self.num_bytes = num_pages * geometry.page_bytes
        geometry.check_arena(self.num_bytes)
        try:
            self.memory: torch.Tensor = torch.empty(
                self.num_bytes, dtype=torch.uint8, device=device, pin_memory=pin_memory
            )
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"an arena of {self.num_bytes} bytes on {device!r} is not possible: {reason}") from None

    def entry(self, page: int, slot: int, fmt: BlockFormat) -> int:
        """The block table entry of block `slot` of a page that belongs to the format's group."""
        if not (0 <= page < self.num_pages and 0 <= slot < fmt.blocks_per_page):
            raise ConfigError(
                f"block {slot} of page {page} is outside {self.num_pages} pages of {fmt.blocks_per_page} blocks"
            )
        return (page * self.geometry.page_bytes + slot * fmt.block_bytes) // self.geometry.unit

    def block(self, entry: int, fmt: BlockFormat) -> torch.Tensor:
        """The bytes of the block at a table's `entry`, uint8 [fmt.block_bytes], contiguous, not a copy.

        `ConfigError` for an entry outside the arena.
        """
        start = entry * self.geometry.unit
        if not 0 <= start <= self.num_bytes - fmt.block_bytes:
            raise ConfigError(
                f"block table entry {entry} of {fmt.group.name} is outside an arena of {self.num_bytes} bytes"
            )
        return self.memory[start : start + fmt.block_bytes]

    def view(self, layer: int, component: str) -> torch.Tensor:
        """One component of one layer over all entries: shape `[entries, block_size, *component]`, `stride(0) == unit`.

        A recurrent state has no token dimension. `component` is one of the layer spec's: `k`, `v`, `latent`, `indexer`,
        or a state array's name.
        """
        import torch

        fmt = self.geometry.format_of(layer)
        offset = fmt.place(layer)[1] + fmt.component_offset(component)
        part = next(part for part in fmt.group.spec.components() if part.name == component)
        dtype = torch.float8_e4m3fn if part.dtype == "float8_e4m3" else getattr(torch, part.dtype)
        unit = self.geometry.unit
        if unit % dtype.itemsize or offset % dtype.itemsize:
            raise ConfigError(
                f"{component} of layer {layer} is {part.dtype} at byte {offset} of units of {unit} bytes, which is not "
                f"aligned to its {dtype.itemsize}-byte elements; choose a larger block_size"
            )
        shape = (fmt.block_size, *part.shape) if fmt.block_size else part.shape
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        entries = (self.num_bytes - fmt.block_bytes) // unit + 1
        return self.memory.view(dtype).as_strided(
            (entries, *shape), (unit // dtype.itemsize, *strides), offset // dtype.itemsize
        )
