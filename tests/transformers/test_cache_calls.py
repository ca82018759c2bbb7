"""What else the library does with a cache: sampling, beams, assistants, chunked prefill, plain calls, wrong calls."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")

import torch
import transformers
from tiny_models import FAMILIES, VOCABULARY, ragged, tiny_model

from kvtide.connectors.transformers import KvtideCache
from kvtide.kvcache import ConfigError, KvtideError, MissingExtra

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40}


class Pair:
    """Two models of the same weights; the first has kvtide's cache, the second the library's own."""

    def __init__(self, family: str, memory: str = "4MiB", **options: Any) -> None:
        self.model, self.reference = tiny_model(family), tiny_model(family)
        self.cache = KvtideCache(self.model, memory=memory, **options)
        self.cache.arena.memory.fill_(0xFF)

    def check(self, prompts: Any, **options: Any) -> Any:
        torch.manual_seed(0)
        found = self.model.generate(**prompts, cache=self.cache, **options)
        torch.manual_seed(0)
        assert torch.equal(found, self.reference.generate(**prompts, **options))
        self.cache.manager.check()
        return found

    def logits(self, **inputs: Any) -> Any:
        with torch.no_grad():
            return self.model(**inputs, cache=self.cache).logits


@pytest.fixture(params=["llama", "gemma3", "deepseek-v3", "qwen3-next"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    found = Pair(request.param)
    yield found
    found.cache.close()


@pytest.fixture
def llama() -> Iterator[Pair]:
    found = Pair("llama")
    yield found
    found.cache.close()


def test_sampling_several_answers_computes_the_prompt_once(pair: Pair) -> None:
    pair.check(ragged(1, [50]), do_sample=True, num_return_sequences=4, max_new_tokens=30)
    assert pair.cache.stats().device_hit_tokens == 3 * 48


def test_beams(pair: Pair) -> None:
    pair.check(ragged(2, [40, 21]), do_sample=False, num_beams=3, max_new_tokens=30)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3-next"])
def test_prompt_lookup(family: str) -> None:
    pair = Pair(family)
    prompt = ragged(3, [12])["input_ids"].repeat(1, 4)  # drafts that are often right
    pair.check({"input_ids": prompt}, **GREEDY, prompt_lookup_num_tokens=4)
    pair.cache.close()


def test_an_assistant(llama: Pair) -> None:
    assistant = tiny_model("llama", seed=0)
    for weight in assistant.parameters():
        weight.data += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    llama.check(ragged(4, [30]), **GREEDY, assistant_model=assistant)


def test_assistants_cannot_take_a_state_back() -> None:
    pair = Pair("qwen3-next")
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        pair.model.generate(**ragged(3, [12]), **GREEDY, prompt_lookup_num_tokens=4, cache=pair.cache)
    pair.logits(**ragged(3, [12]))
    with pytest.raises(ConfigError, match="a recurrent state cannot take tokens back"):
        pair.cache.crop(-1)
    pair.cache.close()


def test_more_is_taken_back_than_the_last_step_computed(llama: Pair) -> None:
    ids = ragged(5, [60])["input_ids"]
    right = llama.reference(ids).logits
    llama.logits(input_ids=ids[:, :40])
    llama.logits(input_ids=ids[:, 40:50])
    llama.cache.crop(-25)
    found = llama.logits(input_ids=ids[:, 25:])
    assert (found - right[:, 25:]).abs().max() < 1e-4
    assert llama.cache.stats().device_hit_tokens == 16  # one whole block of 25 tokens


def test_prompts_go_in_chunks(request: pytest.FixtureRequest) -> None:
    for family in ("llama", "gemma3", "deepseek-v3", "qwen3-next"):
        pair = Pair(family, max_step_tokens=32)
        pair.check(ragged(6, [150, 70, 3]), **GREEDY)
        pair.cache.close()


def test_generate_chunks_the_prefill(pair: Pair) -> None:
    """Rows of only padding in the first chunk come later."""
    pair.check(ragged(7, [60, 9]), **GREEDY, prefill_chunk_size=16)
    pair.check(ragged(8, [60]), **GREEDY, prefill_chunk_size=16)


def test_plain_calls(pair: Pair) -> None:
    """All logits of a prompt padded on either side, then one column more; and the same again."""
    ids, mask = ragged(9, [30, 12]).values()
    for inputs in (
        {"input_ids": ids, "attention_mask": mask},
        {"input_ids": ids.flip(1), "attention_mask": mask.flip(1)},
    ):
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            right = pair.reference(**inputs, position_ids=positions).logits
        for _ in range(2):
            found = pair.logits(**inputs)
            real = inputs["attention_mask"].bool()
            assert (found - right)[real].abs().max() < 1e-4
            assert not found[~real].any()
    assert pair.cache.stats().device_hit_tokens == 0  # all logits were wanted


def test_a_prefix_that_a_plain_call_computed_is_hit(llama: Pair) -> None:
    ids = ragged(10, [50])["input_ids"]
    llama.logits(input_ids=ids)
    llama.check({"input_ids": ids}, **GREEDY)
    assert llama.cache.stats().device_hit_tokens == 48


def test_rows_that_ended_are_padded_by_generate(llama: Pair) -> None:
    prompts = ragged(11, [20, 20, 20])
    ends = llama.check(prompts, **GREEDY)[0, 25].item()
    llama.check(prompts, **GREEDY, eos_token_id=ends)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, "inputs_embeds is given; kvtide's cache serves token ids"),
        ({"input_ids": torch.ones(1, 3, dtype=torch.long), "labels": torch.ones(1, 3)}, "labels is given"),
        ({}, r"input_ids are missing, or are not \[rows, columns\]"),
        (
            {"input_ids": torch.ones(1, 3, dtype=torch.long), "attention_mask": torch.ones(1, 1, 3, 3)},
            "attention_mask has 4 dimensions",
        ),
        (
            {"input_ids": torch.ones(1, 3, dtype=torch.long), "position_ids": torch.tensor([[0, 4, 8]])},
            "position_ids do not count each row's tokens from 0",
        ),
        (
            {"input_ids": torch.ones(1, 3, dtype=torch.long), "attention_mask": torch.zeros(1, 3)},
            "the call has no token to compute: attention_mask is 0 everywhere",
        ),
        (
            {"input_ids": torch.ones(1, 3, dtype=torch.long), "logits_to_keep": torch.tensor([1])},
            "logits_to_keep is a tensor",
        ),
    ],
)
def test_calls_that_are_not_served(llama: Pair, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        llama.logits(**inputs)
    llama.check(ragged(12, [20]), **GREEDY)


def test_a_batch_in_between(llama: Pair) -> None:
    ids = ragged(13, [20])["input_ids"]
    llama.logits(input_ids=ids)
    llama.model.generate(**ragged(14, [9, 9]), **GREEDY, cache=llama.cache)
    with pytest.raises(KvtideError, match="one KvtideCache serves one batch at a time"):
        llama.logits(input_ids=ids[:, :1], attention_mask=torch.ones(1, 21))


def test_a_model_takes_one_cache_at_a_time(llama: Pair) -> None:
    with pytest.raises(ConfigError, match="the model has a KvtideCache already"):
        KvtideCache(llama.model, memory="1MiB")


def test_another_cache_while_kvtides_attention_is_on(llama: Pair) -> None:
    with pytest.raises(KvtideError, match="layer 0 runs kvtide's attention without a KvtideCache"):
        llama.model.generate(**ragged(15, [9]), **GREEDY)


def test_layers_that_are_not_served() -> None:
    config = transformers.Llama4TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=16,
        intermediate_size_mlp=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        attention_chunk_size=32,
        pad_token_id=0,
    )
    model = transformers.Llama4ForCausalLM(config)
    with pytest.raises(ConfigError, match=r"chunk 32 \(chunked_local\), which the transformers bridge does not serve"):
        KvtideCache(model, memory="1MiB")
    assert "forward" not in model.__dict__
    assert model.config._attn_implementation != "kvtide"


def test_versions_whose_layers_keep_latents_and_states_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair("deepseek-v3")
    inner = pair.cache._paged._cache
    inner.step = object()
    with pytest.raises(ConfigError, match=r"layer 0 caches 4 heads of 20\+10 values instead of one latent of 32\+8"):
        inner.update(torch.zeros(1, 4, 3, 20), torch.zeros(1, 4, 3, 10), 0)
    inner.step = None
    pair.cache.close()
    monkeypatch.delattr(transformers.Cache, "get_recurrent_state")
    with pytest.raises(ConfigError, match=r"layers \[0, 1, 2\] are recurrent, and transformers .* use 5\.24 or later"):
        KvtideCache(tiny_model("qwen3-next"), memory="1MiB")


def test_a_pass_that_fails_leaves_nothing_behind(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither blocks nor keys: what the failed pass was to compute must not be hit."""
    prompts = ragged(19, [50, 20])
    layer = pair.model.model.layers[1]
    own = layer.forward
    for steps in (0, 3):
        left = iter([True] * steps)

        def fails(*args: Any, left: Iterator[bool] = left, **options: Any) -> Any:
            if not next(left, False):
                raise RuntimeError("out of luck")
            return own(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(layer, "forward", fails)
            with pytest.raises(RuntimeError, match="out of luck"):
                pair.model.generate(**prompts, **GREEDY, cache=pair.cache)
        pair.cache.manager.check()
        assert not pair.cache.manager.pool.refs.any()
        if not steps:
            assert not pair.cache.manager.pool.cached.any()
    pair.check(prompts, **GREEDY)


def test_a_window_that_grew_after_the_cache_was_made() -> None:
    pair = Pair("mistral")
    pair.model.config.sliding_window = 48
    with pytest.raises(ConfigError, match="layer 0 has a window of 48 tokens; by its config 24 are held"):
        pair.logits(**ragged(18, [9]))
    pair.cache.close()


def test_rows_that_are_repeated_and_chosen(pair: Pair) -> None:
    ids, more = ragged(16, [30, 30])["input_ids"], ragged(17, [4, 4, 4])["input_ids"]
    pair.logits(input_ids=ids)
    pair.cache.batch_repeat_interleave(2)
    pair.cache.batch_select_indices(torch.tensor([1, 3, 2]))
    found = pair.logits(input_ids=more)
    with torch.no_grad():
        right = pair.reference(torch.cat((ids[[0, 1, 1]], more), dim=1)).logits[:, 30:]
    assert (found - right).abs().max() < 1e-4
    pair.cache.manager.check()


def test_a_store_that_cannot_be_opened_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = tiny_model("llama")
    own = model.config._attn_implementation
    (tmp_path / "file").write_text("")
    for path, message in (("", "path"), (str(tmp_path / "file"), "file")):
        store = {"kv_connector": "LMDBConnector", "kv_connector_extra_config": {"path": path}}
        with pytest.raises(ConfigError, match=message):
            KvtideCache(model, memory="1MiB", store=store)
        assert (model.config._attn_implementation, "forward" in model.__dict__) == (own, False)


@pytest.fixture
def fresh_module() -> Iterator[Any]:
    module = sys.modules.pop("kvtide.connectors.transformers")
    yield importlib.import_module("kvtide.connectors.transformers")
    sys.modules["kvtide.connectors.transformers"] = module


def test_version_4(monkeypatch: pytest.MonkeyPatch, fresh_module: Any) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.3")
    with pytest.raises(ConfigError, match=r"transformers 4\.57\.3 is installed; .* needs version 5") as error:
        fresh_module.KvtideCache  # noqa: B018
    assert "\n" not in str(error.value)


def test_no_transformers(monkeypatch: pytest.MonkeyPatch, fresh_module: Any) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"kvtide\[transformers\]"):
        fresh_module.KvtideCache  # noqa: B018
