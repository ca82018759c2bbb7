"""Paged grouped-query attention in Triton, for the layers of hybrid models that are not MLA: one launch, no splits.

    query rows of one request and KV head:  row = token * group + head in group       group = heads / kv_heads
    keys of a tile of rows:   [sink tiles] ........ [first tile of the window or chunk ... last visible key]

Decode and extend are one kernel: many query tokens only mean more row tiles. Every mask of the hybrid layouts is here:
causal from the bottom right, sliding window, chunks, tokens that are always visible, a logit per head that takes part
in the softmax, a soft cap on scores. Keys that no row of a tile sees are not read, so that the cost follows the window.
It need not win races: a long context on a small batch is read by few programs.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# ruff: noqa: N803, N806

from __future__ import annotations

import math

import torch

from .device import machine_of
from .triton_kernel import Launch, TritonKernel, dot, e4m3_to, round_to, row_max, row_sum, tl, with_sink

# Float16 probabilities are 2**14 times as large, as in MLA decode.
FLOAT16_SHIFT = 14
_DOT = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def _attend_tile(
    query,
    keys,
    values,
    table,
    seq_lens,
    q_lens,
    k_scale,
    v_scale,
    sink,
    out,
    lse,
    score_factor,
    soft_cap,
    query_b,
    query_t,
    query_h,
    key_page,
    key_slot,
    key_h,
    value_page,
    value_slot,
    value_h,
    table_b,
    out_b,
    out_t,
    out_h,
    lse_b,
    lse_t,
    lse_h,
    q_len,
    columns,
    window,
    chunk,
    sink_tokens,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DOT: tl.constexpr,
    FP8: tl.constexpr,
    FP8_BYTES: tl.constexpr,
    SHIFT: tl.constexpr,
    HAS_Q_LENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    request = tl.program_id(2).to(tl.int64)
    query_rows = tile * ROWS + tl.arange(0, ROWS)
    token = query_rows // GROUP
    head = kv_head * GROUP + query_rows % GROUP
    seq_len = tl.load(seq_lens + request)
    tokens = q_len
    if HAS_Q_LENS:
        tokens = tl.load(q_lens + request)
    valid = token < tokens
    before = seq_len - tokens
    position = tl.where(valid, before + token, -1)

    # Keys that some row of the tile sees, apart from those that all see: from the first row's start to the last row.
    first_token = (tile * ROWS) // GROUP
    last_token = tl.minimum((tile * ROWS + ROWS - 1) // GROUP, tokens - 1)
    stop = tl.minimum(before + last_token + 1, columns * BLOCK)
    stop = tl.where(first_token < tokens, stop, 0)
    low = 0
    start = position * 0
    if HAS_WINDOW:
        low = tl.maximum(before + first_token - window + 1, 0)
        start = position - window + 1
    if HAS_CHUNK:
        low = tl.maximum(before + first_token, 0) // chunk * chunk
        start = position // chunk * chunk
    sink_stop = tl.minimum(sink_tokens, stop)
    sink_tiles = (sink_stop + KEYS - 1) // KEYS
    first_tile = tl.maximum(low // KEYS, sink_tiles)
    steps = sink_tiles + tl.maximum((stop + KEYS - 1) // KEYS - first_tile, 0)

    dims = tl.arange(0, DIM_TILE)
    value_dims = tl.arange(0, VALUE_TILE)
    query_at = query + request * query_b + token.to(tl.int64) * query_t + head * query_h
    q = tl.load(query_at[:, None] + dims[None, :], mask=valid[:, None] & (dims < DIM)[None, :], other=0)
    q = round_to(q, DOT, INTERPRETED)
    UNIT: tl.constexpr = 256.0 if FP8_BYTES else 1.0
    factor = score_factor
    v_factor = 1.0
    if FP8:
        factor = factor * (tl.load(k_scale) * UNIT)
        v_factor = tl.load(v_scale) * UNIT
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    acc = tl.full((ROWS, VALUE_TILE), 0.0, tl.float32)
    for step in tl.range(0, steps):
        key_tile = tl.where(step < sink_tiles, step, first_tile + step - sink_tiles)
        key = key_tile * KEYS + tl.arange(0, KEYS)
        live = (key < stop) & ((key >= low) | (key < sink_stop))
        entry = tl.load(table + request * table_b + key // BLOCK, mask=live, other=0).to(tl.int64)
        slot = key % BLOCK
        key_at = keys + entry * key_page + slot * key_slot + kv_head * key_h
        k = tl.load(key_at[:, None] + dims[None, :], mask=live[:, None] & (dims < DIM)[None, :], other=0)
        value_at = values + entry * value_page + slot * value_slot + kv_head * value_h
        v_mask = live[:, None] & (value_dims < VALUE)[None, :]
        v = tl.load(value_at[:, None] + value_dims[None, :], mask=v_mask, other=0)
        if FP8:
            k = e4m3_to(k, DOT, FP8_BYTES, INTERPRETED)
            v = e4m3_to(v, DOT, FP8_BYTES, INTERPRETED)
        qk = dot(q, tl.trans(k.to(DOT)), tl.full((ROWS, KEYS), 0.0, tl.float32), UPCAST)
        inside = (key[None, :] >= start[:, None]) | (key < sink_stop)[None, :]
        visible = (key[None, :] <= position[:, None]) & inside
        qk = qk * factor
        if HAS_SOFT_CAP:
            # Scores and the cap are times log2(e). tanh(x) = 1 - 2 / (1 + exp(2x)), which is 1 long before 2**100.
            grown = tl.exp2(tl.minimum(qk * (2.0 * 1.4426950408889634 / soft_cap), 100.0))
            qk = soft_cap - 2.0 * soft_cap / (1.0 + grown)
        qk = tl.where(visible, qk, float("-inf"))
        highest = tl.maximum(maximum, row_max(qk))
        reference = tl.where(highest == float("-inf"), 0.0, highest)
        grown = tl.exp2(maximum - reference)
        maximum = highest
        p = tl.exp2(qk - (reference - SHIFT)[:, None])
        total = total * grown + row_sum(p)
        acc = dot(round_to(p, DOT, INTERPRETED), v.to(DOT), acc * grown[:, None], UPCAST)

    seen = total > 0
    log_sum = tl.where(seen, maximum - SHIFT + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    norm = tl.where(seen, v_factor / tl.where(seen, total, 1.0), 0.0)
    if HAS_SINK:
        whole = with_sink(log_sum, tl.load(sink + head) * 1.4426950408889634)
        norm = norm * tl.exp2(log_sum - tl.where(seen, whole, 0.0))
        log_sum = whole
    stored = query_rows < q_len * GROUP
    lse_at = lse + request * lse_b + token.to(tl.int64) * lse_t + head * lse_h
    tl.store(lse_at, log_sum * 0.6931471805599453, mask=stored)
    to = out + request * out_b + token.to(tl.int64) * out_t + head * out_h
    stored_values = stored[:, None] & (value_dims < VALUE)[None, :]
    result = round_to(acc * norm[:, None], out.dtype.element_ty, INTERPRETED)
    tl.store(to[:, None] + value_dims[None, :], result, mask=stored_values)


ATTEND = TritonKernel(_attend_tile, varying=("q_len", "columns", "window", "chunk", "sink_tokens"))


def attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    q_lens: torch.Tensor | None = None,
    window: int | None = None,
    chunk: int | None = None,
    sink: torch.Tensor | None = None,
    sink_tokens: int = 0,
    soft_cap: float | None = None,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Attention of `query` [batch, q_len, heads, dim] over caches [entries, block_size, kv_heads, dim].

    Table, lengths, causality, empty rows and LSE as in `contract.MlaCall`. `sink` float32 [heads] is a logit without a
    value; the first `sink_tokens` keys are seen by all later queries, whatever the window or chunk. `soft_cap` as for
    `paged_attention`.
    """
    attend_launch(
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        out,
        lse,
        scale=scale,
        q_lens=q_lens,
        window=window,
        chunk=chunk,
        sink=sink,
        sink_tokens=sink_tokens,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
        capability=machine_of(query.device).capability,
    ).run()


def attend_launch(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    q_lens: torch.Tensor | None,
    window: int | None,
    chunk: int | None,
    sink: torch.Tensor | None,
    sink_tokens: int,
    soft_cap: float | None,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    capability: tuple[int, int],
) -> Launch:
    """The launch of `attend` for a GPU of that compute capability."""
    batch, q_len, heads, dim = query.shape
    kv_heads, value_dim = value_cache.shape[2:]
    group = heads // kv_heads
    fp8 = key_cache.dtype == torch.float8_e4m3fn
    if fp8:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    wide = torch.float32 in (query.dtype, key_cache.dtype)
    dot_dtype = torch.float32 if wide else query.dtype if fp8 else key_cache.dtype
    interpreted = query.device.type == "cpu"
    # 64 rows fill the matrix instruction of sm_90 and sm_100; a decode step with a small group has at most 16. sm_80
    # keeps operands in registers: 64 rows of a head of 256 spill there.
    rows = 16 if group * q_len <= 16 or wide else 32 if dim > 128 and capability < (9, 0) else 64
    # Keys and values of a tile, twice for the pipeline, beside the accumulator: heads of 256 take half as many keys.
    keys = 16 if wide else 64 if dim <= 128 else 32
    return Launch(
        ATTEND,
        (-(-group * q_len // rows), kv_heads, batch),
        {
            "query": query,
            "keys": key_cache,
            "values": value_cache,
            "table": block_table,
            "seq_lens": seq_lens,
            "q_lens": seq_lens if q_lens is None else q_lens,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "sink": lse if sink is None else sink,
            "out": out,
            "lse": lse,
            "score_factor": scale * math.log2(math.e),
            "soft_cap": (soft_cap or 1.0) * math.log2(math.e),
            "query_b": query.stride(0),
            "query_t": query.stride(1),
            "query_h": query.stride(2),
            "key_page": key_cache.stride(0),
            "key_slot": key_cache.stride(1),
            "key_h": key_cache.stride(2),
            "value_page": value_cache.stride(0),
            "value_slot": value_cache.stride(1),
            "value_h": value_cache.stride(2),
            "table_b": block_table.stride(0),
            "out_b": out.stride(0),
            "out_t": out.stride(1),
            "out_h": out.stride(2),
            "lse_b": lse.stride(0),
            "lse_t": lse.stride(1),
            "lse_h": lse.stride(2),
            "q_len": q_len,
            "columns": block_table.shape[1],
            "window": window or 0,
            "chunk": chunk or 0,
            "sink_tokens": sink_tokens,
            "BLOCK": key_cache.shape[1],
            "GROUP": group,
            "DIM": dim,
            "DIM_TILE": max(16, 1 << (dim - 1).bit_length()),
            "VALUE": value_dim,
            "VALUE_TILE": max(16, 1 << (value_dim - 1).bit_length()),
            "ROWS": rows,
            "KEYS": keys,
            "DOT": _DOT[dot_dtype],
            "FP8": fp8,
            "FP8_BYTES": fp8 and capability < (8, 9) and not (interpreted and capability == (0, 0)),
            "SHIFT": FLOAT16_SHIFT if dot_dtype == torch.float16 else 0,
            "HAS_Q_LENS": q_lens is not None,
            "HAS_WINDOW": window is not None,
            "HAS_CHUNK": chunk is not None,
            "HAS_SINK": sink is not None,
            "HAS_SOFT_CAP": soft_cap is not None,
            "INTERPRETED": interpreted,
            "UPCAST": wide or interpreted,
        },
        warps=4 if rows == 16 else 8 if dim > 128 else 4,
        stages=2,
    )
