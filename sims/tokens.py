"""Token ids for requests of a trace: its own, else made up, equal where it says that prefixes are, unlike elsewhere."""

from __future__ import annotations

import numpy as np

from kvtide.kvcache.specs import Int64Array

from .traces import Request

# Prefix blocks get runs that start at multiples of one large odd step, what is a request's own at those of another.
_RANGE = 2**31
_HASH_STEP = 1_000_003
_OWN_STEP = 7_368_787
_OWN_START = 2**30


def prompt_tokens(number: int, request: Request) -> Int64Array:
    """Ids of the prompt of a trace's request `number`: its own where the trace has them."""
    if request.prompt_ids is not None:
        return np.array(request.prompt_ids, dtype=np.int64)
    if request.hash_ids is None:
        return _own(number, request.input_tokens, 0)
    ids = np.array(request.hash_ids, dtype=np.int64)
    shared = (ids[:, None] * _HASH_STEP + np.arange(request.hash_block)).ravel() % _RANGE
    rest = request.input_tokens - len(shared)
    if rest > 0:
        shared = np.concatenate([shared, _own(number, rest, 2)])
    return shared[: request.input_tokens]


def output_tokens(number: int, request: Request) -> Int64Array:
    """Ids of the tokens that request `number` will sample."""
    if request.output_ids is not None:
        return np.array(request.output_ids, dtype=np.int64)
    return _own(number, request.output_tokens, 1)


def _own(number: int, count: int, stream: int) -> Int64Array:
    return (np.arange(count) + (number * 4 + stream) * _OWN_STEP + _OWN_START) % _RANGE
