"""Which tiles and how many splits the Triton MLA kernel gets, from what the host knows without asking the device.

    rows = heads * q_len ---> tile of ROWS query rows x KEYS keys, warps, stages     (architecture, format)
    row tiles * batch < what the GPU holds at once ---> split the keys until they fill it

    rows        sm_80                    sm_90                               sm_100
    1 .. 16     16 x 32, two an SM       16 x 64 (16 bit) or 16 x 32         as sm_90
    17 .. 32    32 x 64                  32 x 64                             32 x 64
    33 ..       32 x 64                  64 x 64 on wgmma; FP8_DS 32 x 64    32 x 64

The table was made with the compiler, not with a stopwatch: registers, spills and instructions of the loop are read
from the assembly (tests/kernels/test_compile.py). Larger tiles spill in the loop (FP8_DS at 64 rows), do not fit
sm_80, or need more than the 512 columns of sm_100's tensor memory, where a compiler makes an empty kernel of them.

The capacity of the block table bounds the number of splits, not the sequences' lengths: those are on the device, and
a captured CUDA graph must stay right when they grow. A request with fewer keys cuts them into as many, shorter splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .contract import MlaCall
from .device import machine_of, num_sms
from .formats import LatentFormat

# A split writes and reads ROWS x (latent_dim + 1) float32: with this many keys for each of its rows, half as many bytes
# as the bfloat16 latents it reads (16 rows: 33 KB twice against 128 keys of 1,152 bytes), and those mostly in L2.
MIN_SPLIT_KEYS_PER_ROW = 8
# More splits than this only lengthen the merge.
MAX_SPLITS = 128
# `batch_invariant` cuts at multiples of this from a row's first key, whatever the batch: a multiple of every KEYS.
INVARIANT_SPLIT_KEYS = 4096


@dataclass(frozen=True)
class Tile:
    """One configuration of the kernel: query rows and keys a step, warps, pipeline stages, programs that fit an SM."""

    rows: int
    keys: int
    warps: int
    stages: int
    per_sm: int


@dataclass(frozen=True)
class Schedule:
    """A tile, and how keys are cut: into `splits` equal parts, or (`split_keys` > 0) into parts of that many keys."""

    tile: Tile
    splits: int
    split_keys: int = 0


@dataclass(frozen=True)
class Device:
    """What the schedule needs to know of a GPU: compute capability as 10 * major + minor, and multiprocessors."""

    capability: int
    processors: int


# In the interpreter: the tiles of a Hopper GPU, and so few processors that nothing is split for speed.
INTERPRETER = Device(capability=90, processors=1)

_NARROW = Tile(rows=16, keys=32, warps=4, stages=2, per_sm=2)
_NARROW_16_BIT = Tile(rows=16, keys=64, warps=4, stages=2, per_sm=2)
_MIDDLE = Tile(rows=32, keys=64, warps=8, stages=2, per_sm=1)
_HOPPER = Tile(rows=64, keys=64, warps=8, stages=2, per_sm=1)
# Float32 products have no matrix instruction: this one is for checking numbers, and only has to fit.
_FLOAT32 = Tile(rows=16, keys=16, warps=8, stages=1, per_sm=1)


def device_of(device: torch.device) -> Device:
    """The device of a call; any that is not CUDA runs in the interpreter."""
    machine = machine_of(device)
    if machine.kind != "cuda":
        return INTERPRETER
    return Device(10 * machine.capability[0] + machine.capability[1], num_sms(device))


def tile_for(rows: int, fmt: LatentFormat, wide: bool, capability: int) -> Tile:
    """The tile for so many query rows a request; `wide`: query or cache is float32."""
    if wide:
        return _FLOAT32
    if rows <= 16:
        bits_16 = fmt in (LatentFormat.FLOAT16, LatentFormat.BFLOAT16)
        return _NARROW_16_BIT if bits_16 and capability >= 90 else _NARROW
    # wgmma exists on sm_90 alone, and works on 64 rows at once.
    return _HOPPER if rows > 32 and capability // 10 == 9 and fmt is not LatentFormat.FP8_DS else _MIDDLE


def choose(call: MlaCall, device: Device) -> Schedule:
    """The schedule of a call on a device; depends on shapes only."""
    rows = call.heads * call.q_len
    wide = torch.float32 in (call.query.dtype, call.cache.dtype)
    tile = tile_for(rows, call.fmt, wide, device.capability)
    reach = call.max_kv_len
    if call.window is not None:
        # From the first key of the first token's window, at a tile's border, to the last token.
        reach = min(reach, call.window + call.q_len + tile.keys)
    if call.batch_invariant:
        return Schedule(tile, max(1, -(-reach // INVARIANT_SPLIT_KEYS)), INVARIANT_SPLIT_KEYS)
    programs = max(1, call.batch * -(-rows // tile.rows))
    wanted = device.processors * tile.per_sm // programs
    useful = reach // max(MIN_SPLIT_KEYS_PER_ROW * tile.rows, tile.keys)
    return Schedule(tile, max(1, min(wanted, useful, MAX_SPLITS)))
