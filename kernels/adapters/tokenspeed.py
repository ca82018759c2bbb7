"""TokenSpeed's MLA decode on Blackwell: `tokenspeed_mla_decode`, the one foreign kernel with a sliding window.

Pages divide 128, the query has the cache's type, the LSE is base 2 and [batch, q_len, heads]. `window_left` counts the
keys before the query's own, so a window of w is w - 1, and the q_len query tokens themselves must fit into it.
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
    architectures=("10.0", "10.3", "10.7"),
    query_dtypes=frozenset({torch.float16, torch.bfloat16}),
    formats=frozenset({LatentFormat.FLOAT16, LatentFormat.BFLOAT16, LatentFormat.FP8}),
    same_dtype=True,
    dims=(512, 64),
    max_heads=128,
    pages=(64, 32, 128, 16),
    stride_alignment=16,
    window="block",
    cuda_graph=True,
    package="tokenspeed_mla",
    distribution="tokenspeed-mla",
    quantizes_query=True,
    reads_unused=True,
)


def load() -> ModuleType:
    """The package. Where its own needs are missing it still imports, with functions that raise ImportError."""
    package = import_module("tokenspeed_mla")
    import_module("tokenspeed_mla.mla_decode")
    return package


def decode(call: MlaCall) -> None:
    """Answer one call."""
    fitted = frame(call, SUPPORT)
    if fitted is None:
        return
    device = fitted.query.device
    out, lse = load().tokenspeed_mla_decode(
        query=fitted.query.contiguous(),
        kv_cache=fitted.cache,
        workspace_buffer=workspace("tokenspeed", device, _workspace_bytes(call, device)),
        kv_lora_rank=call.latent_dim,
        qk_rope_head_dim=call.rope_dim,
        block_tables=fitted.table,
        seq_lens=fitted.seq_lens,
        max_seq_len=fitted.max_kv_len,
        softmax_scale=fitted.scale,
        output_scale=fitted.value_scale,
        out=fitted.out,
        causal_mask=True,
        window_left=-1 if call.window is None else call.window - 1,
        return_lse=True,
    )
    fitted.finish(out, lse, base2=True)


def _workspace_bytes(call: MlaCall, device: torch.device) -> int:
    """Enough for the partial results of any batch: only tiles that together fill the GPU once are split.

    A tile of 128 rows takes two multiprocessors and one of 64 rows one, so there are at most 64 rows of partial output
    and LSE in flight for each; twice that, since the kernel rounds its split counts.
    """
    return 2 * num_sms(device) * 64 * (call.latent_dim + 1) * 4
