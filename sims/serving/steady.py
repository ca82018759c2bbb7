"""Requests that only decode: counted together, since a step means the same to each of them.

    rest of the running jobs ── join ─► one token each, every step ── end, or dissolve ─► on their own again

Nearly all parts of nearly all steps are the next token of a request that has nothing else to do. Such jobs stand at the
head of the running ones, in their order; a step names them all by one `Decodes`, and their own counters are brought up
to date when they leave. Steps are numbered from 1 on: `scheduled` and `completed` say how many there have been, and a
job that joined behind step j and left behind step l took part in those between.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np

from kvtide.kvcache.specs import Int64Array

from .job import Columns, Decodes, Job, Scheduled, columns_of


class SteadyJobs:
    """The jobs of one scheduler that decode one token a step. `max_model_len` bounds every sequence.

    With `ahead` a job's next step is scheduled before the token of its last one is known.
    """

    def __init__(self, max_model_len: int, *, ahead: bool) -> None:
        self._longest = max_model_len
        self._ahead = ahead
        self._scheduled = self._completed = 0
        self._call = 0
        self._jobs: tuple[Job, ...] = ()
        self._rows: Int64Array = np.empty(0, dtype=np.int64)
        self._starts: Int64Array = np.empty(0, dtype=np.int64)
        # Per job: the step behind which it joined, that which brings its last token, and its tokens to come.
        self._joined: list[int] = []
        self._last: list[int] = []
        self._tokens: list[list[int]] = []
        self._next_end = -1
        # Jobs that have left while steps with them are in flight: when they joined and left.
        self._left: list[tuple[int, int, Job]] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def steps_left(self, job: Job) -> int:
        """Steps until a job that decodes has all its tokens, those in flight not counted."""
        return min(job.longest, self._longest) - job.num_prompt - job.num_output - job.placeholders

    def join(self, jobs: Sequence[Job]) -> None:
        """Jobs that have sampled, and that only decode from now on, come behind those that are here."""
        now = self._scheduled
        self._jobs += tuple(jobs)
        self._rows = np.concatenate([self._rows, np.array([job.row for job in jobs], dtype=np.int64)])
        self._starts = np.concatenate([self._starts, np.array([job.computed for job in jobs], dtype=np.int64)])
        for job in jobs:
            left = self.steps_left(job)
            begin = job.computed - job.num_prompt
            self._joined.append(now)
            self._last.append(now + left)
            # From the end, so that the next one can be popped.
            self._tokens.append(job.output[begin : begin + left][::-1].tolist())
        self._next_end = min(self._last)

    def columns(self, parts: Sequence[Scheduled]) -> Columns:
        """Of the next step, if `parts` follow."""
        return columns_of(self._rows, self._starts, parts)

    def schedule(self, call: int) -> Decodes | None:
        """The jobs' part of the step that is scheduled in this call; those whose last token it brings leave."""
        if not self._jobs:
            return None
        decodes = Decodes(self._jobs, self._rows, self._starts, [tokens.pop() for tokens in self._tokens])
        self._starts = self._starts + 1
        self._scheduled += 1
        self._call = call
        if self._scheduled == self._next_end:
            self._keep([last > self._scheduled for last in self._last])
        return decodes

    def complete(self) -> list[Job]:
        """The oldest step with decodes is done. Returns its jobs that have left, whose own counters it must move."""
        self._completed += 1
        if not self._left:
            return []
        number = self._completed
        jobs = [job for joined, left, job in self._left if joined < number <= left]
        self._left = [entry for entry in self._left if entry[1] > number]
        return sorted(jobs, key=lambda job: job.place) if len(jobs) > 1 else jobs

    def dissolve(self) -> None:
        """All jobs leave."""
        self._keep([False] * len(self._jobs))

    def _keep(self, keeps: list[bool]) -> None:
        """Bring the counters of the others up to date, and let them go."""
        for job, joined, keep in zip(self._jobs, self._joined, keeps, strict=True):
            if not keep:
                self._leave(job, joined)
        self._jobs = tuple(compress(self._jobs, keeps))
        self._joined = list(compress(self._joined, keeps))
        self._last = list(compress(self._last, keeps))
        self._tokens = list(compress(self._tokens, keeps))
        chosen = np.array(keeps, dtype=np.bool_)
        self._rows, self._starts = self._rows[chosen], self._starts[chosen]
        self._next_end = min(self._last, default=-1)

    def _leave(self, job: Job, joined: int) -> None:
        took = self._scheduled - joined
        in_flight = self._scheduled - max(self._completed, joined)
        job.computed += took
        job.in_flight += in_flight
        job.num_output += took - in_flight
        if self._ahead and took:
            job.placeholders += in_flight
            job.eligible = self._call + 1
        if in_flight:
            self._left.append((joined, self._scheduled, job))
