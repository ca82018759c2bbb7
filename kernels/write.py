"""Cache writes: put a step's new tokens where the block tables say, in the cache's own format.

    slot    entry * block_size + position in the block, as `HybridMemoryManager.slots` gives it; -1: the token is
            stored nowhere (it was dead on arrival)

Called once per layer and step, before attention. On CUDA one Triton launch writes all; elsewhere torch does. Entries
are units of the arena, so a slot can be far larger than the number of tokens that the memory holds: offsets are int64.
Nothing waits for the device. Slots of one call must differ.
"""

from __future__ import annotations

import torch

from kvtide.kvcache import ConfigError

from .arguments import QUERY_DTYPES, check_contiguous, check_tensor, check_written
from .formats import LatentFormat
from .mla import check_cache, check_widths
from .reference import quantise, to_e4m3
from .scales import quantisation_scale

_SLOT_DTYPES = (torch.int64, torch.int32)
_CACHE_DTYPES = (*QUERY_DTYPES, torch.float8_e4m3fn)


@torch.no_grad()
def write_latent(
    latent: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    *,
    latent_dim: int = 512,
    rope_dim: int = 64,
    k_scale: torch.Tensor | float = 1.0,
) -> None:
    """Store the latents of new tokens.

    `latent` [tokens, latent_dim + rope_dim], normalised and with the rotary embedding applied, any float dtype. `slots`
    int64 or int32 [tokens]. `cache` [entries, block_size, width] of any `LatentFormat`. `k_scale`, a number or float32
    [1]: an fp8_e4m3 cache holds values / k_scale, rotary part included, saturated at 448 (choose it by the larger of
    both). `ConfigError` for arguments that do not fit.
    """
    latent_dim, rope_dim = check_widths(latent_dim, rope_dim)
    latent = check_tensor("latent", latent, ("tokens", latent_dim + rope_dim), QUERY_DTYPES, None)
    fmt = check_cache(cache, latent_dim, rope_dim, latent.device)
    check_written("cache", cache)
    slots = _check_slots(slots, latent, cache)
    scale = quantisation_scale("k_scale", k_scale, latent.device, is_fp8=fmt is LatentFormat.FP8)
    if latent.device.type == "cuda":
        from . import triton_write

        latent = latent if latent.stride(1) == 1 else latent.contiguous()
        values, rope = torch.split(latent, [latent_dim, rope_dim], dim=1)
        triton_write.write_latent(values, rope, cache, slots, fmt, scale)
        return
    _scatter(quantise(latent, fmt, latent_dim, rope_dim, scale), slots, cache)


@torch.no_grad()
def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    k_scale: torch.Tensor | float = 1.0,
    v_scale: torch.Tensor | float = 1.0,
) -> None:
    """Store the keys and values of new tokens.

    `key` [tokens, kv_heads, dim] and `value` [tokens, kv_heads, value_dim], any float dtype. `slots` as above.
    `key_cache` and `value_cache` [entries, block_size, kv_heads, ...]: `Arena.view(layer, "k")` and `"v"`, both
    float32, float16, bfloat16 or e4m3; e4m3 holds key / k_scale and value / v_scale, saturated at 448.
    """
    key = check_tensor("key", key, ("tokens", "kv_heads", "dim"), QUERY_DTYPES, None)
    tokens, heads, dim = key.shape
    value = check_tensor("value", value, (tokens, heads, "value_dim"), QUERY_DTYPES, key.device)
    shape = ("entries", "block_size", heads)
    key_cache = check_tensor("key_cache", key_cache, (*shape, dim), _CACHE_DTYPES, key.device)
    entries, block_size = key_cache.shape[:2]
    value_cache = check_tensor(
        "value_cache", value_cache, (entries, block_size, heads, value.shape[2]), (key_cache.dtype,), key.device
    )
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_contiguous(name, cache)
        check_written(name, cache)
    slots = _check_slots(slots, key, key_cache)
    is_fp8 = key_cache.dtype == torch.float8_e4m3fn
    scales = [
        quantisation_scale(name, scale, key.device, is_fp8=is_fp8)
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))
    ]
    if key.device.type == "cuda":
        from . import triton_write

        key, value = (part if part.stride(2) == 1 else part.contiguous() for part in (key, value))
        triton_write.write_kv(key, value, key_cache, value_cache, slots, *scales)
        return
    for source, cache, scale in ((key, key_cache, scales[0]), (value, value_cache, scales[1])):
        _scatter(to_e4m3(source.float() / scale) if is_fp8 else source.to(cache.dtype), slots, cache)


def _check_slots(slots: torch.Tensor, tokens: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    slots = check_tensor("slots", slots, (len(tokens),), _SLOT_DTYPES, tokens.device)
    if slots.device.type == "cpu" and len(slots):
        # Elsewhere looking at the numbers would wait for the device.
        limit = cache.shape[0] * cache.shape[1]
        if int(slots.max()) >= limit:
            raise ConfigError(f"slots go up to {int(slots.max())}; the cache has {limit}")
    return slots.contiguous()


def _scatter(stored: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> None:
    kept = torch.nonzero(slots >= 0).squeeze(1)
    slots = slots[kept].long()
    entries = slots // cache.shape[1]
    if cache.itemsize == 1:
        # Torch does not scatter e4m3.
        stored, cache = stored.view(torch.uint8), cache.view(torch.uint8)
    cache[entries, slots - entries * cache.shape[1]] = stored[kept]
