"""Triton's grouped-query attention in its interpreter, against float64: every mask of the hybrid layouts.

Unused bytes of the pools are 0xFF, NaN in every type; entries lie two blocks apart; tables are exactly wide enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton")

from kvtide.kernels.triton_gqa import attend

POISON_ENTRY = 2_147_480_000
K_SCALE, V_SCALE = 0.5, 0.25
# As in mla_cases: what results may be off, as a share of a row's largest value.
BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def pool(rows: Sequence[torch.Tensor], places: Sequence[Sequence[int]], block: int) -> torch.Tensor:
    """A poisoned cache that holds each row's tokens in its places."""
    entries = 1 + max((place for row in places for place in row), default=0)
    shape = (entries, 2, block, *rows[0].shape[1:])
    memory = torch.full((math.prod(shape) * rows[0].itemsize,), 0xFF, dtype=torch.uint8).view(rows[0].dtype)
    view = memory.view(shape)[:, 1]
    for row, row_places in zip(rows, places, strict=True):
        for column, place in enumerate(row_places):
            held = row[column * block : (column + 1) * block]
            view.view(torch.uint8)[place, : len(held)] = held.view(torch.uint8)
    return view


def attended(
    lens: Sequence[int],
    *,
    q_len: int = 1,
    q_lens: Sequence[int] | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    value_dim: int = 16,
    block: int = 16,
    window: int | None = None,
    chunk: int | None = None,
    sink: bool = False,
    sink_tokens: int = 0,
    soft_cap: float | None = None,
    spread: float = 1.0,
    dtype: torch.dtype = torch.float32,
    cached: torch.dtype | None = None,
) -> None:
    """Attend, and compare with float64 attention over the tokens that each query sees."""
    cached = cached or dtype
    generator = torch.Generator().manual_seed(0)
    keys = [torch.randn(n, kv_heads, dim, generator=generator).to(cached) for n in lens]
    values = [torch.randn(n, kv_heads, value_dim, generator=generator).to(cached) for n in lens]
    counts = [-(-n // block) for n in lens]
    order = (torch.randperm(2 * sum(counts) + 1, generator=generator) + 1).tolist()
    places = [[order.pop() for _ in range(count)] for count in counts]
    table = torch.full((len(lens), max(counts, default=0)), POISON_ENTRY, dtype=torch.int32)
    for row, row_places in enumerate(places):
        table[row, : len(row_places)] = torch.tensor(row_places, dtype=torch.int32)
    query = (spread * torch.randn(len(lens), q_len, heads, dim, generator=generator)).to(dtype)
    logits = torch.randn(heads, generator=generator) if sink else None
    out = torch.full((len(lens), q_len, heads, value_dim), math.nan, dtype=dtype)
    lse = torch.full((len(lens), q_len, heads), math.nan)
    fp8 = cached == torch.float8_e4m3fn
    attend(
        query,
        pool(keys, places, block),
        pool(values, places, block),
        table,
        torch.tensor(lens, dtype=torch.int32),
        out,
        lse,
        scale=dim**-0.5,
        q_lens=None if q_lens is None else torch.tensor(q_lens, dtype=torch.int32),
        window=window,
        chunk=chunk,
        sink=logits,
        sink_tokens=sink_tokens,
        soft_cap=soft_cap,
        k_scale=torch.tensor([K_SCALE if fp8 else 1.0]),
        v_scale=torch.tensor([V_SCALE if fp8 else 1.0]),
    )
    bound = BOUNDS[dtype]
    for row, length in enumerate(lens):
        tokens = q_len if q_lens is None else q_lens[row]
        k = keys[row].double().repeat_interleave(heads // kv_heads, dim=1) * (K_SCALE if fp8 else 1)
        v = values[row].double().repeat_interleave(heads // kv_heads, dim=1) * (V_SCALE if fp8 else 1)
        for token in range(q_len):
            at = length - tokens + token
            seen = [
                j
                for j in range(at + 1 if token < tokens else 0)
                if j < sink_tokens
                or ((window is None or j > at - window) and (chunk is None or j // chunk == at // chunk))
            ]
            if not seen:
                assert (out[row, token] == 0).all()
                assert (lse[row, token] == -math.inf).all()
                continue
            scores = torch.einsum("hd,jhd->hj", query[row, token].double(), k[seen]) * dim**-0.5
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if logits is not None:
                scores = torch.cat([scores, logits.double()[:, None]], dim=1)
            weights = torch.softmax(scores, dim=1)[:, : len(seen)]
            right = torch.einsum("hj,jhd->hd", weights, v[seen])
            assert ((out[row, token].double() - right).abs() <= bound * v.abs().max()).all()
            assert ((lse[row, token] - scores.logsumexp(dim=1)).abs() <= bound).all()


LENS = [0, 1, 5, 33, 64, 65, 100]
TYPES = [(torch.float32, None), (torch.float16, None), (torch.bfloat16, None), (torch.bfloat16, torch.float8_e4m3fn)]


@pytest.mark.parametrize(("dtype", "cached"), TYPES, ids=str)
@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"window": 7, "sink": True},
        {"window": 1, "sink_tokens": 3},
        {"chunk": 32, "sink_tokens": 40},
        {"chunk": 8, "sink": True},
    ],
    ids=str,
)
def test_masks(masks: dict[str, int], dtype: torch.dtype, cached: torch.dtype | None) -> None:
    attended(LENS, q_len=3, dtype=dtype, cached=cached, **masks)


@pytest.mark.parametrize(("dtype", "cached"), TYPES, ids=str)
@pytest.mark.parametrize("soft_cap", [0.5, 5.0])
def test_soft_caps(soft_cap: float, dtype: torch.dtype, cached: torch.dtype | None) -> None:
    """Scores up to twenty times the cap, where tanh is 1, and scores far below it."""
    attended(LENS, q_len=2, dtype=dtype, cached=cached, soft_cap=soft_cap, spread=4.0, window=40, sink=True)
    attended(LENS, dtype=dtype, cached=cached, soft_cap=soft_cap, spread=0.1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (5, 1), (6, 2), (3, 3), (16, 1)])
@pytest.mark.parametrize("q_len", [1, 4, 40])
def test_groups_and_extends(heads: int, kv_heads: int, q_len: int) -> None:
    """A row shorter than the query, and tiles that a request's last rows do not fill."""
    attended([q_len + 20, 3], q_len=q_len, heads=heads, kv_heads=kv_heads, window=9, sink_tokens=2)


@pytest.mark.parametrize("block", [8, 24, 48, 128])
def test_block_sizes(block: int) -> None:
    attended([block - 1, block, block + 1], block=block)


def test_padded_query_tokens() -> None:
    attended([9, 40, 5, 33], q_len=5, q_lens=[0, 2, 5, 1], sink=True)


def test_dimensions_that_are_no_power_of_two() -> None:
    attended([20, 33], dim=24, value_dim=40, dtype=torch.float16)


def test_table_of_no_columns() -> None:
    attended([0, 0], sink_tokens=4)
