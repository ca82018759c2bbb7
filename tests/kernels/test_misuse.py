"""The public functions as engines call them, rightly and wrongly: random calls, modes of torch, threads, bad values.

Right calls are compared with float64 attention (`mla_cases.py`); every refusal is one sentence that names the argument.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from mla_cases import Case, check, make_case

from kvtide.kernels import (
    UpProjections,
    copy_blocks,
    cpu,
    merge_states,
    mla_decode,
    mla_prefill,
    paged_attention,
    registry,
    scales,
    write_kv,
    write_latent,
)
from kvtide.kernels.contract import AttentionResult
from kvtide.kernels.formats import LatentFormat
from kvtide.kvcache import ConfigError, KvtideError

DIMS = {"latent_dim": 128, "rope_dim": 16}


def decoded(case: Case, **changes: Any) -> AttentionResult:
    """The case's call through `mla_decode`, with other arguments."""
    call = case.call
    tensors = {name: changes.pop(name, getattr(call, name)) for name in ("query", "cache", "block_table", "seq_lens")}
    options = {
        "scale": call.scale,
        "latent_dim": call.latent_dim,
        "rope_dim": call.rope_dim,
        "q_lens": call.q_lens,
        "k_scale": call.k_scale if call.fmt is LatentFormat.FP8 else 1.0,
        "window": call.window,
        "sink": call.sink,
        "out": call.out,
        "lse": call.lse,
        "batch_invariant": call.batch_invariant,
    }
    return mla_decode(**tensors, **(options | changes))


def strided(rng: random.Random, tensor: torch.Tensor, *, last: bool) -> torch.Tensor:
    """The same values with strides of somebody's own; `last`: also in the last dimension."""
    order = list(range(tensor.dim()))
    inner = order if last else order[:-1]
    rng.shuffle(inner)
    order = inner if last else [*inner, tensor.dim() - 1]
    wide = tensor.permute(order).repeat_interleave(2, dim=0)[::2]
    return wide.permute([order.index(i) for i in range(tensor.dim())])


@pytest.mark.parametrize("seed", range(6))
def test_random_calls(seed: int) -> None:
    rng = random.Random(seed)
    for number in range(15):
        fmt = rng.choice(list(LatentFormat))
        q_len, size = rng.randint(1, 8), rng.choice([1, 3, 16, 17, 64])
        lens = [rng.choice([0, 1, size, size + 1, rng.randint(0, 700)]) for _ in range(rng.choice([0, 1, 2, 5]))]
        dims = rng.choice([(128, 2), (384, 64)] if fmt is LatentFormat.FP8_DS else [(7, 0), (64, 1), (100, 8)])
        case = make_case(
            fmt,
            lens,
            heads=rng.choice([1, 5, 16]),
            q_len=q_len,
            q_lens=[min(rng.randint(0, q_len), length) for length in lens] if rng.random() < 0.4 else None,
            block_size=size,
            latent_dim=dims[0],
            rope_dim=dims[1],
            window=rng.choice([None, 1, 5, 300, 2**31 - 1, 2**40]),
            sink=rng.random() < 0.3,
            k_scale=rng.choice([0.02, 3.7]) if fmt is LatentFormat.FP8 else 1.0,
            dtype=rng.choice([torch.float32, torch.float16, torch.bfloat16]),
            batch_invariant=rng.random() < 0.3,
            seed=100 * seed + number,
        )
        call = case.call
        mode = rng.choice([torch.enable_grad, torch.inference_mode])
        changes = {
            "query": strided(rng, call.query, last=True).requires_grad_(),
            "block_table": strided(rng, call.block_table, last=True),
            "seq_lens": torch.stack((call.seq_lens, call.seq_lens), dim=1)[:, 1],
            "out": strided(rng, call.out, last=False),
            "lse": strided(rng, call.lse, last=True),
        }
        if call.fmt is LatentFormat.FP8 and rng.random() < 0.5:
            changes["k_scale"] = float(call.k_scale)
        with mode():
            found = decoded(case, **changes, backend=rng.choice([None, "CPU", "TORCH_REFERENCE"]))
            assert not found.out.requires_grad
            assert found.out.data_ptr() == changes["out"].data_ptr()
            call.out.copy_(found.out)
            call.lse.copy_(found.lse)
        check(case)


@pytest.mark.parametrize("window", [2**31 - 1, 2**31 - 6, 2**62, 10**30])
@pytest.mark.parametrize("backend", ["CPU", "TORCH_REFERENCE", "TRITON_MLA"])
def test_a_window_of_any_size(window: int, backend: str) -> None:
    """Engines write "no window" as the largest integer they have; int32 must not overflow."""
    if backend == "TRITON_MLA":
        pytest.importorskip("triton")
    case = make_case(LatentFormat.FLOAT32, [3, 40], q_len=8, latent_dim=16)
    decoded(case, window=window, backend=backend)
    check(case)


def test_inference_mode_leaves_nothing_that_other_calls_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers and scales that were made in it are ordinary tensors."""
    monkeypatch.setattr(cpu, "_scratch", cpu._Scratch())
    scales._one.clear()
    for fmt in LatentFormat:
        case = make_case(fmt, [40, 9], q_len=2)
        with torch.inference_mode():
            decoded(case.fresh())
        decoded(case)
        check(case)
    assert not any(buffer.is_inference() for buffer in cpu._scratch._buffers.values())


def test_scales_that_are_numbers_are_not_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in (torch.inference_mode, torch.enable_grad):
        with mode():
            scale = scales.quantisation_scale("k_scale", 0.3, torch.device("cpu"), is_fp8=True)
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "__float__", lambda tensor: pytest.fail("read"))
                assert scales.host_scale(scale) == float(np.float32(0.3))
    with torch.inference_mode():
        uncounted = torch.tensor([0.5])
    assert scales.host_scale(uncounted) == 0.5
    with torch.inference_mode():
        uncounted.fill_(2.0)
    assert scales.host_scale(uncounted) == 2.0


def test_the_result_may_lie_in_the_query() -> None:
    for backend in ("CPU", "TORCH_REFERENCE"):
        case = make_case(LatentFormat.FLOAT32, [40, 9, 0], q_len=2)
        query = case.call.query.clone()
        found = decoded(case, query=query, out=query[..., :128], backend=backend)
        case.call.out.copy_(found.out)
        check(case)


@pytest.mark.parametrize("backend", ["CPU", "TRITON_MLA"])
def test_calls_of_many_threads(backend: str) -> None:
    if backend == "TRITON_MLA":
        pytest.importorskip("triton")
    lens = [300, 0, 33, 700] if backend == "CPU" else [20, 0]
    cases = [make_case(fmt, lens, q_len=2, window=window) for fmt in LatentFormat for window in (None, 40)]
    failures = []

    def run(case: Case) -> None:
        try:
            for _ in range(3 if backend == "CPU" else 1):
                again = case.fresh()
                decoded(again, backend=backend)
                check(again)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(case,)) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_weights_and_caches_take_no_gradients() -> None:
    """Parameters outside of `no_grad`: results and caches stay out of the graph."""
    projections = UpProjections(torch.nn.Parameter(torch.randn(2, 8, 128)), torch.nn.Parameter(torch.randn(2, 128, 8)))
    cache, latent = torch.zeros(4, 16, 144), torch.nn.Parameter(torch.randn(3, 144))
    write_latent(latent, torch.arange(3), cache, **DIMS)
    assert not cache.requires_grad
    keys = torch.zeros(2, 2, 4, 16, 1, 8)
    write_kv(torch.nn.Parameter(torch.randn(3, 1, 8)), torch.randn(3, 1, 8), torch.arange(3), keys[0, 0], keys[0, 1])
    assert not keys.requires_grad
    table, query = torch.zeros(1, 1, dtype=torch.int32), torch.randn(3, 2, 24)
    found = mla_prefill(query, latent, [0, 3], cache, table, [3], projections, scale=0.1, **DIMS)
    assert not found.out.requires_grad
    merged = merge_states(torch.nn.Parameter(found.out), found.lse, found.out, found.lse)
    assert not merged.out.requires_grad


def test_numbers_of_numpy() -> None:
    case = make_case(LatentFormat.FLOAT32, [40, 9])
    decoded(case, scale=np.float32(case.call.scale), window=np.int64(10**6), latent_dim=np.int64(128))
    check(case)
    memory = torch.arange(100, dtype=torch.uint8)
    copy_blocks(memory, memory, [0], [50], np.int64(8))  # type: ignore[arg-type]
    assert torch.equal(memory[50:58], memory[:8])


def _case() -> Case:
    return make_case(LatentFormat.BFLOAT16, [40, 9])


INT32 = torch.int32
SPARSE = torch.sparse_coo_tensor(size=(2, 1, 4, 144), check_invariants=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": SPARSE}, "query is sparse_coo; it must be a dense tensor"),
        ({"query": torch.zeros(2, 1, 4, 144, device="meta")}, "query is on meta, where tensors hold no numbers"),
        ({"latent_dim": None}, "latent_dim is None; it must be a whole number of at least 1"),
        ({"window": True}, "window is True; it must be a whole number of at least 1, or None"),
        ({"window": torch.tensor(3)}, "window is tensor(3); it must be a whole number"),
        ({"seq_lens": torch.tensor([49, 9], dtype=INT32)}, "seq_lens hold 49; they must be from 0 to the 48 tokens"),
        ({"seq_lens": torch.tensor([40, -9], dtype=INT32)}, "seq_lens hold -9; they must be from 0 to the 48 tokens"),
        ({"q_lens": torch.tensor([2, 1], dtype=INT32)}, "q_lens hold 2; they must be from 0 to query's 1 tokens"),
        ({"block_table": torch.full((2, 3), -1, dtype=INT32)}, "block_table holds -1 where keys are read; the cache"),
        ({"block_table": torch.full((2, 3), 17, dtype=INT32)}, "block_table holds 17 where keys are read; the cache"),
        ({"out": torch.zeros(1, 1, 4, 128).expand(2, 1, 4, 128)}, "out has the strides [0, 512, 128, 1]; no two of"),
        ({"lse": torch.zeros(1, 1, 4).expand(2, 1, 4)}, "lse has the strides [0, 4, 1]; no two of its elements"),
        ({"backend": 3}, "backend is 3; it must be one of TORCH_REFERENCE, CPU"),
        ({"projections": 3}, "projections is a int; it must be UpProjections"),
    ],
)
def test_refusals_of_decode(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        decoded(_case(), **changes)
    assert str(error.value).startswith(message)


def test_a_nonsense_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.VARIABLE, "fastest\n" * 100)
    with pytest.raises(ConfigError, match="KVTIDE_ATTENTION_BACKEND 'FASTEST") as error:
        decoded(_case())
    assert len(str(error.value)) < 300


def test_refusals_of_the_others() -> None:
    latent, slots = torch.randn(3, 144), torch.arange(3)
    grouped = torch.zeros(4 * 16 * 168, dtype=torch.uint8)
    query, keys = torch.randn(2, 2, 4, 8), torch.zeros(4, 16, 2, 8)
    table, lens = torch.tensor([[0, 1], [2, 3]], dtype=INT32), torch.tensor([20, 9], dtype=INT32)
    projections = UpProjections(torch.randn(4, 24, 128), torch.randn(4, 128, 20))

    def prefill(**changes: Any) -> object:
        options = {"block_table": table, "context_lens": [20, 3], "projections": projections, "scale": 0.1} | changes
        rows = (torch.randn(5, 4, 40), torch.randn(5, 144), [0, 2, 5], torch.zeros(4, 16, 144))
        return mla_prefill(*rows, **options, **DIMS)  # type: ignore[arg-type]

    memory, lse = torch.zeros(100, dtype=torch.uint8), torch.zeros(2)
    twice = torch.zeros(1, 3).expand(2, 3)
    for run, message in (
        (lambda: write_latent(latent, slots, torch.zeros(1, 16, 144).expand(4, 16, 144), **DIMS), "cache has the str"),
        (
            lambda: write_latent(latent, slots, grouped.as_strided((4, 16, 164), (2690, 166, 1)), **DIMS),
            "cache has the strides [2690, 166, 1] and starts at byte 0; the float32 scales of fp8_ds_mla need",
        ),
        (
            lambda: write_latent(
                latent[:, :128], slots, grouped.view(4, 16, 168)[..., :132], latent_dim=128, rope_dim=0
            ),
            "rope_dim 0 must be even and at least 2 in a cache of fp8_ds_mla",
        ),
        (lambda: write_kv(keys[:3, 0], keys[:3, 0], slots, keys, keys[:1].expand(4, 16, 2, 8)), "value_cache has the"),
        (lambda: paged_attention(query, keys, keys, table + 3, lens, scale=0.3), "block_table holds 4 where keys"),
        (lambda: paged_attention(query, keys, keys, table, lens + 100, scale=0.3), "seq_lens hold 120; they must be"),
        (lambda: paged_attention(query, keys, keys, table, lens, scale=0.3, sink_tokens=None), "sink_tokens is None;"),  # type: ignore[arg-type]
        (lambda: prefill(block_table=table + 9), "block_table holds 10 where keys are read; the cache has 4 entries"),
        (lambda: prefill(block_table=table - 5), "block_table holds -5 where keys are read; the cache has 4 entries"),
        (lambda: prefill(chunk_tokens=None), "chunk_tokens is None; it must be a whole number of at least 1"),
        (lambda: prefill(absorbed_below="a"), "absorbed_below is 'a'; it must be a number, or None"),
        (lambda: prefill(projections=None), "projections is a NoneType; it must be UpProjections"),
        (lambda: UpProjections(torch.zeros(0, 4, 8), torch.zeros(0, 8, 4)), "w_uk has the shape [0, 4, 8]; every dim"),
        (lambda: merge_states(None, lse, lse, lse), "out_a is None; it must be a tensor [..., dim]"),  # type: ignore[arg-type]
        (lambda: merge_states(twice, lse, twice, lse, out=twice), "out has the strides [0, 1]; no two of its elem"),
        (
            lambda: copy_blocks(memory, memory, torch.zeros(1, dtype=INT32, device="meta"), [0], 8),  # type: ignore[arg-type]
            "source_offsets are on meta; they must be on the CPU",
        ),
    ):
        with pytest.raises(KvtideError) as error:
            run()
        assert str(error.value).startswith(message)
