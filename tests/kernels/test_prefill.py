"""MLA prefill against float64 attention over whole histories, in both forms."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from mla_cases import paged

from kvtide.kernels import LatentFormat, UpProjections, mla_decode, mla_prefill
from kvtide.kernels.contract import AttentionResult
from kvtide.kernels.reference import dequantise, quantise
from kvtide.kvcache import ConfigError

HEADS, NOPE, VALUE, LATENT, ROPE, SIZE = 3, 20, 16, 128, 8, 16
SCALE = 0.2
MODES = pytest.mark.parametrize("mode", ["absorbed", "decompressed"])


class Batch:
    """Requests with cached context, of which only what the window needs is there, and new tokens."""

    def __init__(
        self,
        requests: list[tuple[int, int]],
        fmt: LatentFormat = LatentFormat.FLOAT32,
        *,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        k_scale: float = 1.0,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.window, self.contexts = window, [context for context, _ in requests]
        self.cu_q_lens = [0, *itertools.accumulate(new for _, new in requests)]
        total = self.cu_q_lens[-1]
        weights = torch.randn(HEADS, NOPE, LATENT, generator=generator), torch.randn(HEADS, LATENT, VALUE)
        self.projections = UpProjections(*((w / LATENT**0.5).to(dtype) for w in weights))
        self.query = torch.randn(total, HEADS, NOPE + ROPE, generator=generator).to(dtype)
        self.latent = torch.randn(total, LATENT + ROPE, generator=generator).to(dtype)
        stored = [
            quantise(torch.randn(n, LATENT + ROPE, generator=generator) * k_scale, fmt, LATENT, ROPE, k_scale)
            for n in self.contexts
        ]
        first = [0 if window is None else max(0, n - window + 1) for n in self.contexts]
        self.cache, self.table = paged(stored, first, fmt, SIZE, fmt.width(LATENT, ROPE), 0)
        self.context_latents = [dequantise(part, fmt, LATENT, ROPE, k_scale) for part in stored]
        self.k_scale = k_scale

    def run(self, **options: Any) -> AttentionResult:
        arguments: dict[str, Any] = {
            "scale": SCALE,
            "latent_dim": LATENT,
            "rope_dim": ROPE,
            "window": self.window,
            "k_scale": self.k_scale,
        }
        return mla_prefill(
            self.query,
            self.latent,
            self.cu_q_lens,
            self.cache,
            self.table,
            self.contexts,
            self.projections,
            **(arguments | options),
        )

    def expected(self, sink: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = [], []
        for row, (begin, end) in enumerate(itertools.pairwise(self.cu_q_lens)):
            latents = torch.cat((self.context_latents[row], self.latent[begin:end].double()))
            nope = torch.einsum("kl,hnl->hkn", latents[:, :LATENT], self.projections.w_uk.double())
            keys = torch.cat((nope, latents[:, LATENT:].expand(HEADS, -1, -1)), dim=-1)
            values = torch.einsum("kl,hlv->hkv", latents[:, :LATENT], self.projections.w_uv.double())
            scores = SCALE * torch.einsum("qhd,hkd->qhk", self.query[begin:end].double(), keys)
            position = torch.arange(self.contexts[row], len(latents))[:, None]
            places = torch.arange(len(latents))
            hidden = places > position
            if self.window is not None:
                hidden |= places <= position - self.window
            logits = scores.masked_fill(hidden[:, None], -math.inf)
            if sink is not None:
                logits = torch.cat((logits, sink.double()[None, :, None].expand(end - begin, -1, 1)), dim=-1)
            probabilities = torch.softmax(logits, dim=-1)[..., : len(latents)]
            out.append(torch.einsum("qhk,hkv->qhv", probabilities, values))
            lse.append(torch.logsumexp(logits, dim=-1))
        return torch.cat(out), torch.cat(lse)


def close(found: AttentionResult, right: tuple[torch.Tensor, torch.Tensor], bound: float = 2e-5) -> None:
    assert (found.out.double() - right[0]).abs().max() <= bound * right[0].abs().max()
    assert (found.lse.double() - right[1]).abs().max() <= bound * (1 + right[1].abs().max())


@MODES
@pytest.mark.parametrize("window", [None, 1, 7, 40])
@pytest.mark.parametrize("chunk_tokens", [16, 33, 1024])
def test_context_new_tokens_and_the_border(mode: str, window: int | None, chunk_tokens: int) -> None:
    """Contexts of 0, 1, page ends and one over; new tokens from 0 up; the window reaches across the border."""
    batch = Batch([(0, 5), (1, 1), (16, 40), (17, 3), (70, 0), (100, 9), (0, 0)], window=window)
    close(batch.run(mode=mode, chunk_tokens=chunk_tokens), batch.expected())


@MODES
@pytest.mark.parametrize("fmt", list(LatentFormat), ids=lambda fmt: fmt.value)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.float16, 6e-3), (torch.bfloat16, 4e-2)])
def test_formats(mode: str, fmt: LatentFormat, dtype: torch.dtype, bound: float) -> None:
    k_scale = 0.02 if fmt is LatentFormat.FP8 else 1.0
    batch = Batch([(50, 20), (3, 2)], fmt, dtype=dtype, k_scale=k_scale)
    found = batch.run(mode=mode, chunk_tokens=32)
    assert found.out.dtype == dtype
    assert found.lse.dtype == torch.float32
    close(found, batch.expected(), bound)


@MODES
def test_more_query_tokens_than_a_tile(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.kernels.prefill.QUERY_TILE", 8)
    for window in (None, 11):
        batch = Batch([(30, 50)], window=window)
        close(batch.run(mode=mode, chunk_tokens=16), batch.expected())


@MODES
def test_an_attention_sink(mode: str) -> None:
    batch = Batch([(30, 5), (0, 2)], window=9)
    sink = torch.randn(HEADS)
    close(batch.run(mode=mode, sink=sink), batch.expected(sink))


def test_each_request_takes_the_cheaper_form() -> None:
    """171 new tokens for DeepSeek's dims; here the choice shows in the last bits."""
    w_uk, w_uv = torch.zeros(1, 128, 512), torch.zeros(1, 512, 128)
    assert math.ceil(UpProjections(w_uk, w_uv).absorbed_below) == 171
    batch = Batch([(30, 4), (30, 12)])
    absorbed, decompressed = (batch.run(mode=mode) for mode in ("absorbed", "decompressed"))
    mixed = batch.run(absorbed_below=10)
    assert torch.equal(mixed.lse[:4], absorbed.lse[:4])
    assert torch.equal(mixed.lse[4:], decompressed.lse[4:])
    assert not torch.equal(absorbed.lse, decompressed.lse)


def test_prefill_of_one_token_is_decode() -> None:
    batch = Batch([(20, 1), (0, 1)])
    history = [torch.cat((old, new[None])) for old, new in zip(batch.context_latents, batch.latent, strict=True)]
    cache, table = paged([h.float() for h in history], [0, 0], LatentFormat.FLOAT32, SIZE, LATENT + ROPE, 1)
    decoded = mla_decode(
        batch.query[:, None],
        cache,
        table,
        torch.tensor([21, 1], dtype=torch.int32),
        scale=SCALE,
        latent_dim=LATENT,
        rope_dim=ROPE,
        projections=batch.projections,
    )
    found = batch.run()
    assert torch.allclose(found.out, decoded.out[:, 0], atol=1e-5)
    assert torch.allclose(found.lse, decoded.lse[:, 0], atol=1e-5)


def test_results_may_be_given() -> None:
    batch = Batch([(20, 3)])
    out, lse = torch.full((3, HEADS, VALUE), math.nan), torch.full((3, HEADS), math.nan)
    found = batch.run(out=out, lse=lse)
    assert found.out.data_ptr() == out.data_ptr()
    close(found, batch.expected())
    nobody = Batch([])
    assert nobody.run().out.shape == (0, HEADS, VALUE)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"cu_q_lens": [0, 2]}, {}, "cu_q_lens are 2 numbers up to 2; they must rise from 0 to query's 3 tokens"),
        ({"cu_q_lens": []}, {}, "cu_q_lens are 0 numbers up to 0"),
        ({"contexts": [33]}, {}, "context_lens go from 33 to 33; block_table has room for 32"),
        ({"contexts": [-1]}, {}, "context_lens go from -1 to -1"),
        ({"contexts": [1.5]}, {}, r"context_lens has the shape \[1\] of float64; it must be a list of integers"),
        ({}, {"mode": "fast"}, "mode is 'fast'; allowed are absorbed, decompressed"),
        ({}, {"chunk_tokens": 0}, "chunk_tokens is 0"),
        ({}, {"latent_dim": 64}, "projections are of 128 latent values; latent_dim is 64"),
        ({"latent": torch.zeros(2, 136)}, {}, r"latent has the shape \[2, 136\]; it must be \[3, 136\]"),
        ({"query": torch.zeros(3, 4, 28)}, {}, r"query has the shape \[3, 4, 28\]; it must be \[total_q, 3, 28\]"),
    ],
)
def test_arguments_that_do_not_fit(change: dict[str, Any], options: dict[str, Any], message: str) -> None:
    batch = Batch([(20, 3)])
    for name, value in change.items():
        setattr(batch, name, value)
    with pytest.raises(ConfigError, match=message):
        batch.run(**options)


def test_projections_that_do_not_fit_together() -> None:
    with pytest.raises(ConfigError, match=r"w_uv has the shape \[2, 12, 4\]; it must be \[2, 16, value_dim\]"):
        UpProjections(torch.zeros(2, 8, 16), torch.zeros(2, 12, 4))
