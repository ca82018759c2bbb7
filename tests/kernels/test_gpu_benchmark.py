"""`benchmarks/gpu_mla.py` where there is no GPU: what it says then, and its own code with a clock that is none."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtide.kernels.reference import decode

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu_mla(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, small, its measurements taken on the CPU."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("gpu_mla")
    monkeypatch.setattr(module, "BATCH", 1)
    monkeypatch.setattr(module, "COPY_BYTES", 1000)
    monkeypatch.setattr(module, "MATMUL_SIZE", 8)
    monkeypatch.setattr(module.Bench, "seconds", lambda bench, run: (run(), (1e-3, True))[1])
    return module


def broken(call: Any) -> None:
    raise RuntimeError("no kernel image\nis available")


def measured(gpu_mla: Any, monkeypatch: pytest.MonkeyPatch, **backends: Any) -> dict[str, Any]:
    """The figures by name, of few and small calls."""
    monkeypatch.setattr(gpu_mla, "runnable", lambda call, finite_unused: backends)
    calls = [call for call in gpu_mla.check_calls(torch.device("cpu")) if call.heads * call.q_len < 40]
    monkeypatch.setattr(gpu_mla, "check_calls", lambda device: calls)
    # The clock stands still, so that a step costs the same at every length.
    sizes = gpu_mla.Sizes(rows=(16, 64), kv=(64, 512), formats=("bfloat16", "fp8_ds_mla"), repetitions=1)
    bench = gpu_mla.Bench(torch.device("cpu"), 1)
    return {figure.name: figure for figure in gpu_mla.measure(bench, sizes)}


def test_without_a_gpu_every_figure_is_null(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "gpu_mla.py", "--quick", "--json", out],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no CUDA device here" in done.stderr
    figures = json.loads(out.read_text())["figures"]
    assert {"check/TRITON_MLA", "copy", "rows 128 kv 16384 bfloat16", "share_of_copy", "q_len_8"} <= set(figures)
    for figure in figures.values():
        assert figure["value"] is figure["peer"] is figure["met"] is None


def test_a_right_kernel_passes_and_a_failing_peer_is_a_note(gpu_mla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = measured(gpu_mla, monkeypatch, TRITON_MLA=decode, FLASHMLA=broken)
    assert figures["check/TRITON_MLA"].met
    assert figures["check/FLASHMLA"].met is False
    assert figures["check/FLASHMLA"].note == "RuntimeError: no kernel image is available"
    step = figures["rows 64 kv 512 bfloat16"]
    assert step.value == pytest.approx(1000)
    assert step.peer is None
    assert "FLASHMLA: RuntimeError: no kernel image" in step.note
    assert figures["check/TOKENSPEED_MLA"].value is None
    assert "this is the CPU, it runs on 10.0" in figures["check/TOKENSPEED_MLA"].note
    assert not {"check/CPU", "check/TORCH_REFERENCE"} & set(figures)
    assert "WRONG" not in step.note
    assert figures["beside_flashmla"].value is None
    assert figures["q_len_8"].value == pytest.approx(1)
    assert figures["token_cost"].value == pytest.approx(64 / 512)


def test_a_wrong_kernel_is_called_wrong(gpu_mla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(call: Any) -> None:
        decode(call)
        call.out[-1] *= 1.1

    figures = measured(gpu_mla, monkeypatch, TRITON_MLA=wrong, FLASHMLA=decode)
    assert figures["check/TRITON_MLA"].met is False
    assert figures["check/TRITON_MLA"].note
    assert "WRONG" in figures["rows 16 kv 512 fp8_ds_mla"].note
    assert figures["beside_flashmla"].ratio == pytest.approx(1)


def test_the_floor_is_the_larger_of_bytes_and_flops(gpu_mla: Any) -> None:
    from mla_pool import Pool

    bench = gpu_mla.Bench(torch.device("cpu"), 1, copy=4.3e12, matmul=788e12)
    pool = Pool(torch.device("cpu"), gpu_mla.LatentFormat.BFLOAT16, 2 * 4096)
    # The notes' table for an H200, batch 128: 141 us (memory) at 16 rows, 185 us (flops) at 128 rows, 4,096 tokens.
    for heads, micro, by_memory in ((16, 141, True), (128, 185, False)):
        seconds, memory_bound = bench.floor(pool.call(2, heads, 1, 4096), 4096)
        assert seconds * 1e6 * 64 == pytest.approx(micro, rel=0.01)
        assert memory_bound is by_memory


def test_what_does_not_fit_into_the_time_is_null(gpu_mla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_mla, "TIME_LIMIT", -1.0)
    figures = measured(gpu_mla, monkeypatch, TRITON_MLA=decode)
    assert figures["rows 16 kv 64 bfloat16"].value is None
    assert figures["rows 16 kv 64 bfloat16"].note == "out of time"
    assert figures["share_of_copy"].value is None


def test_a_wrong_peer_does_not_count(gpu_mla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = measured(gpu_mla, monkeypatch, TRITON_MLA=decode, FLASHMLA=lambda call: call.out.zero_())
    step = figures["rows 16 kv 512 bfloat16"]
    assert step.peer is None
    assert "FLASHMLA is WRONG" in step.note
    assert figures["beside_flashmla"].value is None
