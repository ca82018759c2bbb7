"""What a prefix cache of any size would hit, from the trace alone: no engine, no time, one pass for all sizes.

A cache under LRU of `c` blocks holds the `c` blocks used last, so a block is hit in every cache that is larger than the
number of others used since (Mattson's stack distance; R. L. Mattson et al., Evaluation techniques for storage
hierarchies, 1970). Within a prompt the head counts as used after the tail: tails go first, and what is held of a prompt
is always a prefix of it. That is the order in which kvtide and vLLM free the blocks of a request.

Blocks lie in the order of their uses, and `live` marks the last use of each. A prompt needs counts of live uses behind
some places: sums over whole chunks, kept up to date, and over a part of one.

    uses   | a b c d | e b a | f ...        live  c d e b a f
    behind b's last use lie a and f: b is hit by every cache of 3 blocks and more
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvtide.kvcache import ConfigError
from kvtide.kvcache.specs import Int64Array

from .traces import Request


class HitCurve(NamedTuple):
    """Tokens hit by the size of the cache. `hit_tokens[i]` are those that a cache of `blocks[i]` blocks hits, rising.

    `total_tokens` are of the prompts that were measured, `unique_blocks` of the whole trace; `longest_prompt` is in
    blocks, and a cache smaller than that would lose the head of a prompt to its own tail.
    """

    blocks: Int64Array
    hit_tokens: Int64Array
    total_tokens: int
    unique_blocks: int
    longest_prompt: int

    def hit_rate(self, capacity: int) -> float:
        """Share of the prompts' tokens that a cache of `capacity` blocks hits."""
        at = int(np.searchsorted(self.blocks, capacity, side="right"))
        return int(self.hit_tokens[at - 1]) / self.total_tokens if at else 0.0


def lru_hit_curve(requests: Sequence[Request], warmup: float = 0.0) -> HitCurve:
    """The curve of a trace whose requests name their prefix blocks; the first `warmup` of them only fill the cache.

    A block is named by its own id and by all before it. `ConfigError` when no measured request names its blocks.
    """
    if not 0 <= warmup < 1:
        raise ConfigError(f"warmup {warmup} must be at least 0 and below 1")
    named = [request for request in requests if request.hash_ids]
    lengths = [len(request.hash_ids or ()) for request in named]
    slots = sum(lengths)
    width = max(64, math.isqrt(slots))
    live = np.zeros((-(-slots // width) + 1, width), dtype=np.int64)
    flat = live.reshape(-1)
    in_chunk = np.zeros(len(live), dtype=np.int64)
    columns = np.arange(width)
    nodes: dict[tuple[int, int], int] = {}
    last = np.full(slots, -1, dtype=np.int64)
    distances, weights = [], []
    first_measured = math.floor(len(named) * warmup)
    total = start = 0
    for number, (request, count) in enumerate(zip(named, lengths, strict=True)):
        path = _path(nodes, request.hash_ids or ())
        known = last[path]
        # What is known of a prompt is a prefix of it.
        hit = int(np.count_nonzero(known >= 0))
        known = known[:hit]
        chunk = known // width
        if number >= first_measured:
            tokens = np.minimum(
                np.full(count, request.hash_block), request.input_tokens - np.arange(count) * request.hash_block
            )
            total += int(tokens.sum())
            behind = in_chunk[::-1].cumsum()[::-1] - in_chunk
            inside = (live[chunk] * (columns >= (known % width)[:, None])).sum(axis=1)
            distances.append(behind[chunk] + inside)
            weights.append(tokens[:hit])
        flat[known] = 0
        np.subtract.at(in_chunk, chunk, 1)
        # The tail first: the head is what was used last.
        fresh = np.arange(start + count - 1, start - 1, -1)
        flat[fresh] = 1
        np.add.at(in_chunk, fresh // width, 1)
        last[path] = fresh
        start += count
    if not total:
        raise ConfigError("no request that would be measured names its prefix blocks")
    needed, tokens = np.concatenate(distances), np.concatenate(weights)
    blocks, which = np.unique(needed, return_inverse=True)
    hits = np.bincount(which, weights=tokens, minlength=len(blocks)).astype(np.int64).cumsum()
    return HitCurve(blocks, hits, total, len(nodes), max(lengths))


def _path(nodes: dict[tuple[int, int], int], ids: Sequence[int]) -> Int64Array:
    """Numbers of a prompt's blocks; equal where all ids up to there are equal."""
    path = np.empty(len(ids), dtype=np.int64)
    node = -1
    for depth, block in enumerate(ids):
        node = nodes.setdefault((node, block), len(nodes))
        path[depth] = node
    return path
