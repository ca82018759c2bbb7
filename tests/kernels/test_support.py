"""What backends declare: re-cut blocks, architectures, widths, and that a declaration is what the code does."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from mla_cases import check, make_case
from requests_of import HOPPER, request

from kvtide.kernels import mla_decode, registry
from kvtide.kernels.device import Machine
from kvtide.kernels.formats import LatentFormat
from kvtide.kernels.registry import Backend, explain, pick, priority
from kvtide.kernels.support import Recut, Request, Support, pieces, reasons, recut
from kvtide.kvcache import BackendUnavailable

CPU = Machine("cpu")


def test_cuda_graphs_batches_of_mixed_queries_and_pages_of_one_layer() -> None:
    assert reasons(Support(), request(capturing=True)) == ["cannot be captured in a CUDA graph"]
    assert reasons(Support(varlen=False), request(varlen=True)) == ["no query length per row"]
    compact = Support(pages=(128,), compact=True)
    assert len(reasons(compact, request(token_stride=1168, block_stride=128 * 1168))) == 1
    assert reasons(compact, request(block_size=256)) == []
    assert reasons(compact, request(block_stride=2 * 128 * 1152)) == [
        "pages 294,912 bytes apart are not the 147,456 bytes of a compact cache of one layer"
    ]


@pytest.mark.parametrize("block_size", [64, 128, 192, 256])
@pytest.mark.parametrize("page", [32, 64])
@pytest.mark.parametrize("gap", [0, 1, 7, 960])
def test_a_re_cut_reaches_every_token_of_every_block(block_size: int, page: int, gap: int) -> None:
    """Against the addresses of the contract: token t of block e lies at e * unit + t * width."""
    width = 12
    unit = block_size * width + gap * 4
    cut = recut(block_size, page, unit, width)
    assert cut is not None
    for entry in (0, 1, 5):
        for token in (0, 1, page - 1, block_size // 2 + 1, block_size - 1):
            part, slot = divmod(token, page)
            entry_of_page = entry * cut.scale + part * cut.step
            assert entry_of_page * cut.stride + slot * width == entry * unit + token * width


def test_what_cannot_be_cut() -> None:
    assert recut(96, 64, 96 * 2, 2) is None
    assert recut(64, 64, 1000, 2) == Recut(64, 1, 1000, 1, 0)
    assert recut(128, 64, 128 * 2, 2) == Recut(64, 2, 128, 2, 1)
    # An arena's unit that is a fraction of a block keeps its entries: 128 tokens of 2 bytes, unit 64.
    assert recut(128, 64, 64, 2) == Recut(64, 2, 64, 1, 2)


@pytest.mark.parametrize(
    ("architecture", "yes", "no"),
    [
        ("9.0", (9, 0), (9, 1)),
        ("10.x", (10, 3), (11, 0)),
        ("8.0+", (12, 0), (7, 5)),
        ("8.9+", (9, 0), (8, 6)),
    ],
)
def test_architectures(architecture: str, yes: tuple[int, int], no: tuple[int, int]) -> None:
    assert Machine("cuda", yes).is_a(architecture)
    assert not Machine("cuda", no).is_a(architecture)
    assert not Machine("cpu").is_a(architecture)


def verdict(name: str, asked: Request) -> registry.Verdict:
    return next(found for found in explain(asked) if found.name == name)


@pytest.mark.parametrize("machine", [CPU, HOPPER], ids=str)
@pytest.mark.parametrize(
    ("dims", "reason"),
    [
        ((512, 64), None),
        ((256, 32), None),
        ((192, 0), None),
        ((16, 64), None),
        ((100, 64), "latent 100 is not one to 4 pieces of one power of two from 16 to 128"),
        ((1024, 64), "latent 1024 is not one to 4 pieces of one power of two from 16 to 128"),
        ((512, 128), "rope 128 is more than 64"),
    ],
)
def test_the_triton_kernel_declares_its_widths(machine: Machine, dims: tuple[int, int], reason: str | None) -> None:
    pytest.importorskip("triton")
    asked = request(machine=machine, latent_dim=dims[0], rope_dim=dims[1])
    assert verdict("TRITON_MLA", asked).reasons == (() if reason is None else (reason,))
    # Nothing is picked that then refuses.
    expected = {"CPU"} if machine == CPU else {"TRITON_MLA"} if reason is None else {"TORCH_REFERENCE"}
    assert pick(asked._replace(finite_unused=False, window=5)) in expected


def test_pieces() -> None:
    assert [pieces(latent) for latent in (16, 48, 64, 80, 96, 512, 640)] == [
        (1, 16),
        (3, 16),
        (4, 16),
        None,
        (3, 32),
        (4, 128),
        None,
    ]
    assert pieces(0) is None
    assert pieces(1024) == (4, 256)
    assert pieces(1024, 128) is None


def test_the_interpreter_runs_only_when_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv(registry.VARIABLE, raising=False)
    asked = request(machine=CPU)
    assert (
        verdict("TRITON_MLA", asked).by_name_only
        == "runs in Triton's interpreter here, which is slow, so only when named"
    )
    assert "TRITON_MLA" not in priority(asked)
    assert verdict("TRITON_MLA", request()).by_name_only is None
    case = make_case(LatentFormat.FP8, [20, 0, 33], q_len=2, latent_dim=32, window=9, sink=True, dtype=torch.bfloat16)
    call = case.call
    for forced in (Backend.TRITON_MLA, None):
        case = case.fresh()
        if forced is None:
            monkeypatch.setenv(registry.VARIABLE, "triton_mla")
        mla_decode(
            call.query,
            call.cache,
            call.block_table,
            call.seq_lens,
            scale=call.scale,
            latent_dim=32,
            rope_dim=16,
            window=9,
            sink=call.sink,
            out=case.call.out,
            lse=case.call.lse,
            backend=forced,
        )
        check(case)


def test_a_finite_pool_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With projections too, where the function calls itself."""
    asked = []

    def select(call: Any, backend: Any, *, finite_unused: bool) -> Any:
        asked.append(finite_unused)
        return lambda call: None

    monkeypatch.setattr("kvtide.kernels.mla.select", select)
    call = make_case(LatentFormat.FLOAT32, [3], latent_dim=16).call
    from kvtide.kernels import UpProjections

    projections = UpProjections(torch.zeros(4, 8, 16), torch.zeros(4, 16, 8))
    for options in ({}, {"finite_unused": True}, {"finite_unused": True, "projections": projections}):
        query = torch.zeros(1, 1, 4, 24) if "projections" in options else call.query
        mla_decode(query, call.cache, call.block_table, call.seq_lens, scale=1.0, latent_dim=16, rope_dim=16, **options)  # type: ignore[arg-type]
    assert asked == [False, True, True]


OWN = ["TORCH_REFERENCE", "CPU", "TRITON_MLA"]


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("fmt", list(LatentFormat), ids=lambda fmt: fmt.value)
def test_what_is_declared_runs_and_what_is_not_is_refused(name: str, fmt: LatentFormat) -> None:
    """Odd widths, ropes of nothing, odd blocks: a kernel that declares them computes them, the others say no."""
    pytest.importorskip("triton")
    grouped = fmt is LatentFormat.FP8_DS
    widths = itertools.product((128, 256, 640), (2, 8, 66)) if grouped else itertools.product(_LATENTS, (0, 1, 8, 65))
    ran = refused = 0
    for number, (latent, rope) in enumerate(widths):
        size = (1, 3, 16, 20)[number % 4]
        dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
        case = make_case(fmt, [7, 0, 21], heads=3, block_size=size, latent_dim=latent, rope_dim=rope, dtype=dtype)
        request = Request.of(case.call)
        if verdict(name, request).reasons:
            with pytest.raises(BackendUnavailable, match=r"of one power of two|rope \d+ is more"):
                registry.select(case.call, name)
            refused += 1
            continue
        registry.select(case.call, name)(case.call)
        check(case)
        ran += 1
    assert ran > 1
    assert (refused > 0) == (name == "TRITON_MLA")


_LATENTS = (1, 5, 16, 48, 80, 160)


def test_the_adapters_declare_what_their_packages_take() -> None:
    """The limits of the packages' own checks, as recorded from their sources."""
    kernels = {name: registry._kernels[name] for name in Backend.__members__ if name not in OWN}
    for name, found in kernels.items():
        for kernel in found:
            support = kernel.support
            assert support.dims == (512, 64), name
            assert support.query_dtypes == {torch.float16, torch.bfloat16}, name
            assert support.same_dtype, name
            assert not support.sink, name
            assert LatentFormat.FP8_DS not in support.formats, name
            assert LatentFormat.FLOAT32 not in support.formats, name
            assert math.gcd(*(support.pages or (support.block_multiple,))) >= 16, name
