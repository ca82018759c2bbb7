"""What every adapter does around a foreign kernel: fit the call to it before, and undo its conventions after.

    before   blocks -> kernel pages (re-cut view and table)          table entries past a row's end -> entry 0
             q_lens -> tokens moved to the end of their row          heads -> padded to what the kernel tiles
             length 0 -> 1 (its result is overwritten)               scales -> folded, read on the host once
    after    each of these undone, LSE from base 2 to e, 0 and -inf for every query that sees no key

Everything is a device operation on shapes that the host knows: nothing waits for the device, and all of it can be
captured in a CUDA graph. A kernel's result is never trusted where no key is visible: several leave NaN, +inf or
whatever the buffer held there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..contract import MlaCall
from ..formats import FP8_MAX, LatentFormat
from ..scales import host_scale, outside_capture
from ..support import Support

LN2 = math.log(2)


@dataclass(frozen=True)
class Frame:
    """A call as a foreign kernel gets it; `out` is a contiguous buffer for it to write.

    `query` [batch, q_len, heads (padded), width], the row's real tokens at its end; FP8 if the kernel wants that.
    `cache` [pages, page, width]; `table` int32 [batch, columns], contiguous; `seq_lens` int32 [batch], at least 1.
    `scale` goes on q * k, `value_scale` on the output.
    """

    call: MlaCall
    query: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    seq_lens: torch.Tensor
    out: torch.Tensor
    scale: float
    value_scale: float

    @property
    def page(self) -> int:
        """Tokens of a kernel page."""
        return self.cache.shape[1]

    @property
    def max_kv_len(self) -> int:
        """The longest row that the table has columns for."""
        return self.table.shape[1] * self.page

    def finish(self, out: torch.Tensor, lse: torch.Tensor, *, base2: bool = False) -> None:
        """Write the call's `out` and `lse` from the kernel's [batch, q_len, heads (padded), latent] and [.., heads]."""
        call = self.call
        out, lse = out[:, :, : call.heads], lse[:, :, : call.heads]
        if call.q_lens is not None:
            place = _last_tokens(call, call.q_lens)
            rows = torch.arange(call.batch, device=place.device)[:, None]
            # Past a row's last token the place is beyond the row; what is read there is overwritten below.
            place = place.clamp(max=call.q_len - 1)
            out, lse = out[rows, place], lse[rows, place]
        if out.data_ptr() != call.out.data_ptr():
            call.out.copy_(out)
        unseen = _sees_nothing(call)[:, :, None]
        call.out.masked_fill_(unseen[..., None], 0)
        torch.mul(lse, LN2 if base2 else 1.0, out=call.lse)
        call.lse.masked_fill_(unseen, -math.inf)


def frame(call: MlaCall, support: Support, *, pad_heads: int | None = None) -> Frame | None:
    """Fit `call` to a kernel that `support` describes; None where there is nothing to compute, and it is written.

    `pad_heads`: the head count that the kernel wants.
    """
    if not call.batch or not call.q_len or not call.max_kv_len:
        call.out.zero_()
        call.lse.fill_(-math.inf)
        return None
    cache, table = _pages(call, support)
    query = call.query
    if call.q_lens is not None:
        place = torch.arange(call.q_len, device=query.device) - (call.q_len - call.q_lens[:, None])
        query = query[torch.arange(call.batch, device=query.device)[:, None], place.clamp(min=0)]
    if pad_heads is not None and pad_heads != call.heads:
        query = torch.nn.functional.pad(query, (0, 0, 0, pad_heads - call.heads))
    scale, value_scale, out_dtype = call.scale, 1.0, query.dtype
    if call.fmt is LatentFormat.FP8:
        value_scale = host_scale(call.k_scale)
        scale *= value_scale
        # Saturate here: not every torch does, and the others make NaN of a query beyond the largest FP8 value.
        query = query.float().clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        out_dtype = torch.bfloat16
    shape = (*query.shape[:3], call.latent_dim)
    fits = call.q_lens is None and call.out.shape == shape and call.out.dtype == out_dtype and call.out.is_contiguous()
    out = call.out if fits else torch.empty(shape, dtype=out_dtype, device=query.device)
    return Frame(call, query, cache, table, call.seq_lens.clamp(min=1), out, scale, value_scale)


def _pages(call: MlaCall, support: Support) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache in kernel pages, and a table of them that is in range wherever a kernel may look."""
    cache, table = call.cache, call.block_table
    page = cache.shape[1]
    cut = support.cut(page, cache.stride(0) * cache.itemsize, cache.stride(1) * cache.itemsize)
    if cut is not None and cut.factor > 1:
        page = cut.page
        pages = (cache.shape[0] - 1) * cut.scale + (cut.factor - 1) * cut.step + 1
        cache = cache.as_strided(
            (pages, page, cache.shape[2]),
            (cut.stride // cache.itemsize, cache.stride(1), cache.stride(2)),
            cache.storage_offset(),
        )
        parts = torch.arange(cut.factor, dtype=torch.int32, device=table.device) * cut.step
        table = (table[:, :, None] * cut.scale + parts).reshape(call.batch, -1)
    used = (call.seq_lens + (page - 1)) // page
    columns = torch.arange(table.shape[1], dtype=torch.int32, device=table.device)
    table = table.masked_fill(columns >= used[:, None], 0)
    # A window that has moved on may have left -1 in front of it.
    return cache, table if call.window is None else table.clamp(min=0)


def _last_tokens(call: MlaCall, q_lens: torch.Tensor) -> torch.Tensor:
    """Where query token t of each row stands once its tokens are moved to the row's end."""
    return torch.arange(call.q_len, device=q_lens.device) + (call.q_len - q_lens[:, None])


def _sees_nothing(call: MlaCall) -> torch.Tensor:
    """Bool [batch, q_len]: query tokens that no key is visible to, or that are padding."""
    token = torch.arange(call.q_len, dtype=torch.int32, device=call.seq_lens.device)
    if call.q_lens is None:
        return token < (call.q_len - call.seq_lens)[:, None]
    q_lens = call.q_lens[:, None]
    return (token >= q_lens) | (token < q_lens - call.seq_lens[:, None])


def workspace(owner: str, device: torch.device, num_bytes: int) -> torch.Tensor:
    """Scratch of one kernel on one device, zeroed when it is made: some keep counters in it that they leave at zero.

    At least `num_bytes`, a power of two. Like the engines that these kernels come from, it relies on calls of one
    device running one after the other. It is never given back, since captured graphs point into it.
    """
    num_bytes = 1 << max(num_bytes - 1, 1).bit_length()
    found = _workspaces.get((owner, device, num_bytes))
    if found is None:
        # Zeroing that is captured would happen at that graph's replay, and another graph may run before it.
        outside_capture(device, f"the workspace of {owner} has to be allocated")
        with torch.inference_mode(False):
            found = torch.zeros(num_bytes, dtype=torch.int8, device=device)
        _workspaces[owner, device, num_bytes] = found
    return found


_workspaces: dict[tuple[str, torch.device, int], torch.Tensor] = {}
