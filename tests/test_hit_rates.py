"""Hit curves against an LRU cache that is simulated block by block, for every size."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.kvcache import ConfigError
from kvtide.sims.hit_rates import lru_hit_curve
from kvtide.sims.traces import Request, open_trace

BLOCK = 16


def simulated(requests: list[Request], capacity: int, warmup: int) -> tuple[int, int]:
    """Tokens hit and all tokens of the requests from `warmup` on, in a cache that is kept block by block."""
    cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hit = total = 0
    for number, request in enumerate(requests):
        ids = request.hash_ids or ()
        prefixes = [ids[: depth + 1] for depth in range(len(ids))]
        alive = True
        for depth, prefix in enumerate(prefixes):
            tokens = min(BLOCK, request.input_tokens - depth * BLOCK)
            alive = alive and prefix in cache
            if number >= warmup:
                total += tokens
                hit += tokens * alive
        for prefix in reversed(prefixes):
            cache[prefix] = None
            cache.move_to_end(prefix)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hit, total


prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40)


@given(prompts=prompts, partial=st.integers(1, BLOCK), warmup=st.sampled_from([0.0, 0.5]))
def test_every_size_of_cache(prompts: list[list[int]], partial: int, warmup: float) -> None:
    requests = [
        Request(str(i), i, (len(ids) - 1) * BLOCK + partial, 1, hash_ids=tuple(ids), hash_block=BLOCK)
        for i, ids in enumerate(prompts)
    ]
    curve = lru_hit_curve(requests, warmup)
    assert curve.longest_prompt == max(map(len, prompts))
    for capacity in range(curve.longest_prompt, curve.unique_blocks + 2):
        hit, total = simulated(requests, capacity, int(len(prompts) * warmup))
        assert curve.total_tokens == total
        assert curve.hit_rate(capacity) == pytest.approx(hit / total)


def test_a_long_trace_crosses_chunks() -> None:
    requests = list(open_trace("demo", num_requests=300))
    requests = [request._replace(hash_ids=(request.hash_ids or ())[:60], hash_block=BLOCK) for request in requests]
    requests = [request._replace(input_tokens=BLOCK * len(request.hash_ids or ())) for request in requests]
    curve = lru_hit_curve(requests)
    for capacity in (60, 200, 1000, 3000):
        hit, total = simulated(requests, capacity, 0)
        assert curve.hit_rate(capacity) == pytest.approx(hit / total)


def test_the_ceiling_of_a_real_trace(shared: Path) -> None:
    """Every block that was seen before is a hit when the cache holds all."""
    requests = list(open_trace(shared / "traces/mooncake/synthetic_trace.jsonl"))
    curve = lru_hit_curve(requests, 0.5)
    seen: set[tuple[int, int]] = set()
    hit = 0
    for number, request in enumerate(requests):
        for depth, block in enumerate(request.hash_ids or ()):
            tokens = min(request.hash_block, request.input_tokens - depth * request.hash_block)
            hit += tokens * ((depth, block) in seen and number >= len(requests) // 2)
        seen.update(enumerate(request.hash_ids or ()))
    assert curve.hit_rate(curve.unique_blocks) == pytest.approx(hit / curve.total_tokens)


def test_errors() -> None:
    with pytest.raises(ConfigError, match="names its prefix blocks"):
        lru_hit_curve([Request("a", 0, 10, 1)])
    with pytest.raises(ConfigError, match="warmup 1 must be"):
        lru_hit_curve([], 1)
