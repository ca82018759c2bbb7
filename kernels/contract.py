"""The one call that every MLA decode backend answers: `MlaCall`, checked and complete, so that a backend only computes.

    block table row    [ e0, e1, e2, ... ]        cache[e]: `block_size` tokens of one layer, at byte e * unit
    key position j     block j // block_size of the row, slot j % block_size
    query token t      stands at key position  p = seq_len - q_len + t   (causal, aligned bottom right)
    sees               max(0, p - window + 1) <= j <= p

Positions count from the first column of the table: for a compact window table the caller takes the tokens before its
first block off `seq_lens`, and nothing else changes. Slots that no token fills, blocks outside the row's length and
table entries beyond it may hold anything, NaN included, and must not matter. Entries are int32, offsets are int64.
A query that sees no key gives output 0 and LSE -inf. LSE is the natural logarithm of the sum of exp(scale * q.k), the
sink's logit included. Every backend computes the same numbers, to its format's error bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .formats import LatentFormat


class AttentionResult(NamedTuple):
    """`out` and `lse` (natural logarithm, float32) of an attention call; shapes are those of the function's docs."""

    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class MlaCall:
    """Absorbed MLA decode over paged latents; all tensors on one device, shapes already checked.

    `query` [batch, q_len, heads, latent_dim + rope_dim], last dimension contiguous, float32, float16 or bfloat16.
    `cache` [entries, block_size, width], elements of a token contiguous; the other strides are the arena's.
    `block_table` int32 [batch, columns], last dimension contiguous; `seq_lens` int32 [batch], the new tokens included.
    `q_lens` int32 [batch]: row i has only its first `q_lens[i]` query tokens, which are its last tokens; the rest
    gives 0 and -inf. None: all rows have q_len.
    `k_scale` float32 [1]: one stored FP8 value times it is the real value (of keys and values alike); 1 otherwise.
    `sink` float32 [heads]: a logit that takes part in every softmax and adds no value.
    `out` [batch, q_len, heads, latent_dim] of the query's dtype and `lse` float32 [batch, q_len, heads] are written
    whole, whatever they held. `batch_invariant`: a row's result may not depend on the other rows, bit for bit.
    """

    query: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    q_lens: torch.Tensor | None
    fmt: LatentFormat
    latent_dim: int
    rope_dim: int
    scale: float
    k_scale: torch.Tensor
    window: int | None
    sink: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    batch_invariant: bool

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return self.query.shape[0]

    @property
    def q_len(self) -> int:
        """Query tokens a row, padding included."""
        return self.query.shape[1]

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.query.shape[2]

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.cache.shape[1]

    @property
    def max_kv_len(self) -> int:
        """The longest row that the block table has columns for: known on the host, unlike `seq_lens`."""
        return self.block_table.shape[1] * self.block_size
