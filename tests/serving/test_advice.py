"""When drafts pay and when they do not: published gains and losses, and advice against brute force."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtide.kvcache import ModelLayout
from kvtide.sims.serving.advice import MOST_REQUESTS, advise
from kvtide.sims.serving.cost import CostModel, Parallel
from kvtide.sims.serving.drafter import drafter_of
from kvtide.sims.serving.gpus import GPUS
from kvtide.sims.serving.speculation import Acceptance, read_speculative_config
from kvtide.sims.serving.work import read_work

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
BIG = LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
SMALL = LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}


def cost_of(raw: dict[str, Any], config: dict[str, Any], gpu: str, ranks: int) -> CostModel:
    layout, work = ModelLayout.from_hf(raw), read_work(raw)
    wide, drafter = drafter_of(read_speculative_config(config, n_predict=1), layout, work, ranks)
    return CostModel(wide.shard(ranks), work, GPUS[gpu], Parallel(ranks), drafter=drafter)


@pytest.fixture
def a100(tmp_path: Path) -> CostModel:
    """Llama-3.1-70B in bf16 on four A100, an 8B model drafting five tokens."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    config = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 5}
    return cost_of(BIG, config, "a100", 4)


def test_a_70b_model_on_a100_can_lose_a_quarter_of_its_speed(a100: CostModel) -> None:
    """A published run fell from 95.43 to 68.19 tokens/s, to 71 %; its acceptance was not published.

    With a drafter of 8B a rate of two in ten does that here at a few requests a step; seven in ten gains.
    """
    for batch in (1, 4, 16):
        poor = advise(a100, Acceptance.from_rate(0.2, 5).rates, batch, 1000)
        assert not poor.gains
        assert 0.6 < poor.length / poor.break_even < 0.85
        assert poor.best in (0, 1)
        good = advise(a100, Acceptance.from_rate(0.7, 5).rates, batch, 1000)
        assert good.gains
        assert good.threshold == poor.threshold
        assert 0.2 < (poor.threshold or 0) < 0.7


def test_deepseek_gains_from_its_mtp_layer(shared: Path) -> None:
    """Published gains are 1.8 times the speed alone, at an acceptance of 85 to 90 %, and 1.5 times at batch 32."""
    raw = json.loads((shared / "model_configs/deepseek-ai--DeepSeek-V3.json").read_text())
    cost = cost_of(raw, {"method": "mtp", "num_speculative_tokens": 1}, "h200", 8)
    alone, some = (advise(cost, [0.87], batch, 2000) for batch in (1, 32))
    assert 1.45 < alone.gain < 1.87
    assert 1.3 < some.gain < 1.7
    # At batch 32 a step with drafts reads experts that one without would not.
    assert some.gain < alone.gain
    assert alone.best == some.best == 1


def test_past_the_ridge_drafts_do_not_pay(a100: CostModel) -> None:
    """The last batch at which they do is where the speeds cross; the advice is a schedule that vLLM takes."""
    rates = Acceptance.from_rate(0.7, 5).rates
    found = advise(a100, rates, 512, 1000)
    assert not found.gains
    assert found.last_batch is not None
    assert 8 < found.last_batch < 512
    assert advise(a100, rates, found.last_batch, 1000).gains
    assert not advise(a100, rates, found.last_batch + 1, 1000).gains
    said = " ".join(found.sentences(5, 512))
    assert "speculation loses at 512 requests a step" in said
    schedule = json.loads(said[said.index("[[") : said.index("]]") + 2])
    read_speculative_config(
        {"method": "ngram", "num_speculative_tokens": 5, "num_speculative_tokens_per_batch_size": schedule}
    )
    assert schedule == [[1, found.last_batch, 5], [found.last_batch + 1, MOST_REQUESTS, 0]]


@pytest.mark.parametrize("batch", [1, 8, 64, 256])
@pytest.mark.parametrize("rate", [0.1, 0.4, 0.6, 0.9])
def test_the_best_number_of_drafts_is_the_fastest(a100: CostModel, batch: int, rate: float) -> None:
    """Against cost models that draft so many tokens from the start."""
    rates = Acceptance.from_rate(rate, 5).rates
    found = advise(a100, rates, batch, 1000)
    speeds = [advise(a100, rates[:k], batch, 1000) for k in range(1, 6)]
    gains = [1.0, *(each.length / each.break_even for each in speeds)]
    assert found.best == max(range(6), key=lambda k: gains[k])
    assert found.gain == pytest.approx(max(gains))
    if found.best == 0:
        assert any("none" in sentence for sentence in found.sentences(5, batch))


def test_nothing_is_said_where_all_is_well(a100: CostModel) -> None:
    assert advise(a100, Acceptance.from_rate(0.95, 5).rates, 1, 1000).sentences(5, 1) == []


def test_drafts_that_no_rate_pays_for(a100: CostModel) -> None:
    found = advise(a100, Acceptance.from_rate(0.99, 5).rates, 4096, 10)
    if found.threshold is None:
        assert any("no acceptance rate would pay" in sentence for sentence in found.sentences(5, 4096))
    assert found.break_even > 3
