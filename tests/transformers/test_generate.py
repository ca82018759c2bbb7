"""`generate` on kvtide's memory, against `generate` on the library's own cache: the same tokens, the same logits.

The oracle is the library itself, with its own cache and attention. Arenas are filled with NaN before they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")

import torch
from tiny_models import FAMILIES, MORE, VOCABULARY, WINDOW, ragged, tiny_model

from kvtide.connectors.transformers import KvtideCache, weights_digest
from kvtide.kvcache import Exhausted
from kvtide.offload.policies import LoadPolicy

LENGTHS = [40, 27, 9]
EAGER = LoadPolicy(min_tokens=16, seconds_per_token=1.0)
GREEDY: dict[str, Any] = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
MakeCache = Callable[..., Any]


@pytest.fixture
def make_cache() -> Iterator[MakeCache]:
    caches = []

    def make(model: Any, memory: int | str = "4MiB", **options: Any) -> Any:
        cache = KvtideCache(model, memory=memory, **options)
        cache.arena.memory.fill_(0xFF)
        caches.append(cache)
        return cache

    yield make
    for cache in caches:
        cache.manager.check()
        assert cache.close()
        cache.manager.check()
        assert not cache.manager.pool.refs.any()


def check_same(found: Any, right: Any) -> None:
    """The same tokens, and logits within what float32 allows of another order of sums."""
    assert torch.equal(found.sequences, right.sequences)
    found_logits, right_logits = torch.stack(found.logits), torch.stack(right.logits)
    assert (found_logits - right_logits).abs().max() < 2e-5 * right_logits.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_long_ragged_generations_and_a_second_call_that_hits(family: str, make_cache: MakeCache) -> None:
    model = tiny_model(family)
    prompts = ragged(1, LENGTHS)
    right = model.generate(**prompts, **GREEDY, max_new_tokens=8 * WINDOW)
    assert len(set(right.sequences[0].tolist())) > VOCABULARY / 5  # not one token over and over
    cache = make_cache(model)
    check_same(model.generate(**prompts, **GREEDY, max_new_tokens=8 * WINDOW, cache=cache), right)
    first = cache.stats()
    assert (first.prompt_tokens, first.device_hit_tokens) == (sum(LENGTHS), 0)
    # The last token of a row is sampled and never computed; padding is not computed at all.
    assert first.computed_tokens == sum(LENGTHS) + 3 * (8 * WINDOW - 1)
    check_same(model.generate(**prompts, **GREEDY, max_new_tokens=8 * WINDOW, cache=cache), right)
    second = cache.stats()
    # Of 40 and 27 tokens the whole blocks of 16: at least.
    assert second.device_hit_tokens >= 32 + 16
    assert second.computed_tokens - first.computed_tokens == first.computed_tokens - second.device_hit_tokens


@pytest.mark.parametrize("family", MORE)
def test_other_families(family: str, make_cache: MakeCache) -> None:
    model = tiny_model(family)
    prompts = ragged(2, LENGTHS)
    right = model.generate(**prompts, **GREEDY, max_new_tokens=2 * WINDOW)
    digest = weights_digest(model)
    cache = make_cache(model)
    assert weights_digest(model) == digest  # whatever attention is on
    for _ in range(2):
        check_same(model.generate(**prompts, **GREEDY, max_new_tokens=2 * WINDOW, cache=cache), right)
    assert cache.stats().device_hit_tokens >= 32 + 16


def test_the_model_gets_its_own_attention_back(make_cache: MakeCache) -> None:
    model = tiny_model("gemma3")
    right = model.generate(**ragged(2, LENGTHS), **GREEDY, max_new_tokens=10)
    cache = make_cache(model)
    model.generate(**ragged(2, LENGTHS), **GREEDY, max_new_tokens=10, cache=cache)
    cache.close()
    check_same(model.generate(**ragged(2, LENGTHS), **GREEDY, max_new_tokens=10), right)
    check_same(model.generate(**ragged(2, LENGTHS), **GREEDY, max_new_tokens=10, cache=make_cache(model)), right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "deepseek-v3", "qwen3-next"])
def test_half_precision_is_as_exact_as_the_librarys_own(family: str, dtype: Any, make_cache: MakeCache) -> None:
    """Both caches against float32, on tokens that are given."""
    changes = {"deepseek-v3": {"first_k_dense_replace": 3}, "qwen3-next": {"mlp_only_layers": [0, 1, 2, 3]}}
    model = tiny_model(family, dtype=dtype, **changes.get(family, {}))  # type: ignore[arg-type]
    exact = tiny_model(family, dtype=dtype, **changes.get(family, {})).float()  # type: ignore[arg-type]
    ids = ragged(3, [4 * WINDOW] * 2)["input_ids"]

    def logits(model: Any, **cache: Any) -> Any:
        """A prompt, then token by token."""
        with torch.no_grad():
            outputs = [model(ids[:, :WINDOW], **cache)]
            for at in range(WINDOW, ids.shape[1]):
                outputs.append(model(ids[:, at : at + 1], cache=outputs[-1].cache))
        return torch.cat([output.logits.float() for output in outputs], dim=1)

    right = logits(exact)
    own = (logits(model) - right).square().mean().sqrt()
    found = (logits(model, cache=make_cache(model)) - right).square().mean().sqrt()
    assert 0 < own < 0.1 * right.abs().max()
    assert found < 1.25 * own


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pool_that_does_not_hold_the_batch(family: str, make_cache: MakeCache) -> None:
    model = tiny_model(family)
    prompts = ragged(4, LENGTHS)
    right = model.generate(**prompts, **GREEDY, max_new_tokens=3 * WINDOW)
    assert preempted(model, prompts, right, make_cache).preemptions > 0


def preempted(model: Any, prompts: Any, right: Any, make_cache: MakeCache, **options: Any) -> Any:
    """Generate in less and less memory, until a row was preempted; every run must be right. Stats of the last one."""
    count = right.sequences.shape[1] - prompts["input_ids"].shape[1]
    cache = make_cache(model)
    pages = cache.manager.pool.num_pages
    while not cache.stats().preemptions:
        cache.close()
        cache = make_cache(model, pages * cache.manager.geometry.page_bytes, **options)
        check_same(model.generate(**prompts, **GREEDY, max_new_tokens=count, cache=cache), right)
        pages = int((cache.manager.pool.owner >= 0).sum()) * 4 // 5
    return cache.stats()


def test_a_pool_that_does_not_hold_one_sequence(make_cache: MakeCache) -> None:
    model = tiny_model("llama")
    cache = make_cache(model)
    page = cache.manager.geometry.page_bytes
    cache.close()
    cache = make_cache(model, 5 * page)
    with pytest.raises(Exhausted, match=r"the memory does not hold one sequence of \d+ tokens"):
        model.generate(**ragged(5, [40]), **GREEDY, max_new_tokens=500, cache=cache)
    assert not cache.manager.running_rows.size  # nothing is left behind, and the next batch runs
    model.generate(**ragged(5, [10]), **GREEDY, max_new_tokens=5, cache=cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_store_brings_prefixes_to_a_new_cache(family: str, tmp_path: Path, make_cache: MakeCache) -> None:
    store = {"kv_connector": "LMDBConnector", "kv_connector_extra_config": {"path": str(tmp_path / "kv")}}
    prompts = ragged(6, [90, 50, 20])
    model = tiny_model(family)
    right = model.generate(**prompts, **GREEDY, max_new_tokens=40)
    cache = make_cache(model, store=store, load_policy=EAGER)
    check_same(model.generate(**prompts, **GREEDY, max_new_tokens=40, cache=cache), right)
    assert cache.close()
    again = tiny_model(family)
    cache = make_cache(again, store=store, load_policy=EAGER)
    check_same(again.generate(**prompts, **GREEDY, max_new_tokens=40, cache=cache), right)
    stats = cache.stats()
    assert stats.device_hit_tokens == 0
    assert stats.store_hit_tokens >= 80 + 48
    assert cache.close()
    other = tiny_model(family, seed=1)
    cache = make_cache(other, store=store, load_policy=EAGER)
    other.generate(**prompts, **GREEDY, max_new_tokens=2, cache=cache)
    assert cache.stats().store_hit_tokens == 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek-v3", "qwen3-next"])
def test_preempted_rows_come_back_from_the_store(family: str, tmp_path: Path, make_cache: MakeCache) -> None:
    store = {"kv_connector": "LMDBConnector", "kv_connector_extra_config": {"path": str(tmp_path / "kv")}}
    model = tiny_model(family)
    prompts = ragged(7, [130, 100])
    right = model.generate(**prompts, **GREEDY, max_new_tokens=30)
    stats = preempted(model, prompts, right, make_cache, store=store, load_policy=EAGER)
    assert stats.store_hit_tokens > 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-next"])
def test_a_conversation_goes_on_from_what_is_cached(family: str, make_cache: MakeCache) -> None:
    reference, model = tiny_model(family), tiny_model(family)
    cache = make_cache(model)
    ids = ragged(8, [50])["input_ids"]
    kept = 0
    for turn in range(3):
        before = cache.stats()
        found = model.generate(ids, **GREEDY, max_new_tokens=40, cache=cache)
        check_same(found, reference.generate(ids, **GREEDY, max_new_tokens=40))
        hit = cache.stats().device_hit_tokens - before.device_hit_tokens
        assert hit >= kept
        # All whole blocks that were computed; with recurrent states, up to where the prompt's state was kept.
        computed = ids.shape[1] - 1 if family == "qwen3-next" else found.sequences.shape[1] - 1
        kept = computed // 16 * 16
        ids = torch.cat((found.sequences, ragged(20 + turn, [10])["input_ids"]), dim=1)
    assert kept > 100
