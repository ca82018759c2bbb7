"""Who reads the bytes: paged MLA attention, cache writes, block copies, and the registry of kernel backends.

    write_latent, write_kv            new tokens into their blocks
    mla_decode, mla_prefill           attention over latents        merge_states    two results over disjoint keys
    paged_attention                   attention over K and V        table_lengths   lengths for compact tables
    copy_blocks                       whole blocks between memories

Needs torch; the names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvtide.kvcache import MissingExtra

if TYPE_CHECKING:
    from .contract import AttentionResult, MlaCall
    from .copy import copy_blocks
    from .formats import LatentFormat
    from .gqa import paged_attention, table_lengths
    from .merge import merge_states
    from .mla import mla_decode
    from .prefill import mla_prefill
    from .projections import UpProjections
    from .registry import Backend
    from .write import write_kv, write_latent

_HOMES = {
    "AttentionResult": "contract",
    "Backend": "registry",
    "LatentFormat": "formats",
    "MlaCall": "contract",
    "UpProjections": "projections",
    "copy_blocks": "copy",
    "merge_states": "merge",
    "mla_decode": "mla",
    "mla_prefill": "prefill",
    "paged_attention": "gqa",
    "table_lengths": "gqa",
    "write_kv": "write",
    "write_latent": "write",
}

__all__ = [
    "AttentionResult",
    "Backend",
    "LatentFormat",
    "MlaCall",
    "UpProjections",
    "copy_blocks",
    "merge_states",
    "mla_decode",
    "mla_prefill",
    "paged_attention",
    "table_lengths",
    "write_kv",
    "write_latent",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import torch  # noqa: F401
    except ImportError:
        raise MissingExtra("kvtide.kernels", "torch", "torch") from None
    return getattr(import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return __all__
