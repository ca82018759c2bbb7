"""Draft metrics: values worked out by hand, and the definitions written out over a list of drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.hma.drafts import DraftAccounting, DraftCounts
from kvtide.kvcache import ConfigError

Step = list[tuple[int, int]]  # (drafted, accepted) of each request

MOST = 4
DRAFT = st.integers(0, MOST).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d)))
STEPS = st.lists(st.lists(DRAFT, max_size=5), max_size=8)


def record(accounting: DraftAccounting, step: Step) -> None:
    accounting.record([d for d, _ in step], [a for _, a in step])


def counted(steps: Sequence[Step], most: int = MOST) -> DraftCounts:
    drafts = [draft for step in steps for draft in step if draft[0] > 0]
    return DraftCounts(
        num_drafts=len(drafts),
        num_draft_tokens=sum(d for d, _ in drafts),
        num_accepted_tokens=sum(a for _, a in drafts),
        num_accepted_tokens_per_position=tuple(sum(a > i for _, a in drafts) for i in range(most)),
    )


class TestByHand:
    def test_two_steps(self) -> None:
        accounting = DraftAccounting(3)
        accounting.record([3, 3, 0], [3, 1, 0])
        accounting.record(np.array([2, 3]), np.array([1, 0]))
        counts = accounting.counts()
        # 4 drafts (the request without draft tokens is none), 11 tokens drafted, 5 accepted.
        assert counts == DraftCounts(4, 11, 5, (3, 1, 1))
        assert counts.acceptance_rate == 5 / 11
        assert counts.mean_acceptance_length == 1 + 5 / 4
        # The draft of 2 tokens is in the denominator of position 2.
        assert counts.acceptance_per_position == (3 / 4, 1 / 4, 1 / 4)
        assert counts.conditional_acceptance_per_position == (3 / 4, 1 / 3, 1 / 1)

    def test_all_rejected(self) -> None:
        accounting = DraftAccounting(2)
        accounting.record([2, 2], [0, 0])
        counts = accounting.counts()
        assert counts.acceptance_rate == 0
        assert counts.mean_acceptance_length == 1
        assert counts.acceptance_per_position == (0, 0)
        assert counts.conditional_acceptance_per_position == (0, None)

    @pytest.mark.parametrize("step", [[], [(0, 0), (0, 0)]], ids=["nothing", "no drafts"])
    def test_no_draft_has_no_rates(self, step: Step) -> None:
        accounting = DraftAccounting(2)
        record(accounting, step)
        counts = accounting.counts()
        assert counts == DraftCounts(0, 0, 0, (0, 0))
        assert counts.acceptance_rate is None
        assert counts.mean_acceptance_length is None
        assert counts.acceptance_per_position == (None, None)
        assert counts.conditional_acceptance_per_position == (None, None)

    def test_counts_are_a_moment(self) -> None:
        accounting = DraftAccounting(2)
        accounting.record([2], [1])
        before = accounting.counts()
        accounting.record([2], [2])
        assert before == DraftCounts(1, 2, 1, (1, 0))
        assert accounting.counts() - before == DraftCounts(1, 2, 2, (1, 1))


class TestProperties:
    @given(steps=STEPS, since=st.integers(0, 8))
    def test_counts_match_the_definitions(self, steps: list[Step], since: int) -> None:
        accounting = DraftAccounting(MOST)
        for step in steps[:since]:
            record(accounting, step)
        earlier = accounting.counts()
        for step in steps[since:]:
            record(accounting, step)
        assert earlier == counted(steps[:since])
        assert accounting.counts() == counted(steps)
        assert accounting.counts() - earlier == counted(steps[since:])

    @given(steps=STEPS)
    def test_rates_agree_with_each_other(self, steps: list[Step]) -> None:
        counts = counted(steps)
        rates = [rate for rate in counts.acceptance_per_position if rate is not None]
        assert rates == sorted(rates, reverse=True)
        if counts.num_drafts:
            assert counts.mean_acceptance_length == pytest.approx(1 + sum(rates))
            reached = 1.0
            for rate, conditional in zip(rates, counts.conditional_acceptance_per_position, strict=True):
                reached *= conditional or 0.0
                assert rate == pytest.approx(reached)


class TestErrors:
    @pytest.mark.parametrize(
        ("drafted", "accepted", "message"),
        [
            ([2, 1], [2, 2], "request 1 of the batch has 2 accepted of 1 draft tokens"),
            ([0], [1], "request 0 of the batch has 1 accepted of 0 draft tokens"),
            ([2], [-1], "-1 accepted"),
            ([-1], [-1], "of -1 draft tokens"),
            ([3], [0], "<= 2 must hold"),
            ([2, 2], [1], "2 requests and accepted has 1"),
            ([2.0], [1], "drafted is an array of float64"),
            ([True], [1], "drafted is an array of bool"),
            ([[2]], [[1]], "2 axes"),
        ],
    )
    def test_a_refused_step_counts_nothing(self, drafted: list[int], accepted: list[int], message: str) -> None:
        accounting = DraftAccounting(2)
        accounting.record([2], [1])
        before = accounting.counts()
        with pytest.raises(ConfigError, match=message) as raised:
            accounting.record(drafted, accepted)
        assert "\n" not in str(raised.value)
        assert accounting.counts() == before

    @pytest.mark.parametrize("most", [0, -1, 1.0, True, None])
    def test_max_draft_tokens(self, most: int) -> None:
        with pytest.raises(ConfigError, match=f"max_draft_tokens is {most!r}"):
            DraftAccounting(most)

    def test_an_interval_runs_forward_over_the_same_positions(self) -> None:
        accounting = DraftAccounting(2)
        before = accounting.counts()
        accounting.record([2], [1])
        with pytest.raises(ConfigError, match="later counts minus the earlier"):
            before - accounting.counts()
        with pytest.raises(ConfigError, match="over 3 draft positions"):
            accounting.counts() - DraftAccounting(3).counts()
