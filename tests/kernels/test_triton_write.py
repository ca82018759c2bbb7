"""Cache writes by Triton, in its interpreter, against torch's own rounding."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from kvtide.kernels.formats import LatentFormat
from kvtide.kernels.reference import quantise
from kvtide.kernels.triton_write import write_kv, write_latent

BLOCK = 16
ENTRIES = 3
TYPES = [torch.float32, torch.float16, torch.bfloat16]


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A cache of 0xFF bytes whose entries lie twice as far apart as they are long, as the layers of a block do."""
    size = math.prod(shape)
    memory = torch.full((2 * size * dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype)
    return memory.view(shape[0], 2, *shape[1:])[:, 1]


def tokens(count: int, dim: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows of all magnitudes, one of zeros, one that is 448 times a power of two, one beyond FP8."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.linspace(-14, 9, count)[:, None].round()
    values = torch.randn(count, dim, generator=generator) * 2.0**exponents
    values[0], values[1], values[2] = 0, 448 / 64, 3000
    return values.to(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("fmt", list(LatentFormat), ids=str)
def test_write_latent(fmt: LatentFormat, dtype: torch.dtype) -> None:
    latent_dim, rope_dim, k_scale = (256 if fmt is LatentFormat.FP8_DS else 24), 8, 0.3
    latent, rope = tokens(20, latent_dim, dtype), tokens(20, rope_dim, dtype, seed=1)
    cache = poisoned(ENTRIES, BLOCK, fmt.width(latent_dim, rope_dim), dtype=fmt.storage_dtype)
    slots = torch.randperm(ENTRIES * BLOCK, generator=torch.Generator().manual_seed(2))[:20]
    slots[[3, 11]] = -1
    write_latent(latent, rope, cache, slots, fmt, torch.tensor([k_scale]))

    stored = quantise(torch.cat([latent, rope], dim=1).float(), fmt, latent_dim, rope_dim, k_scale)
    wanted = torch.full_like(cache.view(torch.uint8), 0xFF)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted[slot // BLOCK, slot % BLOCK] = stored[token].view(torch.uint8)
    assert torch.equal(cache.view(torch.uint8), wanted)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("cached", [*TYPES, torch.float8_e4m3fn], ids=str)
def test_write_kv(cached: torch.dtype, dtype: torch.dtype) -> None:
    heads, key_dim, value_dim = 3, 24, 16
    key = tokens(10, heads * key_dim, dtype).view(10, heads, key_dim)
    value = tokens(10, heads * value_dim, dtype, seed=1).view(10, heads, value_dim)
    slots = torch.tensor([0, 47, -1, 16, 15, 31, 3, 20, -1, 33], dtype=torch.int32)
    fp8 = cached == torch.float8_e4m3fn
    for k_scale, v_scale in ((0.5, 0.7),) if fp8 else ((1.0, 1.0),):
        key_cache = poisoned(ENTRIES, BLOCK, heads, key_dim, dtype=cached)
        value_cache = poisoned(ENTRIES, BLOCK, heads, value_dim, dtype=cached)
        write_kv(key, value, key_cache, value_cache, slots, torch.tensor([k_scale]), torch.tensor([v_scale]))
        for source, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
            wanted = torch.full_like(cache.view(torch.uint8), 0xFF)
            for token, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    scaled = source[token].float() / torch.tensor(scale)
                    values = (scaled.clamp(-448, 448) if fp8 else scaled).to(cached)
                    wanted[slot // BLOCK, slot % BLOCK] = values.view(torch.uint8)
            assert torch.equal(cache.view(torch.uint8), wanted)


def test_every_rounding_of_e4m3() -> None:
    """All values of float16: every e4m3 value, every tie between two, subnormals, saturation, infinity and NaN."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).view(256, 1, 256)
    values = torch.where(values.isnan(), math.nan, values)  # numpy warns of signalling ones
    cache = poisoned(1, 256, 1, 256, dtype=torch.float8_e4m3fn)
    write_kv(values, values, cache, cache, torch.arange(256), torch.ones(1), torch.ones(1))
    numbers = values.float().clamp(-448, 448)
    found = cache[0].float()
    assert torch.equal(found.isnan(), values.isnan())
    assert torch.equal(found[~values.isnan()], numbers.to(torch.float8_e4m3fn).float()[~values.isnan()])


def test_slots_beyond_int32_11() -> None:
    """Slot 4 million of a pool of more than 2**31 bytes; pages that are not touched cost no memory."""
    latent, rope = torch.ones(1, 512), torch.ones(1, 64)
    cache = torch.empty(4_000_000 // 64, 64, 576, dtype=torch.uint8).view(torch.float8_e4m3fn)
    write_latent(latent, rope, cache, torch.tensor([3_999_999]), LatentFormat.FP8, torch.ones(1))
    assert (cache[-1, -1].float() == 1).all()
