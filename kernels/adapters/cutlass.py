"""CUTLASS's MLA decode on Blackwell, from vLLM: `sm100_cutlass_mla_decode`.

One query token a row, pages of 128 tokens that lie side by side (its strides are compiled in, so a cache of several
layers is out), output and LSE always for 128 heads, LSE natural. FlashInfer carries the same kernel without its LSE
and with a fixed softmax scale, which leaves nothing that this contract could use.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch

from ..contract import MlaCall
from ..device import num_sms
from ..formats import LatentFormat
from ..support import Support
from .framing import frame, workspace

SUPPORT = Support(
    architectures=("10.x",),
    query_dtypes=frozenset({torch.float16, torch.bfloat16}),
    formats=frozenset({LatentFormat.FLOAT16, LatentFormat.BFLOAT16}),
    same_dtype=True,
    dims=(512, 64),
    max_heads=128,
    max_q_len=1,
    pages=(128,),
    compact=True,
    cuda_graph=True,
    package="vllm",
    distribution="vllm",
    reads_unused=True,
)
HEADS = 128
AUTOMATIC_SPLITS = -1


def load() -> ModuleType:
    """vLLM's operators; the name exists in every build, the operator behind it only in those for this GPU."""
    operators = import_module("vllm._custom_ops")
    if not hasattr(torch.ops._C, "sm100_cutlass_mla_decode"):
        raise ImportError("this build of vLLM has no sm100_cutlass_mla_decode")
    return operators


def decode(call: MlaCall) -> None:
    """Answer one call."""
    fitted = frame(call, SUPPORT)
    if fitted is None:
        return
    operators = load()
    query, device = fitted.query[:, 0], fitted.query.device
    out = query.new_empty((call.batch, HEADS, call.latent_dim))
    lse = query.new_empty((call.batch, HEADS), dtype=torch.float32)
    num_bytes = operators.sm100_cutlass_mla_get_workspace_size(
        fitted.max_kv_len, call.batch, num_sms(device), num_kv_splits=AUTOMATIC_SPLITS
    )
    operators.sm100_cutlass_mla_decode(
        out,
        lse,
        query[..., : call.latent_dim],
        query[..., call.latent_dim :],
        fitted.cache,
        fitted.seq_lens,
        fitted.table,
        workspace("cutlass", device, num_bytes).view(torch.uint8),
        fitted.scale,
        AUTOMATIC_SPLITS,
    )
    fitted.finish(out[:, None], lse[:, None])
