"""MLA decode on a CPU, in torch alone: the backend `CPU`.

    row's keys    |  edge  |  full  |  full  |  edge  |        parts of up to 4,096 keys, cut at whole blocks
                  ^ window's start           ^ the query tokens' own keys, the row's end
    group         parts of any rows, one or more a thread: gather -> (convert) -> flash attention -> merge by LSE

A group's latents are gathered once and serve as keys and as values. The buffers are kept from call to call, because
fresh pages cost more than the arithmetic. *Full* parts are seen whole by every query token of their row; the others
take a mask, and what no query sees is zeroed, since a probability of zero does not hide a NaN. Products run in bfloat16
(which processors with AMX do fast) where query and cache allow it, in float32 otherwise; sums and LSE in float32. Reads
lengths as numbers, which is free on a CPU.
"""

from __future__ import annotations

import math
import threading
from functools import lru_cache
from typing import NamedTuple

import torch

from .contract import MlaCall
from .formats import SCALE_GROUP, LatentFormat

# A thread's share of a group: one part, or several short ones. 9 MB of float32 latents that stay allocated; of 256 to
# 4,096 keys the most was the fastest, since it saves calls and merges.
KEYS_PER_THREAD = 4096
# Few keys are cut into smaller parts, so that every thread has some; this many at least.
MIN_PART_KEYS = 512
# Parts that depend on nothing but the row.
INVARIANT_PART_KEYS = 1024
# The one attention kernel of torch for CPUs that returns the LSE; `scaled_dot_product_attention` runs it underneath.
_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class _Part(NamedTuple):
    """Keys of columns `[column, column + columns)` of a row's table."""

    row: int
    column: int
    columns: int


class _Span(NamedTuple):
    """A row's query tokens, the position of the first, and its keys: `[low, stop)` is what any of them sees."""

    tokens: int
    before: int
    low: int
    stop: int


class _Scratch(threading.local):
    """Buffers that outlive the call; each thread has its own, as large as its largest group."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor, valid until the next `get` of that name."""
        num_bytes = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < num_bytes:
            # An ordinary tensor, which later calls may write in any mode.
            with torch.inference_mode(False):
                buffer = self._buffers[name] = torch.empty(num_bytes, dtype=torch.uint8)
        return buffer[:num_bytes].view(dtype).view(shape)


_scratch = _Scratch()


def decode(call: MlaCall) -> None:
    """Answer the call into its `out` and `lse`."""
    spans = _spans(call)
    width = max(1, _part_keys(call, spans) // call.block_size)
    limit = max(1, _group_keys() // (width * call.block_size))
    full, edges = _cut(call, spans, width)
    dtype = _product_dtype(call)
    query = (call.query if call.query.dtype == dtype else call.query.to(dtype)).flatten(1, 2)[:, None]
    scale, value_scale = call.scale, 1.0
    if call.fmt is LatentFormat.FP8:
        value_scale = float(call.k_scale)
        scale *= value_scale
    parts: list[_Part] = []
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    # Full parts are looked up all at once, edges a group at a time: each group has a width of its own.
    for members, size, is_full in (
        (full, limit, True),
        *((group, len(group), False) for group in _groups(call, edges)),
    ):
        if not members:
            continue
        queries = query[torch.tensor([part.row for part in members])]
        entries = _entries(call, members, is_full)
        for first in range(0, len(members), size):
            group = members[first : first + size]
            keys = _gather(call, entries[first : first + size], dtype)
            mask, seen = (None, None) if is_full else _mask(call, group, spans, keys)
            out, lse = _flash_attention(queries[first : first + size], keys, keys, attn_mask=mask, scale=scale)
            out, lse = out[:, 0, :, : call.latent_dim], lse[:, 0]
            if seen is not None:
                # Torch calls the sum over no keys 0.
                lse = lse.masked_fill(~seen, -math.inf)
            parts += group
            results.append((out, lse))
    if results:
        _merge(call, spans, parts, results, value_scale)
    else:
        call.out.zero_()
        call.lse.fill_(-math.inf)


def _spans(call: MlaCall) -> list[_Span]:
    lengths = call.seq_lens.tolist()
    tokens = [call.q_len] * call.batch if call.q_lens is None else call.q_lens.tolist()
    spans = []
    for length, count in zip(lengths, tokens, strict=True):
        before = length - count
        low = 0 if call.window is None else max(0, before - call.window + 1)
        spans.append(_Span(count, before, low, length if count else 0))
    return spans


def _group_keys() -> int:
    return KEYS_PER_THREAD * torch.get_num_threads()


def _part_keys(call: MlaCall, spans: list[_Span]) -> int:
    """The longest part: a power of two, small enough that the batch gives two to every thread."""
    if call.batch_invariant:
        return INVARIANT_PART_KEYS
    keys = sum(max(span.stop - span.low, 0) for span in spans) // (2 * torch.get_num_threads())
    return min(max(1 << max(keys, 1).bit_length() - 1, MIN_PART_KEYS), KEYS_PER_THREAD)


def _cut(call: MlaCall, spans: list[_Span], width: int) -> tuple[list[_Part], list[_Part]]:
    """Full parts, all of `width` columns, and the edges."""
    size = call.block_size
    full: list[_Part] = []
    edges: list[_Part] = []
    for row, span in enumerate(spans):
        # What every query token sees: from the last one's window on, up to the first one's own key.
        low = 0 if call.window is None else max(0, span.stop - call.window)
        stop = -(-span.stop // size)
        start = span.low // size
        while start < stop:
            end = min(start // width * width + width, stop)
            whole = end - start == width and start * size >= low and end * size <= span.before + 1
            (full if whole else edges).append(_Part(row, start, end - start))
            start = end
    return full, edges


def _groups(call: MlaCall, edges: list[_Part]) -> list[list[_Part]]:
    """Edges that are computed together: of like width, and more of them where they are narrow."""
    if call.batch_invariant:
        # An edge is widened to the widest of its group, which changes the order in which its keys are summed up.
        return [[edge] for edge in edges]
    edges = sorted(edges, key=lambda edge: edge.columns)
    limit = max(1, _group_keys() // call.block_size)
    groups: list[list[_Part]] = []
    for edge in edges:
        if groups and (len(groups[-1]) + 1) * edge.columns <= limit:
            groups[-1].append(edge)
        else:
            groups.append([edge])
    return groups


def _product_dtype(call: MlaCall) -> torch.dtype:
    """Bfloat16 if the query is and every latent is exact in it; torch's products in float16 are slow on a CPU."""
    exact = call.fmt in (LatentFormat.BFLOAT16, LatentFormat.FP8, LatentFormat.FP8_DS)
    return torch.bfloat16 if call.query.dtype == torch.bfloat16 and exact else torch.float32


def _entries(call: MlaCall, parts: list[_Part], is_full: bool) -> torch.Tensor:
    """Table entries `[parts, columns]`; 0 in columns that a part narrower than the others does not have."""
    rows, first, counts = torch.tensor(parts).T[:, :, None]
    columns = torch.arange(max(part.columns for part in parts))
    if is_full:
        return call.block_table[rows, first + columns]
    # Columns beyond a part's own may be beyond the table, or hold no entry.
    entries = call.block_table[rows, (first + columns).clamp(max=call.block_table.shape[1] - 1)]
    return entries.masked_fill(columns >= counts, 0)


def _gather(call: MlaCall, entries: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The latents of entries `[parts, columns]`: `[parts, 1, keys, latent_dim + rope_dim]`; k_scale is not applied."""
    shape = (len(entries), 1, entries.shape[1] * call.block_size, -1)
    entries = entries.flatten()
    size = (len(entries), call.block_size)
    cache = call.cache if call.cache.itemsize > 1 else call.cache.view(torch.uint8)
    stored = _scratch.get("stored", (*size, cache.shape[2]), cache.dtype)
    torch.index_select(cache, 0, entries, out=stored)
    if stored.dtype == dtype:
        return stored.view(shape)
    tokens = _scratch.get("tokens", (*size, call.latent_dim + call.rope_dim), dtype)
    if call.fmt is LatentFormat.FP8:
        _e4m3(stored, tokens)
    elif call.fmt is LatentFormat.FP8_DS:
        groups = call.latent_dim // SCALE_GROUP
        values, scales, rope = torch.split(stored, [call.latent_dim, 4 * groups, 2 * call.rope_dim], dim=-1)
        latent = _scratch.get("latent", (*size, call.latent_dim), dtype)
        _e4m3(values, latent)
        # Powers of two: the product is exact.
        factors = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)[..., None].to(dtype)
        scaled = latent.view(*size, groups, SCALE_GROUP).mul_(factors)
        tokens[..., : call.latent_dim] = scaled.view(latent.shape)
        tokens[..., call.latent_dim :] = rope.clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
    else:
        tokens.copy_(stored)
    return tokens.view(shape)


def _e4m3(stored: torch.Tensor, out: torch.Tensor) -> None:
    """Bytes of e4m3 as the dtype of `out`, which is contiguous; by table, two bytes a look-up."""
    if stored.shape[-1] % 2:
        out.copy_(stored.view(torch.float8_e4m3fn))
        return
    count = out.numel() // 2
    index = _scratch.get("index", (count,), torch.int32)
    index.view(*stored.shape[:-1], -1).copy_(stored.view(torch.uint16))
    if out.dtype == torch.bfloat16:
        torch.index_select(_pairs(), 0, index, out=out.view(-1).view(torch.int32))
        return
    pairs = _scratch.get("pairs", (count,), torch.int32)
    torch.index_select(_pairs(), 0, index, out=pairs)
    out.copy_(pairs.view(torch.bfloat16).view(out.shape))


@lru_cache(maxsize=1)
def _pairs() -> torch.Tensor:
    """Every two bytes of e4m3 as two values of bfloat16, which holds them exactly, in one int32."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
    return every.view(torch.float8_e4m3fn).to(torch.bfloat16).view(torch.int32)


def _mask(
    call: MlaCall, group: list[_Part], spans: list[_Span], keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores' mask `[parts, 1, rows, keys]` of 0 and -inf, and which rows `[parts, rows]` see a key.

    Zeroes the keys that no query token sees.
    """
    places = torch.tensor([part.column * call.block_size for part in group])[:, None] + torch.arange(keys.shape[2])
    of = [spans[part.row] for part in group]
    # Parts of one row may lie side by side in a group: each is bounded by its own last column.
    ends = [min(s.stop, (p.column + p.columns) * call.block_size) for p, s in zip(group, of, strict=True)]
    end, before = torch.tensor(ends)[:, None], torch.tensor([span.before for span in of])[:, None]
    for i, (part, span) in enumerate(zip(group, of, strict=True)):
        start = part.column * call.block_size
        keys[i, 0, : max(span.low - start, 0)] = 0
        keys[i, 0, ends[i] - start :] = 0
    positions = (before + torch.arange(call.q_len))[:, :, None]
    places = places[:, None, :]
    visible = (places <= positions) & (places < end[..., None])
    if call.window is not None:
        visible &= places > positions - call.window
    mask = torch.zeros(visible.shape, dtype=keys.dtype).masked_fill_(~visible, -math.inf)
    seen = visible.any(dim=-1)
    return mask.repeat_interleave(call.heads, dim=1)[:, None], seen.repeat_interleave(call.heads, dim=1)


def _merge(
    call: MlaCall,
    spans: list[_Span],
    parts: list[_Part],
    results: list[tuple[torch.Tensor, torch.Tensor]],
    value_scale: float,
) -> None:
    """Add up the parts of each row, always in the same order; then the sink, and nothing for padding tokens."""
    out, lse = (torch.cat(part) for part in zip(*results, strict=True))
    if parts != (ordered := sorted(parts)):
        # Edges come after full parts, and by width: an order that the other rows of the batch must not change.
        order = torch.tensor(sorted(range(len(parts)), key=parts.__getitem__))
        parts, out, lse = ordered, out[order], lse[order]
    rows = torch.tensor([part.row for part in parts])
    out = out.float()
    shape = (call.batch, lse.shape[1])
    if len(set(rows.tolist())) == len(rows):
        # One part a row: nothing to add up.
        summed = torch.zeros((*shape, call.latent_dim)).index_copy_(0, rows, out)
        lse = torch.full(shape, -math.inf).index_copy_(0, rows, lse)
        seen = lse > -math.inf
        norm = torch.full(shape, value_scale)
    else:
        highest = torch.full(shape, -math.inf).scatter_reduce_(0, rows[:, None].expand_as(lse), lse, "amax")
        weights = torch.exp(lse - highest.clamp(min=torch.finfo(torch.float32).min)[rows])
        total = torch.zeros(shape).index_add_(0, rows, weights)
        summed = torch.zeros((*shape, call.latent_dim)).index_add_(0, rows, out * weights[..., None])
        seen = total > 0
        lse = torch.where(seen, highest + total.log(), -math.inf)
        norm = value_scale / total
    if call.sink is not None:
        with_sink = torch.logaddexp(lse, call.sink.repeat(call.q_len).expand_as(lse))
        norm *= torch.exp(lse - with_sink)
        lse = with_sink
    tokens = torch.tensor([span.tokens for span in spans])
    seen = seen & (torch.arange(call.q_len) < tokens[:, None]).repeat_interleave(call.heads, dim=1)
    summed.mul_(norm[..., None]).masked_fill_(~seen[..., None], 0)
    call.out.copy_(summed.view(call.out.shape))
    call.lse.copy_(lse.masked_fill(~seen, -math.inf).view(call.lse.shape))
