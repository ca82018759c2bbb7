"""vLLM's cache tensors as values: one value is a block of a group, all its layers, the same bytes in any layout.

    value = layer 0's block | layer 1's block | ...      each in vLLM's logical order: heads, tokens, content

vLLM gives one `[blocks, heads, tokens, content]` view a layer, over memory in whatever order its attention kernels
want, and may cut a block into smaller kernel blocks. Where a block's layers lie one after the other (its cross-layer
layouts) a value is one row of memory and is copied as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy.typing as npt
import torch

from kvtide.kvcache import ConfigError

if TYPE_CHECKING:
    import numpy as np

_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Pages:
    """One group's blocks. `caches` are its layers' tensors, in the order of the value; `num_blocks` is the pool's.

    Copies run on the current stream of the caches' device, and are complete when the call returns.
    """

    def __init__(self, caches: Sequence[torch.Tensor], num_blocks: int) -> None:
        parts = [_by_block(cache, num_blocks) for cache in caches]
        self._sizes = [part[0].numel() * part.element_size() for part in parts]
        self.value_bytes = sum(self._sizes)
        whole = _joined(parts, self._sizes)
        self._parts = parts if whole is None else [whole]
        if whole is not None:
            self._sizes = [self.value_bytes]

    @property
    def is_one_row(self) -> bool:
        """Whether a block's layers lie one after the other in memory."""
        return len(self._parts) == 1

    def read(self, blocks: Sequence[int], out: npt.NDArray[np.uint8]) -> None:
        """Copy blocks into `out`, value after value."""
        rows = torch.from_numpy(out).view(len(blocks), self.value_bytes)
        start = 0
        for part, size in zip(self._parts, self._sizes, strict=True):
            where = torch.tensor(blocks, device=part.device)
            found = part.index_select(0, where).reshape(len(blocks), -1).view(torch.uint8)
            rows[:, start : start + size].copy_(found)
            start += size

    def write(self, blocks: Sequence[int], values: npt.NDArray[np.uint8]) -> None:
        """Copy values into blocks."""
        rows = torch.from_numpy(values).view(len(blocks), self.value_bytes)
        start = 0
        for part, size in zip(self._parts, self._sizes, strict=True):
            where = torch.tensor(blocks, device=part.device)
            found = rows[:, start : start + size].contiguous().view(part.dtype).view(len(blocks), *part.shape[1:])
            part.index_copy_(0, where, found.to(part.device))
            start += size


def _by_block(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """A layer's tensor with the pool's blocks first, as integers of the same width (every device can index those)."""
    if cache.shape[0] % num_blocks or cache.element_size() not in _SAME_WIDTH:
        raise ConfigError(f"a KV cache tensor {tuple(cache.shape)} of {cache.dtype} does not hold {num_blocks} blocks")
    view = cache.view(_SAME_WIDTH[cache.element_size()])
    return view if view.shape[0] == num_blocks else view.unflatten(0, (num_blocks, -1))  # type: ignore[no-untyped-call]


def _joined(parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor | None:
    """Rows of one value each, if memory lies so."""
    first = parts[0]
    stride = first.stride(0) * first.element_size()
    place = first.data_ptr()
    for part, size in zip(parts, sizes, strict=True):
        one = part[0]
        if (
            part.data_ptr() != place
            or part.dtype != first.dtype
            or part.stride(0) * part.element_size() != stride
            or not one.is_contiguous()
        ):
            return None
        place += size
    return first.as_strided((first.shape[0], sum(sizes) // first.element_size()), (first.stride(0), 1))
