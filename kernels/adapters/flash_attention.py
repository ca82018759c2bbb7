"""FlashAttention's MLA: version 3 on Hopper (inside vLLM's wheel only), version 4 on Blackwell (`flash-attn-4`).

Both take the rope parts and the latents as separate views of the same cache, have no padding of heads, and give a
natural LSE: version 3 as [heads, tokens], version 4 as [batch, q_len, heads]. Both multiply the unused slots of a
row's last page by zero, so these have to be finite (flash-attention issues 1745, 1974 and 2374).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from ..contract import MlaCall
from ..formats import LatentFormat
from ..support import Support
from .framing import Frame, frame

_HALF: dict[str, Any] = {
    "query_dtypes": frozenset({torch.float16, torch.bfloat16}),
    "formats": frozenset({LatentFormat.FLOAT16, LatentFormat.BFLOAT16}),
    "same_dtype": True,
    "dims": (512, 64),
    "block_multiple": 16,
    "stride_alignment": 16,
    "cuda_graph": True,
    "reads_unused": True,
}
SUPPORT = Support(architectures=("9.0",), batch_invariant=True, package="vllm", distribution="vllm", **_HALF)
# Not batch invariant even with one split: the batch also decides between its kernels of one and of two blocks a tile.
SUPPORT_4 = Support(
    architectures=("10.x", "11.x"),
    package="flash_attn",
    distribution="flash-attn-4",
    **_HALF,
)


@lru_cache(maxsize=1)
def load() -> ModuleType:
    """Version 3; vLLM can be there without it."""
    module = import_module("vllm.vllm_flash_attn.flash_attn_interface")
    if not module.FA3_AVAILABLE:
        raise ImportError(f"vLLM has no FlashAttention 3 here: {module.FA3_UNAVAILABLE_REASON}")
    return module


@lru_cache(maxsize=1)
def load_4() -> ModuleType:
    """Version 4; `flash_attn` may also be version 2, which has no such module."""
    return import_module("flash_attn.cute.interface")


def decode(call: MlaCall) -> None:
    """Answer one call with version 3."""
    _decode(call, SUPPORT, _version_3)


def decode_4(call: MlaCall) -> None:
    """Answer one call with version 4."""
    _decode(call, SUPPORT_4, _version_4)


def _decode(call: MlaCall, support: Support, kernel: Callable[[Frame], tuple[torch.Tensor, torch.Tensor]]) -> None:
    fitted = frame(call, support)
    if fitted is not None:
        fitted.finish(*kernel(fitted))


def _version_3(fitted: Frame) -> tuple[torch.Tensor, torch.Tensor]:
    call = fitted.call
    batch, q_len, heads, _ = fitted.query.shape
    query = fitted.query.reshape(batch * q_len, heads, -1)
    cache = fitted.cache[:, :, None]
    out, lse = load().flash_attn_varlen_func(
        q=query[..., call.latent_dim :],
        k=cache[..., call.latent_dim :],
        v=cache[..., : call.latent_dim],
        q_v=query[..., : call.latent_dim],
        max_seqlen_q=q_len,
        cu_seqlens_q=torch.arange(0, (batch + 1) * q_len, q_len, dtype=torch.int32, device=query.device),
        max_seqlen_k=fitted.max_kv_len,
        seqused_k=fitted.seq_lens,
        block_table=fitted.table,
        softmax_scale=fitted.scale,
        causal=True,
        return_softmax_lse=True,
        out=fitted.out.view(batch * q_len, heads, -1),
        # Its own choice (0) follows the batch; one split gives a row the same result in every batch.
        num_splits=1 if call.batch_invariant else 0,
        fa_version=3,
    )
    return out.view(batch, q_len, heads, -1), lse.view(heads, batch, q_len).permute(1, 2, 0)


def _version_4(fitted: Frame) -> tuple[torch.Tensor, torch.Tensor]:
    latent = fitted.call.latent_dim
    cache = fitted.cache[:, :, None]
    out, lse = load_4().flash_attn_varlen_func(
        q=fitted.query[..., latent:],
        k=cache[..., latent:],
        v=cache[..., :latent],
        qv=fitted.query[..., :latent],
        max_seqlen_k=fitted.max_kv_len,
        seqused_k=fitted.seq_lens,
        page_table=fitted.table,
        softmax_scale=fitted.scale,
        causal=True,
        num_splits=0,
        return_lse=True,
    )
    return out, lse
