"""What fits: `fits` says yes exactly when the request really runs to its end in the manager it asks about.

The judge is a real manager, prefix caching on, driven chunk by chunk: with an empty pool, and with a pool whose every
page holds cached blocks of other requests. Then the public reports about admission, whose numbers in `facts/vllm.md`
§4.1 head the tests, with the values that are right.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvtide.hma import HybridMemoryManager, fits
from kvtide.kvcache import Exhausted, FullAttention, LayerSpec, SlidingWindow
from kvtide.kvcache.geometry import PageGeometry
from kvtide.kvcache.solver import solve_geometry

sys.path.insert(0, str(Path(__file__).parent))

from layouts import layout_of, qwen_3_5_27b
from machine import geometries
from oracle import fingerprint, geometry_of

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
                count = min(16, MAX_LEN - done)
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


@settings(
    max_examples=settings().max_examples // 2, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
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


def hybrid(
    full: int, window: int, *, layers: tuple[int, int] = (1, 1), reach: int, bytes_per_token: tuple[int, int] = (2, 2)
) -> PageGeometry:
    """Full layers in blocks of `full` tokens and windows in blocks of `window`, a table per layer and a page per block.

    `bytes_per_token` make the blocks of both equally large.
    """
    specs: list[LayerSpec] = [
        FullAttention(1, bytes_per_token[0] // 2, bytes_per_token[0] // 2, "float8_e4m3"),
        SlidingWindow(1, bytes_per_token[1] // 2, bytes_per_token[1] // 2, "float8_e4m3", window=reach),
    ]
    layout = layout_of("hybrid", *zip(layers, specs, strict=True))
    names = [group.name for group in layout.groups]
    geometry = geometry_of(layout, dict(zip(names, (full, window), strict=True)), dict(zip(names, layers, strict=True)))
    assert len({fmt.block_bytes for fmt in geometry.formats}) == 1
    return geometry


def least_pool(geometry: PageGeometry, prompt: int, output: int = 1, **how: Any) -> int:
    """Pages of the smallest pool in which the request fits."""
    options = {"max_model_len": 131_072, "max_step_tokens": 32_768}
    return 1 + bisect_left(
        range(1, 10_000), True, key=lambda pages: fits(manager_of(geometry, pages, **options), prompt, output, **how)
    )


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(**CASES)
def test_the_last_pool_that_does_not_fit_and_the_first_that_does(
    geometry: PageGeometry, pages: int, lookahead: int, prompt: int, output: int, **how: Any
) -> None:
    """Random pools are mostly much too small or much too large; here both sides of the border are run."""
    assume(prompt + max(output, 1) - 1 <= MAX_LEN)

    def accepted(pages: int) -> bool:
        return fits(manager_of(geometry, pages, lookahead=lookahead), prompt, output, **how)

    least = 1 + bisect_left(range(1, 2_000), True, key=accepted)
    for count in (least - 1, least):
        if count:
            manager = manager_of(geometry, count, lookahead=lookahead)
            assert really_fits(manager, prompt, output, **how) is accepted(count) is (count == least)


def test_blocks_that_are_pages_of_their_own_fit_a_full_pool_just_as_well() -> None:
    geometry = hybrid(4, 4, layers=(2, 3), reach=9)
    steps = [(done, min(done + 7, 50)) for done in range(0, 50, 7)] + [(done, done + 1) for done in range(50, 55)]
    # Before a step the window goes back 8 tokens; after it the step's tokens are there as well.
    most = max(2 * -(-after // 4) + 3 * (-(-after // 4) - max(before - 8, 0) // 4) for before, after in steps)
    for pages in range(20, 60):
        manager = manager_of(geometry, pages)
        fill_with_cache(manager, 2)
        assert manager.pool.free_pages == 0
        expected = fits(manager, 50, 6, step_tokens=7)
        assert really_fits(manager, 50, 6, step_tokens=7) is expected
        assert expected is (pages >= most)


def test_longer_than_the_model_never_fits() -> None:
    manager = manager_of(hybrid(4, 4, reach=8), 1_000)
    assert fits(manager, MAX_LEN, 1)
    assert fits(manager, MAX_LEN, 0)
    assert fits(manager, 1, MAX_LEN)
    assert fits(manager, MAX_LEN - 10, 11)
    for prompt, output in ((MAX_LEN + 1, 0), (MAX_LEN + 1, 1), (MAX_LEN, 2), (1, MAX_LEN + 1), (MAX_LEN - 10, 12)):
        assert not fits(manager, prompt, output)
    for prompt, output in ((0, 5), (-1, 5), (5, -1)):
        assert not fits(manager, prompt, output)
    assert not fits(manager, 5, 5, image_tokens=MAX_LEN + 1)


def test_asking_changes_nothing_and_is_not_swayed_by_who_is_there() -> None:
    geometry = hybrid(4, 4, reach=8)
    manager = manager_of(geometry, 24)
    fill_with_cache(manager, 2)
    row = manager.admit("running", [1] * 30).row
    manager.reserve([row], [30])
    before = fingerprint(manager)
    answers = [fits(manager, prompt, 3) for prompt in range(1, 62)]
    assert fingerprint(manager) == before
    assert answers == [fits(manager_of(geometry, 24), prompt, 3) for prompt in range(1, 62)]
    assert answers == sorted(answers, reverse=True)
    assert set(answers) == {True, False}


# -- public reports ----------------------------------------------------------------------------------------------------


def test_01_39734_a_long_prompt_needs_its_window_and_one_step() -> None:
    """512 blocks of the full layer; the window holds 64 of the step before and 128 of this one. vLLM wanted 1,024."""
    assert least_pool(hybrid(16, 16, reach=1024), 8192, step_tokens=2048) == 512 + 64 + 128


def test_02_55800_window_blocks_beside_blocks_of_2304_fit_in_chunks() -> None:
    """1,011 pages: one step of 16,384 tokens takes 1,024 window blocks, unless dead tokens get none; chunks fit."""
    geometry = hybrid(2304, 16, reach=2048, bytes_per_token=(2, 288))
    manager = manager_of(geometry, 1011, max_model_len=32_768, max_step_tokens=16_384)
    assert not fits(manager, 20_000)
    assert fits(manager, 20_000, kv_from_activations=True)
    assert fits(manager, 20_000, step_tokens=8192)
    # Steady: 9 blocks of 2,304 tokens, and a window of 128 blocks and the one that is being filled.
    assert least_pool(geometry, 20_000, step_tokens=16) == 9 + 129


@pytest.mark.parametrize(("reach", "block", "steady", "charged"), [(4, 4, 2, 8194), (512, 32, 17, 1041)])
def test_03_54703_tokens_in_flight_are_charged_once_to_the_pool(
    reach: int, block: int, steady: int, charged: int
) -> None:
    """n requests need n windows and one burst, not n bursts, which is what vLLM charges each of them."""
    geometry = geometry_of(
        layout_of("window", (1, SlidingWindow(1, 1, 1, window=reach))), {"sliding_window": block}, {"sliding_window": 1}
    )
    in_flight, requests = 32_768, 16
    burst = -(-in_flight // block)
    assert charged == -(-(reach - 1 + in_flight) // block) + 1
    manager = manager_of(
        geometry, requests * steady + burst, max_requests=requests, max_model_len=10_000, max_step_tokens=in_flight
    )
    rows = [manager.admit(f"r{n}", [n] * 5_000).row for n in range(requests)]
    for _ in range(2):
        # All requests together have as many tokens in flight as one of them could have.
        counts = [in_flight // requests] * requests
        manager.reserve(rows, counts)
        manager.commit(rows, counts)
    assert requests * (steady - 1) <= int((manager.pool.refs > 0).sum()) <= requests * steady
    assert least_pool(geometry, 600, 100, step_tokens=1) == steady
    assert least_pool(geometry, 32_769, kv_from_activations=True) == steady


def test_07_40691_the_longest_request_uses_the_whole_pool() -> None:
    """One full layer and five windows of 1,024 in 5,999 blocks of 16: (5,999 - 5 x 65) x 16 tokens, not 15,984."""
    manager = manager_of(hybrid(16, 16, layers=(1, 5), reach=1024), 5999, max_model_len=131_072)
    longest = (5999 - 5 * 65) * 16
    assert longest == 90_784
    assert fits(manager, longest, step_tokens=16)
    assert not fits(manager, longest + 1, step_tokens=16)


def test_14_a_tiny_prompt_costs_its_states_and_a_page_per_group() -> None:
    geometry = solve_geometry(qwen_3_5_27b())
    state, attention = geometry.formats
    assert (state.block_size, attention.block_size) == (0, 16)
    least = least_pool(geometry, 12)
    assert least == -(-state.tables // state.blocks_per_page) + -(-attention.tables // attention.blocks_per_page)
    # The states are the fixed cost, and all else is less than one page of either group, and their tails.
    assert (
        least * geometry.page_bytes < state.group.state_bytes + 2 * geometry.page_bytes + least * state.page_tail_bytes
    )
    assert least_pool(geometry, 12 + 16 * attention.blocks_per_page) > least
