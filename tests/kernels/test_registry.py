"""Selection: every reason for refusing, the order by architecture and shape, forcing, caching, and its cost."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from requests_of import AMPERE, BLACKWELL, HOPPER, request

from kvtide.kernels import registry
from kvtide.kernels.contract import MlaCall
from kvtide.kernels.device import Machine
from kvtide.kernels.formats import LatentFormat
from kvtide.kernels.registry import Backend, Kernel, explain, pick, priority, register, select
from kvtide.kernels.support import Request, Support
from kvtide.kvcache import BackendUnavailable, ConfigError, KvtideError


def call(device: str = "cpu", **changes: Any) -> MlaCall:
    """A tiny call with real tensors."""
    batch, q_len, heads, latent, rope, block = 2, 1, 4, 16, 8, 4
    plain = MlaCall(
        query=torch.zeros(batch, q_len, heads, latent + rope, dtype=torch.bfloat16, device=device),
        cache=torch.zeros(8, block, latent + rope, dtype=torch.bfloat16, device=device),
        block_table=torch.zeros(batch, 2, dtype=torch.int32, device=device),
        seq_lens=torch.ones(batch, dtype=torch.int32, device=device),
        q_lens=None,
        fmt=LatentFormat.BFLOAT16,
        latent_dim=latent,
        rope_dim=rope,
        scale=0.2,
        k_scale=torch.ones(1, device=device),
        window=None,
        sink=None,
        out=torch.zeros(batch, q_len, heads, latent, dtype=torch.bfloat16, device=device),
        lse=torch.zeros(batch, q_len, heads, device=device),
        batch_invariant=False,
    )
    return replace(plain, **changes)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The packages that seem to be installed, and that load; none at first. Nothing is remembered afterwards."""
    present: set[str] = set()
    monkeypatch.delenv(registry.VARIABLE, raising=False)
    monkeypatch.setattr(registry, "find_spec", lambda name: name if name in present else None)
    monkeypatch.setattr(registry, "_load", lambda kernel: str(kernel.support.package))
    for cached in (registry._choose, registry._force):
        cached.cache_clear()
    yield present
    for cached in (registry._choose, registry._force):
        cached.cache_clear()


ALL = {"triton", "flash_mla", "vllm", "flashinfer", "tokenspeed_mla", "flash_attn"}


def why(name: str, asked: Request) -> tuple[str, ...]:
    return next(verdict.reasons for verdict in explain(asked) if verdict.name == name)


def test_every_reason_is_given_in_a_stable_order(packages: set[str]) -> None:
    asked = request(
        machine=AMPERE,
        query_dtype=torch.float32,
        fmt=LatentFormat.FP8_DS,
        latent_dim=256,
        heads=192,
        q_len=3,
        block_size=48,
        window=2,
        sink=True,
        batch_invariant=True,
    )
    assert why("CUTLASS_MLA", asked) == (
        "this is compute capability 8.0, it runs on 10.x",
        "query float32 is not bfloat16 or float16",
        "format fp8_ds_mla is not float16 or bfloat16",
        "latent 256 + rope 64 is not 512 + 64",
        "192 heads are more than 128",
        "q_len 3 is more than 1",
        "block size 48 is not a multiple of 128",
        "no sliding window, and 2 is asked for",
        "no attention sink",
        "a row's result may depend on its batch",
        "the package vllm is not installed (pip install 'vllm')",
    )
    assert "window 2 is less than q_len 3" in why("TOKENSPEED_MLA", asked)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"heads": 129}, "129 heads are more than 128"),
        ({"fmt": LatentFormat.FLOAT16}, "cache float16 is not the query's bfloat16"),
        ({"fmt": LatentFormat.FLOAT32}, "format float32 is not float16 or bfloat16"),
        ({"block_size": 16}, "block size 16 is not a multiple of 64"),
        ({"block_stride": 128 * 1152 + 8}, "page stride of 8 bytes is not a multiple of 16"),
        ({"token_stride": 1160}, "token stride of 1160 bytes is not a multiple of 16"),
        ({"entries": 2**31}, "blocks cut into pages of 64 need table entries beyond int32"),
        ({"window": 4096}, "no sliding window, and 4096 is asked for"),
        ({"sink": True}, "no attention sink"),
        ({"batch_invariant": True}, "a row's result may depend on its batch"),
        ({"machine": Machine("cuda", (9, 1))}, "this is compute capability 9.1, it runs on 9.0"),
        ({"machine": Machine("cpu")}, "this is the CPU, it runs on 9.0"),
        ({"machine": Machine("mps")}, "this is the MPS, it runs on 9.0"),
    ],
)
def test_one_change_gives_one_reason(packages: set[str], changes: dict[str, Any], reason: str) -> None:
    packages.update(ALL)
    assert why("FLASHMLA", request()) == ()
    assert why("FLASHMLA", request(**changes)) == (reason,)


def test_a_backend_of_several_kernels_names_all_their_architectures(packages: set[str]) -> None:
    assert why("FLASH_ATTN_MLA", request(machine=AMPERE))[0] == (
        "this is compute capability 8.0, it runs on 9.0, 10.x or 11.x"
    )


def test_the_order_is_the_architectures(packages: set[str]) -> None:
    packages.update(ALL)
    for machine, expected in {
        AMPERE: "TRITON_MLA",
        Machine("cuda", (8, 9)): "TRITON_MLA",
        HOPPER: "FLASH_ATTN_MLA",
        BLACKWELL: "FLASHINFER_MLA",
        Machine("cuda", (10, 3)): "FLASHINFER_MLA",
        Machine("cuda", (12, 0)): "TRITON_MLA",
        Machine("cpu"): "CPU",
        Machine("mps"): "TORCH_REFERENCE",
        Machine("hip"): "TORCH_REFERENCE",
    }.items():
        assert pick(request(machine=machine)) == expected
    packages.discard("vllm")
    assert pick(request()) == "FLASHMLA"
    packages.clear()
    assert pick(request()) == "TORCH_REFERENCE"


def test_the_batchs_shape_changes_the_order(packages: set[str]) -> None:
    packages.update(ALL)
    asked = request(machine=BLACKWELL, heads=16, q_len=4, kv_len=131072)
    assert [pick(asked._replace(batch=batch)) for batch in (1, 4, 8, 256)] == [
        "FLASHINFER_MLA",
        "FLASHINFER_MLA",
        "TOKENSPEED_MLA",
        "TOKENSPEED_MLA",
    ]
    small = request(machine=BLACKWELL, heads=16, batch=32, kv_len=4096)
    assert pick(small) == "TRITON_MLA"
    assert pick(small._replace(kv_len=8192)) == "TOKENSPEED_MLA"
    assert pick(small._replace(heads=32)) == "TOKENSPEED_MLA"
    one_head = small._replace(heads=1, batch=8)
    assert pick(one_head) == "TRITON_MLA"
    assert pick(one_head._replace(kv_len=8192)) == "TOKENSPEED_MLA"  # little work, but a long context
    assert len(priority(small)) == len(set(priority(small))) == len(priority(asked))


def test_what_changes_the_numbers_runs_only_when_named(packages: set[str]) -> None:
    packages.update(ALL)
    asked = request(machine=BLACKWELL, fmt=LatentFormat.FP8, batch=64)
    assert pick(asked) == "TRITON_MLA"
    assert pick(asked, Backend.TOKENSPEED_MLA) == "TOKENSPEED_MLA"
    verdicts = {verdict.name: verdict for verdict in explain(asked)}
    assert verdicts["FLASHINFER_MLA"].by_name_only == "rounds the query to FP8, so runs only when named"
    assert verdicts["TRITON_MLA"].by_name_only is None


def test_kernels_that_read_unused_slots_need_a_finite_pool(packages: set[str]) -> None:
    packages.update(ALL)
    for machine, finite, anything in (
        (BLACKWELL, "FLASHINFER_MLA", "TRITON_MLA"),
        (HOPPER, "FLASH_ATTN_MLA", "FLASHMLA"),
    ):
        assert pick(request(machine=machine)) == finite
        assert pick(request(machine=machine, finite_unused=False)) == anything
        assert pick(request(machine=machine, finite_unused=False), finite) == finite
    by_name_only = {v.name: v.by_name_only for v in explain(request(finite_unused=False))}
    assert [name for name, why in by_name_only.items() if why] == [
        "FLASH_ATTN_MLA",
        "FLASHINFER_MLA",
        "TOKENSPEED_MLA",
        "CUTLASS_MLA",
    ]
    assert Request.of(call(), True).finite_unused
    assert not Request.of(call()).finite_unused


def test_a_kernel_with_a_window_is_found(packages: set[str]) -> None:
    packages.update(ALL)
    assert pick(request(window=1024)) == "TRITON_MLA"
    assert pick(request(machine=BLACKWELL, window=1024)) == "TOKENSPEED_MLA"
    assert why("TOKENSPEED_MLA", request(machine=BLACKWELL, window=4, q_len=4)) == ()


def test_forcing_by_argument_and_by_environment(packages: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    packages.add("triton")
    assert pick(request(), "triton_mla") == pick(request(), Backend.TRITON_MLA) == "TRITON_MLA"
    monkeypatch.setenv(registry.VARIABLE, "TORCH_REFERENCE")
    assert pick(request()) == "TORCH_REFERENCE"
    assert pick(request(), "triton_mla") == "TRITON_MLA"  # the argument wins
    with pytest.raises(BackendUnavailable, match=r"^the attention backend CPU cannot run this call: this is compute"):
        pick(request(), "CPU")
    monkeypatch.setenv(registry.VARIABLE, " ")
    assert pick(request()) == "TRITON_MLA"
    monkeypatch.setenv(registry.VARIABLE, "FLASHMALA")
    with pytest.raises(ConfigError, match=r"^KVTIDE_ATTENTION_BACKEND 'FLASHMALA' is not known; allowed are TORCH_REF"):
        pick(request())
    with pytest.raises(ConfigError, match="backend 'SDPA' is not known; allowed are TORCH_REFERENCE, CPU, TRITON_MLA"):
        select(call(), "sdpa")


def test_a_refusal_is_one_sentence_with_all_reasons(packages: set[str]) -> None:
    with pytest.raises(KvtideError) as caught:
        select(call(window=3), Backend.FLASHMLA)
    assert str(caught.value) == (
        "the attention backend FLASHMLA cannot run this call: this is the CPU, it runs on 9.0; "
        "latent 16 + rope 8 is not 512 + 64; block size 4 is not a multiple of 64; "
        "no sliding window, and 3 is asked for; "
        "the package flash_mla is not installed (pip install 'sgl-flash-mla')"
    )


def test_nothing_can_run(packages: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = request(capturing=True)
    with pytest.raises(BackendUnavailable, match=r"no attention backend can run this call \(FLASH_ATTN_MLA: .*; TORCH"):
        pick(capturing)
    packages.add("triton")
    assert pick(capturing) == "TRITON_MLA"


@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError, TypeError])
def test_a_package_that_does_not_load_refuses_with_its_words(
    packages: set[str], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def broken(kernel: Kernel) -> Any:
        if kernel.support.package == "flash_mla":
            raise error("no such\n  operator") from OSError("libcudart.so.13 is missing")
        return kernel.support.package

    packages.update({"flash_mla", "triton"})
    monkeypatch.setattr(registry, "_load", broken)
    assert why("FLASHMLA", request()) == ("it does not load: no such operator: libcudart.so.13 is missing",)
    assert pick(request()) == "TRITON_MLA"


def test_packages_are_imported_only_when_nothing_else_refuses(
    packages: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    monkeypatch.setattr(registry, "_load", lambda kernel: loaded.append(kernel.support.package))
    packages.update(ALL)
    explain(request(machine=Machine("cpu")))
    assert loaded == [None, None, "triton"]  # the CPU path, the reference, and the interpreter


def test_the_cache_holds_numbers_and_tells_calls_apart(packages: set[str]) -> None:
    asked = Request.of(call())
    assert not any(isinstance(value, torch.Tensor) for value in asked)
    hash(asked)
    base = call()
    for changes in (
        {"query": base.query.half()},
        {"query": base.query.repeat(1, 3, 1, 1)},
        {"query": base.query.repeat(1, 1, 2, 1)},
        {"query": base.query.repeat(2, 1, 1, 1)},
        {"cache": base.cache[:, :2]},
        {"cache": base.cache[::2]},
        {"block_table": base.block_table.repeat(1, 4)},
        {"fmt": LatentFormat.FLOAT16},
        {"latent_dim": 8, "rope_dim": 16},
        {"window": 5},
        {"sink": torch.zeros(4)},
        {"q_lens": torch.ones(2, dtype=torch.int32)},
        {"batch_invariant": True},
    ):
        assert Request.of(replace(base, **changes)) != asked, changes
    # Batches and lengths of one power of two share a choice, so that the cache stays small.
    assert Request.of(call(block_table=torch.zeros(2, 200, dtype=torch.int32))).kv_len == 1024


def test_the_choice_is_logged_once_with_what_came_before(packages: set[str], caplog: pytest.LogCaptureFixture) -> None:
    packages.add("triton")
    with caplog.at_level(logging.INFO, logger=registry.__name__):
        for _ in range(3):
            select(call())
    assert [record.message.split(" for ")[0] for record in caplog.records] == ["CPU is chosen"]
    caplog.clear()
    with caplog.at_level(logging.INFO, logger=registry.__name__):
        pick(request(sink=True))
    assert "FLASH_ATTN_MLA: no attention sink" in caplog.text


def test_a_call_like_an_earlier_one_is_not_judged_again(packages: set[str]) -> None:
    for _ in range(100):
        select(call())
        select(call(), "CPU")
    assert registry._choose.cache_info()[:2] == (99, 1)
    assert registry._force.cache_info()[:2] == (99, 1)


@pytest.fixture
def restored() -> Iterator[None]:
    """Puts the table of backends back."""
    kernels, registered = dict(registry._kernels), list(registry._registered)
    yield
    registry._kernels.clear()
    registry._kernels.update(kernels)
    registry._registered[:] = registered
    registry._choose.cache_clear()


@pytest.mark.usefixtures("restored")
def test_a_backend_of_ones_own() -> None:
    register("MY_MLA", Kernel(Support(architectures=("cpu",), pages=(4,)), load=lambda: print))
    assert select(call(), "my_mla") is print
    assert select(call()) is print
    assert priority(Request.of(call()))[0] == "MY_MLA"
    register("MY_MLA", Kernel(Support(architectures=("cpu",), pages=(4,)), load=lambda: repr))
    assert select(call()) is repr
    assert priority(Request.of(call())).count("MY_MLA") == 1
    other_blocks = Request.of(call(cache=torch.zeros(8, 3, 24, dtype=torch.bfloat16)))
    assert "MY_MLA" not in [verdict.name for verdict in explain(other_blocks) if not verdict.reasons]
    with pytest.raises(ConfigError, match="FLASHMLA is kvtide's own"):
        register("FLASHMLA", Kernel(Support(), load=lambda: print))
    with pytest.raises(ConfigError, match="OTHER has no kernel"):
        register("OTHER")
