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
import numpy.typing as npt

from .job import Columns, Decodes, Job, Scheduled, columns_of

# Tokens to come of all jobs that are kept at first; it grows with what they need.
TOKENS = 1 << 14


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
        # By job: row, position of the token that it computes next, where that token stands in `_tokens`, the step
        # behind which it joined, and the step that brings its last token.
        self._state = np.empty((5, 0), dtype=np.int64)
        self._next_end = -1
        self._tokens = np.empty(TOKENS, dtype=np.int64)
        self._used = 0
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
        lengths = [self.steps_left(job) for job in jobs]
        if self._used + sum(lengths) > len(self._tokens):
            self._make_room(sum(lengths))
        state = []
        for job, left in zip(jobs, lengths, strict=True):
            begin = job.computed - job.num_prompt
            self._tokens[self._used : self._used + left] = job.output[begin : begin + left]
            state.append([job.row, job.computed, self._used, now, now + left])
            self._used += left
        self._jobs += tuple(jobs)
        self._state = np.concatenate([self._state, np.array(state, dtype=np.int64).T], axis=1)
        self._next_end = int(self._state[4].min())

    def columns(self, parts: Sequence[Scheduled]) -> Columns:
        """Of the next step, if `parts` follow."""
        return columns_of(self._state[0], self._state[1], parts)

    def schedule(self, call: int) -> Decodes | None:
        """The jobs' part of the step that is scheduled in this call; those whose last token it brings leave."""
        if not self._jobs:
            return None
        rows, starts, places, *_ = state = self._state
        decodes = Decodes(self._jobs, rows, starts, self._tokens[places])
        # A new array, since steps in flight keep theirs.
        self._state = state = state.copy()
        state[1:3] += 1
        self._scheduled += 1
        self._call = call
        if self._scheduled == self._next_end:
            self._keep(state[4] > self._scheduled)
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
        self._keep(np.zeros(len(self._jobs), dtype=np.bool_))

    def _keep(self, keeps: npt.NDArray[np.bool_]) -> None:
        """Bring the counters of the others up to date, and let them go."""
        joined = self._state[3]
        for i in (~keeps).nonzero()[0].tolist():
            self._leave(self._jobs[i], int(joined[i]))
        self._jobs = tuple(compress(self._jobs, keeps.tolist()))
        self._state = self._state[:, keeps]
        self._next_end = int(self._state[4].min(initial=np.iinfo(np.int64).max))

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

    def _make_room(self, count: int) -> None:
        """Move the tokens still to come to the front, so that `count` more have room behind them."""
        _, _, places, _, last = self._state
        left = last - self._scheduled
        spans = zip(places.tolist(), (places + left).tolist(), strict=True)
        tokens = np.concatenate([self._tokens[:0], *(self._tokens[begin:end] for begin, end in spans)])
        places[:] = left.cumsum() - left
        self._used = len(tokens)
        # Twice as many as needed, so that this is rare.
        self._tokens = np.empty(max(len(self._tokens), 2 * (self._used + count)), dtype=np.int64)
        self._tokens[: self._used] = tokens
