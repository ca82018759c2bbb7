"""Staging memory: runs never overlap, bytes add up, and what comes back joins what is free."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.kvcache import ConfigError, KvtideError
from kvtide.offload.staging import ALIGNMENT, Staging

STEPS = st.lists(st.one_of(st.integers(0, 5 * ALIGNMENT), st.just("give back")), max_size=60)


@given(STEPS, st.randoms(use_true_random=False))
def test_runs_never_overlap_and_free_bytes_are_exact(steps, random):
    staging = Staging(16 * ALIGNMENT)
    held = []
    for step in steps:
        if step != "give back":
            grant = staging.take(step)
            if grant is not None:
                view = staging.view(grant)
                assert len(view) == step
                view[:] = bytes([len(held) % 251]) * step
                held.append((grant, bytes(view)))
            else:
                assert staging.free_bytes < 16 * ALIGNMENT
        elif held:
            staging.give_back(held.pop(random.randrange(len(held)))[0])
        assert staging.free_bytes == 16 * ALIGNMENT - sum(grant.held for grant, _ in held)
        assert all(bytes(staging.view(grant)) == content for grant, content in held)
    for grant, _ in held:
        staging.give_back(grant)
    whole = staging.take(16 * ALIGNMENT)
    assert whole == (0, 16 * ALIGNMENT, 16 * ALIGNMENT)


def test_giving_back_twice_is_an_error_and_changes_nothing():
    staging = Staging(4 * ALIGNMENT)
    first, second, third = (staging.take(ALIGNMENT) for _ in range(3))
    for grant in (first, third, second):
        staging.give_back(grant)
        with pytest.raises(KvtideError, match="given back twice"):
            staging.give_back(grant)
    assert staging.free_bytes == 4 * ALIGNMENT


def test_memory_starts_on_a_page_and_is_never_less_than_one():
    assert Staging(3 * ALIGNMENT + 100).num_bytes == 3 * ALIGNMENT
    assert Staging(ALIGNMENT).memory.ctypes.data % ALIGNMENT == 0
    with pytest.raises(ConfigError, match="staging_bytes 100 must be at least 4096"):
        Staging(100)
