"""MLA decode in Triton: the backend `TRITON_MLA`, one or two launches a call.

    call --choose--> schedule --launches--> [decode tile]                        one split: writes out and lse
                                            [decode tile -> scratch] [merge]     several

Grid of the first: (row tiles, splits, requests), the row tiles of a request side by side so that the second finds its
latents in the L2 cache. Grids and scratch follow from shapes alone: nothing waits for the device, and a captured CUDA
graph stays valid while lengths change within the table's width. Scratch is splits * rows * (latent_dim + 1) * 4 bytes
a request, from torch's allocator.

Every format of `formats.py`; products in float16 for FP8 and float16 caches, bfloat16 for bfloat16 ones, float32 if
query or cache is (slow, for checking). Any page size. A latent is kept in one to four pieces of a power of two
(`support.pieces`).
"""

from __future__ import annotations

import math

import torch

from kvtide.kvcache import ConfigError

from .contract import MlaCall
from .formats import SCALE_GROUP, LatentFormat
from .support import MAX_PIECES, pieces
from .triton_kernel import Launch, tl
from .triton_mla_kernels import DECODE, MERGE
from .triton_schedule import Device, Schedule, choose, device_of

# Splits that the merge reads at once: 32 x 128 float32 are 32 registers a thread.
MERGE_SPLITS = 32
# Float16 probabilities are 2**14 times as large: full precision down to 2**-28, and 2 of them stay below 65504.
FLOAT16_SHIFT = 14
_DOT = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def decode(call: MlaCall) -> None:
    """Answer the call into its `out` and `lse`."""
    device = device_of(call.query.device)
    for launch in launches(call, choose(call, device), device):
        launch.run()


def launches(call: MlaCall, schedule: Schedule, device: Device) -> list[Launch]:
    """The kernels that a schedule of a call takes, in order."""
    tile = schedule.tile
    cut = pieces(call.latent_dim)
    if cut is None:
        raise ConfigError(
            f"latent_dim {call.latent_dim} is not one to {MAX_PIECES} pieces of one power of two from 16 up"
        )
    chunks, chunk = cut
    rows = call.heads * call.q_len
    latent, rope, scales = cache_parts(call.cache, call.fmt, call.latent_dim)
    dot = _dot_dtype(call)
    grouped = call.fmt is LatentFormat.FP8_DS
    fp8 = grouped or call.fmt is LatentFormat.FP8
    interpreted = call.query.device.type == "cpu"
    split = schedule.splits > 1 or schedule.split_keys > 0
    size = call.batch * schedule.splits * rows if split else 0
    part_out = torch.empty(size * call.latent_dim, dtype=torch.float32, device=call.out.device)
    part_lse = torch.empty(size, dtype=torch.float32, device=call.out.device)
    results = {
        "sink": call.lse if call.sink is None else call.sink,
        "out": call.out,
        "lse": call.lse,
        "part_out": part_out,
        "part_lse": part_lse,
        "out_b": call.out.stride(0),
        "out_t": call.out.stride(1),
        "out_h": call.out.stride(2),
        "lse_b": call.lse.stride(0),
        "lse_t": call.lse.stride(1),
        "lse_h": call.lse.stride(2),
        "heads": call.heads,
        "q_len": call.q_len,
        "splits": schedule.splits,
        "CHUNK": chunk,
        "CHUNKS": chunks,
        "HAS_SINK": call.sink is not None,
        "INTERPRETED": interpreted,
    }
    decoding = Launch(
        DECODE,
        (-(-rows // tile.rows), schedule.splits, call.batch),
        {
            **results,
            "query": call.query,
            "latent": latent,
            "rope": rope,
            "scales": scales,
            "table": call.block_table,
            "seq_lens": call.seq_lens,
            "q_lens": call.seq_lens if call.q_lens is None else call.q_lens,
            "k_scale": call.k_scale,
            "score_factor": call.scale * math.log2(math.e),
            "query_b": call.query.stride(0),
            "query_t": call.query.stride(1),
            "query_h": call.query.stride(2),
            "latent_page": latent.stride(0),
            "latent_slot": latent.stride(1),
            "rope_page": rope.stride(0),
            "rope_slot": rope.stride(1),
            "scale_page": scales.stride(0),
            "scale_slot": scales.stride(1),
            "table_b": call.block_table.stride(0),
            "columns": call.block_table.shape[1],
            "window": call.window or 0,
            "split_keys": schedule.split_keys,
            "PAGE": call.block_size,
            "ROPE": call.rope_dim,
            "ROPE_TILE": max(16, 1 << (call.rope_dim - 1).bit_length()),
            "ROPE_ALIGN": math.gcd(16 // rope.itemsize, rope.stride(0), rope.stride(1)),
            "ROWS": tile.rows,
            "KEYS": tile.keys,
            "DOT": _DOT[dot],
            # FP8_DS has bfloat16 ropes; a float16 query keeps its precision and takes them as float16.
            "ROPE_DOT": _DOT[call.query.dtype if grouped and dot == torch.float16 else dot],
            "NORMALISE": dot == torch.float16 and call.query.dtype != torch.float16,
            "FP8": fp8,
            "FP8_BYTES": fp8 and device.capability < 89,
            "GROUP": SCALE_GROUP if grouped else 0,
            "SHIFT": FLOAT16_SHIFT if dot == torch.float16 else 0,
            "HAS_Q_LENS": call.q_lens is not None,
            "HAS_WINDOW": call.window is not None,
            "SPLIT": split,
            "UPCAST": dot == torch.float32 or interpreted,
        },
        tile.warps,
        tile.stages,
    )
    if not split:
        return [decoding]
    merging = Launch(MERGE, (rows, chunks, call.batch), {**results, "SPLITS": MERGE_SPLITS}, warps=4, stages=1)
    return [decoding, merging]


def cache_parts(
    cache: torch.Tensor, fmt: LatentFormat, latent_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of a latent cache: latents and ropes (bytes where they are FP8), and FP8_DS's scales."""
    if fmt is LatentFormat.FP8_DS:
        ropes_at = latent_dim + 4 * (latent_dim // SCALE_GROUP)
        return (
            cache[..., :latent_dim],
            cache[..., ropes_at:].view(torch.bfloat16),
            cache[..., latent_dim:ropes_at].view(torch.float32),
        )
    if fmt is LatentFormat.FP8:
        cache = cache.view(torch.uint8)
    return cache[..., :latent_dim], cache[..., latent_dim:], cache


def _dot_dtype(call: MlaCall) -> torch.dtype:
    """The operands' type of both matrix products."""
    if torch.float32 in (call.query.dtype, call.cache.dtype):
        return torch.float32
    return torch.bfloat16 if call.fmt is LatentFormat.BFLOAT16 else torch.float16
