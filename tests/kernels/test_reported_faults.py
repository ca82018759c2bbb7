"""Public reports about attention kernels, replayed on every backend; `test_scenarios.py` lists all reports and tests.

Foreign kernels are stand-ins that leave behind what the real ones leave (`fake_packages.py`); Triton's kernel runs in
its interpreter. Names of tests end in the numbers of the reports.
"""

from __future__ import annotations

import gc
import itertools
import math
import subprocess
import sys
import weakref
from dataclasses import replace

import pytest
import torch
from mla_cases import Case, check, make_case
from test_adapters import ADAPTERS, BAD_ENTRY, Adapter, block_for, every_adapter, layers_for, make
from test_adapters import check as check_adapter
from test_adapters import package as package  # a fixture

pytest.importorskip("triton")

from fake_packages import Package

from kvtide.kernels import cpu, merge_states, mla_decode, reference, registry, triton_mla
from kvtide.kernels.adapters import framing, tokenspeed
from kvtide.kernels.formats import LatentFormat
from kvtide.kernels.registry import Decode
from kvtide.kernels.triton_schedule import Device, Schedule, Tile

OWN = {"reference": reference.decode, "cpu": cpu.decode, "triton": triton_mla.decode}
every_backend = pytest.mark.parametrize("decode", OWN.values(), ids=OWN.keys())
SMALL = Tile(rows=16, keys=32, warps=4, stages=2, per_sm=2)
HOPPER = Device(capability=90, processors=1)


def whole(cache: torch.Tensor) -> torch.Tensor:
    """All of the memory that a view is of."""
    return torch.empty(0, dtype=cache.dtype).set_(cache.untyped_storage())


@every_backend
@pytest.mark.parametrize("fmt", [LatentFormat.FLOAT32, LatentFormat.FLOAT16, LatentFormat.BFLOAT16], ids=str)
@pytest.mark.parametrize("filling", [math.inf, -math.inf])
def test_infinity_in_unused_slots_7_8_9(decode: Decode, fmt: LatentFormat, filling: float) -> None:
    """In tails, in block 0 and in unused blocks, where the other tests have NaN."""
    case = make_case(fmt, [13, 0, 16, 33, 70], q_len=2, latent_dim=32, window=20)
    memory = whole(case.call.cache)
    memory[memory.isnan()] = filling
    decode(case.call)
    check(case)


@pytest.mark.parametrize("left", [math.inf, math.nan, -49994.0, 0.0])
@pytest.mark.parametrize("base2", [False, True])
def test_whatever_a_kernel_leaves_where_no_key_is_seen_2_3_5_6(left: float, base2: bool) -> None:
    call = make((130, 0, 1), q_len=2, heads=3)
    fitted = framing.frame(call, ADAPTERS["FLASHMLA"].support)
    assert fitted is not None
    out, lse = torch.randn(fitted.out.shape), torch.randn(fitted.out.shape[:3])
    unseen = torch.tensor([[False, False], [True, True], [True, False]])
    lse[unseen], out[unseen] = left, math.nan
    fitted.finish(out, lse, base2=base2)
    assert torch.isneginf(call.lse[unseen]).all()
    assert not call.out[unseen].any()
    assert torch.equal(call.out[~unseen], out[~unseen].bfloat16())
    torch.testing.assert_close(call.lse[~unseen], lse[~unseen] * (math.log(2) if base2 else 1))


def test_a_row_of_no_key_changes_no_other_row_1() -> None:
    """Bit for bit, in every backend of kvtide's own."""
    for decode in OWN.values():
        case = make_case(LatentFormat.FP8, [40, 0, 7], latent_dim=32, dtype=torch.bfloat16)
        decode(case.call)
        call = case.call
        kept = [0, 2]
        without = Case(call, [case.history[row] for row in kept]).fresh(
            query=call.query[kept],
            block_table=call.block_table[kept],
            seq_lens=call.seq_lens[kept],
            out=call.out[kept],
            lse=call.lse[kept],
        )
        decode(without.call)
        assert torch.equal(without.call.out, call.out[kept])
        assert torch.equal(without.call.lse, call.lse[kept])


@every_backend
def test_rows_of_no_key_may_have_entries_of_minus_one_19(decode: Decode) -> None:
    case = make_case(LatentFormat.BFLOAT16, [0, 20, 0], latent_dim=16, q_len=2)
    case.call.block_table[[0, 2]] = -1
    decode(case.call)
    check(case)


@every_adapter
def test_rows_of_no_key_may_have_entries_of_minus_one_in_adapters_19(package: Package, adapter: Adapter) -> None:
    call = make((0, 70, 0), block=block_for(adapter), layers=layers_for(adapter))
    call.block_table[[0, 2]] = -1
    check_adapter(adapter, call)


GUARD = """
import sys; sys.path[:0] = {paths}
import ctypes, math, mmap, torch
from dataclasses import replace
from mla_cases import Case, check, make_case
from kvtide.kernels import cpu, paged_attention, reference, triton_mla
from kvtide.kernels.formats import LatentFormat

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
held = []

def at_the_end(values):
    # The values' last byte is the last of a page, and the page after it may not be read.
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    held.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(start + mmap.PAGESIZE, mmap.PAGESIZE, 0) == 0
    size = values.numel() * values.itemsize
    place = torch.frombuffer(memory, dtype=values.dtype, count=values.numel(), offset=mmap.PAGESIZE - size)
    return place.view(values.shape).copy_(values)

for q_len, window, lens in ((3, None, [40, 3, 16, 70]), (1, 5, [64, 40]), (8, 20, [33, 70])):
    # Of bfloat16 the kernel takes 64 keys at a time, which end behind the last column.
    case = make_case(LatentFormat.BFLOAT16, lens, q_len=q_len, latent_dim=16, window=window, dtype=torch.bfloat16)
    call = case.call
    assert call.block_table.shape[1] == -(-max(lens) // call.block_size)
    for decode in (reference.decode, cpu.decode, triton_mla.decode):
        case = case.fresh(block_table=at_the_end(call.block_table), seq_lens=at_the_end(call.seq_lens))
        decode(case.call)
        check(case)

# Keys and values per head, of entries beyond 2**31 elements.
entries = 2**31 // (16 * 16) + 8
keys = torch.empty(entries, 16, 1, 16, dtype=torch.uint8).view(torch.float8_e4m3fn)
values = torch.empty(entries, 16, 1, 16, dtype=torch.uint8).view(torch.float8_e4m3fn)
keys[-1], values[-1] = torch.randn(2, 16, 1, 16).to(keys.dtype)
query, lens = torch.randn(1, 1, 2, 16), torch.tensor([16], dtype=torch.int32)
table = at_the_end(torch.tensor([[entries - 1]], dtype=torch.int32))
results = [
    paged_attention(query, keys, values, table, lens, scale=0.2, backend=backend) for backend in ("torch", "triton")
]
assert torch.allclose(results[0].out, results[1].out, atol=1e-5)
"""


def test_nothing_is_read_behind_tables_and_lengths_10_14_33() -> None:
    """Tables exactly wide enough, of as many rows as requests, at the end of mapped memory: one more is a fault."""
    code = GUARD.format(paths=[str(path) for path in sys.path])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])


def test_no_schedule_is_used_for_another_q_len_15(package: Package) -> None:
    """FlashMLA's is valid for one set of lengths and query tokens; the stand-in fails where one is used twice."""
    adapter = ADAPTERS["FLASHMLA"]
    for q_len in (1, 4, 1):
        check_adapter(adapter, make((70, 3), q_len=q_len))
    assert len({id(given["tile_scheduler_metadata"]) for given in package.calls}) == 3


def test_every_batch_with_every_number_of_splits_22() -> None:
    """No program waits for another (there are no atomics and no flags), so that none can hang."""
    for batch, splits in itertools.product(range(1, 4), range(1, 6)):
        lens = [(0, 33, 70)[(batch + row) % 3] for row in range(batch)]
        case = make_case(LatentFormat.FLOAT32, lens, heads=1, latent_dim=16, rope_dim=0)
        for launch in triton_mla.launches(case.call, Schedule(SMALL, splits), HOPPER):
            launch.run()
        check(case)


@every_backend
def test_twenty_runs_give_the_same_bits_24(decode: Decode) -> None:
    case = make_case(LatentFormat.BFLOAT16, [40, 600, 3], heads=2, latent_dim=16, dtype=torch.bfloat16)
    if decode is triton_mla.decode:
        case = make_case(LatentFormat.BFLOAT16, [40, 3], heads=2, latent_dim=16, dtype=torch.bfloat16)
    decode(case.call)
    for _ in range(19):
        again = case.fresh()
        decode(again.call)
        assert torch.equal(again.call.out, case.call.out)
        assert torch.equal(again.call.lse, case.call.lse)


@pytest.mark.parametrize("splits", [1, 3])
def test_launches_stay_right_when_lengths_change_25_35(splits: int) -> None:
    """A captured graph: grids, scratch and arguments stay, lengths and tables change, up to the table's width."""
    long = make_case(LatentFormat.BFLOAT16, [100, 64, 33], q_len=2, heads=2, latent_dim=16)
    call = replace(long.call, seq_lens=torch.zeros(3, dtype=torch.int32))
    launches = triton_mla.launches(call, Schedule(SMALL, splits), HOPPER)
    for lens in ([1, 0, 2], [100, 64, 33], [0, 0, 0], [97, 64, 1]):
        call.seq_lens.copy_(torch.tensor(lens))
        call.out.fill_(math.nan)
        call.lse.fill_(math.nan)
        for launch in launches:
            launch.run()
        check(Case(call, [keys[:length] for keys, length in zip(long.history, lens, strict=True)]))


def halves(case: Case) -> tuple[Case, Case]:
    """The case's two halves by columns of its table; query tokens stand behind the first, and see all of it."""
    call, columns = case.call, case.call.block_table.shape[1] // 2
    cut = columns * call.block_size
    first = case.fresh(block_table=call.block_table[:, :columns], seq_lens=call.seq_lens.clamp(max=cut))
    second = case.fresh(block_table=call.block_table[:, columns:], seq_lens=(call.seq_lens - cut).clamp(min=0))
    return first, second


@every_backend
def test_two_halves_of_the_keys_are_the_whole_27(decode: Decode) -> None:
    case = make_case(LatentFormat.FLOAT32, [64, 20, 0, 50], latent_dim=16)
    first, second = halves(case)
    for half in (first, second):
        decode(half.call)
    merge_states(*_results(first), *_results(second), out=case.call.out, lse=case.call.lse)
    check(case)


@every_adapter
def test_two_halves_of_the_keys_are_the_whole_in_adapters_27(package: Package, adapter: Adapter) -> None:
    """Whatever the base of the kernel's LSE."""
    block = block_for(adapter)
    call = make((4 * block, 20, 0, 3 * block + 1), block=block, layers=layers_for(adapter))
    case = Case(call, [])
    first, second = halves(case)
    for half in (first, second):
        adapter.decode(half.call)
    merged = merge_states(*_results(first), *_results(second))
    adapter.decode(call)
    torch.testing.assert_close(merged.out, call.out, rtol=2**-6, atol=2**-7)
    torch.testing.assert_close(merged.lse, call.lse, rtol=1e-5, atol=1e-5)


def _results(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    return case.call.out, case.call.lse


def test_tables_of_odd_widths_34(package: Package) -> None:
    """295 columns of 32 tokens: some kernels used to ask for multiples of 128 tokens."""
    for name, adapter in ADAPTERS.items():
        if name not in ("FLASHMLA", "CUTLASS_MLA"):
            check_adapter(adapter, make((70, 0, 3), block=32, columns=295))
            assert package.calls[-1].get("max_seq_len", 295 * 32) == 295 * 32
    case = make_case(LatentFormat.BFLOAT16, [70, 0, 3], block_size=32, latent_dim=16)
    wide = torch.full((3, 295), BAD_ENTRY, dtype=torch.int32)
    wide[:, : case.call.block_table.shape[1]] = case.call.block_table
    for decode in OWN.values():
        case = case.fresh(block_table=wide)
        decode(case.call)
        check(case)


def test_what_is_forced_is_seen_by_a_call_like_an_earlier_one_36(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(registry.VARIABLE, raising=False)
    call = make_case(LatentFormat.BFLOAT16, [5], latent_dim=16).call
    for _ in range(2):
        assert registry.select(call) is cpu.decode
        monkeypatch.setenv(registry.VARIABLE, "TORCH_REFERENCE")
        assert registry.select(call) is reference.decode
        assert registry.select(call, "CPU") is cpu.decode
        monkeypatch.delenv(registry.VARIABLE)


@pytest.mark.parametrize("processors", [148, 160])
def test_the_workspace_holds_every_split_37(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """TokenSpeed's own formula: packed rows of 128 (64 in FP8) in float32 with their LSE, for each split."""
    monkeypatch.setattr(tokenspeed, "num_sms", lambda device: processors)
    call = make((5,))
    held = tokenspeed._workspace_bytes(call, torch.device("cpu"))
    for batch, heads, q_len, tile in itertools.product(
        (1, 2, 3, 7, 37, 74, 75, 149), (1, 16, 64, 96, 128), (1, 2, 5, 8), (64, 128)
    ):
        tiles = -(-heads * q_len // tile)
        splits = min(processors // batch // (tiles * tile // 64), 64 if tile == 64 else 32)
        assert splits <= 1 or batch * tile * tiles * splits * 513 * 4 <= held


def test_no_tensor_of_a_call_is_kept_38(package: Package) -> None:
    case = make_case(LatentFormat.FP8, [5, 3], latent_dim=16, k_scale=0.5)
    call = case.call
    mla_decode(
        call.query,
        call.cache,
        call.block_table,
        call.seq_lens,
        scale=call.scale,
        latent_dim=16,
        rope_dim=16,
        k_scale=call.k_scale,
        out=call.out,
        lse=call.lse,
    )
    calls = [call]
    for adapter in ADAPTERS.values():
        other = make((70, 3), block=block_for(adapter), layers=layers_for(adapter))
        adapter.decode(other)
        calls.append(other)
    package.calls.clear()
    names = ("query", "cache", "block_table", "seq_lens", "k_scale", "out", "lse")
    kept = [(name, weakref.ref(getattr(call, name))) for call in calls for name in names]
    del case, call, other, calls
    gc.collect()
    assert [name for name, tensor in kept if tensor() is not None] == []
