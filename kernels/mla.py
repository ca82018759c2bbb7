"""MLA decode for engines: check a step's tensors, let the registry choose a kernel, run it.

Called once per layer and step. Everything it looks at is known to the host, so it never waits for the device and can be
captured in a CUDA graph (for which `out` and `lse` should be given). What the masks, positions and empty rows mean is
written in `contract.py`; which kernel runs, in `registry.py`. Not for tracing: `torch.compile` breaks its graph here a
few times (once, behind `torch.compiler.disable`); for one graph, an engine makes a custom operator of its call.
"""

from __future__ import annotations

import math

import torch

from kvtide.kvcache import ConfigError

from .arguments import (
    QUERY_DTYPES,
    check_contiguous,
    check_entries,
    check_lengths,
    check_result,
    check_rows,
    check_scale,
    check_sink,
    check_tensor,
    check_tokens,
    check_whole,
)
from .contract import AttentionResult, MlaCall
from .formats import SCALE_GROUP, LatentFormat
from .projections import UpProjections
from .registry import Backend, select
from .scales import quantisation_scale

MAX_QUERY_TOKENS = 8


@torch.no_grad()
def mla_decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    latent_dim: int = 512,
    rope_dim: int = 64,
    q_lens: torch.Tensor | None = None,
    k_scale: torch.Tensor | float = 1.0,
    window: int | None = None,
    sink: torch.Tensor | None = None,
    projections: UpProjections | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    backend: Backend | str | None = None,
    batch_invariant: bool = False,
    finite_unused: bool = False,
) -> AttentionResult:
    """Attention of the last 1 to 8 tokens of each row over its cached latents; for inference, without gradients.

    `query` [batch, q_len, heads, latent_dim + rope_dim], absorbed, float32, float16 or bfloat16; with `projections`
    [batch, q_len, heads, nope_dim + rope_dim], and they are absorbed here.
    `cache` [entries, block_size, width]: `Arena.view(layer, "latent")`, or a tensor like it; see `LatentFormat`.
    `block_table` int32 [batch, columns]: entries of `cache`, anything beyond a row's end.
    `seq_lens` int32 [batch]: tokens of each row from the table's first column on, the new ones included and written
    (`table_lengths` gives it for compact tables). `q_lens` int32 [batch]: rows use their first `q_lens[i]` query
    tokens only, which are the row's last tokens.
    `scale` multiplies query . key: the model's own (DeepSeek's is (nope_dim + rope_dim) ** -0.5 times its mscale
    squared). `k_scale`: the number, or float32 [1], by which an fp8_e4m3 cache was divided when written.
    `window`: a query sees itself and the `window - 1` tokens before it. `sink` [heads]: logits without a value.
    `backend` forces a kernel, as KVTIDE_ATTENTION_BACKEND does. `batch_invariant`: a row's result does not depend on
    the batch, bit for bit. `finite_unused` promises that the pool holds no NaN and no infinity, not even where no token
    is (it was zeroed, and only ever holds one type of value): then kernels that need this may be chosen too.

    Returns `out` [batch, q_len, heads, latent_dim] (with `projections` [..., value_dim]) of the query's dtype and `lse`
    float32 [batch, q_len, heads]; 0 and -inf where a query sees nothing. `ConfigError` for arguments that do not fit,
    `BackendUnavailable` if no kernel, or not the named one, can run the call.
    """
    if projections is not None:
        check_projections(projections, query, ("batch", "q_len"), latent_dim, rope_dim)
        absorbed = mla_decode(
            projections.absorb(query),
            cache,
            block_table,
            seq_lens,
            scale=scale,
            latent_dim=latent_dim,
            rope_dim=rope_dim,
            q_lens=q_lens,
            k_scale=k_scale,
            window=window,
            sink=sink,
            lse=lse,
            backend=backend,
            batch_invariant=batch_invariant,
            finite_unused=finite_unused,
        )
        shape = (*query.shape[:3], projections.value_dim)
        result = check_result("out", out, shape, query.dtype, query.device)
        return AttentionResult(result.copy_(projections.to_values(absorbed.out)), absorbed.lse)
    latent_dim, rope_dim = check_widths(latent_dim, rope_dim)
    query = check_tensor("query", query, ("batch", "q_len", "heads", latent_dim + rope_dim), QUERY_DTYPES, None)
    batch, q_len, heads, _ = query.shape
    device = query.device
    if not 1 <= q_len <= MAX_QUERY_TOKENS or not heads:
        raise ConfigError(
            f"query has {q_len} tokens and {heads} heads; allowed are 1 to {MAX_QUERY_TOKENS} tokens (more are for "
            f"mla_prefill) and at least 1 head"
        )
    fmt = check_cache(cache, latent_dim, rope_dim, device)
    call = MlaCall(
        query=query if query.stride(-1) == 1 else query.contiguous(),
        cache=cache,
        block_table=check_rows("block_table", block_table, (batch, "columns"), device),
        seq_lens=check_rows("seq_lens", seq_lens, (batch,), device),
        q_lens=None if q_lens is None else check_rows("q_lens", q_lens, (batch,), device),
        fmt=fmt,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        scale=check_scale(scale),
        k_scale=quantisation_scale("k_scale", k_scale, device, is_fp8=fmt is LatentFormat.FP8),
        window=check_tokens("window", window),
        sink=check_sink("sink", sink, heads, device),
        out=check_result("out", out, (batch, q_len, heads, latent_dim), query.dtype, device),
        lse=check_result("lse", lse, (batch, q_len, heads), torch.float32, device),
        batch_invariant=bool(batch_invariant),
    )
    check_lengths(call.block_table, call.seq_lens, call.q_lens, q_len, call.block_size)
    if not batch or not call.max_kv_len or not cache.shape[0]:
        # No row has a key: not a question for a kernel, and some would read the first entry.
        call.out.zero_()
        call.lse.fill_(-math.inf)
    else:
        if device.type == "cpu":
            check_entries(_read_entries(call), cache.shape[0])
        select(call, backend, finite_unused=bool(finite_unused))(call)
    return AttentionResult(call.out, call.lse)


def check_widths(latent_dim: object, rope_dim: object) -> tuple[int, int]:
    """Values of a token's latent and of its rope, as whole numbers."""
    return check_whole("latent_dim", latent_dim), check_whole("rope_dim", rope_dim, 0)


def _read_entries(call: MlaCall) -> torch.Tensor:
    """The table's entries of blocks with keys that some query token sees."""
    first = torch.arange(call.block_table.shape[1]) * call.block_size
    last = call.seq_lens[:, None]
    read = first < last
    if call.window is not None:
        tokens = call.q_len if call.q_lens is None else call.q_lens[:, None]
        read &= first + call.block_size > last - tokens - call.window + 1
    return call.block_table[read]


def check_cache(cache: object, latent_dim: int, rope_dim: int, device: torch.device) -> LatentFormat:
    """The format of a latent cache: `[entries, block_size, width]`, the elements of a token side by side."""
    dtypes = tuple(dict.fromkeys(fmt.storage_dtype for fmt in LatentFormat))
    cache = check_tensor("cache", cache, ("entries", "block_size", "width"), dtypes, device)
    check_contiguous("cache", cache)
    if not cache.shape[1]:
        raise ConfigError("cache has a block_size of 0; it must be at least 1")
    fmt = LatentFormat.of(cache, latent_dim, rope_dim)
    if fmt is LatentFormat.FP8_DS:
        if latent_dim % SCALE_GROUP:
            raise ConfigError(f"latent_dim {latent_dim} must be a multiple of {SCALE_GROUP} in a cache of {fmt.value}")
        if rope_dim % 2 or not rope_dim:
            raise ConfigError(f"rope_dim {rope_dim} must be even and at least 2 in a cache of {fmt.value}")
        if any(offset % 4 for offset in (*cache.stride()[:2], cache.storage_offset())):
            raise ConfigError(
                f"cache has the strides {list(cache.stride())} and starts at byte {cache.storage_offset()}; the "
                f"float32 scales of {fmt.value} need multiples of 4"
            )
    return fmt


def check_projections(
    projections: UpProjections, query: object, leading: tuple[str, ...], latent_dim: int, rope_dim: int
) -> torch.Tensor:
    """The query, which must be of the projections' heads, dims, dtype and device."""
    if not isinstance(projections, UpProjections):
        raise ConfigError(f"projections is a {type(projections).__name__}; it must be UpProjections")
    if projections.latent_dim != latent_dim:
        raise ConfigError(f"projections are of {projections.latent_dim} latent values; latent_dim is {latent_dim}")
    shape: tuple[int | str, ...] = (*leading, projections.heads, projections.nope_dim + rope_dim)
    return check_tensor("query", query, shape, (projections.w_uk.dtype,), projections.w_uk.device)
