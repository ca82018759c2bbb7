"""FlashMLA, dense decode on Hopper: `flash_mla`, from sgl-flash-mla or from upstream up to April 2026.

Its pages are 64 tokens, its LSE is natural and [batch, heads, q_len], a query without a key gets +inf. Its schedule is
valid for one set of shapes *and lengths*, and it does not check: so every call gets a fresh one, which the first
launch fills in on the device. Its own tests put NaN into every unused slot, so those do not matter.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from importlib import import_module
from types import ModuleType

import torch

from ..contract import MlaCall
from ..formats import LatentFormat
from ..support import Support
from .framing import frame

SUPPORT = Support(
    architectures=("9.0",),
    query_dtypes=frozenset({torch.float16, torch.bfloat16}),
    formats=frozenset({LatentFormat.FLOAT16, LatentFormat.BFLOAT16}),
    same_dtype=True,
    dims=(512, 64),
    max_heads=128,
    pages=(64,),
    stride_alignment=16,
    cuda_graph=True,
    package="flash_mla",
    distribution="sgl-flash-mla",
)


def load() -> ModuleType:
    """The package, with kernels for this generation: SGLang's fork keeps them in an extension of their own."""
    package = import_module("flash_mla")
    has_legacy = getattr(package, "has_legacy", None)
    if has_legacy is not None and not has_legacy():
        raise ImportError("it was built without the Hopper kernels")
    return package


@lru_cache(maxsize=1)
def _options() -> dict[str, bool]:
    """What only one of the two packages takes."""
    parameters = inspect.signature(load().flash_mla_with_kvcache).parameters
    return {"use_legacy": True} if "use_legacy" in parameters else {}


def decode(call: MlaCall) -> None:
    """Answer one call."""
    fitted = frame(call, SUPPORT)
    if fitted is None:
        return
    package = load()
    schedule, _ = package.get_mla_metadata()
    out, lse = package.flash_mla_with_kvcache(
        q=fitted.query,
        k_cache=fitted.cache[:, :, None],
        block_table=fitted.table,
        cache_seqlens=fitted.seq_lens,
        head_dim_v=call.latent_dim,
        tile_scheduler_metadata=schedule,
        softmax_scale=fitted.scale,
        causal=True,
        is_fp8_kvcache=False,
        **_options(),
    )
    fitted.finish(out, lse.transpose(1, 2))
