"""Reasoning budgets against an oracle that reads the whole token list anew at every position.

The oracle is the rule of the contract and nothing else: find the last markers, count, compare, match the end phrase.
The decode loops drive `ThinkingBudget` as an engine would, with a model whose next token depends on all tokens before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvtide.hma.thinking import Forcing, ThinkingBudget, ThinkingMarkers
from kvtide.kvcache import ConfigError

Tokens = list[int]

# Reasoning and answer tokens are 0..9 and the markers stand apart from them; with PHRASE the forced end is a sentence.
SINGLE = ThinkingMarkers(start=(20,), natural_end=(21,), forced_end=(21,))
PHRASE = ThinkingMarkers(start=(20, 30), natural_end=(21, 31), forced_end=(40, 41, 40, 42, 21, 31))
APART = pytest.mark.parametrize("markers", [SINGLE, PHRASE], ids=["single", "phrase"])

VOCABULARY = 4  # of the random markers: so few tokens that markers share tokens, overlap and contain each other
TOKEN = st.integers(0, VOCABULARY - 1)


# ---- the oracle ----


def last_index(tokens: Sequence[int], marker: Sequence[int]) -> int:
    places = [i for i in range(len(tokens)) if tuple(tokens[i : i + len(marker)]) == tuple(marker)]
    return max(places, default=-1)


def count(tokens: Sequence[int], markers: ThinkingMarkers) -> int | None:
    """Tokens behind the start marker of the open section; None if none is open."""
    start = last_index(tokens, markers.start)
    if start <= last_index(tokens, markers.natural_end):
        return None
    return len(tokens) - start - len(markers.start)


def forced(tokens: Sequence[int], markers: ThinkingMarkers, budget: int | None) -> int:
    """The token that must come next, or -1."""
    spent = count(tokens, markers)
    if budget is None or budget < 0 or spent is None or spent < budget:
        return -1
    end = markers.forced_end
    lengths = [k for k in range(len(end)) if k <= len(tokens) and tuple(tokens[len(tokens) - k :]) == end[:k]]
    return end[max(lengths)]


def step_oracle(tokens: Tokens, drafts: Tokens, markers: ThinkingMarkers, budget: int | None) -> tuple[Tokens, int]:
    """Forced token of every position, and the most tokens of the step."""
    row = [forced(tokens + drafts[:j], markers, budget) for j in range(len(drafts) + 1)]
    stops = [j for j, draft in enumerate(drafts) if row[j] not in (-1, draft)]
    return row, min(stops, default=len(drafts)) + 1


# ---- drawing ----


@st.composite
def any_markers(draw: st.DrawFn) -> ThinkingMarkers:
    marker = st.lists(TOKEN, min_size=1, max_size=3).map(tuple)
    natural_end = draw(marker)
    forced_end = (*draw(st.lists(TOKEN, max_size=3)), *natural_end, *draw(st.lists(TOKEN, max_size=2)))
    try:
        return ThinkingMarkers(draw(marker), natural_end, forced_end)
    except ConfigError:
        assume(False)
        raise


def pieces(markers: ThinkingMarkers) -> st.SearchStrategy[Tokens]:
    """Tokens in which markers, whole and in part, are frequent."""
    whole = st.sampled_from([markers.start, markers.natural_end, markers.forced_end])
    part = whole.flatmap(lambda marker: st.integers(1, len(marker)).map(lambda n: marker[:n]))
    return st.lists(part | st.lists(TOKEN, max_size=3).map(tuple), max_size=5).map(
        lambda ps: [t for p in ps for t in p]
    )


BUDGETS = st.sampled_from([0, 1, 2, 3, 5, -1, None])


def padded(rows: Sequence[Sequence[int]], width: int) -> npt.NDArray[np.int64]:
    out = np.full((len(rows), width), -1, dtype=np.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


# ---- a request, and engines that decode it ----


@dataclass(frozen=True)
class Request:
    prompt: Tokens
    budget: int | None
    seed: int

    def next_token(self, tokens: Sequence[int], vocabulary: Sequence[int]) -> int:
        """A deterministic model: the same tokens are followed by the same token."""
        return random.Random(hash((self.seed, *tokens))).choice(vocabulary)


def decode_alone(request: Request, markers: ThinkingMarkers, vocabulary: Sequence[int]) -> Iterator[int]:
    """Token by token, by the oracle."""
    tokens = list(request.prompt)
    while True:
        token = forced(tokens, markers, request.budget)
        tokens.append(token if token >= 0 else request.next_token(tokens, vocabulary))
        yield tokens[-1]


def decode_batch(
    requests: Sequence[Request],
    markers: ThinkingMarkers,
    vocabulary: Sequence[int],
    *,
    num_tokens: int,
    most_drafts: int,
    cut: bool,
    rng: random.Random,
) -> list[Tokens]:
    """Outputs of at least `num_tokens` tokens each; rows are shuffled, idle in some steps, and resumed at random.

    Forced tokens are put in by the sampler, or with `cut` afterwards.
    """
    budget = ThinkingBudget(markers, max_requests=len(requests) + 2)
    free = list(range(len(requests) + 2))
    rng.shuffle(free)
    row_of = [free.pop() for _ in requests]
    outputs: list[Tokens] = [[] for _ in requests]
    for row, request in zip(row_of, requests, strict=True):
        budget.admit(row, request.prompt, request.budget)

    while any(len(out) < num_tokens for out in outputs):
        batch = [i for i in range(len(requests)) if rng.random() < 0.8]
        rng.shuffle(batch)
        drafts = []
        for i in batch:
            # What the model will say, with mistakes, so that some are accepted and some are not.
            alone = decode_alone(replace(requests[i], prompt=requests[i].prompt + outputs[i]), markers, vocabulary)
            right = islice(alone, rng.randint(0, most_drafts))
            drafts.append([t if rng.random() < 0.7 else rng.choice(vocabulary) for t in right])
        rows = [row_of[i] for i in batch]
        forcing = budget.force(rows, padded(drafts, most_drafts))

        sampled = []
        for i, draft, must in zip(batch, drafts, forcing.tokens.tolist(), strict=True):
            tokens = requests[i].prompt + outputs[i]
            kept: Tokens = []
            for j in range(len(draft) + 1):
                said = requests[i].next_token(tokens + kept, vocabulary)
                kept.append(must[j] if must[j] >= 0 and not cut else said)
                if j == len(draft) or kept[j] != draft[j]:
                    break
            sampled.append(kept)
        token_ids, counts = padded(sampled, most_drafts + 1), np.array([len(kept) for kept in sampled], dtype=np.int64)
        if cut:
            token_ids, counts = forcing.cut(token_ids, counts)
        assert (counts <= forcing.limit).all()
        budget.commit(rows, token_ids, counts)
        for i, kept, n in zip(batch, token_ids.tolist(), counts.tolist(), strict=True):
            outputs[i] += kept[:n]

        if rng.random() < 0.2:  # preempted, and admitted elsewhere with all its tokens
            i = rng.randrange(len(requests))
            budget.release(row_of[i])
            free.insert(0, row_of[i])
            row_of[i] = free.pop()
            budget.admit(row_of[i], requests[i].prompt + outputs[i], requests[i].budget)
    return outputs


# ---- scenarios with numbers ----


def admitted(tokens: Tokens, budget: int | None, markers: ThinkingMarkers = SINGLE) -> ThinkingBudget:
    state = ThinkingBudget(markers, max_requests=1)
    state.admit(0, tokens, budget)
    return state


def answer(state: ThinkingBudget, drafts: Tokens) -> tuple[Tokens, int]:
    forcing = state.force([0], [drafts])
    assert forcing.tokens.dtype == np.int32
    assert forcing.limit.dtype == np.int64
    return forcing.tokens[0].tolist(), int(forcing.limit[0])


class TestScenarios:
    def test_51_budget_10_with_3_drafts_and_8_used(self) -> None:
        state = admitted([20, 0, 1, 2, 3, 4, 5, 6, 7], 10)
        assert state.spent([0]) == 8
        # Of the 4 candidate tokens 2 are reasoning; the third is the end of reasoning, whatever was drafted there.
        assert answer(state, [8, 9, 1]) == ([-1, -1, 21, 21], 3)
        state.commit([0], [[8, 9, 21, -1]], [3])
        assert state.spent([0]) == 0
        assert answer(state, [1, 2, 3]) == ([-1] * 4, 4)

    def test_51_end_of_reasoning_drafted_at_the_budget_is_accepted(self) -> None:
        state = admitted([20, 0, 1, 2, 3, 4, 5, 6, 7], 10)
        assert answer(state, [8, 9, 21]) == ([-1, -1, 21, -1], 4)

    def test_51_the_bonus_token_is_forced(self) -> None:
        state = admitted([20, 0, 1, 2, 3, 4, 5, 6], 10)
        assert answer(state, [7, 8, 9]) == ([-1, -1, -1, 21], 4)

    def test_52_all_drafts_rejected_counts_one(self) -> None:
        state = admitted([20, 0, 1, 2, 3, 4, 5, 6, 7], 10)
        state.force([0], [[8, 9, 1]])
        state.commit([0], [[0, -1, -1, -1]], [1])
        assert state.spent([0]) == 9
        assert answer(state, [8, 9, 1]) == ([-1, 21, 21, 21], 2)

    @pytest.mark.parametrize("num_drafts", [0, 1, 3])
    def test_budget_0_ends_at_once(self, num_drafts: int) -> None:
        state = admitted([5, 20], 0)
        tokens, limit = answer(state, [7] * num_drafts)
        assert tokens[0] == 21
        assert limit == 1

    @pytest.mark.parametrize("budget", [-1, None])
    def test_unlimited(self, budget: int | None) -> None:
        state = admitted([20, *range(10)], budget)
        assert answer(state, [7, 7]) == ([-1, -1, -1], 3)
        state.commit([0], [[7]], [1])
        assert state.spent([0]) == 0

    def test_tokens_of_the_prompt_count(self) -> None:
        assert answer(admitted([20, 7, 7, 7], 5), [7, 7, 7])[0] == [-1, -1, 21, 21]
        assert answer(admitted([20, 7, 7, 7], 2), [])[0] == [21]

    def test_a_natural_end_cancels(self) -> None:
        assert answer(admitted([20, 7], 3), [7, 21, 7, 7])[0] == [-1] * 5

    def test_a_second_section_has_a_fresh_budget(self) -> None:
        state = admitted([20, 7, 7, 21, 7, 7, 7], 2)
        assert answer(state, [20, 7, 7, 7]) == ([-1, -1, -1, 21, 21], 4)

    def test_a_phrase_is_forced_one_token_at_a_time(self) -> None:
        state = admitted([20, 30, 7], 2, PHRASE)
        written = []
        for _ in range(9):
            ((token,), _limit) = answer(state, [])
            written.append(token)
            state.commit([0], [[token if token >= 0 else 7]], [1])
            assert state.spent([0]) == (2 if len(written) < 7 else 0)
        assert written == [-1, 40, 41, 40, 42, 21, 31, -1, -1]

    def test_a_phrase_is_resumed_from_a_prompt(self) -> None:
        assert answer(admitted([20, 30, 7, 7, 40, 41, 40], 2, PHRASE), [])[0] == [42]
        # The longest suffix that begins the phrase, not the longest that was ever matched.
        assert answer(admitted([20, 30, 7, 7, 40, 41, 40, 41], 2, PHRASE), [])[0] == [40]

    def test_drafts_that_equal_the_phrase_are_kept(self) -> None:
        state = admitted([20, 30, 7], 2, PHRASE)
        assert answer(state, [7, 40, 41, 7]) == ([-1, 40, 41, 40, 40], 4)
        assert answer(state, [7, 40, 41, 40]) == ([-1, 40, 41, 40, 42], 5)

    def test_what_follows_the_natural_end_in_the_phrase_is_not_forced(self) -> None:
        state = admitted([20, 7], 1, ThinkingMarkers((20,), (21,), (40, 21, 50)))
        assert answer(state, [40, 21, 7])[0] == [40, 21, -1, -1]

    def test_a_section_opened_by_the_last_tokens_of_a_whole_phrase(self) -> None:
        # 5 21 20 5 is the phrase; of it only 5 21 is forced, the model says 20 5, and that 5 begins the phrase again.
        markers = ThinkingMarkers(start=(20, 5), natural_end=(21,), forced_end=(5, 21, 20, 5))
        assert answer(admitted([5, 21, 20, 5], 0, markers), [])[0] == [21]
        assert answer(admitted([5, 21], 0, markers), [20, 5])[0] == [-1, -1, 21]

    def test_shorter_drafts_are_filled_up(self) -> None:
        state = ThinkingBudget(SINGLE, max_requests=4)
        for row in range(3):
            state.admit(row, [20, 7], 2)
        forcing = state.force([2, 0, 1, 3], [[7, 7], [7, -1], [-1, -1], [7, 7]])
        assert forcing.tokens.tolist() == [[-1, 21, 21], [-1, 21, -1], [-1, -1, -1], [-1, -1, -1]]
        assert forcing.limit.tolist() == [2, 2, 1, 3]

    def test_a_released_row_is_free(self) -> None:
        state = admitted([20], 0)
        state.release(0)
        assert answer(state, [7]) == ([-1, -1], 2)
        state.admit(0, [7], 0)
        assert answer(state, [7]) == ([-1, -1], 2)

    def test_an_empty_batch(self) -> None:
        forcing = admitted([20], 0).force([], np.empty((0, 3), dtype=np.int64))
        assert forcing.tokens.shape == (0, 4)
        assert forcing.limit.shape == (0,)

    def test_cut_ends_at_the_first_token_that_is_not_the_forced_one(self) -> None:
        forcing = Forcing(np.array([[-1, 40, 41], [-1, 40, 41], [-1, -1, 40]], np.int32), np.array([3, 2, 3]))
        token_ids = np.array([[7, 40, 5], [7, 6, -1], [7, -1, -1]])
        kept, counts = forcing.cut(token_ids, [3, 2, 1])
        assert kept.tolist() == [[7, 40, 41], [7, 40, -1], [7, -1, -1]]
        assert counts.tolist() == [3, 2, 1]
        assert token_ids[0].tolist() == [7, 40, 5]


# ---- properties ----


class TestAgainstOracle:
    @given(data=st.data())
    def test_every_position_of_a_step(self, data: st.DataObject) -> None:
        markers = data.draw(any_markers())
        state = ThinkingBudget(markers, max_requests=4)
        rows = data.draw(st.permutations(range(4)))[: data.draw(st.integers(1, 4))]
        budgets = [data.draw(BUDGETS) for _ in rows]
        sequences = [data.draw(pieces(markers)) for _ in rows]
        for row, tokens, budget in zip(rows, sequences, budgets, strict=True):
            state.admit(row, tokens, budget)
        for _ in range(3):
            drafts = [data.draw(pieces(markers))[:6] for _ in rows]
            for _ in range(2):  # the first call changed nothing
                forcing = state.force(rows, padded(drafts, 6))
                for i, draft in enumerate(drafts):
                    expected, limit = step_oracle(sequences[i], draft, markers, budgets[i])
                    assert forcing.tokens[i].tolist() == expected + [-1] * (6 - len(draft))
                    assert forcing.limit[i] == limit
            committed = [data.draw(pieces(markers))[:7] for _ in rows]
            state.commit(rows, padded(committed, 7), [len(tokens) for tokens in committed])
            for i, tokens in enumerate(committed):
                sequences[i] = sequences[i] + tokens
            for spent, tokens, budget in zip(state.spent(rows).tolist(), sequences, budgets, strict=True):
                most = 0 if budget is None or budget < 0 else budget
                assert spent == min(count(tokens, markers) or 0, most)

    @given(data=st.data())
    def test_admitted_whole_or_committed_in_parts(self, data: st.DataObject) -> None:
        markers = data.draw(any_markers())
        tokens = data.draw(pieces(markers))
        split = data.draw(st.integers(0, len(tokens)))
        budget = data.draw(BUDGETS)
        parts = ThinkingBudget(markers, max_requests=1)
        parts.admit(0, tokens[:split], budget)
        parts.commit([0], [tokens[split:]], [len(tokens) - split])
        whole = ThinkingBudget(markers, max_requests=1)
        whole.admit(0, tokens, budget)
        drafts = data.draw(pieces(markers))
        assert answer(parts, drafts) == answer(whole, drafts)


class TestDecoding:
    @given(
        data=st.data(),
        seed=st.integers(0, 2**32),
        most_drafts=st.integers(0, 5),
        cut=st.booleans(),
    )
    def test_same_tokens_with_and_without_drafts(
        self, data: st.DataObject, seed: int, most_drafts: int, cut: bool
    ) -> None:
        markers = data.draw(any_markers() | st.sampled_from([SINGLE, PHRASE]))
        vocabulary = sorted({0, 1, 2, 3, *markers.start, *markers.natural_end})
        requests = [
            Request(data.draw(pieces(markers)), budget, seed + i) for i, budget in enumerate([0, 1, 4, -1, None])
        ]
        outputs = decode_batch(
            requests,
            markers,
            vocabulary,
            num_tokens=20,
            most_drafts=most_drafts,
            cut=cut,
            rng=random.Random(seed),
        )
        for request, output in zip(requests, outputs, strict=True):
            assert output == list(islice(decode_alone(request, markers, vocabulary), len(output)))

    @APART
    @pytest.mark.parametrize("budget", [0, 1, 7])
    @pytest.mark.parametrize("most_drafts", [0, 1, 4])
    @pytest.mark.parametrize("cut", [False, True])
    def test_every_section_has_exactly_its_budget(
        self, markers: ThinkingMarkers, budget: int, most_drafts: int, cut: bool
    ) -> None:
        """A model that never ends its reasoning, in sections that it opens again and again."""
        end = markers.forced_end

        @dataclass(frozen=True)
        class Talker(Request):
            def next_token(self, tokens: Sequence[int], vocabulary: Sequence[int]) -> int:
                # Open a section 3 tokens after the last was closed; the first is opened by the prompt.
                behind = len(tokens) - last_index(tokens, markers.natural_end) - len(markers.natural_end)
                opening = behind - 3
                if count(tokens, markers) is None and 0 <= opening < len(markers.start):
                    return markers.start[opening]
                return super().next_token(tokens, vocabulary)

        requests = [Talker([5, *markers.start], budget, seed) for seed in range(3)]
        outputs = decode_batch(
            requests,
            markers,
            range(10),
            num_tokens=4 * (budget + len(end) + 3 + len(markers.start)),
            most_drafts=most_drafts,
            cut=cut,
            rng=random.Random(budget),
        )
        period = budget + len(end) + 3 + len(markers.start)
        for output in outputs:
            assert len(output) >= 4 * period
            for i, token in enumerate(output):
                place = i % period
                if place < budget:
                    assert token < 10
                elif place < budget + len(end):
                    assert token == end[place - budget]
                elif place < budget + len(end) + 3:
                    assert token < 10
                else:
                    assert token == markers.start[place - budget - len(end) - 3]


# ---- errors ----


class TestErrors:
    @pytest.mark.parametrize("budget", [True, False, 3.0, 1.5, -2, "7", np.True_, np.float32(2), float("inf")])
    def test_a_bad_budget_is_named_and_the_row_stays(self, budget: int) -> None:
        state = admitted([20, 7], 1)
        with pytest.raises(ConfigError) as raised:
            state.admit(0, [7, 7, 7], budget)
        assert f"thinking budget is {budget!r}" in str(raised.value)
        assert answer(state, []) == ([21], 1)

    def test_good_budgets(self) -> None:
        state = ThinkingBudget(SINGLE, max_requests=1)
        for budget in (0, np.int32(0), np.uint8(0)):
            state.admit(0, [20], budget)
            assert answer(state, [])[0] == [21]
        assert answer(admitted([20, 7], 10**30), [])[0] == [-1]

    @pytest.mark.parametrize(
        ("start", "natural_end", "forced_end", "message"),
        [
            ((), (21,), (21,), r"start is \(\)"),
            ((20,), (), (21,), r"natural_end is \(\)"),
            ((20,), (21,), (-1,), r"forced_end is \(-1,\)"),
            ((20,), (True,), (21,), r"natural_end is \(True,\)"),
            ((20,), (2.0,), (21,), r"natural_end is \(2.0,\)"),
            ((20,), (20,), (20,), "no section would ever be open"),
            ((20, 21), (21,), (21,), "no section would ever be open"),
            ((20,), (21,), (40, 41), "would not close the section"),
            ((20,), (21, 22), (22, 21), "would not close the section"),
            ((20,), (21,), (40, 20, 21), "fresh budget"),
            ((20,), (20, 21), (20, 21), "fresh budget"),
        ],
    )
    def test_markers_that_cannot_work(
        self, start: tuple[int, ...], natural_end: tuple[int, ...], forced_end: tuple[int, ...], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            ThinkingMarkers(start, natural_end, forced_end)

    def test_a_start_behind_the_natural_end_of_the_phrase_is_never_written(self) -> None:
        assert answer(admitted([20], 0, ThinkingMarkers((20,), (21,), (21, 20))), [21, 7])[0] == [21, -1, -1]

    @pytest.mark.parametrize("size", [0, True, 2.0])
    def test_max_requests(self, size: int) -> None:
        with pytest.raises(ConfigError, match=f"max_requests is {size!r}"):
            ThinkingBudget(SINGLE, size)

    @pytest.mark.parametrize(
        ("rows", "drafts", "message"),
        [
            ([2], [[7]], "row 2 is not a request row; allowed: 0 to 1"),
            ([-1], [[7]], "row -1 is not"),
            ([1, 1], [[7], [7]], "row 1 is given twice"),
            ([0.0], [[7]], "rows is an array of float64"),
            ([0], [7], "drafts is an array of int64 with 1 axes"),
            ([0, 1], [[7]], "drafts has 1 rows, and must have 2"),
            ([0, 1], [[7], [7, 7]], "drafts has rows of different lengths"),
        ],
    )
    def test_force(self, rows: list[int], drafts: list[list[int]], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            ThinkingBudget(SINGLE, 2).force(rows, drafts)

    @pytest.mark.parametrize(
        ("rows", "token_ids", "counts", "message"),
        [
            ([0, 1], [[7, 7], [7, 7]], [2, 3], "a count is 3, and must be between 0 and 2"),
            ([0, 1], [[7, 7], [7, 7]], [-1, 2], "a count is -1"),
            ([0, 1], [[7, 7], [7, 7]], [2], "counts has 1 rows, and must have 2"),
            ([0, 1], [[7, 7]], [2, 2], "token_ids has 1 rows, and must have 2"),
            ([0, 1], [[7, 7], [7, -1]], [1, 2], "token 1 of row 1 is -1"),
            ([0, 0], [[7, 7], [7, 7]], [1, 1], "row 0 is given twice"),
            ([0, 1], [[0.5, 7], [7, 7]], [1, 1], "token_ids is an array of float64"),
        ],
    )
    def test_a_refused_commit_changes_nothing(
        self, rows: list[int], token_ids: list[list[int]], counts: list[int], message: str
    ) -> None:
        state = ThinkingBudget(SINGLE, 2)
        for row in range(2):
            state.admit(row, [20], 9)
        with pytest.raises(ConfigError, match=message) as raised:
            state.commit(rows, token_ids, counts)
        assert "\n" not in str(raised.value)
        assert state.spent([0, 1]).tolist() == [0, 0]

    def test_cut(self) -> None:
        forcing = admitted([20], 0).force([0], [[7]])
        with pytest.raises(ConfigError, match=r"token_ids has shape \(1, 1\), and must have \(1, 2\)"):
            forcing.cut([[7]], [1])
        with pytest.raises(ConfigError, match="a count is 3"):
            forcing.cut([[7, 7]], [3])
