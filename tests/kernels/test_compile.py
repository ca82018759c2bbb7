"""Compile the Triton kernels for GPUs that are not here, in the configurations that the scheduler can pick.

Compilation succeeds for kernels that a GPU would refuse or that spill, so shared memory, tensor memory, registers,
stack and the matrix instruction are read back from the assembled code. CI compiles a sample; the `long` profile (see
`tests/conftest.py`) all of it, with and without window, sink and padding.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from offline import Compiled, compile_for

from kvtide.kernels.contract import MlaCall
from kvtide.kernels.formats import LatentFormat
from kvtide.kernels.triton_gqa import attend_launch
from kvtide.kernels.triton_kernel import Launch
from kvtide.kernels.triton_mla import launches
from kvtide.kernels.triton_schedule import Device, Tile, choose
from kvtide.kernels.triton_write import kv_launch, latent_launch

LONG = "long" in (os.environ.get("KVTIDE_HYPOTHESIS"), os.environ.get("HYPOTHESIS_PROFILE"))
CAPABILITIES = (80, 90, 100)
# What one program may have: 163 KB on sm_80, 227 KB on sm_90 and sm_100.
SHARED = {80: 166_912, 90: 232_448, 100: 232_448}
TENSOR_MEMORY = 512
# An empty kernel, which the compiler makes where tensor memory does not suffice, has 4.
MIN_REGISTERS = 16
# Triton 3.9 spills in the 64-row tile of sm_90 only: 24 to 48 loads among the 1,300 instructions of its loop. Triton
# 3.6 does not, and two tiles of 32 rows would take more instructions and read every latent twice.
STACK = {64: 384}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile anew: a cached kernel would hide what this compiler does."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def call_of(
    fmt: LatentFormat, heads: int, dtype: torch.dtype = torch.bfloat16, features: bool = False, batch: int = 128
) -> MlaCall:
    """DeepSeek's dimensions over 4,096 tokens in blocks of 64; `features`: window, sink and padded query tokens."""
    return MlaCall(
        query=empty(batch, 1, heads, 576, dtype=dtype),
        cache=empty(1000, 64, fmt.width(512, 64), dtype=fmt.storage_dtype),
        block_table=empty(batch, 64, dtype=torch.int32),
        seq_lens=empty(batch, dtype=torch.int32),
        q_lens=empty(batch, dtype=torch.int32) if features else None,
        fmt=fmt,
        latent_dim=512,
        rope_dim=64,
        scale=0.1,
        k_scale=empty(1),
        window=1000 if features else None,
        sink=empty(heads) if features else None,
        out=empty(batch, 1, heads, 512, dtype=dtype),
        lse=empty(batch, 1, heads),
        batch_invariant=False,
    )


def configurations() -> dict[tuple[int, LatentFormat, torch.dtype, Tile], int]:
    """Everything that the scheduler picks for 1 to 1,024 query rows, with a number of rows that it picks it for."""
    found: dict[tuple[int, LatentFormat, torch.dtype, Tile], int] = {}
    for capability in CAPABILITIES:
        for fmt in LatentFormat:
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                for heads in (1, 2, 4, 8, 16, 17, 24, 32, 33, 48, 64, 128, 1024):
                    tile = choose(call_of(fmt, heads, dtype), Device(capability, 132)).tile
                    found[capability, fmt, dtype, tile] = heads
    return found


def fits(compiled: Compiled, capability: int, rows: int = 0, spilled: int = 0) -> None:
    assert compiled.shared <= SHARED[capability], compiled
    assert compiled.tensor_memory <= TENSOR_MEMORY, compiled
    assert compiled.registers > MIN_REGISTERS, compiled
    assert compiled.stack <= (STACK.get(rows, spilled) if capability == 90 else 0), compiled


ALL = sorted(configurations().items(), key=str)
# CI: the formats that differ in code, each tile of each architecture once.
SAMPLE = [
    (key, heads)
    for key, heads in ALL
    if key[2] == torch.bfloat16
    and key[1] in (LatentFormat.BFLOAT16, LatentFormat.FP8, LatentFormat.FP8_DS)
    and (key[0] == 90 or key[1] is (LatentFormat.FP8_DS if key[3].rows == 16 else LatentFormat.FP8))
]


@pytest.mark.parametrize("features", [False, True] if LONG else [None], ids=str)
@pytest.mark.parametrize(
    ("key", "heads"),
    ALL if LONG else SAMPLE,
    ids=lambda v: f"{v[0]}-{v[1].value}-{v[3]}" if isinstance(v, tuple) else "",
)
def test_decode(key: tuple[int, LatentFormat, torch.dtype, Tile], heads: int, features: bool | None) -> None:
    capability, fmt, dtype, tile = key
    device = Device(capability, 132)
    call = call_of(fmt, heads, dtype, features=fmt is not LatentFormat.FP8 if features is None else features)
    schedule = choose(call, device)
    assert schedule.tile == tile
    compiled = compile_for(launches(call, schedule, device)[0], capability)
    fits(compiled, capability, tile.rows)
    if torch.float32 in (dtype, call.cache.dtype):
        assert compiled.count("FFMA")
        return
    assert compiled.count("HGMMA" if tile.rows == 64 else "HMMA"), compiled
    # Latents come by asynchronous copies: 16 bytes for each of the threads, twice (before the loop and in it).
    assert compiled.count("LDGSTS") >= 2 * tile.keys * 512 * call.cache.itemsize // (16 * 32 * tile.warps), compiled
    if fmt in (LatentFormat.FP8, LatentFormat.FP8_DS):
        # Every byte is converted once, two at a time, and not once for each of its two products.
        unpack = compiled.count("F2FP", "E4M3") if capability >= 89 else compiled.count("PRMT")
        assert unpack < 2 * tile.keys * 512 // (32 * tile.warps * 2), compiled


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_merge(capability: int) -> None:
    device = Device(capability, 132)
    call = call_of(LatentFormat.BFLOAT16, 16, features=True, batch=4)
    schedule = choose(call, device)
    assert schedule.splits > 1
    fits(compile_for(launches(call, schedule, device)[1], capability), capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("fmt", LatentFormat if LONG else [LatentFormat.FP8, LatentFormat.FP8_DS], ids=str)
def test_write_latent(fmt: LatentFormat, capability: int) -> None:
    latent, rope = empty(64, 512, dtype=torch.bfloat16), empty(64, 64, dtype=torch.bfloat16)
    cache = empty(1000, 64, fmt.width(512, 64), dtype=fmt.storage_dtype)
    launch = latent_launch(latent, rope, cache, empty(64, dtype=torch.int64), fmt, empty(1))
    fits(compile_for(launch, capability), capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_write_kv(capability: int) -> None:
    cache = empty(1000, 16, 8, 128, dtype=torch.float8_e4m3fn)
    launch = kv_launch(empty(64, 8, 128, dtype=torch.bfloat16), cache, empty(64, dtype=torch.int64), empty(1))
    fits(compile_for(launch, capability), capability)


def gqa(capability: int, dtype: torch.dtype, dim: int, q_len: int, soft_cap: float | None) -> Launch:
    cache = empty(1000, 16, 2, dim, dtype=dtype)
    return attend_launch(
        empty(8, q_len, 16, dim, dtype=torch.bfloat16),
        cache,
        cache,
        empty(8, 64, dtype=torch.int32),
        empty(8, dtype=torch.int32),
        empty(8, q_len, 16, dim, dtype=torch.bfloat16),
        empty(8, q_len, 16),
        scale=0.1,
        q_lens=empty(8, dtype=torch.int32),
        window=128,
        chunk=None,
        sink=empty(16),
        sink_tokens=4,
        soft_cap=soft_cap,
        k_scale=empty(1),
        v_scale=empty(1),
        capability=(capability // 10, capability % 10),
    )


GQA = [
    (c, t, d, q, s)
    for c in CAPABILITIES
    for t in (torch.bfloat16, torch.float8_e4m3fn)
    for d in (64, 128, 256)
    for q in (1, 64)
    for s in (None, 50.0)
]


@pytest.mark.parametrize(("capability", "dtype", "dim", "q_len", "soft_cap"), GQA if LONG else GQA[5::7], ids=str)
def test_gqa(capability: int, dtype: torch.dtype, dim: int, q_len: int, soft_cap: float | None) -> None:
    launch = gqa(capability, dtype, dim, q_len, soft_cap)
    compiled = compile_for(launch, capability)
    # With every feature at once, the widest FP8 heads spill two registers.
    widest = (dtype, dim, q_len) == (torch.float8_e4m3fn, 256, 64) and soft_cap is not None
    fits(compiled, capability, spilled=8 if widest else 0)
    product = "HMMA" if q_len == 1 else {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}[capability]
    assert compiled.count(product), compiled
