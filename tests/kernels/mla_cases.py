"""MLA decode calls for tests, as hard as the contract allows, with the right answer to each.

    storage     [ NaN block | layer 0, layer 1 | NaN block | ... ]    blocks in random places, every unused byte 0xFF,
                                                                      which is NaN in every format (tails included)
    view        stride(0) is one layer's part of a block, so that entries count units, not blocks
    table       exactly as wide as its longest row; 2147480000 beyond a row's end; -1 where a window has moved on
    out, lse    full of NaN

`expected(case)` is float64 attention over the history itself: it knows no table and no block.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvtide.kernels.contract import MlaCall
from kvtide.kernels.formats import LatentFormat
from kvtide.kernels.reference import dequantise, quantise

POISON_BYTE = 0xFF
POISON_ENTRY = 2_147_480_000
LAYERS = 2


@dataclass(frozen=True)
class Case:
    """A call, and what the cache of each row stands for: float64 `[length, latent_dim + rope_dim]`."""

    call: MlaCall
    history: list[torch.Tensor]

    def fresh(self, **changes: Any) -> Case:
        """The same case with results that nobody has written, and other fields of the call changed."""
        call = replace(self.call, **changes)
        out, lse = torch.full_like(call.out, math.nan), torch.full_like(call.lse, math.nan)
        return Case(replace(call, out=out, lse=lse), self.history)


def make_case(
    fmt: LatentFormat,
    lens: Sequence[int],
    *,
    heads: int = 4,
    q_len: int = 1,
    q_lens: Sequence[int] | None = None,
    block_size: int = 16,
    latent_dim: int = 128,
    rope_dim: int = 16,
    window: int | None = None,
    sink: bool = False,
    k_scale: float = 1.0,
    query_std: float = 1.0,
    rope_std: float = 1.0,
    dtype: torch.dtype = torch.float32,
    batch_invariant: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    """A decode step of rows of `lens` tokens (the new ones included), in a pool with room for as many unused blocks."""
    generator = torch.Generator().manual_seed(seed)
    width = latent_dim + rope_dim
    history, stored = [], []
    for length in lens:
        values = torch.randn(length, width, generator=generator)
        values[:, latent_dim:] *= rope_std
        stored.append(quantise(values * k_scale, fmt, latent_dim, rope_dim, k_scale))
        history.append(dequantise(stored[-1], fmt, latent_dim, rope_dim, k_scale))
    first_seen = [0 if window is None else max(0, length - q_len - window + 1) for length in lens]
    if q_lens is not None and window is not None:
        first_seen = [max(0, n - q - window + 1) for n, q in zip(lens, q_lens, strict=True)]
    cache, table = paged(stored, first_seen, fmt, block_size, fmt.width(latent_dim, rope_dim), seed)
    query = (torch.randn(len(lens), q_len, heads, width, generator=generator) * query_std).to(dtype)
    call = MlaCall(
        query=query.to(device),
        cache=cache.to(device) if device == "cpu" else _moved(cache, device),
        block_table=table.to(device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        q_lens=None if q_lens is None else torch.tensor(q_lens, dtype=torch.int32, device=device),
        fmt=fmt,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        scale=width**-0.5,
        k_scale=torch.tensor([k_scale], device=device),
        window=window,
        sink=torch.randn(heads, generator=generator).to(device) if sink else None,
        out=torch.full((len(lens), q_len, heads, latent_dim), math.nan, dtype=dtype, device=device),
        lse=torch.full((len(lens), q_len, heads), math.nan, device=device),
        batch_invariant=batch_invariant,
    )
    return Case(call, [row.to(device) for row in history])


def paged(
    rows: Sequence[torch.Tensor],
    first_seen: Sequence[int],
    fmt: LatentFormat,
    block_size: int,
    width: int,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned cache view that holds the rows' stored tokens, and its table; blocks before `first_seen` have none."""
    counts = [-(-len(row) // block_size) for row in rows]
    blocks = 2 * sum(counts) + 1
    part = block_size * width * fmt.storage_dtype.itemsize
    memory = torch.full((blocks * LAYERS * part,), POISON_BYTE, dtype=torch.uint8).view(fmt.storage_dtype)
    stride = block_size * width
    # The second layer's view: entry e starts e units and one layer into the memory.
    view = memory.as_strided((LAYERS * (blocks - 1) + 1, block_size, width), (stride, width, 1), stride)
    table = torch.full((len(rows), max(counts, default=0)), POISON_ENTRY, dtype=torch.int32)
    # Block 0 stays unused: masked reads of other kernels go there.
    places = random.Random(seed).sample(range(1, blocks), sum(counts))
    for i, row in enumerate(rows):
        for column in range(counts[i]):
            block = row[column * block_size : (column + 1) * block_size]
            entry = LAYERS * places.pop()
            if (column + 1) * block_size <= first_seen[i]:
                table[i, column] = -1
                continue
            table[i, column] = entry
            view.view(torch.uint8)[entry, : len(block)] = block.view(torch.uint8)
    return view, table


def expected(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 `out` and `lse` of the case's call, from the history alone."""
    call = case.call
    out = torch.zeros(call.out.shape, dtype=torch.float64, device=call.out.device)
    lse = torch.full(call.lse.shape, -math.inf, dtype=torch.float64, device=call.out.device)
    for row, keys in enumerate(case.history):
        tokens = call.q_len if call.q_lens is None else int(call.q_lens[row])
        places = torch.arange(len(keys), device=keys.device)
        for token in range(tokens):
            position = len(keys) - tokens + token
            visible = places <= position
            if call.window is not None:
                visible &= places > position - call.window
            if not visible.any():
                continue
            logits = call.scale * call.query[row, token].double() @ keys[visible].T
            if call.sink is not None:
                logits = torch.cat((logits, call.sink.double()[:, None]), dim=1)
            weights = torch.softmax(logits, dim=1)[:, : int(visible.sum())]
            out[row, token] = weights @ keys[visible][:, : call.latent_dim]
            lse[row, token] = torch.logsumexp(logits, dim=1)
    return out, lse


# What a backend may be off, as a share of the row's largest output, and as a share of 1 + |LSE|. Products run in the
# coarser of the query's and the cache's type (FP8 values are exact in any), and the output has the query's.
_BOUNDS = {
    torch.float32: (2e-5, 2e-5),
    torch.float16: (2e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 2e-3),
}


def bounds(call: MlaCall) -> tuple[float, float]:
    """The error bounds of a call: of `out` relative to a row's largest value, of `lse` relative to 1 + |lse|."""
    cache = call.fmt.storage_dtype if call.fmt.storage_dtype in _BOUNDS else call.query.dtype
    pairs = _BOUNDS[call.query.dtype], _BOUNDS[cache]
    return max(pair[0] for pair in pairs), max(pair[1] for pair in pairs)


def errors(case: Case) -> tuple[float, float]:
    """How far the case's results are from `expected`, in units of `bounds`; infinite where one is NaN or -inf."""
    out, lse = expected(case)
    if not out.numel():
        return 0.0, 0.0
    out_bound, lse_bound = bounds(case.call)
    largest = out.abs().amax(dim=(1, 2, 3), keepdim=True).clamp(min=1e-30)
    out_error = ((case.call.out.double() - out) / largest).abs() / out_bound
    found = case.call.lse.double()
    unseen = lse == -math.inf
    lse_error = torch.where(unseen, 0.0, (found - lse).abs() / (1 + lse.abs()) / lse_bound)
    lse_error[unseen & (found != -math.inf)] = math.inf
    out_error[unseen & (case.call.out != 0).any(dim=-1)] = math.inf
    return _worst(out_error), _worst(lse_error)


def check(case: Case) -> None:
    """Assert that the case's results are right."""
    out_error, lse_error = errors(case)
    assert out_error <= 1, f"out is off by {out_error:.3g} times the bound"
    assert lse_error <= 1, f"lse is off by {lse_error:.3g} times the bound"


def _worst(error: torch.Tensor) -> float:
    return float(error.nan_to_num(nan=math.inf, posinf=math.inf).max())


def _moved(view: torch.Tensor, device: str) -> torch.Tensor:
    """A strided view on another device, with its storage: `to` would copy the elements only."""
    storage = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage()).to(device)
    return storage.as_strided(view.shape, view.stride(), view.storage_offset())
