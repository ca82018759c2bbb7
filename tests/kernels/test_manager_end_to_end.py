"""The memory manager, the arena and the kernels together: what attention returns is attention over the true history.

Random traffic (shared prefixes, chunked prefill, drafts that are rejected, preemption, little memory) drives the real
`HybridMemoryManager`. New tokens go through `slots` and `write_latent` / `write_kv` into views of an arena that is full
of NaN; then `mla_decode`, `mla_prefill` and `paged_attention` read them through the manager's tables, cut to exactly
the width that the step needs, with `table_lengths` for the compact ones. The right answer comes from token histories
alone, in float64: a token's latent, key and value are functions of the layer and of all tokens up to it.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from layouts import layout_of, sees

from kvtide.hma import HybridMemoryManager, Reservation
from kvtide.kernels import (
    LatentFormat,
    UpProjections,
    mla_decode,
    mla_prefill,
    paged_attention,
    table_lengths,
    write_kv,
    write_latent,
)
from kvtide.kernels.reference import dequantise, quantise
from kvtide.kvcache import (
    MLA,
    ChunkedLocal,
    Exhausted,
    FullAttention,
    LayerSpec,
    ModelLayout,
    SinkWindow,
    SlidingWindow,
    SlidingWindowMLA,
)
from kvtide.kvcache.arena import Arena
from kvtide.kvcache.geometry import BlockFormat
from kvtide.kvcache.solver import solve_geometry

HEADS, NOPE, VALUE = 2, 8, 6
SCALE = 0.3
PAGES = 40
MODELS = {
    "deepseek, packed": layout_of("deepseek", (3, MLA(128, 16, "fp8_ds_mla"))),
    "full and window latents": layout_of(
        "window-mla", (1, MLA(32, 8, "float32")), (3, SlidingWindowMLA(32, 8, "bfloat16", window=24))
    ),
    "gemma": layout_of(
        "gemma", (1, FullAttention(1, 8, 8, "float32")), (3, SlidingWindow(2, 8, 6, "float32", window=20))
    ),
    "sinks": layout_of(
        "sinks", (1, FullAttention(2, 8, 8, "bfloat16")), (2, SinkWindow(1, 8, 8, "float32", window=20, sinks=5))
    ),
    "chunks": layout_of(
        "chunks", (1, FullAttention(2, 8, 8, "float32")), (3, ChunkedLocal(1, 8, 8, "float32", chunk=32))
    ),
}


@dataclass
class Request:
    """Prompt and what was generated; `prefixes[i]` stands for the tokens up to and including i."""

    name: str
    row: int
    tokens: list[int]
    prefixes: list[bytes] = field(default_factory=list)

    def prefix(self, tokens: list[int]) -> list[bytes]:
        """The prefixes of the sequence that starts with `tokens`."""
        chain: list[bytes] = []
        for token in tokens:
            chain.append(blake2b((chain[-1] if chain else b"") + token.to_bytes(4, "little"), digest_size=8).digest())
        return chain


class Engine:
    """A small engine on the CPU. `step` computes some tokens of every request, and checks every attention."""

    def __init__(self, layout: ModelLayout, seed: int) -> None:
        self.rng = random.Random(seed)
        self.layout = layout
        self.geometry = solve_geometry(layout, 16, min_block_size=4)
        self.manager = HybridMemoryManager(
            self.geometry,
            PAGES * self.geometry.page_bytes,
            max_requests=8,
            max_model_len=256,
            max_step_tokens=64,
            lookahead=2,
        )
        self.arena = Arena(self.geometry, PAGES)
        self.arena.memory.fill_(0xFF)
        self.requests: list[Request] = []
        self.waiting: list[Request] = []
        self.serial = self.compared = self.hit = self.not_stored = self.preempted = 0
        self.truth: dict[tuple[int, bytes], tuple[torch.Tensor, ...]] = {}
        self.only_mla = all(isinstance(layer.spec, MLA) for layer in layout.layers)
        generator = torch.Generator().manual_seed(seed)
        self.projections = {
            layer.index: UpProjections(
                torch.randn(HEADS, NOPE, layer.spec.kv_lora_rank, generator=generator) / 8,
                torch.randn(HEADS, layer.spec.kv_lora_rank, VALUE, generator=generator) / 8,
            )
            for layer in layout.layers
            if isinstance(layer.spec, MLA)
        }

    # -- the model ----------------------------------------------------------------------------------------------------

    def true_token(self, layer: int, spec: LayerSpec, prefix: bytes) -> tuple[torch.Tensor, ...]:
        """What the layer stores for a token: its latent, or its key and value; exact in the cache's type."""
        if (layer, prefix) not in self.truth:
            rng = np.random.default_rng([layer, int.from_bytes(prefix, "little")])
            if isinstance(spec, MLA):
                dims = spec.kv_lora_rank, spec.rope_dim
                drawn = torch.from_numpy(rng.standard_normal(sum(dims), dtype=np.float32))
                fmt = LatentFormat.FP8_DS if spec.dtype == "fp8_ds_mla" else LatentFormat(spec.dtype)
                parts = (dequantise(quantise(drawn[None], fmt, *dims), fmt, *dims)[0].float(),)
            else:
                assert isinstance(spec, FullAttention)
                shapes = (spec.num_kv_heads, spec.head_dim), (spec.num_kv_heads, spec.head_dim_v)
                dtype = getattr(torch, spec.dtype)
                drawn_pair = [torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)) for shape in shapes]
                parts = tuple(part.to(dtype).float() for part in drawn_pair)  # type: ignore[assignment]
            self.truth[layer, prefix] = parts
        return self.truth[layer, prefix]

    def true_tokens(self, layer: int, spec: LayerSpec, prefixes: list[bytes]) -> list[torch.Tensor]:
        tokens = [self.true_token(layer, spec, prefix) for prefix in prefixes]
        return [torch.stack(parts) for parts in zip(*tokens, strict=True)]

    # -- traffic ------------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        shared = [7] * self.rng.randint(0, 60)
        prompt = shared + [self.rng.randrange(5) for _ in range(self.rng.randint(1, 60))]
        self.serial += 1
        admission = self.manager.admit(f"r{self.serial}", prompt)
        self.hit += admission.num_cached_tokens
        self.requests.append(Request(f"r{self.serial}", admission.row, prompt))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        if len(self.requests) + len(self.waiting) < 5 and self.rng.random() < 0.4:
            self.admit()
        if self.waiting and self.rng.random() < 0.5:
            request = self.waiting.pop()
            self.hit += self.manager.resume(request.row).num_cached_tokens
            self.requests.append(request)
        counts, drafts, news = [], [], []
        for request in self.requests:
            done = int(self.manager.committed[request.row])
            if done == len(request.tokens):
                request.tokens.append(self.rng.randrange(5))
            left = len(request.tokens) - done
            # A prompt in chunks; with nothing left but the sampled token, drafts behind it.
            count = self.rng.randint(1, min(left, 50)) if left > 1 else 1
            guesses = self.rng.randint(0, 3) if count == left and left == 1 else 0
            counts.append(count + guesses)
            drafts.append(guesses)
            news.append(request.tokens[done : done + count] + [self.rng.randrange(5) for _ in range(guesses)])
        if not self.requests:
            return
        from_activations = self.only_mla and max(counts) > 8
        rows = [request.row for request in self.requests]
        try:
            plan = self.manager.reserve(rows, counts, num_drafts=drafts, kv_from_activations=from_activations)
        except Exhausted:
            victim = self.requests.pop(self.rng.randrange(len(self.requests)))
            self.manager.preempt(victim.row)
            self.waiting.insert(0, victim)
            self.preempted += 1
            return
        assert not plan.copies
        for request, new, start in zip(self.requests, news, plan.start.tolist(), strict=True):
            request.prefixes = request.prefix(request.tokens[:start] + new)
        self.compute(plan, from_activations)
        accepted = [
            count - guesses + self.rng.randint(0, guesses) for count, guesses in zip(counts, drafts, strict=True)
        ]
        unseen: list[int] = []
        for request, new, count, start in zip(self.requests, news, accepted, plan.start.tolist(), strict=True):
            request.tokens[start : start + count] = new[:count]
            unseen += request.tokens[self.manager.num_tokens(request.row) : start + count]
        self.manager.commit(rows, accepted, unseen)
        for request in list(self.requests):
            if len(request.tokens) > 200 or self.rng.random() < 0.03:
                self.manager.release(request.row)
                self.requests.remove(request)

    # -- the step's kernels -------------------------------------------------------------------------------------------

    def compute(self, plan: Reservation, from_activations: bool) -> None:
        for fmt in self.geometry.formats:
            slots = torch.from_numpy(self.manager.slots(plan, fmt.group.name))
            self.not_stored += int((slots < 0).sum())
            for layer in fmt.group.layers:
                part = fmt.place(layer)[0]
                spec = fmt.group.spec
                new = [
                    self.true_tokens(layer, spec, request.prefixes[start:])
                    for request, start in zip(self.requests, plan.start.tolist(), strict=True)
                ]
                tokens = [torch.cat(parts) for parts in zip(*new, strict=True)]
                if isinstance(spec, MLA):
                    cache = self.arena.view(layer, "latent")
                    dims = {"latent_dim": spec.kv_lora_rank, "rope_dim": spec.rope_dim}
                    write_latent(tokens[0], slots[part], cache, **dims)
                    self.check_mla(plan, fmt, layer, spec, tokens[0], from_activations)
                else:
                    caches = self.arena.view(layer, "k"), self.arena.view(layer, "v")
                    write_kv(tokens[0], tokens[1], slots[part], *caches)
                    self.check_gqa(plan, fmt, layer, spec)

    def table(
        self, fmt: BlockFormat, part: int, rows: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A group's table, exactly as wide as needed, and the rows' lengths from its first column on."""
        table = self.manager.tables[fmt.group.name]
        lengths = table_lengths(num_tokens, table.first[rows], table.sink_blocks, fmt.block_size)
        width = -(-int(lengths.max()) // fmt.block_size)
        return torch.from_numpy(table.entries[part, rows, :width]), torch.from_numpy(lengths)

    def check_mla(
        self,
        plan: Reservation,
        fmt: BlockFormat,
        layer: int,
        spec: MLA,
        new: torch.Tensor,
        from_activations: bool,
    ) -> None:
        projections, part = self.projections[layer], fmt.place(layer)[0]
        window = spec.window if isinstance(spec, SlidingWindowMLA) else None
        total = int(plan.num_tokens.sum())
        query = torch.randn(total, HEADS, NOPE + spec.rope_dim)
        common: dict[str, Any] = {
            "scale": SCALE,
            "latent_dim": spec.kv_lora_rank,
            "rope_dim": spec.rope_dim,
            "window": window,
        }
        cache = self.arena.view(layer, "latent")
        if from_activations or plan.num_tokens.max() > 8:
            table, contexts = self.table(fmt, part, plan.rows, plan.start)
            cu_q_lens = [0, *itertools.accumulate(plan.num_tokens.tolist())]
            mode = self.rng.choice(["absorbed", "decompressed"])
            out, lse = mla_prefill(
                query, new, cu_q_lens, cache, table, contexts, projections, mode=mode, chunk_tokens=48, **common
            )
        else:
            table, lengths = self.table(fmt, part, plan.rows, plan.start + plan.num_tokens)
            q_lens = torch.from_numpy(plan.num_tokens.astype(np.int32))
            owners, places = self.padded(plan)
            padded = torch.full((len(plan.rows), int(plan.num_tokens.max()), *query.shape[1:]), math.nan)
            padded[owners, places] = query
            result = mla_decode(padded, cache, table, lengths, q_lens=q_lens, projections=projections, **common)
            out, lse = result.out[owners, places], result.lse[owners, places]
        done = 0
        for request, count in zip(self.requests, plan.num_tokens.tolist(), strict=True):
            (latents,) = self.true_tokens(layer, spec, request.prefixes)
            w_uk, w_uv = projections.w_uk.double(), projections.w_uv.double()
            values = latents.double()[:, : spec.kv_lora_rank]
            nope = torch.einsum("kl,hnl->hkn", values, w_uk)
            keys = torch.cat((nope, latents.double()[:, spec.kv_lora_rank :].expand(HEADS, -1, -1)), dim=-1)
            self.compare(spec, query[done : done + count], keys, values @ w_uv, out[done:], lse[done:])
            done += count

    def check_gqa(self, plan: Reservation, fmt: BlockFormat, layer: int, spec: LayerSpec) -> None:
        assert isinstance(spec, FullAttention)
        table, lengths = self.table(fmt, fmt.place(layer)[0], plan.rows, plan.start + plan.num_tokens)
        query = torch.randn(len(plan.rows), int(plan.num_tokens.max()), HEADS, spec.head_dim)
        found = paged_attention(
            query,
            self.arena.view(layer, "k"),
            self.arena.view(layer, "v"),
            table,
            lengths,
            scale=SCALE,
            window=spec.window if isinstance(spec, SlidingWindow) else None,
            chunk=spec.chunk if isinstance(spec, ChunkedLocal) else None,
            sink_tokens=spec.sinks if isinstance(spec, SinkWindow) else 0,
            q_lens=torch.from_numpy(plan.num_tokens.astype(np.int32)),
        )
        for row, (request, count) in enumerate(zip(self.requests, plan.num_tokens.tolist(), strict=True)):
            keys, values = (
                part.double().transpose(0, 1).repeat_interleave(HEADS // spec.num_kv_heads, dim=0)
                for part in self.true_tokens(layer, spec, request.prefixes)
            )
            self.compare(spec, query[row, :count], keys, values, found.out[row], found.lse[row])

    def padded(self, plan: Reservation) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and place of every token of the step in a batch that is padded to its longest row."""
        owners = np.repeat(np.arange(len(plan.rows)), plan.num_tokens)
        places = np.concatenate([np.arange(count) for count in plan.num_tokens])
        return torch.from_numpy(owners), torch.from_numpy(places)

    def compare(
        self,
        spec: LayerSpec,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """The results of one request's last tokens, over its whole history's keys and values `[heads, tokens, dim]`."""
        count, length = len(query), keys.shape[1]
        visible = torch.tensor([[sees(spec, length - count + t, j) for j in range(length)] for t in range(count)])
        scores = SCALE * torch.einsum("qhd,hkd->hqk", query.double(), keys)
        scores = scores.masked_fill(~visible, -math.inf)
        right = torch.softmax(scores, dim=-1) @ values
        assert (out[:count].double().transpose(0, 1) - right).abs().max() < 1e-4
        assert (lse[:count].double().T - torch.logsumexp(scores, dim=-1)).abs().max() < 1e-4
        self.compared += count


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("model", MODELS)
def test_attention_through_the_tables_is_attention_over_the_history(model: str, seed: int) -> None:
    engine = Engine(MODELS[model], seed)
    engine.run(60)
    engine.manager.check()
    assert engine.compared > 1000
    assert engine.hit > 0
    if model not in ("deepseek, packed", "gemma"):
        assert engine.preempted > 0
    if model == "full and window latents":
        assert engine.not_stored > 0


def test_a_sequence_that_skips_a_block_is_found_out() -> None:
    """The comparison can fail: lengths that forget the compact table's offset give other numbers."""
    engine = Engine(MODELS["gemma"], 0)
    honest = engine.table

    def naive(fmt: BlockFormat, part: int, rows: Any, num_tokens: Any) -> tuple[torch.Tensor, torch.Tensor]:
        table, lengths = honest(fmt, part, rows, num_tokens)
        return table, lengths - fmt.block_size * torch.from_numpy(
            (engine.manager.tables[fmt.group.name].first[rows] > 0).astype(np.int32)
        )

    engine.table = naive  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        engine.run(60)
