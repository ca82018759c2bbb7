"""`--speculative-config`: what is inferred and refused, what a drafter costs, acceptance drawn as it was told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtide.kvcache import ConfigError
from kvtide.sims.serving.job import Job, Scheduled, Step
from kvtide.sims.serving.speculation import Acceptance, read_speculative_config


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"method": "mtp", "num_speculative_tokens": 1}, "mtp"),
        ({"method": "deepseek_mtp", "num_speculative_tokens": 1}, "mtp"),
        ({"model": "[ngram]", "num_speculative_tokens": 4}, "ngram"),
        ({"model": "yuhuili/EAGLE3-LLaMA3.1", "num_speculative_tokens": 2}, "eagle3"),
        ({"model": "yuhuili/EAGLE-LLaMA3", "num_speculative_tokens": 2}, "eagle"),
        ({"model": "meta/small", "num_speculative_tokens": 2}, "draft_model"),
        ({"method": "suffix"}, "suffix"),
    ],
    ids=str,
)
def test_the_method_is_inferred(config: dict[str, Any], method: str) -> None:
    assert read_speculative_config(config, n_predict=1).method == method


def test_sources(tmp_path: Path) -> None:
    inline = read_speculative_config('{"method": "ngram", "num_speculative_tokens": 3}')
    file = tmp_path / "spec.yaml"
    file.write_text("method: ngram\nnum_speculative_tokens: 3\n")
    assert read_speculative_config(str(file)) == inline
    assert read_speculative_config("{method: ngram, num_speculative_tokens: 3}") == inline


def test_defaults_of_the_number_of_drafts() -> None:
    assert read_speculative_config({"method": "mtp"}, n_predict=2).num_speculative_tokens == 2
    assert read_speculative_config({"method": "suffix"}).num_speculative_tokens == 24
    assert (
        read_speculative_config({"method": "suffix", "suffix_decoding_max_tree_depth": 8}).num_speculative_tokens == 8
    )


def test_notes() -> None:
    config = {"method": "deepseek_mtp", "num_speculative_tokens": 3, "disable_by_batch_size": 8}
    notes = " ".join(read_speculative_config(config, n_predict=1).notes)
    assert "old name of mtp" in notes
    assert "disable_by_batch_size is gone" in notes
    assert "one MTP layer run 3 times" in notes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "neither JSON nor YAML"),
        ({"num_speculative_tokens": 1}, "needs a method or a model"),
        ({"method": "magic"}, "must be one of mtp"),
        ({"method": "eagle", "num_speculative_tokens": 1}, "method eagle needs a model"),
        ({"method": "ngram", "num_drafts": 1}, "has no key 'num_drafts'"),
        ({"method": "ngram", "num_speculative_tokens": 1, "tensor_parallel_size": 1}, "use draft_tensor_parallel_size"),
        ({"method": "ngram"}, "num_speculative_tokens is null"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "must be from 1 to 128"),
        ({"method": "ngram", "num_speculative_tokens": True}, "must be from 1 to 128"),
        ({"method": "mtp", "num_speculative_tokens": 3}, "divisible by the model's 2 MTP layers"),
        ({"model": "google/gemma-4-assistant", "num_speculative_tokens": 1}, "it needs method: mtp"),
        (
            {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 4, "prompt_lookup_max": 2},
            "min at most max",
        ),
        ({"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 0}, "min at most max"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "suffix_decoding_min_token_prob is 2"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 0}, "suffix_decoding_max_tree_depth is 0"),
        ({"method": "mtp", "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size 2 must be 1 or 4"),
        ({"method": "mtp", "rejection_sample_method": "x"}, "must be one of standard"),
        ({"method": "mtp", "num_speculative_tokens_per_batch_size": [[2, 4, 1]]}, "begin at 1"),
        ({"method": "mtp", "num_speculative_tokens_per_batch_size": [[1, 4, 1], [4, 8, 1]]}, "do not overlap"),
        ({"method": "mtp", "num_speculative_tokens_per_batch_size": 3}, "must be ranges"),
        ({"method": "mtp", "synthetic_acceptance_rates": [0.5]}, "must be 2 rates"),
        ({"method": "mtp", "synthetic_acceptance_length": 9}, "must be from 1 to 3"),
        ({"method": "mtp", "synthetic_acceptance_rates": [0.5, 0.6]}, "never rise"),
    ],
    ids=str,
)
def test_what_vllm_refuses(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_speculative_config(config, n_predict=2, tensor_parallel_size=4)


@pytest.mark.parametrize(
    ("config", "lookahead", "slots"),
    [
        ({"method": "ngram"}, 0, 0),
        ({"method": "suffix"}, 0, 0),
        ({"method": "mtp"}, 4, 0),
        ({"method": "eagle3", "model": "m"}, 4, 0),
        ({"method": "eagle3", "model": "m", "parallel_drafting": True}, 4, 3),
        ({"method": "draft_model", "model": "m"}, 4, 1),
        ({"method": "draft_model", "model": "m", "parallel_drafting": True}, 4, 4),
        ({"method": "dflash", "model": "m"}, 5, 4),
        ({"method": "dspark"}, 4, 3),
    ],
    ids=str,
)
def test_what_a_drafter_takes(config: dict[str, Any], lookahead: int, slots: int) -> None:
    read = read_speculative_config(config | {"num_speculative_tokens": 4})
    assert (read.lookahead_tokens, read.draft_slots) == (lookahead, slots)
    assert read.allows_async_scheduling == (config["method"] not in ("ngram", "suffix"))


def test_gaps_and_the_tail_of_a_schedule_carry_on() -> None:
    config = {"method": "mtp", "num_speculative_tokens_per_batch_size": [[1, 2, 9], [5, 6, 1]]}
    assert read_speculative_config(config, n_predict=3).dense_schedule(8) == (0, 3, 3, 3, 3, 1, 1, 1, 1)


def test_acceptance_is_drawn_as_told() -> None:
    job = Job("a", np.arange(4), np.arange(4))
    step = Step(tuple(Scheduled(job, i, 4, 4, 3, True) for i in range(20_000)), ())
    for acceptance in (
        Acceptance.from_rate(0.7, 3),
        Acceptance([0.9, 0.5, 0.1]),
        Acceptance.from_length(2.4, 3),
    ):
        counts = np.array(acceptance.accept(step, np.random.default_rng(0)))
        assert [float((counts > i).mean()) for i in range(3)] == pytest.approx(acceptance.rates, abs=0.015)
        assert 1 + counts.mean() == pytest.approx(acceptance.mean_length, abs=0.03)
    assert Acceptance.from_length(2.4, 3).rates == pytest.approx((1, 0.4, 0))


def test_padding_and_prompt_chunks_accept_nothing() -> None:
    job = Job("a", np.arange(4), np.arange(4))
    padding = Scheduled(job, 0, 4, 4, 3, True, 4, is_padding=True)
    chunk = Scheduled(job, 1, 0, 4, 0, False)
    assert Acceptance([1, 1, 1]).accept(Step((padding, chunk), ()), np.random.default_rng(0)) == [0, 0]


@pytest.mark.parametrize(
    "text", ["{a: 2024-13-45}", "{" * 3000, "{a: " + "9" * 5000 + "}"], ids=["date", "nested", "digits"]
)
def test_inline_text_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="is neither JSON nor YAML") as caught:
        read_speculative_config(text)
    assert len(str(caught.value)) < 200
