"""MLA calls for benchmarks: pools of random or poisoned latents in any format, and how far results are from float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from kvtide.kernels.contract import MlaCall
from kvtide.kernels.formats import SCALE_GROUP, LatentFormat

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
    values = torch.randn(*shape, LATENT + ROPE, device=device, dtype=torch.bfloat16)
    if fmt is not LatentFormat.FP8_DS:
        return values.to(fmt.storage_dtype)
    scales = torch.full((*shape, LATENT // SCALE_GROUP), 0.5, device=device)
    quantised = (values[..., :LATENT] * 2).to(torch.float8_e4m3fn)
    parts = (quantised, scales, values[..., LATENT:].contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)


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


def real_keys(stored: torch.Tensor, fmt: LatentFormat) -> torch.Tensor:
    """Float64 [tokens, 576] of tokens as they are stored."""
    if fmt is not LatentFormat.FP8_DS:
        return stored.double()
    ropes_at = LATENT + 4 * (LATENT // SCALE_GROUP)
    scales = stored[:, LATENT:ropes_at].contiguous().view(torch.float32).double()
    values = stored[:, :LATENT].contiguous().view(torch.float8_e4m3fn).double()
    rope = stored[:, ropes_at:].contiguous().view(torch.bfloat16).double()
    return torch.cat((values * scales.repeat_interleave(SCALE_GROUP, dim=1), rope), dim=1)


def error_of_row(call: MlaCall, row: int) -> float:
    """How far one row of a call's results is from float64, as a share of the bounds; infinite for NaN."""
    length = int(call.seq_lens[row])
    blocks = call.block_table[row, : -(-length // BLOCK_SIZE)].long()
    keys = real_keys(call.cache[blocks].reshape(-1, call.cache.shape[2])[:length], call.fmt)
    worst = 0.0
    for token in range(call.q_len):
        end = length - call.q_len + token + 1
        out, lse = call.out[row, token].double(), call.lse[row, token].double()
        if end <= 0:
            right = not out.any() and bool(lse.eq(-math.inf).all())
            worst = max(worst, 0.0 if right else math.inf)
            continue
        scores = SCALE * (call.query[row, token].double() @ keys[:end].T)
        expected = torch.softmax(scores, dim=-1) @ keys[:end, :LATENT]
        out_error = float((out - expected).abs().max() / expected.abs().max()) / OUT_BOUND
        lse_error = float((lse - torch.logsumexp(scores, dim=-1)).abs().max()) / LSE_BOUND
        worst = max(worst, *(math.inf if math.isnan(e) else e for e in (out_error, lse_error)))
    return worst


def check_calls(device: torch.device) -> Iterator[MlaCall]:
    """Small ragged calls over pools whose unused slots, blocks and table entries are poisoned."""
    lens = (1000, 0, 1, 63, 64, 65, 3)
    for fmt in (LatentFormat.BFLOAT16, LatentFormat.FP8, LatentFormat.FP8_DS):
        for heads, q_len in ((16, 1), (128, 1), (12, 3), (16, 8), (128, 5)):
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
