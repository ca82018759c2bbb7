"""Paged attention with keys and values per head, against float64 attention over the history itself."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from kvtide.kernels import paged_attention
from kvtide.kvcache import ConfigError

POISON_ENTRY = 2_147_480_000


def sees(query: int, key: int, window: int | None, chunk: int | None, sink_tokens: int) -> bool:
    if key > query:
        return False
    if window is not None:
        return key > query - window or key < sink_tokens
    if chunk is not None:
        return key // chunk == query // chunk or key < sink_tokens
    return True


class Layer:
    """A poisoned pool of random keys and values, and queries over it."""

    def __init__(
        self, lens: list[int], q_len: int, heads: int, kv_heads: int, dims: tuple[int, int], size: int
    ) -> None:
        self.lens, self.q_len, self.size = lens, q_len, size
        counts = [-(-n // size) for n in lens]
        entries = 2 * sum(counts) + 1
        # Keys and values of a block lie side by side, so that both views are strided.
        memory = torch.full((entries, 2, size, kv_heads, max(dims)), math.nan)
        self.keys, self.values = memory[:, 0, ..., : dims[0]], memory[:, 1, ..., : dims[1]]
        self.table = torch.full((len(lens), max(counts, default=0)), POISON_ENTRY, dtype=torch.int32)
        self.history = [(torch.randn(n, kv_heads, dims[0]), torch.randn(n, kv_heads, dims[1])) for n in lens]
        places = random.Random(0).sample(range(1, entries), sum(counts))
        for row, (keys, values) in enumerate(self.history):
            for column in range(counts[row]):
                entry = places.pop()
                self.table[row, column] = entry
                part = slice(column * size, (column + 1) * size)
                self.keys[entry, : len(keys[part])] = keys[part]
                self.values[entry, : len(values[part])] = values[part]
        self.query = torch.randn(len(lens), q_len, heads, dims[0])

    def run(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        lens = torch.tensor(self.lens, dtype=torch.int32)
        return paged_attention(self.query, self.keys, self.values, self.table, lens, scale=0.3, **options)

    def expected(
        self,
        window: int | None = None,
        chunk: int | None = None,
        sink_tokens: int = 0,
        sinks: torch.Tensor | None = None,
        q_lens: list[int] | None = None,
        soft_cap: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch, q_len, heads, _ = self.query.shape
        out = torch.zeros((batch, q_len, heads, self.values.shape[3]), dtype=torch.float64)
        lse = torch.full((batch, q_len, heads), -math.inf, dtype=torch.float64)
        for row, (keys, values) in enumerate(self.history):
            tokens = q_len if q_lens is None else q_lens[row]
            for token in range(tokens):
                position = len(keys) - tokens + token
                seen = [j for j in range(len(keys)) if sees(position, j, window, chunk, sink_tokens)]
                for head in range(heads if seen else 0):
                    kv_head = head * keys.shape[1] // heads
                    logits = 0.3 * keys[seen, kv_head].double() @ self.query[row, token, head].double()
                    if soft_cap is not None:
                        logits = soft_cap * torch.tanh(logits / soft_cap)
                    if sinks is not None:
                        logits = torch.cat((logits, sinks[head].double()[None]))
                    weights = torch.softmax(logits, 0)[: len(seen)]
                    out[row, token, head] = weights @ values[seen, kv_head].double()
                    lse[row, token, head] = torch.logsumexp(logits, 0)
        return out, lse


def close(found: tuple[torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.allclose(found[0].double(), right[0], atol=2e-5)
    assert torch.allclose(found[1].double(), right[1], atol=2e-5)


@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"window": 7},
        {"window": 1},
        {"chunk": 16},
        {"window": 9, "sink_tokens": 3},
        {"window": 100, "sink_tokens": 40},
        {"chunk": 8, "sink_tokens": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("with_logits", [False, True])
def test_every_mask(masks: dict[str, int], q_len: int, with_logits: bool) -> None:
    layer = Layer([0, 1, 3, 8, 9, 40, 33], q_len, heads=6, kv_heads=2, dims=(16, 12), size=8)
    sinks = torch.randn(6) if with_logits else None
    close(layer.run(**masks, sinks=sinks), layer.expected(**masks, sinks=sinks))


@pytest.mark.parametrize("soft_cap", [0.5, 3, 50.0])
def test_soft_caps(soft_cap: float) -> None:
    """Small ones flatten every score; large ones leave all but outliers alone."""
    layer = Layer([0, 1, 9, 40], 3, heads=4, kv_heads=2, dims=(16, 12), size=8)
    layer.query *= 5
    for options in ({}, {"window": 7}, {"sinks": torch.randn(4)}):
        close(layer.run(soft_cap=soft_cap, **options), layer.expected(soft_cap=soft_cap, **options))
    assert (layer.run(soft_cap=soft_cap)[0] - layer.run()[0]).abs().max() > 1e-4


def test_rows_with_fewer_query_tokens_report_17() -> None:
    layer = Layer([20, 20, 4, 0], 4, heads=2, kv_heads=1, dims=(8, 8), size=4)
    q_lens = [1, 4, 2, 0]
    found = layer.run(q_lens=torch.tensor(q_lens, dtype=torch.int32), window=6)
    close(found, layer.expected(q_lens=q_lens, window=6))


def test_a_whole_prompt_is_a_row_of_query_tokens() -> None:
    layer = Layer([70, 70], 70, heads=2, kv_heads=2, dims=(8, 8), size=16)
    close(layer.run(window=20), layer.expected(window=20))


def test_fp8_caches_with_scales_of_their_own_report_30() -> None:
    layer = Layer([30], 2, heads=2, kv_heads=1, dims=(16, 16), size=16)
    right = layer.run()
    layer.keys = (layer.keys / 0.02).to(torch.float8_e4m3fn)
    layer.values = (layer.values / 3.7).to(torch.float8_e4m3fn)
    found = layer.run(k_scale=0.02, v_scale=torch.tensor([3.7]))
    assert (found[0] - right[0]).abs().max() < 0.3
    assert (layer.run(k_scale=0.02, v_scale=7.4)[0] - 2 * found[0]).abs().max() < 1e-4


def test_entries_that_no_query_sees_are_not_read() -> None:
    """Blocks between sinks and window may be gone: -1 there."""
    layer = Layer([64], 2, heads=2, kv_heads=1, dims=(8, 8), size=8)
    right = layer.run(window=9, sink_tokens=3)
    layer.table[0, 1:6] = -1
    close(layer.run(window=9, sink_tokens=3), (right[0].double(), right[1].double()))


def test_nothing_at_all_report_20() -> None:
    for lens in ([], [0, 0]):
        layer = Layer(lens, 2, heads=2, kv_heads=1, dims=(8, 8), size=8)
        out, lse = layer.run()
        assert not out.any()
        assert torch.isneginf(lse).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 4, "chunk": 8}, "window 4 and chunk 8 are both given"),
        ({"chunk": 12}, "chunk 12 must be a multiple of the block size 8"),
        ({"sink_tokens": -1}, "sink_tokens is -1; it must be a whole number of at least 0"),
        ({"sinks": torch.zeros(3)}, r"sinks has the shape \[3\]; it must be \[2\]"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0; it must be a finite number above 0, or None"),
        ({"soft_cap": math.inf}, "soft_cap is inf; it must be a finite number above 0, or None"),
        ({"backend": "cuda"}, "backend is 'cuda'; allowed are torch, triton"),
        ({"k_scale": 2.0}, "k_scale is 2.0; only a cache of fp8_e4m3 takes another than 1"),
    ],
)
def test_arguments_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    layer = Layer([8], 1, heads=2, kv_heads=1, dims=(8, 8), size=8)
    with pytest.raises(ConfigError, match=message):
        layer.run(**options)


def test_heads_that_do_not_divide() -> None:
    layer = Layer([8], 1, heads=3, kv_heads=2, dims=(8, 8), size=8)
    with pytest.raises(ConfigError, match="query has 3 heads, and key_cache 2 in blocks of 8"):
        layer.run()
