"""MLA calls for benchmarks: pools of random or poisoned latents in any format, and how far results are from float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from kvtide.kernels.contract import MlaCall
from kvtide.kernels.formats import LatentFormat
from kvtide.kernels.reference import decode, quantise

LATENT, ROPE = 512, 64
BLOCK_SIZE = 64
# Blocks of two layers, so that pages lie apart as in an arena.
LAYERS = 2
SCALE = 192**-0.5
# Of the largest output, and absolute: products of bf16 values, summed in float32.
OUT_BOUND, LSE_BOUND = 2**-6, 2e-2
POISON_BYTE = 0xFF  # NaN in every format
POISON_ENTRY = 2**31 - 7


class Pool:
    """Random latents of one format, as many as the largest configuration needs; calls are views of it."""

    def __init__(self, device: torch.device, fmt: LatentFormat, tokens: int) -> None:
        self.fmt, self._device = fmt, device
        width = fmt.width(LATENT, ROPE)
        shape = (-(-tokens // BLOCK_SIZE), LAYERS, BLOCK_SIZE, width)
        self._storage = torch.empty(shape, dtype=fmt.storage_dtype, device=device)
        for part in self._storage[:, 0].split(2048):
            part.copy_(latents(part.shape[:-1], fmt, device))

    def call(self, batch: int, heads: int, q_len: int, kv: int) -> MlaCall:
        """A decode step of `batch` requests of `kv` tokens, their blocks in random order."""
        columns = kv // BLOCK_SIZE
        blocks = torch.randperm(batch * columns, device=self._device).to(torch.int32)
        seq_lens = torch.full((batch,), kv, dtype=torch.int32, device=self._device)
        return make_call(self._storage[:, 0], blocks.view(batch, columns), seq_lens, self.fmt, heads, q_len)


def latents(shape: Sequence[int], fmt: LatentFormat, device: torch.device) -> torch.Tensor:
    """Random tokens in a format's own bytes."""
    return quantise(torch.randn(*shape, LATENT + ROPE, device=device), fmt, LATENT, ROPE)


def make_call(
    cache: torch.Tensor, table: torch.Tensor, seq_lens: torch.Tensor, fmt: LatentFormat, heads: int, q_len: int
) -> MlaCall:
    """A call with random queries, and results full of NaN."""
    batch, device = table.shape[0], cache.device
    query = torch.randn(batch, q_len, heads, LATENT + ROPE, device=device, dtype=torch.bfloat16)
    return MlaCall(
        query=query,
        cache=cache,
        block_table=table,
        seq_lens=seq_lens,
        q_lens=None,
        fmt=fmt,
        latent_dim=LATENT,
        rope_dim=ROPE,
        scale=SCALE,
        k_scale=torch.ones(1, device=device),
        window=None,
        sink=None,
        out=torch.full((batch, q_len, heads, LATENT), math.nan, device=device, dtype=torch.bfloat16),
        lse=torch.full((batch, q_len, heads), math.nan, device=device),
        batch_invariant=False,
    )


def error_of_row(call: MlaCall, row: int) -> float:
    """How far one row of a call's results is from the float64 reference, as a share of the bounds; infinite for NaN."""
    query = call.query[row : row + 1].float()
    exact = replace(
        call,
        query=query,
        block_table=call.block_table[row : row + 1],
        seq_lens=call.seq_lens[row : row + 1],
        out=query.new_empty((1, call.q_len, call.heads, LATENT)),
        lse=query.new_empty((1, call.q_len, call.heads)),
    )
    decode(exact)
    out, lse = call.out[row].float(), call.lse[row]
    unseen = exact.lse[0] == -math.inf
    if not torch.equal(lse == -math.inf, unseen) or out[unseen].any():
        return math.inf
    out_error = (out - exact.out[0]).abs().max() / exact.out.abs().max().clamp(min=1e-30) / OUT_BOUND
    lse_error = (lse - exact.lse[0])[~unseen].abs() / LSE_BOUND
    return float(torch.cat((out_error.view(1), lse_error.view(-1))).nan_to_num(nan=math.inf).max())


def check_calls(device: torch.device) -> Iterator[MlaCall]:
    """Small ragged calls over pools whose unused slots, blocks and table entries are poisoned."""
    lens = (1000, 0, 1, 63, 64, 65, 3)
    for fmt in (LatentFormat.BFLOAT16, LatentFormat.FP8, LatentFormat.FP8_DS):
        for heads, q_len in ((16, 1), (16, 2), (128, 1), (12, 3), (16, 8), (128, 5)):
            columns = -(-max(lens) // BLOCK_SIZE)
            shape = (len(lens) * columns + 1, LAYERS, BLOCK_SIZE, fmt.token_bytes(LATENT, ROPE))
            storage = torch.full(shape, POISON_BYTE, dtype=torch.uint8, device=device)
            cache = storage.view(fmt.storage_dtype)[:, 0]
            table = torch.full((len(lens), columns), POISON_ENTRY, dtype=torch.int32, device=device)
            for row, length in enumerate(lens):
                for column in range(-(-length // BLOCK_SIZE)):
                    block, tokens = 1 + row * columns + column, min(BLOCK_SIZE, length - column * BLOCK_SIZE)
                    table[row, column] = block
                    cache[block, :tokens] = latents((tokens,), fmt, device)
            seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
            yield make_call(cache, table, seq_lens, fmt, heads, q_len)
