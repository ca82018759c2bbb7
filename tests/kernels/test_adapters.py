"""The adapters against recorded call contracts: the arguments that the real packages take, and answers in their terms.

What is compared is what `decode` leaves in `out` and `lse` with a float64 oracle of `kernels/contract.py`, over a pool
whose unused slots, blocks and table entries are poisoned, and with `out` and `lse` full of NaN before.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from fake_packages import SIGNATURES, Package, signature

from kvtide.kernels import registry, scales
from kvtide.kernels.adapters import cutlass, flash_attention, flashinfer, flashmla, framing, tokenspeed
from kvtide.kernels.contract import MlaCall
from kvtide.kernels.device import Machine
from kvtide.kernels.formats import FP8_MAX, LatentFormat
from kvtide.kernels.registry import Decode
from kvtide.kernels.support import Request, Support, reasons
from kvtide.kvcache import BackendUnavailable

LATENT, ROPE = 512, 64
SCALE = 192**-0.5 * 1.1
BAD_ENTRY = 2_147_480_000
RAGGED = (130, 0, 1, 64, 63, 2)


@dataclass(frozen=True)
class Adapter:
    """One adapter, and how it is told apart in a test."""

    name: str
    support: Support
    decode: Decode


ADAPTERS = {
    adapter.name: adapter
    for adapter in (
        Adapter("FLASHMLA", flashmla.SUPPORT, flashmla.decode),
        Adapter("FLASH_ATTN_MLA 3", flash_attention.SUPPORT, flash_attention.decode),
        Adapter("FLASH_ATTN_MLA 4", flash_attention.SUPPORT_4, flash_attention.decode_4),
        Adapter("FLASHINFER_MLA", flashinfer.SUPPORT, flashinfer.decode),
        Adapter("TOKENSPEED_MLA", tokenspeed.SUPPORT, tokenspeed.decode),
        Adapter("CUTLASS_MLA", cutlass.SUPPORT, cutlass.decode),
    )
}
every_adapter = pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS.keys())


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    """The stand-ins installed, and a GPU's multiprocessors on a machine without one."""
    for module in (tokenspeed, cutlass):
        monkeypatch.setattr(module, "num_sms", lambda device: 148)
    monkeypatch.setattr(torch.ops._C, "sm100_cutlass_mla_decode", None, raising=False)
    _forget()
    with Package().installed() as package:
        yield package
    _forget()


def _forget() -> None:
    for cached in (flashmla._options, flash_attention.load, flash_attention.load_4):
        cached.cache_clear()
    framing._workspaces.clear()


def make(
    lens: tuple[int, ...] = RAGGED,
    *,
    q_len: int = 1,
    heads: int = 2,
    block: int = 64,
    layers: int = 3,
    fmt: LatentFormat = LatentFormat.BFLOAT16,
    dtype: torch.dtype = torch.bfloat16,
    q_lens: tuple[int, ...] | None = None,
    window: int | None = None,
    k_scale: float = 1.0,
    columns: int | None = None,
    seed: int = 0,
) -> MlaCall:
    """A call over a pool whose blocks hold `layers` layers, as a view of the second one, poisoned where it may be.

    The unit that entries count is 16 tokens of a layer; with one layer it is the block, and the cache is compact.
    """
    rng = torch.Generator().manual_seed(seed)
    width, batch = LATENT + ROPE, len(lens)
    blocks_of = [-(-length // block) for length in lens]
    columns = max(blocks_of) if columns is None else columns
    num_blocks = sum(blocks_of) + 2
    storage = torch.full((num_blocks * layers * block * width,), math.nan).to(fmt.storage_dtype)
    unit = (16 if layers > 1 else block) * width
    step = layers * block * width // unit
    layer = min(layers - 1, 1) * block * width
    cache = torch.as_strided(storage, ((num_blocks - 1) * step + 1, block, width), (unit, width, 1), layer)
    order = (torch.randperm(num_blocks - 1, generator=rng) + 1).tolist()  # block 0 stays poisoned
    table = torch.full((batch, columns), BAD_ENTRY, dtype=torch.int32)
    for row, length in enumerate(lens):
        for column in range(blocks_of[row]):
            entry = order.pop() * step
            table[row, column] = entry
            tokens = min(block, length - column * block)
            cache[entry, :tokens] = torch.randn(tokens, width, generator=rng).to(fmt.storage_dtype)
    return MlaCall(
        query=torch.randn(batch, q_len, heads, width, generator=rng).to(dtype),
        cache=cache,
        block_table=table,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        q_lens=None if q_lens is None else torch.tensor(q_lens, dtype=torch.int32),
        fmt=fmt,
        latent_dim=LATENT,
        rope_dim=ROPE,
        scale=SCALE,
        k_scale=torch.tensor([k_scale]),
        window=window,
        sink=None,
        out=torch.full((batch, q_len, heads, LATENT), math.nan, dtype=dtype),
        lse=torch.full((batch, q_len, heads), math.nan),
        batch_invariant=False,
    )


def oracle(call: MlaCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract, token by token, in float64."""
    out = torch.zeros(call.out.shape, dtype=torch.float64)
    lse = torch.full(call.lse.shape, -math.inf, dtype=torch.float64)
    lens = call.seq_lens.tolist()
    for row in range(call.batch):
        q_len = call.q_len if call.q_lens is None else int(call.q_lens[row])
        places = range(lens[row])
        entries = [int(call.block_table[row, j // call.block_size]) for j in places]
        everything = call.cache[entries, [j % call.block_size for j in places]].double() * float(call.k_scale)
        for token in range(q_len):
            position = lens[row] - q_len + token
            first = 0 if call.window is None else max(0, position - call.window + 1)
            if position < first:
                continue
            keys = everything[first : position + 1]
            scores = call.scale * (call.query[row, token].double() @ keys.T)
            lse[row, token] = torch.logsumexp(scores, dim=-1)
            out[row, token] = torch.softmax(scores, dim=-1) @ keys[:, : call.latent_dim]
    return out, lse


def check(adapter: Adapter, call: MlaCall, exact: MlaCall | None = None) -> None:
    """Run the adapter and compare with the oracle of `exact`: the call, or one with the query that the kernel sees."""
    adapter.decode(call)
    out, lse = oracle(exact or call)
    torch.testing.assert_close(call.out.double(), out, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(call.lse.double(), lse, rtol=1e-5, atol=1e-5)


def layers_for(adapter: Adapter) -> int:
    return 1 if adapter.support.compact else 3


def block_for(adapter: Adapter) -> int:
    return adapter.support.pages[0] if adapter.support.pages else 64


@every_adapter
@pytest.mark.parametrize("q_len", [1, 2, 5, 8])
def test_ragged_rows_over_a_poisoned_pool(package: Package, adapter: Adapter, q_len: int) -> None:
    q_len = min(q_len, adapter.support.max_q_len or q_len)
    block = block_for(adapter)
    columns = 5 if q_len == 2 else None  # wider than needed, or exactly wide enough
    check(adapter, make(q_len=q_len, block=block, layers=layers_for(adapter), columns=columns))
    assert package.calls


@every_adapter
@pytest.mark.parametrize("heads", [1, 12, 64, 65, 96, 128])
def test_head_counts(package: Package, adapter: Adapter, heads: int) -> None:
    check(adapter, make((70, 0, 3), heads=heads, block=block_for(adapter), layers=layers_for(adapter)))


@every_adapter
@pytest.mark.parametrize("block", [16, 32, 64, 128, 192, 256])
def test_blocks_are_cut_into_the_kernels_pages(package: Package, adapter: Adapter, block: int) -> None:
    call = make((300, 0, 33, 256), block=block, layers=layers_for(adapter))
    request = Request.of(call)._replace(machine=_machine_of(adapter))
    if reasons(adapter.support, request):
        assert adapter.support.pages is not None
        assert all(block % page for page in adapter.support.pages)
    else:
        check(adapter, call)


@every_adapter
def test_query_lengths_per_row(package: Package, adapter: Adapter) -> None:
    lens, q_lens = (130, 0, 64, 5, 9, 2), (3, 0, 4, 1, 0, 4)
    call = make(lens, q_len=4, q_lens=q_lens, block=block_for(adapter), layers=layers_for(adapter))
    if adapter.support.max_q_len == 1:
        call = make(lens, q_lens=(1, 0, 1, 1, 0, 1), block=block_for(adapter), layers=layers_for(adapter))
    check(adapter, call)


@every_adapter
def test_half_precision_and_a_result_in_somebodys_buffer(package: Package, adapter: Adapter) -> None:
    if LatentFormat.FLOAT16 not in adapter.support.formats:
        assert adapter.name == "FLASHINFER_MLA"
        return
    call = make(fmt=LatentFormat.FLOAT16, dtype=torch.float16, block=block_for(adapter), layers=layers_for(adapter))
    wide = torch.full((*call.out.shape[:3], LATENT + 8), math.nan, dtype=torch.float16)
    check(adapter, replace(call, out=wide[..., :LATENT], lse=torch.empty(2, 1, 6).transpose(0, 2)))
    assert wide[..., LATENT:].isnan().all()


@every_adapter
@pytest.mark.parametrize("lens", [(0, 0, 0), ()])
def test_nothing_to_see_anywhere(package: Package, adapter: Adapter, lens: tuple[int, ...]) -> None:
    """All rows empty, with a table of no columns, or no rows at all."""
    call = make(lens, columns=0, block=block_for(adapter), layers=layers_for(adapter))
    adapter.decode(call)
    assert package.calls == []
    assert not call.out.any()
    assert call.lse.eq(-math.inf).all()
    call = make((0, 0), columns=2, block=block_for(adapter), layers=layers_for(adapter))
    check(adapter, call)


@pytest.mark.parametrize("window", [4, 7, 64, 100, 1000])
def test_windows(package: Package, window: int) -> None:
    call = make(q_len=4, window=window)
    exact = replace(call, block_table=call.block_table.clone())
    # Blocks that the window has left are given back, and stand as -1.
    for row, length in enumerate(call.seq_lens.tolist()):
        call.block_table[row, : max(0, length - 4 - window + 1) // call.block_size] = -1
    check(ADAPTERS["TOKENSPEED_MLA"], call, exact)
    assert package.calls[0]["window_left"] == window - 1


@pytest.mark.parametrize("name", ["FLASHINFER_MLA", "TOKENSPEED_MLA"])
@pytest.mark.parametrize(("dtype", "k_scale"), [(torch.bfloat16, 0.25), (torch.float16, 3.7)])
def test_fp8_scales_reach_keys_and_values(package: Package, name: str, dtype: torch.dtype, k_scale: float) -> None:
    call = make((66, 0, 3), fmt=LatentFormat.FP8, dtype=dtype, k_scale=k_scale, q_len=2)
    call.query[0, 0, 0, 0] = 1000.0  # saturates: as NaN it would spoil its head
    seen = call.query.float().clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(dtype)
    check(ADAPTERS[name], call, exact=replace(call, query=seen))


def test_the_scale_is_read_from_the_device_once(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = torch.tensor([0.5])
    assert scales.host_scale(scale) == 0.5
    monkeypatch.setattr(torch.Tensor, "__float__", lambda tensor: pytest.fail("read again"))
    assert scales.host_scale(scale) == 0.5
    monkeypatch.undo()
    scale.fill_(2.0)
    assert scales.host_scale(scale) == 2.0
    before = len(scales._values)
    del scale
    assert len(scales._values) == before - 1  # nothing is kept alive


@pytest.mark.parametrize("name", ["FLASHINFER_MLA", "TOKENSPEED_MLA", "CUTLASS_MLA"])
def test_one_zeroed_workspace_for_all_calls(package: Package, name: str) -> None:
    adapter = ADAPTERS[name]
    for seed in range(3):
        check(adapter, make((70, 3), seed=seed, block=block_for(adapter), layers=layers_for(adapter)))
    assert len(package._workspaces) == (3 if name == "CUTLASS_MLA" else 1)  # that one gets a view of it each time
    assert len(framing._workspaces) == 1


def test_nothing_is_allocated_or_read_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(BackendUnavailable, match=r"^the workspace of kernel has to be allocated before a CUDA graph"):
        framing.workspace("kernel", torch.device("cuda", 0), 100)


def test_flashmla_gets_a_fresh_schedule_each_time(package: Package) -> None:
    for lens in ((70, 3), (3, 70)):
        check(ADAPTERS["FLASHMLA"], make(lens))
    first, second = (given["tile_scheduler_metadata"] for given in package.calls)
    assert first is not second
    assert first._used
    assert second._used


def test_flashmla_from_upstream_has_no_legacy_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    _forget()
    with Package(upstream_flash_mla=True).installed() as package:
        check(ADAPTERS["FLASHMLA"], make())
        assert "use_legacy" not in package.calls[0]
    _forget()


def test_one_split_when_rows_must_not_depend_on_their_batch(package: Package) -> None:
    adapter = ADAPTERS["FLASH_ATTN_MLA 3"]
    assert adapter.support.batch_invariant
    check(adapter, replace(make(), batch_invariant=True))
    check(adapter, make())
    assert [given["num_splits"] for given in package.calls] == [1, 0]
    assert [a.name for a in ADAPTERS.values() if a.support.batch_invariant] == [adapter.name]


def test_the_cache_is_passed_as_it_lies(package: Package) -> None:
    """No copy: the kernels get views of the pool, with its strides."""
    call = make(block=64)
    low, high = call.cache.data_ptr(), call.cache.data_ptr() + call.cache.untyped_storage().nbytes()
    for adapter in ADAPTERS.values():
        if not adapter.support.compact:
            adapter.decode(call)
            given = package.calls[-1]
            for name in ("kv_cache", "k_cache", "k", "v"):
                if name in given:
                    assert low <= given[name].data_ptr() < high
                    assert given[name].stride(0) == call.cache.stride(0)


@every_adapter
def test_a_table_that_is_part_of_a_wider_one(package: Package, adapter: Adapter) -> None:
    call = make((130, 0, 64), block=block_for(adapter), layers=layers_for(adapter))
    wide = torch.full((3, 10), BAD_ENTRY, dtype=torch.int32)
    part = wide[:, 3 : 3 + call.block_table.shape[1]]
    part.copy_(call.block_table)
    lengths = torch.stack((call.seq_lens, torch.full_like(call.seq_lens, 10**6)), dim=1)[:, 0]
    check(adapter, replace(call, block_table=part, seq_lens=lengths))


def _machine_of(adapter: Adapter) -> Machine:
    assert adapter.support.architectures is not None
    major, minor = adapter.support.architectures[0].replace("x", "0").split(".")
    return Machine("cuda", (int(major), int(minor)))


@every_adapter
def test_the_registry_reaches_the_adapter(package: Package, adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = _machine_of(adapter)
    monkeypatch.setattr("kvtide.kernels.support.machine_of", lambda device: machine)
    caches = (registry._choose, registry._force, registry._load)
    for cached in caches:
        cached.cache_clear()
    call = make(block=block_for(adapter), layers=layers_for(adapter))
    assert registry.select(call, adapter.name.split()[0]) is adapter.decode
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize(
    ("module", "spoil", "reason"),
    [
        (flashmla, lambda: setattr(importlib.import_module("flash_mla"), "has_legacy", lambda: False), "Hopper"),
        (flash_attention, lambda: _spoil_version_3(), "no FlashAttention 3 here: no kernel image"),
        (cutlass, lambda: delattr(torch.ops._C, "sm100_cutlass_mla_decode"), "no sm100_cutlass_mla_decode"),
    ],
)
def test_a_package_without_the_kernel_says_so(package: Package, module: ModuleType, spoil: Any, reason: str) -> None:
    module.load()
    for cached in (flash_attention.load, flashmla._options):
        cached.cache_clear()
    spoil()
    with pytest.raises(ImportError, match=reason):
        module.load()
    if module is cutlass:
        torch.ops._C.sm100_cutlass_mla_decode = None  # for the fixture to take away


def _spoil_version_3() -> None:
    interface: Any = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    interface.FA3_AVAILABLE, interface.FA3_UNAVAILABLE_REASON = False, "no kernel image"


def test_installed_packages_have_the_recorded_signatures() -> None:
    installed = []
    for name in SIGNATURES:
        # A folder of a package's name on the path is found too, and holds nothing that can be imported.
        with contextlib.suppress(ImportError):
            importlib.import_module(name.rpartition(".")[0])
            installed.append(name)
    for name in installed:
        module, _, function = name.rpartition(".")
        theirs = inspect.signature(getattr(importlib.import_module(module), function)).parameters
        for parameter in signature(name).parameters.values():
            assert parameter.name in theirs, name
            assert parameter.kind == theirs[parameter.name].kind
    if not installed:
        pytest.skip("none of the adapted packages is installed")
