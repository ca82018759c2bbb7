"""What fits: `fits` says yes exactly when the request really runs to its end in the manager it asks about.

The judge is the real manager of the engine, prefix caching on, driven chunk by chunk: once with an empty pool, once
with a pool whose every page holds cached blocks of other requests. Then the public reports about admission
(`facts/vllm.md` §4.1), with the values that are right.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvtide.hma import HybridMemoryManager, fits
from kvtide.kvcache import Exhausted
from kvtide.kvcache.geometry import PageGeometry

sys.path.insert(0, str(Path(__file__).parent))

from machine import geometries

MAX_LEN = 64


def manager_of(geometry: PageGeometry, pages: int, **options: Any) -> HybridMemoryManager:
    options = {"max_requests": 2, "max_model_len": MAX_LEN, "max_step_tokens": 64, **options}
    return HybridMemoryManager(geometry, pages * geometry.page_bytes, **options)


def really_fits(
    manager: HybridMemoryManager,
    prompt: int,
    output: int,
    *,
    token: int = 1,
    image_tokens: int = 0,
    step_tokens: int | None = None,
    kv_from_activations: bool = False,
) -> bool:
    """Run the request as an engine does; it is released afterwards, and leaves what it has in the cache."""
    row = manager.admit(f"t{token}", [token] * prompt, image_tokens=image_tokens).row
    stored = prompt + max(output, 1) - 1
    try:
        while (done := int(manager.committed[row])) < stored:
            count = min(step_tokens or manager.max_step_tokens, prompt - done) if done < prompt else 1
            manager.reserve([row], [count], kv_from_activations=kv_from_activations)
            manager.commit([row], [count], [token] if done >= prompt else None)
    except Exhausted:
        return False
    finally:
        manager.release(row)
    return True


def fill_with_cache(manager: HybridMemoryManager, start: int) -> None:
    """Serve other requests until no page has no content, as far as that goes."""
    for token in range(start, start + 60):
        if not manager.pool.free_pages:
            break
        row = manager.admit(f"f{token}", [token] * MAX_LEN).row
        try:
            while (done := int(manager.committed[row])) < MAX_LEN:
                count = min(manager.base, MAX_LEN - done)
                manager.reserve([row], [count])
                manager.commit([row], [count])
        except Exhausted:
            pass
        manager.release(row)


CASES: dict[str, Any] = {
    "geometry": geometries(),
    "pages": st.integers(1, 60),
    "lookahead": st.sampled_from([0, 0, 1, 3]),
    "prompt": st.integers(1, MAX_LEN),
    "output": st.integers(0, 12),
    "image_tokens": st.sampled_from([0, 0, 9]),
    "step_tokens": st.sampled_from([None, 1, 4, 7, 16]),
    "kv_from_activations": st.booleans(),
}


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(**CASES)
def test_accepts_exactly_what_an_empty_pool_runs(
    geometry: PageGeometry, pages: int, lookahead: int, prompt: int, output: int, **how: Any
) -> None:
    assume(prompt + max(output, 1) - 1 <= MAX_LEN)
    manager = manager_of(geometry, pages, lookahead=lookahead)
    expected = really_fits(manager_of(geometry, pages, lookahead=lookahead), prompt, output, **how)
    assert fits(manager, prompt, output, **how) is expected


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(**CASES)
def test_what_fits_gets_through_a_pool_full_of_cached_blocks(
    geometry: PageGeometry, pages: int, lookahead: int, prompt: int, output: int, **how: Any
) -> None:
    """At once, or after the cache was reset: what is cached can scatter a request over a few pages more."""
    assume(prompt + max(output, 1) - 1 <= MAX_LEN)
    manager = manager_of(geometry, pages, lookahead=lookahead)
    fill_with_cache(manager, 2)
    if fits(manager, prompt, output, **how) and not really_fits(manager, prompt, output, **how):
        manager.reset_cache()
        assert really_fits(manager, prompt, output, **how)
