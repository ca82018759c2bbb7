"""MLA decode on the CPU: the oracle, the fast path and the public function, over hard cases (`mla_cases.py`).

Numbers in test names (`..._report_7`) are those of the public reports in the project's notes on attention kernels.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from mla_cases import Case, check, errors, expected, make_case

from kvtide.kernels import LatentFormat, UpProjections, cpu, mla_decode, reference
from kvtide.kernels.contract import AttentionResult, MlaCall
from kvtide.kvcache import BackendUnavailable, ConfigError

Decode = Callable[[MlaCall], None]
BACKENDS = pytest.mark.parametrize("decode", [reference.decode, cpu.decode], ids=["reference", "cpu"])
FORMATS = pytest.mark.parametrize("fmt", list(LatentFormat), ids=lambda fmt: fmt.value)


def public(case: Case, **changes: object) -> AttentionResult:
    """The case through `mla_decode`, into the call's results."""
    call = case.call
    arguments: dict[str, object] = {
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
    return mla_decode(call.query, call.cache, call.block_table, call.seq_lens, **(arguments | changes))  # type: ignore[arg-type]


@BACKENDS
@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_ragged_rows(decode: Decode, fmt: LatentFormat, dtype: torch.dtype) -> None:
    """Lengths 0, 1, page ends and one over (reports 1, 2, 7, 8, 9, 19, 29, 33): no poison gets through."""
    case = make_case(fmt, [0, 1, 15, 16, 17, 33, 64, 40], heads=3, dtype=dtype)
    decode(case.call)
    check(case)


@BACKENDS
@pytest.mark.parametrize("seed", range(8))
def test_samples_of_everything(decode: Decode, seed: int) -> None:
    rng = random.Random(seed)
    for number in range(12):
        q_len = rng.choice([1, 2, 3, 4, 5, 7, 8])
        size = rng.choice([1, 16, 32, 64, 128])
        # The fast path cuts at 512 keys or more.
        edges = [0, 1, size - 1, size, size + 1, 2 * size, rng.randint(0, 300), rng.choice([512, 1024, 2300])]
        lens = [rng.choice(edges) for _ in range(rng.randint(1, 5))]
        fmt = rng.choice(list(LatentFormat))
        case = make_case(
            fmt,
            lens,
            heads=rng.choice([1, 5, 12, 16]),
            q_len=q_len,
            q_lens=[min(rng.randint(0, q_len), n) for n in lens] if rng.random() < 0.5 else None,
            block_size=size,
            window=rng.choice([None, None, 1, 7, 40, 600, 1200]),
            sink=rng.random() < 0.3,
            k_scale=rng.choice([1.0, 0.02, 3.7]) if fmt is LatentFormat.FP8 else 1.0,
            dtype=rng.choice([torch.float32, torch.float16, torch.bfloat16]),
            batch_invariant=rng.random() < 0.3,
            seed=100 * seed + number,
        )
        decode(case.call)
        check(case)


@BACKENDS
def test_the_real_dimensions(decode: Decode) -> None:
    case = make_case(LatentFormat.FP8_DS, [700, 65], heads=16, q_len=2, block_size=64, latent_dim=512, rope_dim=64)
    decode(case.call)
    check(case)


@BACKENDS
def test_no_visible_key_gives_nothing_reports_1_2_5_20(decode: Decode) -> None:
    """Rows shorter than their query tokens, all rows empty, and a sink that must not fill in for keys."""
    case = make_case(LatentFormat.BFLOAT16, [2, 0, 40], q_len=4, heads=2, sink=True)
    decode(case.call)
    check(case)
    assert torch.isneginf(case.call.lse[0, :2]).all()
    assert not case.call.out[0, :2].any()
    empty = make_case(LatentFormat.BFLOAT16, [0, 0], q_len=2)
    decode(empty.call)
    check(empty)


@BACKENDS
def test_large_queries_report_21(decode: Decode) -> None:
    case = make_case(LatentFormat.FLOAT32, [40, 1500], query_std=100.0, heads=4)
    decode(case.call)
    assert torch.isfinite(case.call.out).all()
    check(case)


@BACKENDS
def test_k_scale_reaches_keys_and_values_report_30(decode: Decode) -> None:
    """The same bytes under another scale: with one key, the output is the value itself and must grow with it."""
    case = make_case(LatentFormat.FP8, [1, 1])
    decode(case.call)
    scaled = case.fresh(k_scale=torch.tensor([3.7]))
    decode(scaled.call)
    assert torch.allclose(scaled.call.out, 3.7 * case.call.out)
    for k_scale in (0.02, 3.7):
        case = make_case(LatentFormat.FP8, [40, 3], k_scale=k_scale)
        decode(case.call)
        check(case)


@pytest.mark.parametrize("q_len", [5, 6, 7])
def test_equal_rows_give_equal_results_report_16(q_len: int) -> None:
    case = make_case(LatentFormat.BFLOAT16, [1300, 1300, 1300], heads=5, q_len=q_len, dtype=torch.bfloat16)
    call = case.call
    query = call.query[:1].expand(3, -1, -1, -1)
    case = case.fresh(query=query, block_table=call.block_table[:1].expand(3, -1))
    cpu.decode(case.call)
    for row in (1, 2):
        assert torch.equal(case.call.out[0], case.call.out[row])
        assert torch.equal(case.call.lse[0], case.call.lse[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batch_invariance_report_26(dtype: torch.dtype) -> None:
    """A row alone and among others: the same bits."""
    lens = [2700, 3, 2048, 40, 2049, 999]
    case = make_case(LatentFormat.BFLOAT16, lens, heads=4, q_len=2, dtype=dtype, batch_invariant=True)
    cpu.decode(case.call)
    for row in range(len(lens)):
        one = slice(row, row + 1)
        call = case.call
        alone = Case(call, case.history[one]).fresh(
            query=call.query[one],
            block_table=call.block_table[one],
            seq_lens=call.seq_lens[one],
            out=call.out[one],
            lse=call.lse[one],
        )
        cpu.decode(alone.call)
        assert torch.equal(alone.call.out[0], call.out[row])
        assert torch.equal(alone.call.lse[0], call.lse[row])


def test_a_pool_beyond_int32_reports_10_13() -> None:
    """Memory that is never touched costs nothing: entries high in 4.6 GB of virtual float16."""
    block_size, width = 16, 144
    part = block_size * width
    entries = 2**31 // part + 100
    pool = torch.empty((entries, block_size, width), dtype=torch.float16)
    keys = torch.randn(40, width).half()
    table = torch.tensor([[entries - 1, 5, entries - 50]], dtype=torch.int32)
    for column, entry in enumerate(table[0].tolist()):
        block = keys[column * block_size : (column + 1) * block_size]
        pool[entry, : len(block)] = block
    query = torch.randn(1, 1, 4, width)
    scores = torch.softmax(0.1 * query[0, 0].double() @ keys.double().T, dim=1)
    for backend in ("CPU", "TORCH_REFERENCE"):
        found = mla_decode(
            query,
            pool,
            table,
            torch.tensor([40], dtype=torch.int32),
            scale=0.1,
            latent_dim=128,
            rope_dim=16,
            backend=backend,
        )
        assert (found.out[0, 0] - scores @ keys.double()[:, :128]).abs().max() < 1e-5


def test_the_public_function_runs_every_cpu_backend() -> None:
    case = make_case(LatentFormat.FP8, [40, 0, 17], q_len=3, q_lens=[3, 0, 1], window=9, sink=True, k_scale=0.5)
    for backend in (None, "CPU", "TORCH_REFERENCE"):
        case = case.fresh()
        found = public(case, backend=backend)
        assert found.out.data_ptr() == case.call.out.data_ptr()
        check(case)


def test_a_given_out_may_be_strided_report_18() -> None:
    case = make_case(LatentFormat.FLOAT32, [40, 9], q_len=3)
    wide = torch.full((2, 3, 4, 200), math.nan)
    found = public(case, out=wide[..., :128], lse=None)
    out, lse = expected(case)
    assert (found.out - out).abs().max() < 1e-5
    assert (found.lse - lse).abs().max() < 1e-5
    assert wide[..., 128:].isnan().all()


def test_no_rows_and_no_columns_report_20() -> None:
    case = make_case(LatentFormat.BFLOAT16, [0, 0])
    assert case.call.block_table.shape == (2, 0)
    public(case)
    check(case)
    nobody = make_case(LatentFormat.BFLOAT16, [])
    assert public(nobody).out.shape == (0, 1, 4, 128)


def test_projections_give_what_decompressed_attention_gives() -> None:
    heads, nope, value = 3, 24, 20
    case = make_case(LatentFormat.FLOAT32, [40, 17, 0], heads=heads, q_len=2)
    projections = UpProjections(torch.randn(heads, nope, 128) / 12, torch.randn(heads, 128, value) / 12)
    query = torch.randn(3, 2, heads, nope + 16)
    out = torch.empty(3, 2, heads, value)
    found = mla_decode(
        query,
        case.call.cache,
        case.call.block_table,
        case.call.seq_lens,
        scale=case.call.scale,
        latent_dim=128,
        rope_dim=16,
        projections=projections,
        out=out,
    )
    assert found.out.data_ptr() == out.data_ptr()
    for row, history in enumerate(case.history):
        keys, values = projections.decompress(history.float())
        for token in range(2):
            end = len(history) - 1 + token
            if end <= 0:
                assert not out[row, token].any()
                continue
            scores = case.call.scale * torch.einsum("hd,hkd->hk", query[row, token], keys[:, :end])
            right = torch.einsum("hk,hkv->hv", torch.softmax(scores, dim=1), values[:, :end])
            assert (out[row, token] - right).abs().max() < 1e-4


def test_the_oracle_sees_planted_faults() -> None:
    """What the comparison is worth: an off-by-one in length, window or table is far outside the bounds."""
    case = make_case(LatentFormat.FLOAT32, [33, 40], q_len=3, window=7)
    call = case.call
    faults = [
        {"seq_lens": call.seq_lens - 1},
        {"window": 8},
        {"window": 6},
        {"block_table": call.block_table.flip(0)},
        {"scale": call.scale * 1.01},
        {"sink": torch.zeros(4)},
    ]
    for fault in faults:
        wrong = case.fresh(**fault)
        reference.decode(wrong.call)
        case.call.out.copy_(wrong.call.out)
        case.call.lse.copy_(wrong.call.lse)
        assert max(errors(case)) > 10, fault
    reference.decode(case.call)
    check(case)
    case.call.out[1, 0, 0, 0] = math.nan
    assert max(errors(case)) == math.inf


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": math.nan}, "scale is nan; it must be a finite number"),
        ({"scale": None}, "scale is None; it must be a finite number"),
        ({"window": 0}, "window is 0; it must be a whole number of at least 1, or None"),
        ({"latent_dim": 100}, "query has the shape [2, 2, 4, 144]; it must be [batch, q_len, heads, 116]"),
        ({"k_scale": 0.5}, "k_scale is 0.5; only a cache of fp8_e4m3 takes another than 1"),
        ({"k_scale": torch.ones(1)}, "k_scale is a tensor; only a cache of fp8_e4m3 takes one"),
        ({"sink": torch.zeros(3)}, "sink has the shape [3]; it must be [4]"),
        ({"q_lens": torch.zeros(2)}, "q_lens is float32; it must be int32"),
        ({"out": torch.empty(2, 2, 4, 144)}, "out has the shape [2, 2, 4, 144]; it must be [2, 2, 4, 128]"),
        ({"out": torch.empty(2, 2, 128, 4).transpose(2, 3)}, "out has the strides [1024, 512, 1, 4]; its last"),
        ({"lse": [0.0]}, "lse is a list; it must be a torch tensor"),
        ({"backend": "FASTEST"}, "backend 'FASTEST' is not known"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, object], message: str) -> None:
    case = make_case(LatentFormat.BFLOAT16, [9, 8], q_len=2)
    with pytest.raises(ConfigError) as error:
        public(case, **changes)
    assert str(error.value).startswith(message)


def test_tensors_that_do_not_fit() -> None:
    call = make_case(LatentFormat.BFLOAT16, [9, 8], q_len=2).call
    good = {"query": call.query, "cache": call.cache, "block_table": call.block_table, "seq_lens": call.seq_lens}
    bad: list[tuple[str, object, str]] = [
        ("query", torch.zeros(2, 9, 4, 144), "query has 9 tokens and 4 heads; allowed are 1 to 8 tokens"),
        ("query", call.query.double(), "query is float64; it must be float32 or float16 or bfloat16"),
        ("cache", call.cache[0], "cache has the shape [16, 144]; it must be [entries, block_size, width]"),
        ("cache", call.cache.view(torch.int16), "cache is int16; it must be"),
        ("cache", call.cache[..., :143], "a latent cache of torch.bfloat16 and 143 elements a token"),
        ("cache", torch.zeros(3, 144, 16).bfloat16().transpose(1, 2), "cache has the strides [2304, 1, 16]"),
        ("block_table", call.block_table.long(), "block_table is int64; it must be int32"),
        ("block_table", call.block_table[:1], "block_table has the shape [1, 1]; it must be [2, columns]"),
        ("seq_lens", call.seq_lens[:1], "seq_lens has the shape [1]; it must be [2]"),
        ("seq_lens", call.seq_lens.to("meta"), "seq_lens is on meta; it must be on cpu"),
    ]
    for name, value, message in bad:
        with pytest.raises(ConfigError) as error:
            mla_decode(**(good | {name: value}), scale=1.0, latent_dim=128, rope_dim=16)  # type: ignore[arg-type]
        assert str(error.value).startswith(message)


def test_a_backend_that_cannot_run_here_says_why() -> None:
    case = make_case(LatentFormat.BFLOAT16, [9])
    with pytest.raises(BackendUnavailable, match="FLASHMLA cannot run this call: this is the CPU"):
        public(case, backend="FLASHMLA")
