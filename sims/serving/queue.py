"""The queue of waiting jobs: first come first served, or by priority. Preempted jobs return to its head."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable

from .job import Job


class WaitingQueue:
    """Jobs in the order in which they are tried. Under the priority policy a returned job is placed by its rank too."""

    def __init__(self, policy: str) -> None:
        self._by_priority = policy == "priority"
        self._fifo: deque[Job] = deque()
        self._heap: list[tuple[tuple[int, float, str], Job]] = []

    def __len__(self) -> int:
        return len(self._fifo) + len(self._heap)

    @property
    def head(self) -> Job:
        """The next job to try."""
        return self._heap[0][1] if self._by_priority else self._fifo[0]

    def add(self, job: Job) -> None:
        """A new job comes."""
        if self._by_priority:
            heapq.heappush(self._heap, (job.rank, job))
        else:
            self._fifo.append(job)

    def put_back(self, job: Job) -> None:
        """A preempted job comes back, before all others."""
        if self._by_priority:
            self.add(job)
        else:
            self._fifo.appendleft(job)

    def pop(self) -> Job:
        """Remove the head."""
        return heapq.heappop(self._heap)[1] if self._by_priority else self._fifo.popleft()

    def last_with_row(self, head: Job) -> Job | None:
        """Of the jobs that still hold a row of the manager, the one that is tried last; never the head."""
        return self._last(job for job in self._jobs() if job.row is not None and job is not head)

    def last_loaded(self, head: Job) -> Job | None:
        """Of the jobs that hold what was loaded for them, the one that is tried last; never the head."""
        return self._last(job for job in self._jobs() if job.is_loaded and job is not head)

    def _jobs(self) -> list[Job]:
        return [job for _, job in self._heap] if self._by_priority else list(self._fifo)

    @staticmethod
    def _last(jobs: Iterable[Job]) -> Job | None:
        return max(jobs, key=lambda job: job.rank, default=None)
