"""How many requests of a given length fit in a memory budget, and how long a request can get.

A request is charged the pages of its worst moment on the way to its final length. Tokens in flight (a step's batch,
twice with asynchronous scheduling) can hold window blocks that are already out of reach; they are bounded for the whole
pool, so they are charged **once per pool**. vLLM's start-up log charges them to every request; `vllm_capacity` gives
its figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtide.kvcache import ConfigError
from kvtide.kvcache.baselines import grouped_geometry
from kvtide.kvcache.geometry import BlockFormat, PageGeometry
from kvtide.kvcache.layout import ModelLayout
from kvtide.kvcache.specs import ChunkedLocal

# A context that fits beyond this has no limit in memory: every layer holds a bounded number of tokens.
UNBOUNDED = 2**40


class Capacity(NamedTuple):
    """What fits under one policy. `max_context` is in text tokens, None when memory does not limit it."""

    max_concurrency: int
    max_context: int | None
    bytes_per_request: int
    in_flight_bytes: int


class VllmCapacity(NamedTuple):
    """vLLM's own start-up figures: blocks that it charges one request, blocks in the pool, and their ratio."""

    max_concurrency: float
    blocks_per_request: int
    num_blocks: int


def _pages(fmt: BlockFormat, blocks: int) -> int:
    return -(-blocks * fmt.tables // fmt.blocks_per_page)


def request_pages(geometry: PageGeometry, text_tokens: int, image_tokens: int = 0) -> tuple[int, ...]:
    """Pages per group that one request holds at its worst moment, written token by token to the given length."""
    pages = []
    for fmt in geometry.formats:
        own, stored = geometry.tokens_of(fmt, text_tokens, image_tokens)
        pages.append(_pages(fmt, fmt.peak_blocks(int(own), int(stored))))
    return tuple(pages)


def in_flight_pages(
    geometry: PageGeometry, in_flight_tokens: int, text_tokens: int, image_tokens: int = 0, num_requests: int = 1
) -> tuple[int, ...]:
    """Pages per group beyond `request_pages` that tokens in flight can hold, once for a pool of equal requests.

    Only groups that let go of tokens are charged: elsewhere a token in flight is one of the request's own.
    """
    pages = []
    for fmt in geometry.formats:
        spare = 0
        if not fmt.keeps_all and fmt.group.spec.has_bounded_reach:
            own, stored = geometry.tokens_of(fmt, text_tokens, image_tokens)
            every_block = -(-int(stored) // fmt.block_size)
            spare = num_requests * (every_block - fmt.peak_blocks(int(own), int(stored)))
        pages.append(_pages(fmt, min(-(-in_flight_tokens // fmt.block_size), spare)) if spare else 0)
    return tuple(pages)


def request_bytes(geometry: PageGeometry, text_tokens: int, image_tokens: int = 0) -> int:
    """`request_pages`, with the same arguments, in bytes."""
    return _bytes(geometry, request_pages(geometry, text_tokens, image_tokens))


def in_flight_bytes(
    geometry: PageGeometry, in_flight_tokens: int, text_tokens: int, image_tokens: int = 0, num_requests: int = 1
) -> int:
    """`in_flight_pages`, with the same arguments, in bytes."""
    return _bytes(geometry, in_flight_pages(geometry, in_flight_tokens, text_tokens, image_tokens, num_requests))


def _bytes(geometry: PageGeometry, pages: Sequence[int]) -> int:
    return sum(count * fmt.page_bytes for count, fmt in zip(pages, geometry.formats, strict=True))


def plan_capacity(
    geometry: PageGeometry, memory: int, text_tokens: int, image_tokens: int = 0, in_flight_tokens: int = 0
) -> Capacity:
    """What fits in `memory` bytes of one rank when every request has the given length."""
    if text_tokens + image_tokens < 1:
        raise ConfigError("a request needs at least 1 token")
    usable = memory // geometry.page_bytes * geometry.page_bytes
    per_request = request_bytes(geometry, text_tokens, image_tokens)

    def requests_fit(count: int) -> bool:
        extra = in_flight_bytes(geometry, in_flight_tokens, text_tokens, image_tokens, count)
        return count * per_request + extra <= usable

    def context_fits(tokens: int) -> bool:
        extra = in_flight_bytes(geometry, in_flight_tokens, tokens, image_tokens)
        return request_bytes(geometry, tokens, image_tokens) + extra <= usable

    concurrency = _largest(requests_fit, usable // per_request)
    context = _largest(context_fits, UNBOUNDED)
    return Capacity(
        max_concurrency=concurrency,
        max_context=None if context == UNBOUNDED else context,
        bytes_per_request=per_request,
        in_flight_bytes=in_flight_bytes(geometry, in_flight_tokens, text_tokens, image_tokens, max(concurrency, 1)),
    )


def vllm_capacity(
    layout: ModelLayout, memory: int, max_model_len: int, block_size: int = 16, in_flight_tokens: int = 0
) -> VllmCapacity:
    """vLLM 0.33's "maximum concurrency": its groups, with tokens in flight charged to every request."""
    geometry = grouped_geometry(layout, block_size)
    per_group = [_vllm_blocks(fmt, max_model_len, in_flight_tokens) * fmt.tables for fmt in geometry.formats]
    blocks = max(per_group) if geometry.one_table else sum(per_group)
    num_blocks = memory // geometry.page_bytes
    return VllmCapacity(num_blocks / blocks, blocks, num_blocks)


def _vllm_blocks(fmt: BlockFormat, tokens: int, in_flight_tokens: int) -> int:
    """Blocks per table that vLLM's `max_memory_usage` charges a request of `tokens` tokens."""
    spec = fmt.group.spec
    if not fmt.block_size:
        return 1
    if fmt.keeps_all or not spec.has_bounded_reach:
        return -(-tokens // fmt.block_size)
    if isinstance(spec, ChunkedLocal):
        return -(-min(spec.chunk + in_flight_tokens, tokens) // fmt.block_size)
    window = int(spec.needed(UNBOUNDED).num_tokens)
    return -(-min(window - 1 + in_flight_tokens, tokens) // fmt.block_size) + 1


def _largest(fits: Callable[[int], bool], upper: int) -> int:
    """The largest number in [0, upper] that fits, by bisection; 0 when not even 1 does."""
    low, high = 0, upper
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
