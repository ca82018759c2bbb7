"""FlashInfer's TensorRT-LLM MLA decode on Blackwell: `trtllm_batch_decode_with_kv_cache_mla`.

Pages are 32 or 64 tokens, the query has the cache's type, head counts between 64 and 128 are not tiled (padded to
128 here), the LSE's base is chosen, and a row without keys leaves the output as it was. The backend is named, not
left to FlashInfer: its own choice would take other table widths, a multiple of 128 tokens. Its FA2 and FA3 kernels
need lengths on the host for every batch, so they are not used.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch

from ..contract import MlaCall
from ..formats import LatentFormat
from ..support import Support
from .framing import frame, workspace

SUPPORT = Support(
    architectures=("10.0", "10.3"),
    query_dtypes=frozenset({torch.float16, torch.bfloat16}),
    formats=frozenset({LatentFormat.BFLOAT16, LatentFormat.FP8}),
    same_dtype=True,
    dims=(512, 64),
    max_heads=128,
    pages=(64, 32),
    stride_alignment=16,
    cuda_graph=True,
    package="flashinfer",
    distribution="flashinfer-python",
    quantizes_query=True,
    reads_unused=True,
)
# What FlashInfer asks for.
WORKSPACE = 128 * 2**20
# The model's own head size before absorption; the kernel is chosen by the absorbed sizes, and this only checked.
QK_NOPE_HEAD_DIM = 128


def load() -> ModuleType:
    """The package's MLA module."""
    return import_module("flashinfer.mla")


def decode(call: MlaCall) -> None:
    """Answer one call."""
    fitted = frame(call, SUPPORT, pad_heads=128 if call.heads > 64 else None)
    if fitted is None:
        return
    device = fitted.query.device
    out, lse = load().trtllm_batch_decode_with_kv_cache_mla(
        query=fitted.query.contiguous(),
        kv_cache=fitted.cache,
        workspace_buffer=workspace("flashinfer", device, WORKSPACE),
        qk_nope_head_dim=QK_NOPE_HEAD_DIM,
        kv_lora_rank=call.latent_dim,
        qk_rope_head_dim=call.rope_dim,
        block_tables=fitted.table,
        seq_lens=fitted.seq_lens,
        max_seq_len=fitted.max_kv_len,
        out=fitted.out,
        bmm1_scale=fitted.scale,
        bmm2_scale=fitted.value_scale,
        backend="trtllm-gen",
        return_lse=True,
        return_lse_base="basee",
    )
    fitted.finish(out, lse.view(*out.shape[:3]))
