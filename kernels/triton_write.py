"""Cache writes in Triton: quantise new tokens and scatter them into their blocks, one launch a call.

    slots    [ 37, -1, 4100, ... ]       slot = entry * block_size + position in the block; negative: skip the token
    grid     (tokens, pieces)            FP8_DS: a piece per 128 latents, which share a scale, and one for the rope
                                         others: the latent is one piece, the rope another

Slots are int64 (or int32) and offsets int64: a pool has more than 2**31 elements. Values round to nearest, ties to
even, and saturate at e4m3's 448. FP8_DS takes the smallest power of two as scale that saturates nothing.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# ruff: noqa: N803

from __future__ import annotations

import torch

from .formats import SCALE_GROUP, LatentFormat
from .triton_kernel import Launch, TritonKernel, round_to, tl, to_e4m3
from .triton_mla import cache_parts


def _scatter_latent(
    latent,
    rope,
    slots,
    k_scale,
    latent_cache,
    rope_cache,
    scale_cache,
    latent_t,
    rope_t,
    latent_page,
    latent_slot,
    rope_page,
    rope_slot,
    scale_page,
    scale_slot,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    PIECE_TILE: tl.constexpr,
    PIECES: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_TILE: tl.constexpr,
    FP8: tl.constexpr,
    GROUP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    entry = slot // BLOCK
    position = slot - entry * BLOCK
    # The compiler wants one type for a name that both branches assign.
    if piece < PIECES:
        columns = tl.arange(0, PIECE_TILE)
        mask = columns < tl.where(slot >= 0, PIECE, 0)
        values = tl.load(latent + token * latent_t + piece * PIECE + columns, mask=mask, other=0)
        to = latent_cache + entry * latent_page + position * latent_slot + piece * PIECE + columns
        if GROUP:
            values = values.to(tl.float32)
            largest = tl.reduce(tl.abs(values), 0, tl.standard._elementwise_max)
            # 448 is 1.75 * 2**8: with a larger fraction than that the power of two above is needed. At least 2**-22,
            # for all-zero groups.
            exponent = ((tl.maximum(largest, 1e-4).to(tl.int32, bitcast=True) - 0x600001) >> 23) + 1 - 8
            scale_to = scale_cache + entry * scale_page + position * scale_slot + piece
            tl.store(scale_to, (exponent << 23).to(tl.float32, bitcast=True), mask=slot >= 0)
            tl.store(to, to_e4m3(values * ((254 - exponent) << 23).to(tl.float32, bitcast=True)), mask=mask)
        elif FP8:
            tl.store(to, to_e4m3(tl.div_rn(values.to(tl.float32), tl.load(k_scale))), mask=mask)
        else:
            tl.store(to, round_to(values, latent_cache.dtype.element_ty, INTERPRETED), mask=mask)
    else:
        rope_columns = tl.arange(0, ROPE_TILE)
        rope_mask = rope_columns < tl.where(slot >= 0, ROPE, 0)
        rope_values = tl.load(rope + token * rope_t + rope_columns, mask=rope_mask, other=0)
        rope_to = rope_cache + entry * rope_page + position * rope_slot + rope_columns
        if FP8 and not GROUP:
            tl.store(rope_to, to_e4m3(tl.div_rn(rope_values.to(tl.float32), tl.load(k_scale))), mask=rope_mask)
        else:
            tl.store(rope_to, round_to(rope_values, rope_cache.dtype.element_ty, INTERPRETED), mask=rope_mask)


def _scatter_kv(
    source,
    slots,
    scale,
    cache,
    source_t,
    source_h,
    cache_page,
    cache_slot,
    cache_h,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    entry = slot // BLOCK
    columns = tl.arange(0, DIM_TILE)
    mask = columns < tl.where(slot >= 0, DIM, 0)
    values = tl.load(source + token * source_t + head * source_h + columns, mask=mask, other=0)
    to = cache + entry * cache_page + (slot - entry * BLOCK) * cache_slot + head * cache_h + columns
    if FP8:
        tl.store(to, to_e4m3(tl.div_rn(values.to(tl.float32), tl.load(scale))), mask=mask)
    else:
        tl.store(to, round_to(values, cache.dtype.element_ty, INTERPRETED), mask=mask)


SCATTER_LATENT = TritonKernel(_scatter_latent)
SCATTER_KV = TritonKernel(_scatter_kv)


def write_latent(
    latent: torch.Tensor,
    rope: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    fmt: LatentFormat,
    k_scale: torch.Tensor,
) -> None:
    """Put `latent` [tokens, latent_dim] and `rope` [tokens, rope_dim] into `cache` [entries, block_size, width].

    Last dimensions contiguous; `k_scale` float32 [1], by which FP8 divides.
    """
    latent_launch(latent, rope, cache, slots, fmt, k_scale).run()


def latent_launch(
    latent: torch.Tensor,
    rope: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    fmt: LatentFormat,
    k_scale: torch.Tensor,
) -> Launch:
    """The launch of `write_latent`."""
    tokens, latent_dim = latent.shape
    latents, ropes, scales = cache_parts(cache, fmt, latent_dim)
    grouped = fmt is LatentFormat.FP8_DS
    piece = SCALE_GROUP if grouped else latent_dim
    pieces = latent_dim // piece
    rope_dim = rope.shape[1]
    return Launch(
        SCATTER_LATENT,
        (tokens, pieces + (rope_dim > 0), 1),
        {
            "latent": latent,
            "rope": rope,
            "slots": slots,
            "k_scale": k_scale,
            "latent_cache": latents,
            "rope_cache": ropes,
            "scale_cache": scales,
            "latent_t": latent.stride(0),
            "rope_t": rope.stride(0),
            "latent_page": latents.stride(0),
            "latent_slot": latents.stride(1),
            "rope_page": ropes.stride(0),
            "rope_slot": ropes.stride(1),
            "scale_page": scales.stride(0),
            "scale_slot": scales.stride(1),
            "BLOCK": cache.shape[1],
            "PIECE": piece,
            "PIECE_TILE": _tile(piece),
            "PIECES": pieces,
            "ROPE": rope_dim,
            "ROPE_TILE": _tile(rope_dim),
            "FP8": fmt in (LatentFormat.FP8, LatentFormat.FP8_DS),
            "GROUP": grouped,
            "INTERPRETED": cache.device.type == "cpu",
        },
        warps=1,
        stages=1,
    )


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Put `key` and `value` [tokens, kv_heads, dim] into caches [entries, block_size, kv_heads, dim].

    Last dimensions contiguous; FP8 caches hold values divided by `k_scale` and `v_scale`, float32 [1].
    """
    kv_launch(key, key_cache, slots, k_scale).run()
    kv_launch(value, value_cache, slots, v_scale).run()


def kv_launch(source: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor) -> Launch:
    """The launch that writes keys, or values."""
    tokens, heads, dim = source.shape
    fp8 = cache.dtype == torch.float8_e4m3fn
    cache = cache.view(torch.uint8) if fp8 else cache
    return Launch(
        SCATTER_KV,
        (tokens, heads, 1),
        {
            "source": source,
            "slots": slots,
            "scale": scale,
            "cache": cache,
            "source_t": source.stride(0),
            "source_h": source.stride(1),
            "cache_page": cache.stride(0),
            "cache_slot": cache.stride(1),
            "cache_h": cache.stride(2),
            "BLOCK": cache.shape[1],
            "DIM": dim,
            "DIM_TILE": _tile(dim),
            "FP8": fp8,
            "INTERPRETED": cache.device.type == "cpu",
        },
        warps=1,
        stages=1,
    )


def _tile(dim: int) -> int:
    """The power of two that holds `dim` columns."""
    return 1 << max(dim - 1, 0).bit_length()
