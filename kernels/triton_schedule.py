"""Which tiles and how many splits the Triton MLA kernel gets, from what the host knows without asking the device.

    rows = heads * q_len ---> tile of ROWS query rows x KEYS keys, warps, stages     (architecture, format)
    row tiles * batch < what the GPU holds at once ---> split the keys until they fill it

The table of tiles was made with the compiler, not with a stopwatch: each entry is the largest that compiles without
spilling registers and fits the shared (and on sm_100 the tensor) memory, see tests/kernels/test_compile.py.

The capacity of the block table bounds the number of splits, not the sequences' lengths: those are on the device, and
a captured CUDA graph must stay right when they grow. A request with fewer keys cuts them into as many, shorter splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from .contract import MlaCall
from .formats import LatentFormat

# A split writes and reads ROWS x (latent_dim + 1) float32; with this many keys a row, that is a fifth of the latents
# that it reads (16 rows: 128 keys of 1,152 bytes against 33 KB twice).
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


@lru_cache(maxsize=64)
def device_of(kind: str, index: int | None) -> Device:
    """The device by type and index; any that is not CUDA runs in the interpreter."""
    if kind != "cuda":
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability(index)
    return Device(10 * major + minor, torch.cuda.get_device_properties(index).multi_processor_count)


def tile_for(rows: int, fmt: LatentFormat, wide: bool, capability: int) -> Tile:
    """The tile for so many query rows; `wide`: operands of the products are float32."""
    if wide:
        return Tile(rows=16, keys=16, warps=4, stages=1, per_sm=1)
    return Tile(rows=16, keys=32, warps=4, stages=2, per_sm=2)


def choose(call: MlaCall, device: Device) -> Schedule:
    """The schedule of a call on a device; depends on shapes only."""
    rows = call.heads * call.q_len
    wide = torch.float32 in (call.query.dtype, call.cache.dtype)
    tile = tile_for(rows, call.fmt, wide, device.capability)
    reach = call.max_kv_len if call.window is None else min(call.max_kv_len, call.window + call.q_len + tile.keys)
    if call.batch_invariant:
        return Schedule(tile, -(-max(reach, 1) // INVARIANT_SPLIT_KEYS), INVARIANT_SPLIT_KEYS)
    programs = call.batch * -(-rows // tile.rows)
    wanted = device.processors * tile.per_sm // max(programs, 1)
    useful = reach // max(MIN_SPLIT_KEYS_PER_ROW * min(rows, tile.rows), tile.keys)
    return Schedule(tile, max(1, min(wanted, useful, MAX_SPLITS)))
