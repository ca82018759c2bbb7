"""Measured MLA kernels in the cost model: what is read, how it is interpolated, and that a step uses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtide.kvcache import ConfigError, ModelLayout
from kvtide.sims.serving.cost import CostModel, Efficiency, Parallel
from kvtide.sims.serving.gpus import GPUS
from kvtide.sims.serving.job import Job, Scheduled, Step
from kvtide.sims.serving.kernel_curves import BATCH, Curve, KernelCurves, read_kernel_curves
from kvtide.sims.serving.work import read_work

# A kernel that takes 20 us and 1 ns a token and row of every request.
ROWS, LENGTHS = (16, 128), (1024, 4096, 16384)


def step_of(batch: int, tokens: int, context: int) -> Step:
    job = Job("a", np.arange(1), np.arange(1))
    return Step(tuple(Scheduled(job, i, context, tokens, 0, True) for i in range(batch)), ())


def micros(rows: int, kv: int) -> float:
    return 20 + BATCH * rows * kv * 1e-3


def written(folder: Path, **changes: Any) -> Path:
    figures: dict[str, Any] = {
        f"rows {rows} kv {kv} bfloat16": {"value": micros(rows, kv), "unit": "us"} for rows in ROWS for kv in LENGTHS
    }
    figures |= {
        "copy": {"value": 4.2},
        "rows 32 kv 1024 bfloat16": {"value": 5.0},
        "rows 16 kv 1024 x": {"value": None},
    }
    path = folder / "gpu_mla.json"
    path.write_text(json.dumps({"figures": figures, "versions": {"gpu": "NVIDIA H200"}} | changes))
    return path


def test_measured_points_are_met_and_between_them_it_is_monotonic(tmp_path: Path) -> None:
    curve = read_kernel_curves(written(tmp_path)).curve("bfloat16", "h200")
    assert curve.rows.tolist() == list(ROWS)  # 32 lacks lengths
    for rows in ROWS:
        found = curve.seconds(np.full(3, rows), np.array(LENGTHS))
        assert found * BATCH * 1e6 == pytest.approx([micros(rows, kv) for kv in LENGTHS])
    grid = curve.seconds(np.repeat(np.arange(1, 400, 7), 50), np.tile(np.arange(1, 50_000, 1000), 57)).reshape(57, 50)
    assert (np.diff(grid, axis=0) >= 0).all()
    assert (np.diff(grid, axis=1) >= 0).all()
    twice = curve.seconds(np.array([128, 256, 256]), np.array([16384, 16384, 32768]))
    assert twice / twice[0] == pytest.approx([1, 2, 4])


def test_a_step_takes_what_the_kernel_takes(tmp_path: Path, shared: Path) -> None:
    """DeepSeek-V3's 128 heads over 8 ranks are 16 rows; prompts stay modelled."""
    raw = json.loads((shared / "model_configs/deepseek-ai--DeepSeek-V3.json").read_text())
    layout, work = ModelLayout.from_hf(raw), read_work(raw)
    assert work.heads == 128
    shape = (layout.shard(8), work, GPUS["h200"], Parallel(8), Efficiency())
    plain, measured = CostModel(*shape), CostModel(*shape, curves=read_kernel_curves(written(tmp_path)))
    zero = CostModel(*shape, curves=KernelCurves("", {"bfloat16": flat()}))
    decode = [step_of(BATCH, 1, 4095)]
    assert measured.seconds(decode) - zero.seconds(decode) == pytest.approx(61 * (micros(16, 4096)) * 1e-6, rel=1e-6)
    drafts = [step_of(BATCH, 8, 4088)]
    assert measured.seconds(drafts) - zero.seconds(drafts) == pytest.approx(61 * (micros(128, 4096)) * 1e-6, rel=1e-6)
    assert measured.seconds([step_of(1, 512, 0)]) == plain.seconds([step_of(1, 512, 0)])


def flat() -> Curve:
    """A kernel that takes next to no time."""
    return Curve(np.array([1, 1 << 20]), np.array([1, 1 << 20]), np.full((2, 2), 1e-9))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"figures": []}, "has no figures"),
        ({"figures": {"rows 16 kv 1024 bfloat16": {"value": None}}}, "was there a GPU"),
        ({"versions": {"gpu": "NVIDIA B200"}}, "measured on NVIDIA B200, not on h200"),
        ({"figures": {"rows 16 kv 1024 fp8_ds_mla": {"value": 3}}}, "no cache format bfloat16; they have fp8_ds_mla"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_kernel_curves(written(tmp_path, **changes)).curve("bfloat16", "h200")


def test_models_without_latents_have_no_use_for_them(tmp_path: Path, shared: Path) -> None:
    raw = json.loads((shared / "model_configs/meta-llama--Meta-Llama-3.1-8B.json").read_text())
    layout, work = ModelLayout.from_hf(raw), read_work(raw)
    with pytest.raises(ConfigError, match="has no MLA layers"):
        CostModel(layout, work, GPUS["h200"], curves=read_kernel_curves(written(tmp_path)))
