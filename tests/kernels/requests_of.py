"""Requests for the registry's tests, without a tensor behind them."""

from __future__ import annotations

from typing import Any

import torch

from kvtide.kernels.device import Machine
from kvtide.kernels.formats import LatentFormat
from kvtide.kernels.support import Request

HOPPER, BLACKWELL, AMPERE = (Machine("cuda", c) for c in ((9, 0), (10, 0), (8, 0)))


def request(**changes: Any) -> Request:
    """A call that every half-precision kernel of its architecture could run."""
    fmt = changes.get("fmt", LatentFormat.BFLOAT16)
    block_size = changes.get("block_size", 128)
    token = fmt.token_bytes(512, 64)
    plain = Request(
        machine=HOPPER,
        query_dtype=torch.bfloat16,
        fmt=fmt,
        latent_dim=512,
        rope_dim=64,
        heads=128,
        q_len=1,
        batch=4,
        kv_len=8192,
        block_size=block_size,
        entries=1000,
        block_stride=block_size * token,
        token_stride=token,
        window=None,
        sink=False,
        varlen=False,
        batch_invariant=False,
        capturing=False,
        finite_unused=True,
    )
    return plain._replace(**changes)
