"""Cache writes, and what the bytes of each latent format are."""

from __future__ import annotations

import math

import pytest
import torch

from kvtide.kernels import LatentFormat, reference, write_kv, write_latent
from kvtide.kvcache import ConfigError

BLOCK = 4
LATENT, ROPE = 128, 8
FORMATS = pytest.mark.parametrize("fmt", list(LatentFormat), ids=lambda fmt: fmt.value)


def poisoned(fmt: LatentFormat, entries: int = 9) -> torch.Tensor:
    """A view whose entries are half a block apart, as an arena's can be."""
    part = BLOCK * fmt.token_bytes(LATENT, ROPE)
    memory = torch.full(((entries + 1) * part // 2,), 0xFF, dtype=torch.uint8).view(fmt.storage_dtype)
    width = fmt.width(LATENT, ROPE)
    return memory.as_strided((entries, BLOCK, width), (BLOCK * width // 2, width, 1))


@FORMATS
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_tokens_land_at_their_slots_and_nowhere_else(fmt: LatentFormat, slot_dtype: torch.dtype) -> None:
    cache = poisoned(fmt)
    latents = torch.randn(5, LATENT + ROPE)
    places = {0: (2, 1), 1: (2, 3), 3: (8, 0), 4: (6, 2)}
    slots = torch.tensor([places[i][0] * BLOCK + places[i][1] if i in places else -1 for i in range(5)])
    write_latent(latents, slots.to(slot_dtype), cache, latent_dim=LATENT, rope_dim=ROPE)
    stored = reference.quantise(latents, fmt, LATENT, ROPE)
    for token, (entry, position) in places.items():
        assert torch.equal(cache[entry, position].view(torch.uint8), stored[token].view(torch.uint8))
    memory = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    written = 4 * fmt.token_bytes(LATENT, ROPE)
    expected_poison = memory.numel() - written
    assert expected_poison <= int((memory == 0xFF).sum()) <= expected_poison + written // 20


@FORMATS
def test_what_is_written_is_read_back_as_closely_as_the_format_allows(fmt: LatentFormat) -> None:
    cache = poisoned(fmt)
    latents = torch.randn(BLOCK, LATENT + ROPE)
    k_scale = 0.05 if fmt is LatentFormat.FP8 else 1.0
    write_latent(latents, torch.arange(BLOCK), cache, latent_dim=LATENT, rope_dim=ROPE, k_scale=k_scale)
    found = reference.dequantise(cache[0], fmt, LATENT, ROPE, k_scale)
    share = {"float32": 0, "float16": 2**-11, "bfloat16": 2**-8, "fp8_e4m3": 2**-4, "fp8_ds_mla": 2**-4}[fmt.value]
    assert ((found - latents).abs() <= share * latents.abs() + 1e-3).all()


def test_fp8_saturates_and_keeps_nan() -> None:
    cache = poisoned(LatentFormat.FP8)
    latents = torch.zeros(2, LATENT + ROPE)
    latents[0, :6] = torch.tensor([1e6, -1e6, math.inf, -math.inf, 448.0, 449.0])
    latents[1, 0] = math.nan
    write_latent(latents, torch.tensor([0, 1]), cache, latent_dim=LATENT, rope_dim=ROPE)
    assert cache[0, 0, :6].float().tolist() == [448, -448, 448, -448, 448, 448]
    assert cache[0, 1, 0].float().isnan()


def test_a_rope_twenty_times_the_latent_report_31() -> None:
    """One scale for both: chosen by the larger of the two it saturates nothing, chosen by the latent it does."""
    latents = torch.randn(BLOCK, LATENT + ROPE)
    latents[:, LATENT:] *= 20
    for largest, saturates in ((latents.abs().max(), False), (latents[:, :LATENT].abs().max(), True)):
        cache, k_scale = poisoned(LatentFormat.FP8), (largest / 448).reshape(1)
        write_latent(latents, torch.arange(BLOCK), cache, latent_dim=LATENT, rope_dim=ROPE, k_scale=k_scale)
        found = reference.dequantise(cache[0], LatentFormat.FP8, LATENT, ROPE, k_scale)
        assert torch.isfinite(found).all()
        assert (
            (found - latents).abs().max() > 16.1 * latents.abs().max() / 448
        ) == saturates  # half of the widest step
    # Rope in a type of its own needs no such care.
    cache = poisoned(LatentFormat.FP8_DS)
    write_latent(latents, torch.arange(BLOCK), cache, latent_dim=LATENT, rope_dim=ROPE)
    found = reference.dequantise(cache[0], LatentFormat.FP8_DS, LATENT, ROPE)
    assert torch.equal(found[:, LATENT:], latents[:, LATENT:].bfloat16().double())


def test_the_656_bytes_of_a_token() -> None:
    """512 e4m3, 4 float32 scales, 64 bfloat16: byte by byte, with the format's own arithmetic done by hand."""
    latents = torch.zeros(1, 576)
    latents[0, 0], latents[0, 128], latents[0, 256], latents[0, 384] = 448.0, 449.0, -3.5, 1e-9
    latents[0, 512:] = torch.arange(64)
    stored = reference.quantise(latents, LatentFormat.FP8_DS, 512, 64)
    assert stored.shape == (1, 656)
    scales = stored[0, 512:528].view(torch.float32)
    # 448 fits as it is; 449 needs the next power of two; 3.5 = 448 / 128; and nothing goes below 1e-4 / 448 -> 2**-22.
    assert scales.tolist() == [1.0, 2.0, 2.0**-7, 2.0**-22]
    values = stored[0, :512].view(torch.float8_e4m3fn).float()
    assert [values[i].item() for i in (0, 128, 256)] == [448.0, 224.0, -448.0]
    assert stored[0, 0] == 0x7E
    assert stored[0, 256] == 0xFE
    assert torch.equal(stored[0, 528:].view(torch.bfloat16).float(), torch.arange(64.0))


def test_scales_are_powers_of_two_that_saturate_nothing() -> None:
    latents = torch.randn(200, 144) * torch.logspace(-6, 6, 200)[:, None]
    stored = reference.quantise(latents, LatentFormat.FP8_DS, 128, 16)
    scales = stored[:, 128:132].contiguous().view(torch.float32)
    assert (torch.frexp(scales).mantissa == 0.5).all()
    largest = latents[:, :128].abs().amax(dim=1, keepdim=True)
    assert (largest <= 448 * scales).all()
    grown = largest > 1e-4
    assert (largest > 224 * scales)[grown].all()


def test_slots_of_millions_report_11() -> None:
    """Slot 4 million and a pool of 2.5e9 elements, of which a page is touched."""
    entries = 70_000
    cache = torch.empty((entries, 64, 576), dtype=torch.float16)
    slots = torch.tensor([entries * 64 - 1, 3, 4_000_000], dtype=torch.int32)
    latents = torch.randn(3, 576)
    write_latent(latents, slots, cache)
    for token, slot in enumerate(slots.tolist()):
        assert torch.equal(cache[slot // 64, slot % 64], latents[token].half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_keys_and_values(dtype: torch.dtype) -> None:
    entries, heads, dim, value_dim = 6, 2, 8, 4
    key_cache = torch.full((entries, BLOCK, heads, dim), math.nan).to(dtype)
    value_cache = torch.full((entries, BLOCK, heads, value_dim), math.nan).to(dtype)
    key, value = torch.randn(3, heads, dim), torch.randn(3, heads, value_dim)
    scales = {"k_scale": 0.01, "v_scale": 0.02} if dtype == torch.float8_e4m3fn else {}
    write_kv(key, value, torch.tensor([5 * BLOCK + 1, -1, 7]), key_cache, value_cache, **scales)
    tolerance = {torch.float32: 0, torch.bfloat16: 2**-8, torch.float8_e4m3fn: 2**-4}[dtype]
    for token, (entry, position) in {0: (5, 1), 2: (1, 3)}.items():
        for cache, source, name in ((key_cache, key, "k_scale"), (value_cache, value, "v_scale")):
            found = cache[entry, position].float() * scales.get(name, 1.0)
            assert ((found - source[token]).abs() <= tolerance * source[token].abs() + 1e-4).all()
    assert int(key_cache.float().isnan().all(dim=-1).sum()) == (entries * BLOCK - 2) * heads


def test_slots_that_do_not_fit() -> None:
    cache = poisoned(LatentFormat.BFLOAT16)
    latents = torch.randn(2, LATENT + ROPE)
    for slots, message in (
        (torch.tensor([0, 36]), "slots go up to 36; the cache has 36"),
        (torch.tensor([0.0, 1.0]), "slots is float32; it must be int64 or int32"),
        (torch.tensor([0]), r"slots has the shape \[1\]; it must be \[2\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            write_latent(latents, slots, cache, latent_dim=LATENT, rope_dim=ROPE)
