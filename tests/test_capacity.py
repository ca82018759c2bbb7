"""Capacity: vLLM's published block counts, in-flight tokens once per pool, and what fits by brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.kvcache import ChunkedLocal, ConfigError, FullAttention, Layer, ModelLayout, SlidingWindow
from kvtide.kvcache.baselines import grouped_geometry
from kvtide.kvcache.policies import POLICIES, plan_geometry
from kvtide.sims.capacity import in_flight_bytes, plan_capacity, request_bytes, vllm_capacity

GIB = 2**30


def small_layout(*groups: tuple[int, FullAttention]) -> ModelLayout:
    specs = [spec for count, spec in groups for _ in range(count)]
    return ModelLayout("small", tuple(Layer(i, spec) for i, spec in enumerate(specs)))


@pytest.mark.parametrize(
    ("model", "tokens", "in_flight", "blocks"),
    [
        ("gemma-3-27b", 131072, 2048, 9350),
        ("gemma-3-27b", 131072, 8192, 11654),
        ("gemma-3-27b", 131072, 16384, 14726),
        ("ministral-8b-2410", 131072, 2048, 14723),
        ("ministral-8b-2410", 131072, 16384, 17411),
        ("gpt-oss-20b", 131072, 2048, 8329),
        ("gpt-oss-20b", 131072, 16384, 9225),
        ("llama-4-scout", 2**20, 2048, 67456),
        ("llama-4-scout", 2**20, 16384, 70144),
    ],
)
def test_blocks_that_vllm_charges_a_request(model: str, tokens: int, in_flight: int, blocks: int) -> None:
    assert vllm_capacity(ModelLayout.preset(model), 80 * GIB, tokens, 16, in_flight).blocks_per_request == blocks


def test_in_flight_tokens_are_charged_once_per_pool() -> None:
    """vLLM #54703: window 4, block 4, 32,768 in flight costs 8,194 blocks a request; each request steadily needs 2."""
    layout = small_layout((1, FullAttention(8, 64, 64)), (1, SlidingWindow(8, 64, 64, window=4)))
    geometry = grouped_geometry(layout, 4)
    window = geometry.formats[1]
    assert window.peak_blocks(100_000, 100_000) == 2
    assert in_flight_bytes(geometry, 32768, 100_000, num_requests=1) == 32768 // 4 * window.page_bytes
    assert in_flight_bytes(geometry, 32768, 100_000, num_requests=50) == 32768 // 4 * window.page_bytes
    assert vllm_capacity(layout, GIB, 100_000, 4, 32768).blocks_per_request == 25_000 + 8194


def test_longest_context_of_one_request_in_a_hybrid_pool() -> None:
    """vLLM #40691: one full and five window-1024 groups, 5,999 blocks: (5999 - 5 * 65) * 16 tokens."""
    layout = small_layout((1, FullAttention(8, 128, 128)), (5, SlidingWindow(8, 128, 128, window=1024)))
    geometry = grouped_geometry(layout)
    assert plan_capacity(geometry, 5999 * geometry.page_bytes, 1000).max_context == 90_784


def test_short_requests_owe_nothing_for_tokens_in_flight() -> None:
    geometry = plan_geometry("kvtide", ModelLayout.preset("gemma-3-27b"))
    assert in_flight_bytes(geometry, 8192, 1000) == 0


@pytest.mark.parametrize("policy", POLICIES)
@given(
    tokens=st.integers(1, 3000),
    memory=st.integers(1, 200),
    in_flight=st.integers(0, 4000),
    window=st.integers(1, 500),
    chunked=st.booleans(),
)
def test_plan_is_the_largest_that_fits(
    policy: str, tokens: int, memory: int, in_flight: int, window: int, chunked: bool
) -> None:
    bounded = ChunkedLocal(1, 8, 8, chunk=window) if chunked else SlidingWindow(1, 8, 8, window=window)
    geometry = plan_geometry(policy, small_layout((2, FullAttention(1, 8, 8)), (3, bounded)))
    budget = memory * 4096
    usable = budget // geometry.page_bytes * geometry.page_bytes
    plan = plan_capacity(geometry, budget, tokens, in_flight_tokens=in_flight)

    def fits(count: int, length: int) -> bool:
        extra = in_flight_bytes(geometry, in_flight, length, num_requests=count)
        return count * request_bytes(geometry, length) + extra <= usable

    assert plan.max_concurrency == 0 or fits(plan.max_concurrency, tokens)
    assert not fits(plan.max_concurrency + 1, tokens)
    assert plan.max_context is not None
    assert plan.max_context == 0 or fits(1, plan.max_context)
    assert not fits(1, plan.max_context + 1)


def test_a_model_of_windows_has_no_longest_context() -> None:
    geometry = plan_geometry("kvtide", ModelLayout.preset("mistral-7b-v0.1"))
    assert plan_capacity(geometry, 80 * GIB, 1000).max_context is None


def test_an_empty_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 token"):
        plan_capacity(plan_geometry("kvtide", ModelLayout.preset("llama-3.1-8b")), GIB, 0)
