"""Thinking budgets in a simulated run, through the real `ThinkingBudget`.

A request whose trace counts reasoning tokens thinks for that long, ends with one END token, and answers. Its prompt
ends with the marker that opens the section. Under a budget the section is forced to its end after so many tokens, and
drafts that would go on thinking are cut there: the real code says at which position, step by step. The model is taken
to answer as it would have; what a shorter thought does to an answer no simulator knows.

    prompt START | r r r r r r r END answer ...        as the trace has it
    prompt START | r r r END answer ...                with a budget of 3
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvtide.hma import ThinkingBudget, ThinkingMarkers
from kvtide.kvcache import ConfigError
from kvtide.kvcache.specs import Int64Array

from ..traces import Request
from .job import Job, Scheduled

# Above every made-up token id, so that a marker stands only where it is put.
START, END = 2**31 - 2, 2**31 - 1
MARKERS = ThinkingMarkers(start=(START,), natural_end=(END,), forced_end=(END,))


class ReasoningCounts(NamedTuple):
    """Requests that think, those cut short, and reasoning tokens: as the trace has them, and as served."""

    requests: int
    cut: int
    tokens_asked: int
    tokens_served: int


class Reasoning:
    """The budgets of one run. `budget` is in reasoning tokens per request; `ConfigError` for a negative one."""

    def __init__(self, budget: int, requests: Sequence[Request]) -> None:
        if isinstance(budget, bool) or not 0 <= budget < 2**31:
            raise ConfigError(f"thinking budget is {budget}, but must be from 0 to 2**31 - 1 tokens")
        self._budget = budget
        self._thinking = ThinkingBudget(MARKERS, max(len(requests), 1))
        # By request: its row, and the output that the model would have without a budget.
        self._unforced: dict[str, tuple[int, Int64Array]] = {}
        self._asked = self._served = self._cut = self._count = 0

    @staticmethod
    def thinks(request: Request) -> bool:
        """Whether the trace says that the request thinks, and that it answers something afterwards."""
        return bool(request.reasoning_tokens) and request.output_tokens > (request.reasoning_tokens or 0)

    def start(self, number: int, request: Request, name: str, prompt: Int64Array, output: Int64Array) -> Int64Array:
        """A thinking request arrives: marks its prompt in place, and returns the output under the budget."""
        asked = request.reasoning_tokens or 0
        prompt[-1] = START
        whole = output.copy()
        whole[asked] = END
        kept = min(asked, self._budget)
        self._count += 1
        self._asked += asked
        self._served += kept
        self._cut += kept < asked
        self._thinking.admit(number, prompt, self._budget)
        self._unforced[name] = number, whole
        return np.concatenate([whole[:kept], whole[asked:]])

    def bound(self, parts: Sequence[Scheduled], accepted: Sequence[int]) -> list[int]:
        """Accepted drafts of a step's parts, cut where the budget forces another token than the draft."""
        bounded = list(accepted)
        at, rows, drafts = [], [], []
        for i, part in enumerate(parts):
            known = self._unforced.get(part.job.request_id)
            if known is None or part.job.finished or not part.num_drafts or not accepted[i]:
                continue
            row, whole = known
            at.append(i)
            rows.append(row)
            drafts.append(whole[part.job.num_output :][: part.num_drafts])
        if at:
            width = max(map(len, drafts))
            ids = np.array([np.pad(run, (0, width - len(run)), constant_values=-1) for run in drafts])
            limits = self._thinking.force(rows, ids.reshape(len(at), width)).limit
            for i, limit in zip(at, limits.tolist(), strict=True):
                bounded[i] = min(bounded[i], limit - 1)
        return bounded

    def committed(self, job: Job, num_sampled: int) -> None:
        """A job has got `num_sampled` tokens more; once it has ended it is forgotten."""
        known = self._unforced.get(job.request_id)
        if known is None:
            return
        new = job.output[job.num_output - num_sampled : job.num_output]
        self._thinking.commit([known[0]], new[None, :], [len(new)])
        if job.finished:
            self._thinking.release(known[0])
            del self._unforced[job.request_id]

    def counts(self) -> ReasoningCounts:
        """What the budget did so far."""
        return ReasoningCounts(self._count, self._cut, self._asked, self._served)
