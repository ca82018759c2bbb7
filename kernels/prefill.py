"""MLA prefill: a chunk of new tokens of each request, over its cached context and over itself.

    keys         | cached context: from the block table | new tokens: from the activations |
    key chunks   |  chunk  |  chunk  |  chunk  | rest   |  chunk  |  rest                  |
    query tiles                                         |  tile   |  tile  |  rest         |
    every pair of a tile and a chunk that is in reach: attention -> out, lse -> merge

New tokens are read from the activations, so they need not be in the cache (slot -1: dead on arrival behind a window),
and a window reaches across the border. Each request takes the cheaper of two forms: *absorbed* (scores against latents,
values are latents) for few new tokens, *decompressed* (keys and values of every head, made once a chunk) for many.
Memory is bounded by the chunk and the tile, not by the context. Lengths are host numbers: a prefill batch is made on
the host, and nothing here waits for the device.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from kvtide.kvcache import ConfigError

from .arguments import (
    check_choice,
    check_entries,
    check_result,
    check_rows,
    check_scale,
    check_sink,
    check_tensor,
    check_tokens,
    check_whole,
)
from .contract import AttentionResult
from .formats import LatentFormat
from .merge import merge_states
from .mla import check_cache, check_projections, check_widths
from .projections import UpProjections
from .reference import dequantise
from .scales import quantisation_scale

MODES = ("absorbed", "decompressed")
# Query tokens that one attention call takes: with 128 heads and 1,024 keys, half a GiB of float32 scores.
QUERY_TILE = 1024


@torch.no_grad()
def mla_prefill(
    query: torch.Tensor,
    latent: torch.Tensor,
    cu_q_lens: npt.ArrayLike,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: npt.ArrayLike,
    projections: UpProjections,
    *,
    scale: float,
    latent_dim: int = 512,
    rope_dim: int = 64,
    k_scale: torch.Tensor | float = 1.0,
    window: int | None = None,
    sink: torch.Tensor | None = None,
    mode: str | None = None,
    absorbed_below: float | None = None,
    chunk_tokens: int = 1024,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> AttentionResult:
    """Causal attention of the new tokens of each request over its context and over themselves.

    `query` [total_q, heads, nope_dim + rope_dim] and `latent` [total_q, latent_dim + rope_dim] (normalised, rotary
    embedding applied): the new tokens of all requests, one after the other, of the projections' dtype.
    `cu_q_lens` [batch + 1]: request i has the tokens from `cu_q_lens[i]` up to `cu_q_lens[i + 1]`. `context_lens`
    [batch]: cached tokens from the table's first column on, the new ones not included. Both are host integers: a list,
    an array or a CPU tensor. `cache`, `block_table`, `k_scale`, `scale`, `window`, `sink` as for `mla_decode`.
    `mode` "absorbed" or "decompressed" forces the form for all requests; None takes absorbed below `absorbed_below` new
    tokens (`projections.absorbed_below` if None). `chunk_tokens`: keys that are held decompressed at a time.

    Returns `out` [total_q, heads, value_dim] of the query's dtype and `lse` float32 [total_q, heads].
    """
    latent_dim, rope_dim = check_widths(latent_dim, rope_dim)
    query = check_projections(projections, query, ("total_q",), latent_dim, rope_dim)
    total, heads, _ = query.shape
    device = query.device
    latent = check_tensor("latent", latent, (total, latent_dim + rope_dim), (query.dtype,), device)
    fmt = check_cache(cache, latent_dim, rope_dim, device)
    starts, contexts = _host_numbers("cu_q_lens", cu_q_lens), _host_numbers("context_lens", context_lens)
    if len(starts) != len(contexts) + 1 or starts[0] or starts[-1] != total or np.any(np.diff(starts) < 0):
        raise ConfigError(
            f"cu_q_lens are {len(starts)} numbers up to {starts[-1] if len(starts) else 0}; they must rise from 0 to "
            f"query's {total} tokens, one more than the {len(contexts)} context_lens"
        )
    block_table = check_rows("block_table", block_table, (len(contexts), "columns"), device)
    room = block_table.shape[1] * cache.shape[1]
    if len(contexts) and not 0 <= contexts.min() <= contexts.max() <= room:
        raise ConfigError(f"context_lens go from {contexts.min()} to {contexts.max()}; block_table has room for {room}")
    window, chunk_tokens = check_tokens("window", window), check_whole("chunk_tokens", chunk_tokens)
    check_choice("mode", mode, MODES)
    scale = check_scale(scale)
    sink = check_sink("sink", sink, heads, device)
    factor = quantisation_scale("k_scale", k_scale, device, is_fp8=fmt is LatentFormat.FP8)
    out = check_result("out", out, (total, heads, projections.value_dim), query.dtype, device)
    lse = check_result("lse", lse, (total, heads), torch.float32, device)
    limit = projections.absorbed_below if absorbed_below is None else absorbed_below
    if isinstance(limit, bool) or not isinstance(limit, numbers.Real):
        raise ConfigError(f"absorbed_below is {limit!r}; it must be a number, or None")

    for row, (begin, end) in enumerate(itertools.pairwise(starts.tolist())):
        if begin == end:
            continue
        absorbed = mode == "absorbed" if mode is not None else end - begin < limit
        new, context = slice(begin, end), int(contexts[row])
        first = 0 if window is None else max(0, context - window + 1)
        chunks = itertools.chain(
            _cached_chunks(cache, block_table[row], first, context, chunk_tokens, fmt, latent_dim, rope_dim, factor),
            ((context + i, part) for i, part in _pieces(latent[new], chunk_tokens)),
        )
        # Attention without a sink: it is one more logit in the end.
        found = _attend_request(query[new], chunks, context, projections, absorbed, scale, window)
        if sink is not None:
            with_sink = torch.logaddexp(found.lse, sink)
            found = AttentionResult(found.out * torch.exp(found.lse - with_sink)[..., None], with_sink)
        out[new] = projections.to_values(found.out.to(query.dtype)) if absorbed else found.out
        lse[new] = found.lse
    return AttentionResult(out, lse)


def _attend_request(
    query: torch.Tensor,
    chunks: Iterator[tuple[int, torch.Tensor]],
    context: int,
    projections: UpProjections,
    absorbed: bool,
    scale: float,
    window: int | None,
) -> AttentionResult:
    """Float32 results of one request: `[n, heads, latent_dim]` if absorbed, else `[n, heads, value_dim]`."""
    count, heads, _ = query.shape
    dim = projections.latent_dim if absorbed else projections.value_dim
    out = torch.zeros((count, heads, dim), dtype=torch.float32, device=query.device)
    lse = torch.full((count, heads), -math.inf, device=query.device)
    if absorbed:
        query = projections.absorb(query)
    query = query.transpose(0, 1)
    for low, latents in chunks:
        latents = latents.to(query.dtype)
        high = low + len(latents)
        if absorbed:
            keys, values = latents[None], latents[None, :, :dim]
        else:
            keys, values = projections.decompress(latents)
        for first in range(0, count, QUERY_TILE):
            tile = slice(first, min(first + QUERY_TILE, count))
            oldest, newest = context + tile.start, context + tile.stop - 1
            # Keys that some query of the tile sees.
            start, stop = low, min(high, newest + 1)
            if window is not None:
                start = max(start, oldest - window + 1)
            if start >= stop:
                continue
            seen = slice(start - low, stop - low)
            mask = _mask(oldest, newest, start, stop, window, query.device)
            partial = _attention(query[:, tile], keys[:, seen], values[:, seen], mask, scale)
            merge_states(out[tile], lse[tile], *partial, out=out[tile], lse=lse[tile])
    return AttentionResult(out, lse)


def _cached_chunks(
    cache: torch.Tensor,
    entries: torch.Tensor,
    first: int,
    stop: int,
    chunk_tokens: int,
    fmt: LatentFormat,
    latent_dim: int,
    rope_dim: int,
    k_scale: torch.Tensor,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Positions and latents of cached tokens `first` to `stop`, float32; whole blocks a chunk but for the ends."""
    size = cache.shape[1]
    width = max(1, chunk_tokens // size)
    stored = cache.view(torch.uint8) if cache.itemsize == 1 else cache
    for column in range(first // size, -(-stop // size), width):
        low, high = max(first, column * size), min(stop, (column + width) * size)
        read = entries[column : -(-high // size)].long()
        check_entries(read, len(stored))
        blocks = stored[read].flatten(0, 1)
        tokens = blocks[low - column * size : high - column * size].view(cache.dtype)
        yield low, dequantise(tokens, fmt, latent_dim, rope_dim, k_scale, torch.float32)


def _pieces(latents: torch.Tensor, chunk_tokens: int) -> Iterator[tuple[int, torch.Tensor]]:
    for first in range(0, len(latents), chunk_tokens):
        yield first, latents[first : first + chunk_tokens]


def _mask(
    oldest: int, newest: int, start: int, stop: int, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """Which keys `[start, stop)` the queries at `[oldest, newest]` see; None where all see all."""
    if stop - 1 <= oldest and (window is None or start > newest - window):
        return None
    positions = torch.arange(oldest, newest + 1, device=device)[:, None]
    places = torch.arange(start, stop, device=device)
    visible = places <= positions
    return visible if window is None else visible & (places > positions - window)


def _attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention `[n, heads, dim]` and LSE `[n, heads]` of queries `[heads, n, ...]` over `[heads or 1, m, ...]`.

    Torch's fused kernels for either device, which are the ones that return the LSE.
    """
    heads, count, _ = query.shape
    dim = values.shape[-1]
    bias = None
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, -math.inf)
    if query.device.type == "cpu":
        if query.dtype == torch.float16:
            # Torch's products in float16 are slow on a CPU.
            query, keys, values = query.float(), keys.float(), values.float()
            bias = None if bias is None else bias.float()
        if keys.shape[-1] != dim:
            # It wants values as wide as keys. Absorbed ones are part of the keys: take the whole.
            padding = keys.shape[-1] - dim
            values = keys if len(keys) == 1 < heads else torch.nn.functional.pad(values, (0, padding))
        if len(keys) == 1 < heads:
            # One key head: the heads of a token are rows of one matrix, and its mask theirs.
            query = query.transpose(0, 1).reshape(1, count * heads, -1)
            bias = None if bias is None else bias.repeat_interleave(heads, dim=0)
        found, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[None], keys[None], values[None], attn_mask=bias, scale=scale
        )
        found, lse = found[0, ..., :dim], lse[0]
        if len(keys) == 1 < heads:
            found, lse = found.view(count, heads, dim), lse.view(count, heads)
        else:
            found, lse = found.transpose(0, 1), lse.transpose(0, 1)
    else:
        keys, values = keys.expand(heads, -1, -1), values.expand(heads, -1, -1)
        found, lse = _efficient_attention(query, keys, values, bias, scale)
    if mask is not None:
        lse = lse.masked_fill(~mask.any(dim=1)[:, None], -math.inf)
    return found, lse.float()


def _efficient_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on a GPU, by the kernel that takes any head dims and a bias: `[n, heads, dim]`, `[n, heads]`."""
    heads, count, _ = query.shape
    if bias is not None:
        # Rows of a bias start at multiples of 16 elements.
        padded = torch.nn.functional.pad(bias, (0, -bias.shape[1] % 16))
        bias = padded[:, : bias.shape[1]].expand(1, heads, -1, -1)
    found, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query[None], keys[None], values[None], bias, True, scale=scale
    )
    # The LSE has room for a multiple of 32 queries.
    return found[0].transpose(0, 1), lse[0, :, :count].transpose(0, 1)


def _host_numbers(name: str, numbers: npt.ArrayLike) -> npt.NDArray[np.int64]:
    if isinstance(numbers, torch.Tensor) and numbers.device.type != "cpu":
        raise ConfigError(f"{name} is on {numbers.device}; it must be on the CPU, because its numbers are read")
    found = np.asarray(numbers)
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise ConfigError(f"{name} has the shape {list(found.shape)} of {found.dtype}; it must be a list of integers")
    return found.astype(np.int64)
