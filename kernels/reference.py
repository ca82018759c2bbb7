"""What every MLA backend is compared with: float64 attention, one query token at a time, and the latent formats' bytes.

`decode` is the backend `TORCH_REFERENCE`: right on any device, slow everywhere, and it waits for the device. It reads
only blocks that hold a key which some query token of the row sees. `quantise` and `dequantise` define what the bytes of
each `LatentFormat` mean; cache writes and all kernels agree with them bit for bit.
"""

from __future__ import annotations

import math

import torch

from .contract import MlaCall
from .formats import FP8_MAX, SCALE_GROUP, LatentFormat

# A group of FP8_DS is scaled as if its largest value were at least this.
AMAX_FLOOR = 1e-4
_FLOAT32_MAX = torch.finfo(torch.float32).max


def decode(call: MlaCall) -> None:
    """Answer the call into its `out` and `lse`."""
    # A copy, since `out` may lie in the query's memory.
    query = call.query.clone()
    call.out.zero_()
    call.lse.fill_(-math.inf)
    for row in range(call.batch):
        tokens = call.q_len if call.q_lens is None else int(call.q_lens[row])
        before = int(call.seq_lens[row]) - tokens
        first = 0 if call.window is None else max(0, before - call.window + 1)
        keys = _keys(call, row, first, before + tokens)
        for token in range(tokens):
            position = before + token
            low = 0 if call.window is None else max(0, position - call.window + 1)
            seen = keys[low - first : max(position + 1 - first, 0)]
            if not len(seen):
                continue
            scores = call.scale * (query[row, token].double() @ seen.T)
            out, lse = _softmax(scores, seen[:, : call.latent_dim], call.sink)
            call.out[row, token] = out.to(call.out.dtype)
            call.lse[row, token] = lse.to(call.lse.dtype)


def quantise(
    latents: torch.Tensor, fmt: LatentFormat, latent_dim: int, rope_dim: int, k_scale: torch.Tensor | float = 1.0
) -> torch.Tensor:
    """Tokens as a cache of the format stores them: `[..., latent_dim + rope_dim]` to `[..., fmt.width(...)]`.

    FP8 stores value / `k_scale`; values beyond the largest e4m3 number become that number, never infinity or NaN.
    """
    if fmt is LatentFormat.FP8:
        return to_e4m3(latents.float() / k_scale)
    if fmt is not LatentFormat.FP8_DS:
        return latents.to(fmt.storage_dtype)
    values, rope = torch.split(latents.float(), [latent_dim, rope_dim], dim=-1)
    groups = values.reshape(*values.shape[:-1], latent_dim // SCALE_GROUP, SCALE_GROUP).clamp(
        -_FLOAT32_MAX, _FLOAT32_MAX
    )
    scales = power_of_two_above(groups.abs().amax(dim=-1).clamp(min=AMAX_FLOOR) / FP8_MAX)
    stored = to_e4m3(groups / scales[..., None]).flatten(-2)
    return torch.cat([_packed(part).view(torch.uint8) for part in (stored, scales, rope.bfloat16())], dim=-1)


def dequantise(
    stored: torch.Tensor,
    fmt: LatentFormat,
    latent_dim: int,
    rope_dim: int,
    k_scale: torch.Tensor | float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The real values of stored tokens: `[..., fmt.width(...)]` to `[..., latent_dim + rope_dim]` of `dtype`.

    Exact in float64 and float32, but for a `k_scale` that is no power of two.
    """
    if fmt is LatentFormat.FP8:
        return stored.to(dtype) * (k_scale.to(dtype) if isinstance(k_scale, torch.Tensor) else k_scale)
    if fmt is not LatentFormat.FP8_DS:
        return stored.to(dtype)
    groups = latent_dim // SCALE_GROUP
    values, scales, rope = (
        _packed(part).view(kind).to(dtype)
        for part, kind in zip(
            torch.split(stored, [latent_dim, 4 * groups, 2 * rope_dim], dim=-1),
            (torch.float8_e4m3fn, torch.float32, torch.bfloat16),
            strict=True,
        )
    )
    values = values.view(*scales.shape, SCALE_GROUP) * scales[..., None]
    return torch.cat((values.flatten(-2), rope), dim=-1)


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Values as e4m3, saturated at its largest number; NaN stays NaN."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def power_of_two_above(values: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not less than each value; float32, positive and normal."""
    # A mantissa that is not zero carries into the exponent; then the mantissa goes.
    return ((values.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)


def _packed(values: torch.Tensor) -> torch.Tensor:
    """A compact copy: `contiguous` keeps strange strides of dimensions of size 1, which no other dtype can view."""
    return values.clone(memory_format=torch.contiguous_format)


def _keys(call: MlaCall, row: int, first: int, stop: int) -> torch.Tensor:
    """Keys `first` to `stop` of a row, float64 `[stop - first, latent_dim + rope_dim]`."""
    if stop <= first:
        return call.query.new_empty((0, call.latent_dim + call.rope_dim), dtype=torch.float64)
    size = call.block_size
    columns = slice(first // size, -(-stop // size))
    blocks = call.cache[call.block_table[row, columns].long()].flatten(0, 1)
    start = columns.start * size
    return dequantise(blocks[first - start : stop - start], call.fmt, call.latent_dim, call.rope_dim, call.k_scale)


def _softmax(
    scores: torch.Tensor, values: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[heads, dim]` and LSE `[heads]` of scores `[heads, keys]`; a sink's logit takes part and adds nothing."""
    logits = scores if sink is None else torch.cat((scores, sink.double()[:, None]), dim=-1)
    lse = torch.logsumexp(logits, dim=-1)
    return torch.exp(scores - lse[:, None]) @ values, lse
