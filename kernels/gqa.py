"""Paged attention with keys and values per head (MHA, GQA, MQA): the layers of hybrid models that are not MLA.

    full attention     nothing                              sliding window   window
    chunked local      chunk                                sinks + window   window, sink_tokens
    sink logits        sinks (gpt-oss, MiMo-V2), any kind      soft cap         soft_cap (Gemma-2), any kind

Same tables, positions, empty rows and LSE as MLA decode (`contract.py`), for any number of query tokens, so decode and
chunked prefill are one call. Triton on CUDA, torch elsewhere. A compact table (one that starts at the first block still
held) takes the lengths that `table_lengths` gives.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from kvtide.kvcache import ConfigError

from .arguments import (
    MAX_TOKENS,
    QUERY_DTYPES,
    check_choice,
    check_contiguous,
    check_entries,
    check_lengths,
    check_result,
    check_rows,
    check_scale,
    check_sink,
    check_soft_cap,
    check_tensor,
    check_tokens,
    check_whole,
)
from .contract import AttentionResult
from .scales import quantisation_scale

_BACKENDS = ("torch", "triton")


def table_lengths(
    num_tokens: npt.ArrayLike, first_block: npt.ArrayLike, sink_blocks: int, block_size: int
) -> npt.NDArray[np.int32]:
    """`seq_lens` for compact tables: tokens of each row from the table's first column on, int32 [batch].

    `num_tokens` counts from the sequence's start, the step's new tokens included; `first_block` is `GroupTable.first`
    of the rows, `sink_blocks` the columns before it. The tokens between sinks and window are not there: that moves a
    query and its window by as much, so that window, chunk and sinks keep their meaning. 0 for a table without tokens.
    """
    gone = (np.asarray(first_block, np.int64) - sink_blocks) * block_size
    held: npt.NDArray[np.int64] = np.maximum(np.asarray(num_tokens, np.int64) - gone, 0)
    return held.astype(np.int32)


@torch.no_grad()
def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    sink_tokens: int = 0,
    soft_cap: float | None = None,
    q_lens: torch.Tensor | None = None,
    k_scale: torch.Tensor | float = 1.0,
    v_scale: torch.Tensor | float = 1.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    backend: str | None = None,
) -> AttentionResult:
    """Attention of the last `q_len` tokens of each row over its cached keys and values.

    `query` [batch, q_len, heads, dim], float32, float16 or bfloat16. `key_cache` [entries, block_size, kv_heads, dim]
    and `value_cache` [..., value_dim]: `Arena.view(layer, "k")` and `"v"`, of one dtype (e4m3 included); `heads` is a
    multiple of `kv_heads`. `block_table`, `seq_lens`, `q_lens`, `scale` as for `mla_decode`.
    `window`: a query sees itself and the `window - 1` tokens before it. `chunk`: it sees its own chunk, up to itself;
    chunks start at multiples of `chunk`, a multiple of the block size. `sink_tokens`: the first tokens that all later
    ones see besides. `sinks` [heads]: logits that take part in the softmax and add no value. `soft_cap`: a score s
    becomes soft_cap * tanh(s / soft_cap), before masks and sinks. `backend`: "torch" or "triton"; None takes Triton on
    CUDA.

    Returns `out` [batch, q_len, heads, value_dim] of the query's dtype, and `lse` float32 [batch, q_len, heads].
    """
    query = check_tensor("query", query, ("batch", "q_len", "heads", "dim"), QUERY_DTYPES, None)
    batch, q_len, heads, dim = query.shape
    device = query.device
    dtypes = (*QUERY_DTYPES, torch.float8_e4m3fn)
    key_cache = check_tensor("key_cache", key_cache, ("entries", "block_size", "kv_heads", dim), dtypes, device)
    value_cache = check_tensor(
        "value_cache", value_cache, (*key_cache.shape[:3], "value_dim"), (key_cache.dtype,), device
    )
    check_contiguous("key_cache", key_cache)
    check_contiguous("value_cache", value_cache)
    entries, block_size, kv_heads, _ = key_cache.shape
    if not block_size or not kv_heads or not heads or heads % kv_heads:
        raise ConfigError(
            f"query has {heads} heads, and key_cache {kv_heads} in blocks of {block_size}; all must be at least 1, and "
            f"the first a multiple of the second"
        )
    window, chunk = check_tokens("window", window), check_tokens("chunk", chunk)
    sink_tokens = min(check_whole("sink_tokens", sink_tokens, 0), MAX_TOKENS)
    if window is not None and chunk is not None:
        raise ConfigError(f"window {window} and chunk {chunk} are both given; a layer has one of them")
    if chunk is not None and chunk % block_size:
        raise ConfigError(f"chunk {chunk} must be a multiple of the block size {block_size}")
    check_choice("backend", backend, _BACKENDS)
    is_fp8 = key_cache.dtype == torch.float8_e4m3fn
    block_table = check_rows("block_table", block_table, (batch, "columns"), device)
    seq_lens = check_rows("seq_lens", seq_lens, (batch,), device)
    q_lens = None if q_lens is None else check_rows("q_lens", q_lens, (batch,), device)
    sinks = check_sink("sinks", sinks, heads, device)
    scales = [
        quantisation_scale(name, value, device, is_fp8=is_fp8)
        for name, value in (("k_scale", k_scale), ("v_scale", v_scale))
    ]
    out = check_result("out", out, (batch, q_len, heads, value_cache.shape[3]), query.dtype, device)
    lse = check_result("lse", lse, (batch, q_len, heads), torch.float32, device)
    scale, soft_cap = check_scale(scale), check_soft_cap(soft_cap)
    check_lengths(block_table, seq_lens, q_lens, q_len, block_size)
    if not (batch and q_len and block_table.shape[1] and entries):
        out.zero_()
        lse.fill_(-math.inf)
    elif backend == "triton" or (backend is None and device.type == "cuda"):
        from . import triton_gqa

        triton_gqa.attend(
            query if query.stride(3) == 1 else query.contiguous(),
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
            sink=sinks,
            sink_tokens=sink_tokens,
            soft_cap=soft_cap,
            k_scale=scales[0],
            v_scale=scales[1],
        )
    else:
        out.zero_()
        lse.fill_(-math.inf)
        lengths = seq_lens.tolist()
        tokens = [q_len] * batch if q_lens is None else q_lens.tolist()
        for row in range(batch):
            before, count = lengths[row] - tokens[row], tokens[row]
            visible = _visible(before, count, window, chunk, sink_tokens, device)
            # Only tokens that some query sees are read: others may be gone, and their entries -1.
            read = torch.nonzero(visible.any(dim=0)).squeeze(1)
            if not len(read):
                continue
            at = block_table[row, read // block_size].long(), read % block_size
            check_entries(at[0], entries)
            keys, values = (
                _gathered(cache, at) * factor for cache, factor in ((key_cache, scales[0]), (value_cache, scales[1]))
            )
            out[row, :count], lse[row, :count] = _attend(
                query[row, :count].float(), keys, values, visible[:, read], scale, soft_cap, sinks
            )
    return AttentionResult(out, lse)


def _visible(
    before: int, count: int, window: int | None, chunk: int | None, sink_tokens: int, device: torch.device
) -> torch.Tensor:
    """Which keys `[count, before + count]` the last `count` tokens see."""
    places = torch.arange(max(before + count, 0), device=device)
    positions = torch.arange(before, before + count, device=device)[:, None]
    near = places <= positions
    if window is not None:
        near &= places > positions - window
    if chunk is not None:
        near &= places >= positions // chunk * chunk
    return near | ((places < sink_tokens) & (places <= positions))


def _gathered(cache: torch.Tensor, at: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Tokens `[n, kv_heads, dim]` of a cache, as float32."""
    if cache.dtype != torch.float8_e4m3fn:
        return cache[at].float()
    return cache.view(torch.uint8)[at].view(cache.dtype).float()


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[count, heads, value_dim]` and LSE `[count, heads]` of one row, in float32."""
    count, _, dim = query.shape
    grouped = query.view(count, keys.shape[1], -1, dim).permute(1, 2, 0, 3)
    scores = scale * torch.matmul(grouped, keys.permute(1, 2, 0)[:, None])
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill_(~visible, -math.inf).flatten(0, 1)
    lse = torch.logsumexp(scores, dim=-1)
    if sinks is not None:
        lse = torch.where(lse == -math.inf, lse, torch.logaddexp(lse, sinks[:, None]))
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0)[..., None])
    out = torch.matmul(weights.view(keys.shape[1], -1, *weights.shape[1:]), values.transpose(0, 1)[:, None])
    return out.flatten(0, 1).transpose(0, 1), lse.transpose(0, 1)
