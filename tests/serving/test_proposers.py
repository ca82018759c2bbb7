"""Proposers against slow oracles and against vLLM's own n-gram code; acceptance measured on a trace's token ids."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import layout_of

from kvtide.kvcache import ConfigError, FullAttention
from kvtide.sims.serving import proposers
from kvtide.sims.serving.build import Deployment
from kvtide.sims.serving.gpus import GPUS
from kvtide.sims.serving.measured import proposer_of
from kvtide.sims.serving.proposers import NgramProposer, SuffixProposer
from kvtide.sims.serving.speculation import Acceptance, read_speculative_config
from kvtide.sims.serving.work import estimate_work
from kvtide.sims.traces import Request

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def ngram_oracle(text: list[int], least: int, most: int, drafts: int) -> list[int]:
    """Every n-gram that ends the text, the longest first, compared with every place from the front."""
    for size in range(most, least - 1, -1):
        for start in range(len(text) - size):
            if text[start : start + size] == text[len(text) - size :]:
                return text[start + size : start + size + drafts]
    return []


@given(text=texts, cut=st.integers(1, 60), sizes=st.tuples(st.integers(1, 4), st.integers(0, 3)), k=st.integers(1, 6))
def test_ngram_against_a_search(text: list[int], cut: int, sizes: tuple[int, int], k: int) -> None:
    least, most = sizes[0], sum(sizes)
    proposer = NgramProposer(least, most)
    cut = min(cut, len(text))
    proposer.start("a", text[:cut], 100)
    for end in range(cut, len(text) + 1):
        assert proposer.propose("a", k) == ngram_oracle(text[:end], least, most, k)
        proposer.extend("a", text[end : end + 1])
    proposer.end("a")


def test_ngram_against_vllm() -> None:
    """300 random texts; vLLM's function runs in its own environment."""
    python = os.environ.get("KVTIDE_VLLM_PYTHON")
    if not python:
        pytest.skip("KVTIDE_VLLM_PYTHON names no Python with vLLM")
    rng = random.Random(5)
    cases = []
    for _ in range(300):
        least = rng.randint(1, 4)
        text = [rng.randint(0, rng.choice([1, 3, 9])) for _ in range(rng.randint(1, 80))]
        cases.append((text, least, least + rng.randint(0, 3), rng.randint(1, 6)))
    script = (
        "import json, sys, numpy as np\n"
        "from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as find\n"
        "print(json.dumps([find(np.array(t, dtype=np.int32), a, b, 10**6, k).tolist()"
        " for t, a, b, k in json.load(sys.stdin)]))"
    )
    done = subprocess.run(
        [python, "-c", script],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    for (text, least, most, drafts), expected in zip(cases, theirs, strict=True):
        proposer = NgramProposer(least, most)
        proposer.start("a", text, 1)
        assert proposer.propose("a", drafts) == expected
    assert sum(map(bool, theirs)) > 100


class SuffixTrie:
    """Every suffix of every text down to a depth, with counts: the data structure of the paper, spelled out."""

    def __init__(self, texts: list[list[int]], depth: int) -> None:
        self.counts: Counter[tuple[int, ...]] = Counter()
        for text in texts:
            for start in range(len(text)):
                for end in range(start + 1, min(start + depth, len(text)) + 1):
                    self.counts[tuple(text[start:end])] += 1
        self.depth = depth

    def best_score(self, pattern: list[int], most: int, factor: float, min_prob: float) -> float:
        """The best expected number of accepted drafts over all match lengths."""
        best = 0.0
        for size in range(1, len(pattern) + 1):
            node = tuple(pattern[-size:])
            if not self.counts[node]:
                break
            best = max(best, self.walk(node, min(most, int(size * factor + 1e-6)), min_prob)[0])
        return best

    def walk(self, node: tuple[int, ...], most: int, min_prob: float) -> tuple[float, list[int]]:
        prob, score, drafts = 1.0, 0.0, list[int]()
        while len(drafts) < most:
            children = {child: self.counts[(*node, child)] for child in range(4) if self.counts[(*node, child)]}
            if not children or len(node) == self.depth:
                break
            child = max(children, key=lambda token: children[token])
            prob *= children[child] / self.counts[node]
            if prob < min_prob:
                break
            drafts.append(child)
            score += prob
            node = (*node, child)
        return score, drafts

    def score_of(self, pattern: list[int], drafts: list[int], factor: float, min_prob: float) -> float:
        """The best score with which a walk from some match drafts exactly this; ties between children allowed."""
        best = -1.0
        for size in range(1, len(pattern) + 1):
            node, prob, score = tuple(pattern[-size:]), 1.0, 0.0
            if len(drafts) > min(int(size * factor + 1e-6), self.depth - size):
                continue
            for token in drafts:
                count = self.counts[(*node, token)]
                if not count or count < max(self.counts[(*node, other)] for other in range(4)):
                    break
                prob *= count / self.counts[node]
                score += prob
                node = (*node, token)
            else:
                if prob >= min_prob:
                    best = max(best, score)
        return best


@given(
    text=texts,
    earlier=st.lists(texts, max_size=4),
    depth=st.integers(2, 8),
    factor=st.sampled_from([0.5, 1.0, 2.0]),
    min_prob=st.sampled_from([0.0, 0.1, 0.4]),
    most=st.integers(1, 6),
)
def test_suffix_against_a_trie(
    text: list[int], earlier: list[list[int]], depth: int, factor: float, min_prob: float, most: int
) -> None:
    """Where the most frequent next token is unique at every fork the score is the trie's; always it is a valid walk."""
    proposer = SuffixProposer(depth, 2, factor, min_prob)
    for number, output in enumerate(earlier):
        proposer.start(f"e{number}", [9], len(output))
        proposer.extend(f"e{number}", output)
        proposer.end(f"e{number}")
    cut = len(text) // 2
    prompt, output = [*text[:cut], 3], text[cut:]
    proposer.start("a", prompt, len(output))
    for number, token in enumerate(output):
        proposer.extend("a", [token])
        drafts = proposer.propose("a", most)
        known = [*prompt, *output[: number + 1]]
        own = SuffixTrie([known], depth)
        # Two outputs are remembered: the one before this one, and its own.
        others = SuffixTrie([*earlier[-1:], output[: number + 1]], depth)
        pattern = known[-depth:]
        scores = [trie.score_of(pattern, drafts, factor, min_prob) for trie in (own, others)]
        assert not drafts or max(scores) > 0
        assert len(drafts) <= most
        if not has_ties(own, pattern, most) and not has_ties(others, pattern, most):
            expected = max(trie.best_score(pattern, most, factor, min_prob) for trie in (own, others))
            assert max(*scores, 0.0) == pytest.approx(expected)


def has_ties(trie: SuffixTrie, pattern: list[int], most: int) -> bool:
    for size in range(1, len(pattern) + 1):
        node = tuple(pattern[-size:])
        for _ in range(most):
            counts = sorted(trie.counts[(*node, token)] for token in range(4))
            if counts[-1] and counts[-1] == counts[-2]:
                return True
            if not counts[-1]:
                break
            node = (*node, max(range(4), key=lambda token: trie.counts[(*node, token)]))
    return False


def test_outputs_beyond_the_limit_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where memory is given back, which happens early here; what is remembered still drafts."""
    monkeypatch.setattr(proposers, "_COMPACT", 64)
    proposer = SuffixProposer(8, 3, 1.0, 0.1)
    for number in range(40):
        proposer.start(str(number), [1], 20)
        proposer.extend(str(number), list(range(100 * number, 100 * number + 20)))
        proposer.end(str(number))
    assert len(proposer._outputs._tokens) < 2000
    proposer.start("x", [1, 3900, 3901, 3902], 4)  # 38 and 39 are left, and its own
    assert proposer.propose("x", 8) == [3903, 3904, 3905]
    proposer.start("y", [1, 3800, 3801, 3802], 4)  # now 38 has gone
    assert proposer.propose("y", 8) == []
    proposer.start("z", [1, 3900, 3901, 3902], 4)
    assert proposer.propose("z", 8) == []
    off = SuffixProposer(8, 0, 1.0, 0.1)
    off.start("a", [1], 8)
    off.extend("a", [1, 2, 3, 4])
    off.end("a")
    off.start("b", [1, 2, 3], 8)
    assert off.propose("b", 8) == []


LAYOUT = replace(layout_of("tiny", (4, FullAttention(2, 64, 64))), max_model_len=2048)
PLAN = Deployment(
    LAYOUT,
    estimate_work(LAYOUT, 1e9),
    GPUS["l4"],
    max_num_seqs=4,
    max_num_batched_tokens=256,
    kv_cache_memory_bytes=32 << 20,
)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 3}


def request_of(name: str, prompt: list[int], output: list[int]) -> Request:
    return Request(name, 0.0, len(prompt), len(output), prompt_ids=tuple(prompt), output_ids=tuple(output))


def measured(config: dict[str, Any], *requests: Request, **changes: Any) -> Any:
    plan = replace(PLAN, speculative=read_speculative_config(config), measure_drafts=True, **changes)
    return plan.engine().run(requests)


def test_a_copied_text_is_drafted_right() -> None:
    """The output repeats the prompt: after the first two tokens of it every draft is right."""
    text = list(range(100, 164))
    run = measured(NGRAM, request_of("a", text, text))
    assert run.served[0].output_tokens == 64
    assert run.drafts.num_draft_tokens - run.drafts.num_accepted_tokens == 2  # the last two are beyond the end
    # The prompt and one more step give two tokens; 62 are left, five a step.
    assert run.steps == 1 + 1 + 13
    slow = measured(NGRAM, request_of("a", text, list(range(500, 564))))
    assert slow.drafts.num_drafts == 0
    assert slow.steps == 64


@given(seed=st.integers(0, 1000), method=st.sampled_from(["ngram", "suffix"]))
def test_acceptance_is_what_a_replay_by_hand_says(seed: int, method: str) -> None:
    """One request, step by step: known text, drafts, how many are right, one token more."""
    rng = random.Random(seed)
    text = [rng.randint(0, 2) for _ in range(120)]
    prompt, output = text[:40], text[40:]
    raw: dict[str, Any] = NGRAM if method == "ngram" else {"method": "suffix", "num_speculative_tokens": 6}
    config = read_speculative_config(raw)
    run = measured(raw, request_of("a", prompt, output))
    proposer = proposer_of(config)
    proposer.start("a", prompt, len(output))
    proposer.extend("a", output[:1])
    known, steps, drafted, right = 1, 1, 0, 0
    while known < len(output):
        drafts = proposer.propose("a", config.num_speculative_tokens)
        accepted = 0
        while accepted < len(drafts) and output[known + accepted : known + accepted + 1] == [drafts[accepted]]:
            accepted += 1
        drafted += len(drafts)
        right += accepted
        new = output[known : known + accepted + 1]
        proposer.extend("a", new)
        known += len(new)
        steps += 1
    assert run.steps == steps
    assert (run.drafts.num_draft_tokens, run.drafts.num_accepted_tokens) == (drafted, right)


def test_suffixes_of_other_outputs_help_where_ngrams_cannot() -> None:
    """Three requests answer the same; the third is drafted from the others' outputs."""
    rng = random.Random(1)
    answer = [rng.randint(0, 30000) for _ in range(100)]
    requests = [request_of(str(i), [50000 + i] * 20, answer)._replace(arrival_s=100.0 * i) for i in range(3)]
    suffix = measured({"method": "suffix"}, *requests)
    ngram = measured(NGRAM, *requests)
    assert ngram.drafts.num_accepted_tokens == 0
    assert suffix.drafts.num_accepted_tokens > 150
    assert suffix.served[2].tpot_s < suffix.served[0].tpot_s / 2


def test_what_cannot_be_measured() -> None:
    config = read_speculative_config({"method": "eagle", "model": "x", "num_speculative_tokens": 2})
    with pytest.raises(ConfigError, match="come from a model"):
        proposer_of(config)
    with pytest.raises(ConfigError, match="or for ngram and suffix a trace with token ids"):
        replace(PLAN, speculative=read_speculative_config(NGRAM)).engine()
    with pytest.raises(ConfigError, match="n-grams of 3 to 2"):
        NgramProposer(3, 2)


def test_a_rate_wins_over_measuring_and_budgets_still_hold() -> None:
    """Under a thinking budget measured drafts never pass it; a rate that is given is used as it is."""
    text = list(range(100, 164))
    thinker = request_of("a", text, text)._replace(reasoning_tokens=40)
    run = measured(NGRAM, thinker, thinking_token_budget=10)
    assert run.reasoning == (1, 1, 40, 10)
    assert run.served[0].output_tokens == 10 + 24
    plan = replace(PLAN, speculative=read_speculative_config(NGRAM), acceptance=Acceptance([0, 0, 0, 0]))
    assert plan.engine().run([request_of("a", text, text)]).drafts.num_accepted_tokens == 0
