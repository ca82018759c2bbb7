"""`merge_states`: two halves are the whole, and results over no keys are nothing."""

from __future__ import annotations

import math

import pytest
import torch

from kvtide.kernels import merge_states
from kvtide.kvcache import ConfigError

SHAPE = (3, 4, 16)


def attention(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.softmax(scores, dim=-1) @ values, torch.logsumexp(scores, dim=-1)


def test_halves_of_the_keys_are_the_whole_report_27() -> None:
    scores, values = torch.randn(3, 4, 50) * 5, torch.randn(50, 16)
    whole, lse = attention(scores, values)
    parts = attention(scores[..., :20], values[:20]), attention(scores[..., 20:], values[20:])
    for a, b in (parts, parts[::-1]):
        merged = merge_states(*a, *b)
        assert (merged.out - whole).abs().max() < 1e-5
        assert (merged.lse - lse).abs().max() < 1e-5


def test_nothing_is_the_identity_reports_3_4() -> None:
    out, lse = torch.randn(SHAPE), torch.randn(SHAPE[:-1])
    for filler in (0.0, math.nan, math.inf):
        empty = torch.full(SHAPE, filler), torch.full(SHAPE[:-1], -math.inf)
        for merged in (merge_states(out, lse, *empty), merge_states(*empty, out, lse)):
            assert torch.equal(merged.out, out)
            assert torch.equal(merged.lse, lse)
        both = merge_states(*empty, *empty)
        assert not both.out.any()
        assert torch.isneginf(both.lse).all()


def test_strides_of_each_side_are_its_own_report_28() -> None:
    values, lses = torch.randn(2, *SHAPE), torch.randn(2, *SHAPE[:-1])
    right = merge_states(values[0], lses[0], values[1], lses[1])
    padded = torch.full((3, 8, 40), math.nan)
    padded[:, ::2, :16] = values[1]
    heads_first = lses[1].transpose(0, 1).contiguous().transpose(0, 1)
    found = merge_states(values[0], lses[0], padded[:, ::2, :16], heads_first)
    assert torch.equal(found.out, right.out)
    assert torch.equal(found.lse, right.lse)


def test_results_may_be_the_inputs() -> None:
    values, lses = torch.randn(2, *SHAPE), torch.randn(2, *SHAPE[:-1])
    right = merge_states(values[0], lses[0], values[1], lses[1])
    found = merge_states(values[0], lses[0], values[1], lses[1], out=values[0], lse=lses[0])
    assert found.out.data_ptr() == values.data_ptr()
    assert torch.equal(values[0], right.out)
    assert torch.equal(lses[0], right.lse)


def test_far_apart_and_of_two_dtypes() -> None:
    out = torch.randn(SHAPE)
    low, high = torch.full(SHAPE[:-1], -5e4), torch.full(SHAPE[:-1], 5e4)
    merged = merge_states(out.bfloat16(), high, torch.randn(SHAPE), low)
    assert merged.out.dtype == torch.bfloat16
    assert torch.equal(merged.out, out.bfloat16())
    assert torch.equal(merged.lse, high)


def test_shapes_that_differ() -> None:
    out, lse = torch.zeros(SHAPE), torch.zeros(SHAPE[:-1])
    with pytest.raises(ConfigError, match=r"out_b has the shape \[3, 4\]; it must be \[3, 4, 16\]"):
        merge_states(out, lse, lse, lse)
    with pytest.raises(ConfigError, match="lse_a is bfloat16; it must be float32"):
        merge_states(out, lse.bfloat16(), out, lse)
