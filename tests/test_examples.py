"""The examples run, and the tiny engine says what the library's own greedy generation says, token for token."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parent / "transformers"))

import tiny_engine
from tiny_engine import Request, TinyEngine, ngram_drafts, verify
from tiny_models import VOCABULARY, ragged, tiny_model

from kvtide.connectors.config import make_store

FAMILIES = ["llama", "gemma3", "deepseek-v3", "qwen3-next"]
NEW_TOKENS = 40


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def calm_model(family: str) -> Any:
    """A model that repeats itself now and then, so that drafts are right as well as wrong."""
    model = tiny_model(family)
    for weight in model.parameters():
        weight.data *= 0.5 if weight.ndim > 1 else 1.0
    return model


def prompts() -> list[list[int]]:
    """Half of them with a common beginning; one of a single token."""
    shared = ragged(1, [70])["input_ids"][0].tolist()
    tails = [ragged(n, [5 + 17 * n])["input_ids"][0].tolist() for n in range(5)]
    return [*(shared + tail for tail in tails), *tails, [7]]


def greedy(model: Any, prompt: list[int], count: int = NEW_TOKENS) -> list[int]:
    tokens: list[int] = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=count)[0].tolist()
    return tokens[len(prompt) :]


def served(engine: TinyEngine, right: list[list[int]], budget: int | None = None) -> list[Request]:
    """Run all prompts, some coming while others are under way; check what they say."""
    requests = [Request(f"{n}", prompt, len(right[n]), budget) for n, prompt in enumerate(prompts())]
    engine.waiting.extend(requests[:4])
    for _ in range(5):
        engine.step()
    engine.run(requests[4:])
    engine.manager.check()
    assert not engine.manager.running_rows.size
    for request, output in zip(requests, right, strict=True):
        assert request.output == output, request.name
    return requests


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_generate(family: str, num_drafts: int) -> None:
    model = calm_model(family)
    right = [greedy(model, prompt) for prompt in prompts()]
    engine = TinyEngine(model, memory="4MiB", num_drafts=num_drafts)
    served(engine, right)
    assert engine.counts["preempted"] == 0
    counts = engine.manager.drafts.counts()
    if num_drafts and family != "qwen3-next":
        assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
        assert engine.counts["steps"] < sum(map(len, right))
    else:
        assert counts.num_draft_tokens == 0
    pages = int((engine.manager.pool.owner >= 0).sum())
    page_bytes = engine.manager.geometry.page_bytes
    while not engine.counts["preempted"]:  # and in less and less memory
        pages = pages * 3 // 4
        engine.close()
        engine = TinyEngine(model, memory=pages * page_bytes, num_drafts=num_drafts)
        served(engine, right)
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_engine_hits_what_the_first_one_stored(family: str, tmp_path: Path) -> None:
    model = calm_model(family)
    right = [greedy(model, prompt) for prompt in prompts()]
    computed, hits = [], []
    for _ in range(2):
        store = make_store("LMDBConnector", {"path": str(tmp_path)})
        engine = TinyEngine(model, memory="8MiB", store=store)
        served(engine, right)
        assert engine.offload is not None
        computed.append(engine.counts["computed"])
        hits.append(engine.offload.stats().tokens.get("store", 0))
        engine.close()
        store.close()
    assert hits[1] > hits[0]
    assert hits[1] >= 5 * 64  # the common beginning alone
    assert computed[1] < computed[0]


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_reasoning_is_cut_at_its_budget(num_drafts: int) -> None:
    """The oracle: greedy decoding that reads the budget off the whole sequence, token by token."""
    model = calm_model("llama")
    budget, right = 6, []
    texts = [[*prompt, 1] for prompt in prompts()]
    for prompt in texts:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + NEW_TOKENS:
            start = max((at for at, token in enumerate(tokens) if token == 1), default=-1)
            is_open = start >= 0 and 2 not in tokens[start:]
            spent = is_open and len(tokens) - start - 1 >= budget
            tokens.append(2 if spent else greedy(model, tokens, 1)[0])
        right.append(tokens[len(prompt) :])
    assert any(output[budget] == 2 for output in right)
    engine = TinyEngine(model, memory="4MiB", num_drafts=num_drafts)
    requests = [Request(f"{n}", text, NEW_TOKENS, budget) for n, text in enumerate(texts)]
    engine.run(requests)
    assert [request.output for request in requests] == right
    engine.close()


def test_an_end_token_ends_a_request() -> None:
    model = calm_model("llama")
    prompt = prompts()[0]
    output = greedy(model, prompt)
    engine = TinyEngine(model, memory="4MiB", eos=output[9])
    request = Request("ends", prompt, NEW_TOKENS)
    engine.run([request])
    assert request.output == output[: output.index(output[9]) + 1]
    engine.close()


def test_drafts_and_their_verification() -> None:
    assert ngram_drafts([5, 6, 7, 8, 5, 6], 3) == [7, 8, 5]
    assert ngram_drafts([5, 6, 9, 5, 6, 7, 5, 6], 1) == [7]  # the latest
    assert ngram_drafts([1, 2, 3], 3) == ngram_drafts([1], 3) == []
    none = [-1] * 4
    assert verify([], [4], none, None) == [4]
    assert verify([4, 5], [4, 5, 6], none, None) == [4, 5, 6]
    assert verify([4, 5], [4, 9, 6], none, None) == [4, 9]
    assert verify([4, 5], [4, 5, 6], [-1, 2, -1], None) == [4, 2]
    assert verify([4, 5], [4, 5, 6], none, 4) == [4]


def test_the_tiny_engine_shows_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    tiny_engine.main()
    first, second = capsys.readouterr().out.split("second engine")
    for text in (first, second):
        assert len(re.findall(r"request \d: \d+ prompt tokens", text)) == 8
        assert "cut after 16 tokens" in text
        accepted, drafted = map(int, re.findall(r"(\d+) of (\d+) draft tokens", text)[0])
        assert 0 < accepted < drafted
    assert int(re.findall(r"(\d+) preemptions", first)[0]) > 0
    hits = [int(re.findall(r"'store': (\d+)", text)[0]) for text in (first, second)]
    assert hits[1] > hits[0]


def test_the_vocabulary_has_the_markers() -> None:
    assert max(*tiny_engine.MARKERS.start, *tiny_engine.MARKERS.forced_end) < VOCABULARY
