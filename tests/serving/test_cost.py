"""The cost model: parameter counts of public models, and the directions that a roofline must have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layouts import gemma_3_27b, layout_of

from kvtide.kvcache import ConfigError, FullAttention, ModelLayout, SlidingWindow
from kvtide.sims.serving.cost import CostModel, Efficiency, Parallel
from kvtide.sims.serving.drafter import drafter_of
from kvtide.sims.serving.gpus import GIB, GPUS, gpu_of
from kvtide.sims.serving.job import Job, Scheduled, Step
from kvtide.sims.serving.speculation import read_speculative_config
from kvtide.sims.serving.work import estimate_work, read_work

# Published totals and active parameters, in billions.
PUBLISHED = {
    "Qwen--Qwen3-32B": (32.8, 32.8),
    "Qwen--Qwen3-30B-A3B": (30.5, 3.3),
    "deepseek-ai--DeepSeek-V3": (671, 37),
    "meta-llama--Meta-Llama-3.1-8B": (8.03, 8.03),
    "mistralai--Mixtral-8x7B-v0.1": (46.7, 12.9),
    "openai--gpt-oss-120b": (117, 5.1),
    "moonshotai--Kimi-K2-Instruct": (1026, 32),
}
DENSE = layout_of("dense", (32, FullAttention(8, 128, 128)))


def config(shared: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((shared / "model_configs" / f"{name}.json").read_text())
    return found


def step_of(batch: int, tokens: int, context: int) -> Step:
    job = Job("a", np.arange(1), np.arange(1))
    return Step(tuple(Scheduled(job, i, context, tokens, 0, True) for i in range(batch)), ())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(shared: Path, name: str) -> None:
    work = read_work(config(shared, name))
    total, active = PUBLISHED[name]
    assert work.total_params / 1e9 == pytest.approx(total, rel=0.01)
    assert (work.active_params + work.head_params + work.embedding_params) / 1e9 == pytest.approx(active, rel=0.13)


def test_a_decode_step_reads_the_weights_once(shared: Path) -> None:
    """At batch 1 and no context a step takes the weights over the bandwidth, whatever the FLOPs."""
    raw = config(shared, "meta-llama--Meta-Llama-3.1-8B")
    work = read_work(raw)
    ideal = Efficiency(1, 1, 1, 0, 0)
    cost = CostModel(ModelLayout.from_hf(raw), work, GPUS["h100"], efficiency=ideal)
    read = work.bytes_total - 2 * work.embedding_params
    assert cost.seconds([step_of(1, 1, 0)]) == pytest.approx(read / 3.35e12, rel=0.001)
    # 8,192 prompt tokens are bound by FLOPs instead.
    flops = 2 * (work.dense_params * 8192 + work.head_params) + 4 * 32 * 8192 * 4096.5 * 4096
    assert cost.seconds([step_of(1, 8192, 0)]) == pytest.approx(flops / 989e12, rel=0.01)


def test_more_work_takes_longer(shared: Path) -> None:
    cost = CostModel(DENSE, estimate_work(DENSE, 8e9), GPUS["h200"])
    assert cost.seconds([step_of(2, 1, 100)]) > cost.seconds([step_of(1, 1, 100)])
    assert cost.seconds([step_of(1, 1, 100_000)]) > cost.seconds([step_of(1, 1, 100)])
    assert cost.seconds([step_of(1, 512, 0)]) > cost.seconds([step_of(1, 1, 0)])


def test_a_window_bounds_what_a_step_reads() -> None:
    window = layout_of("window", (32, SlidingWindow(8, 128, 128, window=1024)))
    work = estimate_work(window, 8e9)
    cost = CostModel(window, work, GPUS["h200"])
    assert cost.seconds([step_of(64, 1, 100_000)]) == cost.seconds([step_of(64, 1, 5_000)])
    assert cost.seconds([step_of(64, 1, 100_000)]) < CostModel(DENSE, work, GPUS["h200"]).seconds(
        [step_of(64, 1, 100_000)]
    )


def test_tensor_parallelism_divides_the_work_and_adds_collectives() -> None:
    work = estimate_work(DENSE, 8e9)
    one = CostModel(DENSE, work, GPUS["l40s"])
    four = CostModel(DENSE.shard(4), work, GPUS["l40s"], Parallel(4))
    assert four.weight_bytes == pytest.approx(one.weight_bytes / 4)
    assert four.seconds([step_of(1, 1, 100)]) < one.seconds([step_of(1, 1, 100)])
    # Over PCIe the all-reduce of a full step costs more than the FLOPs that it saves nearly are.
    assert four.seconds([step_of(1, 8192, 0)]) > one.seconds([step_of(1, 8192, 0)]) / 4


def test_experts_are_read_as_tokens_touch_them(shared: Path) -> None:
    work = read_work(config(shared, "Qwen--Qwen3-30B-A3B"))
    assert work.experts_touched(1) == pytest.approx(8 / 128)
    assert work.experts_touched(64) == pytest.approx(0.984, abs=0.001)
    layout = ModelLayout.from_hf(config(shared, "Qwen--Qwen3-30B-A3B"))
    cost = CostModel(layout, work, GPUS["h100"], Parallel(1, 2))
    both = cost.seconds([step_of(32, 1, 100), step_of(32, 1, 100)])
    assert cost.seconds([step_of(32, 1, 100), None]) < both


def test_an_estimate_has_the_parameters_that_were_given() -> None:
    work = estimate_work(gemma_3_27b(), 27e9)
    assert work.total_params == pytest.approx(27e9, rel=0.001)
    sparse = estimate_work(gemma_3_27b(), 100e9, 10e9)
    assert sparse.total_params == pytest.approx(100e9, rel=0.05)
    assert sparse.active_params == pytest.approx(10e9, rel=0.001)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gpu_of("h900"), "'h900' is not known; allowed: h200"),
        (lambda: gpu_of("h200:0"), "must be from 1 to 1024"),
        (lambda: estimate_work(DENSE, 1.0), "must be from 1e6 to 1e14"),
        (lambda: estimate_work(DENSE, 1e9, 2e9), "active at most all"),
        (lambda: read_work({"hidden_size": 8}), "has no num_hidden_layers"),
        (lambda: Efficiency(compute=0), "efficiency compute is 0"),
        (lambda: Efficiency(overhead_s=-1), "overhead_s is -1"),
    ],
    ids=["gpu", "count", "params", "active", "config", "share", "seconds"],
)
def test_bad_input_is_one_sentence(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_devices() -> None:
    assert gpu_of("H200:8") == (GPUS["h200"], 8)
    assert gpu_of("a100")[1] == 1
    for gpu in GPUS.values():
        assert 20 * GIB < gpu.memory < 200 * GIB
        assert 1e11 < gpu.bandwidth < 1e13
        assert gpu.flops8 == 0 or gpu.flops8 == pytest.approx(2 * gpu.flops16, rel=0.02)


def drafted(layout: ModelLayout, work: Any, **config: Any) -> tuple[ModelLayout, Any]:
    return drafter_of(read_speculative_config(config, n_predict=1), layout, work, tensor=2)


def test_an_mtp_module_is_a_layer_and_runs_once_per_draft(shared: Path) -> None:
    raw = config(shared, "deepseek-ai--DeepSeek-V3")
    layout, work = ModelLayout.from_hf(raw), read_work(raw)
    wider, drafter = drafted(layout, work, method="mtp", num_speculative_tokens=3)
    assert len(wider.layers) == len(layout.layers) + 1
    assert drafter.passes == 3
    # DeepSeek-V3's report: the MTP module has 11.5B parameters of its own, 14B with embedding and head.
    assert (drafter.work.dense_params + drafter.work.routed_params) / 1e9 == pytest.approx(11.5, rel=0.02)
    with_draft = CostModel(wider, work, GPUS["h200"], Parallel(2), drafter=drafter)
    without = CostModel(layout, work, GPUS["h200"], Parallel(2))
    assert with_draft.weight_bytes > without.weight_bytes
    assert 1.01 < with_draft.seconds([step_of(8, 1, 100)]) / without.seconds([step_of(8, 1, 100)]) < 1.3


def test_a_draft_model_is_read_from_its_config(shared: Path, tmp_path: Path) -> None:
    raw = config(shared, "meta-llama--Meta-Llama-3.1-8B")
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 2}))
    layout, work = ModelLayout.from_hf(raw), read_work(raw)
    given = {"method": "draft_model", "num_speculative_tokens": 4, "model": str(tmp_path)}
    wider, drafter = drafted(layout, work, **given, draft_tensor_parallel_size=1)
    assert (len(wider.layers), drafter.passes, drafter.tensor) == (len(layout.layers) + 2, 4, 1)
    assert drafted(layout, work, **given, parallel_drafting=True)[1].passes == 1
    with pytest.raises(ConfigError, match="is no folder or config"):
        drafted(layout, work, **given | {"model": "org/name"})


def test_looked_up_drafts_are_free() -> None:
    work = estimate_work(DENSE, 8e9)
    assert drafted(DENSE, work, method="ngram", num_speculative_tokens=3) == (DENSE, None)
