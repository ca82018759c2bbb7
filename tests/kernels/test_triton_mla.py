"""The Triton decode kernels in Triton's interpreter, against float64 attention.

Calls come from `mla_cases`: unused bytes of the pool are NaN in every format, page strides are two pages, tables are
exactly wide enough, results start as NaN. Names of tests end in the number of the public report that they stand for.
Most latents are small (the interpreter takes 30 ms a tile); the chunked layout is the same from 16 to 128 a chunk.
"""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from mla_cases import Case, check, make_case

from kvtide.kernels import triton_mla
from kvtide.kernels.contract import MlaCall
from kvtide.kernels.formats import LatentFormat
from kvtide.kernels.triton_schedule import INVARIANT_SPLIT_KEYS, Device, Schedule, Tile, choose
from kvtide.kvcache import ConfigError

HOPPER = Device(capability=90, processors=1)
AMPERE = Device(capability=80, processors=1)
SMALL = Tile(rows=16, keys=32, warps=4, stages=2, per_sm=2)
FORMATS = list(LatentFormat)


def run(call: MlaCall, splits: int = 1, tile: Tile = SMALL, device: Device = HOPPER, split_keys: int = 0) -> None:
    """The kernels under a schedule of the test's choice, with scratch that is NaN until it is written."""
    launches = triton_mla.launches(call, Schedule(tile, splits, split_keys), device)
    for scratch in ("part_out", "part_lse"):
        launches[0].args[scratch].fill_(math.nan)
    for launch in launches:
        launch.run()


def solved(case: Case, **schedule: object) -> Case:
    run(case.call, **schedule)  # type: ignore[arg-type]
    check(case)
    return case


def dims(fmt: LatentFormat) -> dict[str, int]:
    """Small latents in two chunks; FP8_DS needs 128 a scale, and gets two scales."""
    return {"latent_dim": 256 if fmt is LatentFormat.FP8_DS else 32, "rope_dim": 16}


def product() -> list[tuple[LatentFormat, int, int, int | None, int, torch.dtype]]:
    """Every format, q_len, number of heads, window, page size and query type at least once, paired at random."""
    everything = list(
        itertools.product(
            FORMATS, (1, 2, 3, 4, 5, 7, 8), (1, 12, 16, 64, 128), (None, 1, 20), (16, 32, 64, 128), _QUERIES
        )
    )
    random.Random(4).shuffle(everything)
    missing = {(place, value) for place in range(6) for value in {row[place] for row in everything}}
    missing |= {(0, fmt, 5, dtype) for fmt in FORMATS for dtype in _QUERIES}
    chosen = []
    for row in everything:
        # The interpreter's time goes with the tiles: many heads or many tokens, not both.
        if row[1] * row[2] > 260:
            continue
        news = {*enumerate(row), (0, row[0], 5, row[5])} & missing
        if news:
            missing -= news
            chosen.append(row)
    assert not missing
    return chosen


_QUERIES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize(("fmt", "q_len", "heads", "window", "page", "dtype"), product(), ids=str)
def test_matches_float64_attention(
    fmt: LatentFormat, q_len: int, heads: int, window: int | None, page: int, dtype: torch.dtype
) -> None:
    rows = q_len * heads
    case = make_case(
        fmt,
        [0, 1, page, page + 1],
        heads=heads,
        q_len=q_len,
        block_size=page,
        window=window,
        sink=heads == 12,
        k_scale=0.5 if fmt is LatentFormat.FP8 else 1.0,
        dtype=dtype,
        **dims(fmt),
    )
    solved(case, tile=replace(SMALL, rows=16 if rows <= 16 else 64, keys=64), splits=1 if rows > 64 else 2)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("device", [AMPERE, HOPPER], ids=["sm80", "sm90"])
def test_deepseek_dimensions(fmt: LatentFormat, device: Device) -> None:
    case = make_case(
        fmt, [33, 65], heads=3, q_len=2, block_size=64, latent_dim=512, rope_dim=64, dtype=torch.bfloat16, seed=3
    )
    solved(case, device=device)


@pytest.mark.parametrize("splits", [1, 2, 3, 4])
@pytest.mark.parametrize("q_len", [1, 3])
def test_splits(splits: int, q_len: int) -> None:
    """Lengths around tile borders: 33 keys of tiles of 32 leave a tile that the first query tokens do not see."""
    case = make_case(
        LatentFormat.FLOAT32, [0, 1, 2, 31, 32, 33, 34, 65, 100], q_len=q_len, heads=2, latent_dim=16, sink=True
    )
    solved(case, splits=splits)


@pytest.mark.parametrize("page", [8, 16, 24, 40, 48, 128])
def test_page_sizes_need_not_divide_tiles(page: int) -> None:
    lens = [page - 1, page, page + 1, 2 * page]
    solved(make_case(LatentFormat.FLOAT16, lens, block_size=page, latent_dim=16, dtype=torch.float16))


@pytest.mark.parametrize("latent_dim", [16, 32, 48, 64, 96, 128, 192, 384])
def test_latents_of_one_to_four_chunks(latent_dim: int) -> None:
    solved(make_case(LatentFormat.FLOAT32, [5], heads=2, latent_dim=latent_dim, rope_dim=8), splits=2)


@pytest.mark.parametrize("latent_dim", [8, 80, 100])
def test_latents_that_no_pieces_fit_are_refused(latent_dim: int) -> None:
    with pytest.raises(ConfigError, match=f"latent_dim {latent_dim} is not"):
        triton_mla.decode(make_case(LatentFormat.FLOAT32, [5], latent_dim=latent_dim).call)


@pytest.mark.parametrize("splits", [1, 3])
def test_rows_of_no_key_are_zero_and_leave_others_alone_1_2_20(splits: int) -> None:
    case = make_case(LatentFormat.FP8, [40, 0, 7], latent_dim=32, dtype=torch.bfloat16)
    solved(case, splits=splits)
    alone = make_case(LatentFormat.FP8, [0, 0], latent_dim=32, dtype=torch.bfloat16)
    assert alone.call.block_table.shape[1] == 0
    solved(alone, splits=splits)


@pytest.mark.parametrize("splits", [1, 2])
def test_first_tokens_of_a_row_shorter_than_its_query_see_nothing_5(splits: int) -> None:
    case = solved(make_case(LatentFormat.FLOAT32, [2, 3], q_len=4, latent_dim=16, sink=True), splits=splits)
    assert (case.call.lse[0, :2] == -math.inf).all()


def test_padded_query_tokens_17() -> None:
    case = make_case(LatentFormat.FLOAT32, [9, 40, 5, 33], q_len=5, q_lens=[0, 2, 5, 1], heads=5, latent_dim=16)
    solved(case, splits=2)
    solved(case.fresh(window=3))


@pytest.mark.parametrize("q_len", [5, 6, 7])
def test_identical_requests_give_identical_rows_16(q_len: int) -> None:
    case = make_case(LatentFormat.FLOAT32, [70], q_len=q_len, heads=6, latent_dim=16)
    call = case.call
    query, table = call.query.expand(3, -1, -1, -1), call.block_table.expand(3, -1)
    lens, out = call.seq_lens.expand(3).contiguous(), torch.full((3, *call.out.shape[1:]), math.nan)
    thrice = replace(call, query=query, block_table=table, seq_lens=lens, out=out, lse=out[..., 0].clone())
    run(thrice, splits=2)
    run(call, splits=2)
    assert torch.equal(thrice.out, call.out.expand(3, -1, -1, -1))
    assert torch.equal(thrice.lse, call.lse.expand(3, -1, -1))


def test_large_queries_21() -> None:
    case = solved(make_case(LatentFormat.FLOAT16, [65], query_std=100, dtype=torch.float16, latent_dim=32), splits=2)
    assert case.call.lse.isfinite().all()


@pytest.mark.parametrize("std", [1e-20, 1e5, 1e30])
@pytest.mark.parametrize("fmt", [LatentFormat.FP8, LatentFormat.FP8_DS], ids=str)
def test_bfloat16_queries_leave_the_range_of_float16(fmt: LatentFormat, std: float) -> None:
    case = make_case(fmt, [40], query_std=std, dtype=torch.bfloat16, **dims(fmt))
    solved(case.fresh(scale=0.1 / std))


def test_many_small_probabilities_in_float16() -> None:
    """One key 2**26 ahead of a thousand, which alone have values: float16 by itself would drop them all."""
    case = make_case(LatentFormat.FLOAT16, [1025], heads=1, latent_dim=16, rope_dim=16, block_size=128)
    keys, call = case.history[0], case.call
    keys[:], keys[0, 16], keys[1:, :16] = 0, 16.0, 1.0
    for column, entry in enumerate(call.block_table[0].tolist()):
        held = keys[column * 128 : (column + 1) * 128]
        call.cache[entry, : len(held)] = held.half()
    query = torch.zeros_like(call.query).half()
    query[..., 16] = 26 / 16
    call = replace(call, query=query, out=call.out.half(), scale=math.log(2.0))
    run(call, tile=replace(SMALL, keys=128))
    torch.testing.assert_close(call.out, torch.full_like(call.out, 1024 * 2.0**-26), rtol=0.01, atol=0)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_pages_apart_29(fmt: LatentFormat) -> None:
    """A page stride that is not block_size times the token's width."""
    case = make_case(fmt, [33, 7], dtype=torch.bfloat16, **dims(fmt))
    cache = case.call.cache
    apart = torch.full((cache.shape[0], cache[0].numel() + 16), 0xFF, dtype=torch.uint8).view(torch.uint8)
    apart = apart.repeat(1, cache.itemsize).view(cache.dtype)
    view = apart.as_strided(cache.shape, (apart.stride(0), cache.shape[2], 1))
    view.view(torch.uint8).copy_(cache.view(torch.uint8))
    solved(case.fresh(cache=view), splits=2)


@pytest.mark.parametrize("exponents", [range(-16, 16), range(12, -20, -1)], ids=["rising", "falling"])
def test_scales_of_one_row_far_apart(exponents: range) -> None:
    """FP8_DS keys are taken in units of the largest scale so far, whichever comes first."""
    case = make_case(LatentFormat.FP8_DS, [64], heads=2, latent_dim=256, dtype=torch.bfloat16)
    call, keys = case.call, case.history[0]
    for position, exponent in enumerate(exponents):
        for at in (2 * position, 2 * position + 1):
            entry = int(call.block_table[0, at // call.block_size])
            scales = call.cache[entry, at % call.block_size, 256:264].view(torch.float32)
            keys[at, :256].view(2, 128).mul_(2.0**exponent / scales.double()[:, None])
            scales.fill_(2.0**exponent)
    solved(case.fresh(scale=1e-9))


@pytest.mark.parametrize("scale", [0.02, 3.7])
def test_fp8_scale_reaches_keys_and_values_30_31(scale: float) -> None:
    case = make_case(LatentFormat.FP8, [50], latent_dim=32, k_scale=scale, rope_std=20, dtype=torch.bfloat16)
    solved(case, splits=2)


@pytest.mark.parametrize("heads", [6, 12, 96])
@pytest.mark.parametrize("batch", [1, 2])
def test_odd_head_counts_32(heads: int, batch: int) -> None:
    solved(make_case(LatentFormat.FP8, [40] * batch, heads=heads, dtype=torch.bfloat16, latent_dim=16))


@pytest.mark.parametrize("window", [1, 7, 32, 33])
def test_windows_do_not_read_what_has_left_them_9(window: int) -> None:
    """Blocks that a window has left have entry -1; page 0 and every unused block are NaN."""
    solved(make_case(LatentFormat.FLOAT32, [5, 64, 97, 130], q_len=3, window=window, latent_dim=16), splits=2)


def test_window_costs_its_own_length() -> None:
    """4,096 keys before the window: their entries are all -1, and the split that covers them would be the first."""
    case = make_case(LatentFormat.FLOAT32, [4100], window=40, latent_dim=16, block_size=128)
    assert choose(case.call, Device(90, 1000)).splits == 1
    solved(case)


def test_row_alone_equals_row_in_batch_26() -> None:
    lens = [70, 3, 200, 0, 131]
    batch = make_case(LatentFormat.BFLOAT16, lens, q_len=2, latent_dim=16, dtype=torch.bfloat16, batch_invariant=True)
    run(batch.call, splits=4, split_keys=64)
    for row in range(len(lens)):
        one = slice(row, row + 1)
        columns = -(-lens[row] // batch.call.block_size)
        alone = replace(
            batch.call,
            query=batch.call.query[one],
            block_table=batch.call.block_table[one, :columns],
            seq_lens=batch.call.seq_lens[one],
            out=torch.full_like(batch.call.out[one], math.nan),
            lse=torch.full_like(batch.call.lse[one], math.nan),
        )
        run(alone, splits=max(1, -(-columns * batch.call.block_size // 64)), split_keys=64)
        assert torch.equal(alone.out, batch.call.out[one])
        assert torch.equal(alone.lse, batch.call.lse[one])


def test_invariant_schedules_cut_by_position() -> None:
    few = make_case(LatentFormat.FP8, [100], latent_dim=16, batch_invariant=True).call
    wide = replace(few, block_table=few.block_table.new_zeros(64, 1024), query=few.query.expand(64, -1, -1, -1))
    device = Device(90, 132)
    assert choose(few, device) == Schedule(choose(few, device).tile, 1, INVARIANT_SPLIT_KEYS)
    assert choose(wide, device) == Schedule(choose(few, device).tile, 4, INVARIANT_SPLIT_KEYS)


def test_splits_follow_capacity_and_not_lengths_25() -> None:
    call = make_case(LatentFormat.BFLOAT16, [1], heads=16, latent_dim=16, dtype=torch.bfloat16).call
    table = call.block_table.new_zeros(1, 1024)
    lone = choose(replace(call, block_table=table), Device(90, 132))
    assert lone.splits == 16_384 // 128
    many = replace(call, query=call.query.expand(128, -1, -1, -1), block_table=table.expand(128, -1))
    assert choose(many, Device(90, 132)).splits == 2
    assert choose(replace(many, query=call.query.expand(300, -1, -1, -1)), Device(90, 132)).splits == 1


@pytest.mark.parametrize("heads", [1, 16])
def test_nothing_beside_scratch_and_results_is_written_23(heads: int) -> None:
    case = make_case(LatentFormat.FLOAT32, [40, 9], heads=heads, q_len=3, latent_dim=32)
    call = case.call
    frames = {name: torch.full((getattr(call, name).numel() + 512,), 7.0) for name in ("out", "lse")}
    inner = {name: frames[name][256:-256].view(getattr(call, name).shape) for name in frames}
    case = Case(replace(call, **inner), case.history)
    launches = triton_mla.launches(case.call, Schedule(SMALL, 3), HOPPER)
    for name in ("part_out", "part_lse"):
        frames[name] = torch.full((launches[0].args[name].numel() + 512,), 7.0)
        for launch in launches:
            launch.args[name] = frames[name][256:-256]
    for launch in launches:
        launch.run()
    check(case)
    for name, frame in frames.items():
        assert (torch.cat([frame[:256], frame[-256:]]) == 7).all(), name


def test_unwritten_scratch_is_not_read_24() -> None:
    """More splits than tiles leave parts of the scratch unwritten; whatever lies there, results are the same bits."""
    case = make_case(LatentFormat.FLOAT32, [1, 40, 0, 70], latent_dim=16)
    results = []
    for filling in (math.nan, 0.0, math.inf):
        case = case.fresh()
        launches = triton_mla.launches(case.call, Schedule(SMALL, 4), HOPPER)
        for name in ("part_out", "part_lse"):
            launches[0].args[name].fill_(filling)
        for launch in launches:
            launch.run()
        check(case)
        results.append(case.call.out)
    assert all(torch.equal(results[0], other) for other in results)


def test_strided_query_and_results_18() -> None:
    case = make_case(LatentFormat.FLOAT32, [20, 33], q_len=2, heads=3, latent_dim=16)
    call = case.call
    query = call.query.transpose(1, 2).contiguous().transpose(1, 2)
    out = torch.full((2, 3, 2, 24), math.nan).transpose(1, 2)[..., :16]
    lse = torch.full((3, 2, 2), math.nan).permute(1, 2, 0)
    solved(Case(replace(call, query=query, out=out, lse=lse), case.history), splits=2)


def test_decode_chooses_for_itself() -> None:
    case = make_case(
        LatentFormat.FP8_DS, [40, 0, 65], heads=12, q_len=3, dtype=torch.bfloat16, **dims(LatentFormat.FP8_DS)
    )
    triton_mla.decode(case.call)
    check(case)
    case = case.fresh(batch_invariant=True)
    triton_mla.decode(case.call)
    check(case)


def test_empty_batch() -> None:
    call = make_case(LatentFormat.FLOAT32, [8], latent_dim=16).call
    none = replace(call, query=call.query[:0], block_table=call.block_table[:0], seq_lens=call.seq_lens[:0])
    triton_mla.decode(replace(none, out=call.out[:0], lse=call.lse[:0]))


BEYOND = """
import sys; sys.path[:0] = {paths}
import torch
from dataclasses import replace
from mla_cases import check, make_case, Case
from kvtide.kernels.formats import LatentFormat
import test_triton_mla as t

case = make_case(LatentFormat.FP8, [40], latent_dim=16, heads=2)
call = case.call
where = {where!r}
if where == "pool":
    width, page = call.cache.shape[2], call.block_size
    entries = 2**31 // (page * width) + 4
    pool = torch.empty(entries, page, width, dtype=torch.uint8).view(call.cache.dtype)
    for column, entry in enumerate(call.block_table[0].tolist()):
        pool[entries - 1 - column] = call.cache[entry]
        call.block_table[0, column] = entries - 1 - column
    case = Case(replace(call, cache=pool), case.history)
else:
    # Rows of query and result 2**30 elements apart: the third is beyond int32, their stride is not.
    def apart(x):
        memory = torch.empty(2**31 + 128 + x.numel(), dtype=torch.float16)
        wide = memory.as_strided((3, *x.shape[1:]), (2**30 + 64, *x.stride()[1:]))
        wide.copy_(x.expand(3, *x.shape[1:]))
        return wide
    case = Case(
        replace(
            call,
            query=apart(call.query),
            out=apart(call.out),
            lse=call.lse.repeat(3, 1, 1),
            block_table=call.block_table.repeat(3, 1),
            seq_lens=call.seq_lens.repeat(3),
        ),
        case.history * 3,
    )
t.run(case.call)
check(case)
"""


@pytest.mark.parametrize("where", ["pool", "query and out"])
def test_offsets_beyond_int32_10_12_13(where: str) -> None:
    """In a process of its own, since a wrong offset is a segmentation fault; memory that is not touched costs none."""
    code = BEYOND.format(paths=[str(p) for p in sys.path], where=where)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
