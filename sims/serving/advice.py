"""What to do about drafts, computed from the cost model at the batch and the context that the run had.

A step with K drafts brings 1 + p1 + ... + pK tokens of each request and takes longer: K passes of the drafter, K + 1
times the tokens to multiply with. While a step is bound by memory those come nearly free; past the ridge, where FLOPs
bound it, each costs its full share. So every batch has its own best K, and there is a batch past which none pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .cost import CostModel
from .job import Job, Scheduled, Step

MOST_REQUESTS = 4096


class DraftAdvice(NamedTuple):
    """Tokens per step and request with drafts, and those that pay for them; what would be better.

    `threshold` is the acceptance rate of every draft at which they break even, None above 1. `best` is the number of
    drafts that brings most tokens per second at this batch, and `gain` what it brings over none. `last_batch` is the
    largest number of requests at which the drafts as they are still gain: 0 for none, None without a bound.
    """

    length: float
    break_even: float
    threshold: float | None
    best: int
    gain: float
    last_batch: int | None

    @property
    def gains(self) -> bool:
        """Whether the drafts are worth their time."""
        return self.length > self.break_even

    def sentences(self, num_drafts: int, batch: int) -> list[str]:
        """Advice for people; none where all is well."""
        if self.gains and self.best == num_drafts:
            return []
        said = []
        if not self.gains:
            said.append(
                f"speculation loses at {batch} requests a step: {self.length:.2f} tokens a step, {self.break_even:.2f} "
                "are needed"
            )
            if self.threshold is None:
                said.append(f"no acceptance rate would pay for {num_drafts} drafts there")
            else:
                said.append(
                    f"drafts pay there from an acceptance rate of {self.threshold:.0%} each on; a lower temperature "
                    "raises it, since a draft is accepted with the probability that the target gives it"
                )
        if self.best == 0:
            said.append("at this batch the best number of drafts is none")
        elif self.best != num_drafts:
            said.append(f"{self.best} drafts instead of {num_drafts} would be {self.gain - 1:+.0%} over none")
        if self.last_batch and not self.gains:
            said.append(
                f"up to {self.last_batch} requests a step they gain: num_speculative_tokens_per_batch_size "
                f"[[1, {self.last_batch}, {num_drafts}], [{self.last_batch + 1}, {MOST_REQUESTS}, 0]]"
            )
        return said


def advise(cost: CostModel, rates: Sequence[float], batch: int, context: int) -> DraftAdvice:
    """`cost` has the drafter; `rates[i]` is the share of all drafts accepted at position i, in a decode step."""
    most = len(rates)
    plain = _seconds(cost, batch, context, 0)
    speeds = [(1 + sum(rates[:k])) * plain / _seconds(cost, batch, context, k) for k in range(most + 1)]
    best = int(np.argmax(speeds))
    break_even = _seconds(cost, batch, context, most) / plain

    def pays(size: int) -> bool:
        return (1 + sum(rates)) * _seconds(cost, size, context, 0) > _seconds(cost, size, context, most)

    last: int | None = None
    if not pays(MOST_REQUESTS):
        # Mixtures of experts can lose at small batches and gain at larger ones; what matters is where it ends.
        sizes = [size for size in _sizes() if pays(size)]
        low = max(sizes, default=0)
        high = min((size for size in _sizes() if size > low), default=MOST_REQUESTS)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if pays(middle) else (low, middle)
        last = low
    return DraftAdvice(1 + sum(rates), break_even, _threshold(break_even, most), best, speeds[best], last)


def _sizes() -> list[int]:
    return [1 << bit for bit in range(MOST_REQUESTS.bit_length())]


def _threshold(break_even: float, drafts: int) -> float | None:
    """The rate r with 1 + r + ... + r^K = the length that breaks even."""
    if break_even > drafts + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(drafts + 1)) < break_even else (low, middle)
    return high


def _seconds(cost: CostModel, batch: int, context: int, drafts: int) -> float:
    """A decode step of equal requests; the drafter runs as often as it has drafts to make."""
    nothing = np.zeros(1, dtype=np.int64)
    job = Job("", nothing, nothing)
    parts = tuple(Scheduled(job, 0, context, 1 + drafts, drafts, samples=True) for _ in range(batch))
    drafter = cost.drafter
    if drafter is not None:
        drafter = None if not drafts else replace(drafter, passes=min(drafter.passes, drafts))
    return cost.with_drafter(drafter).seconds([Step(parts, ())])
