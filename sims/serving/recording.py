"""What happened in a run, over time and to single requests: for reports, and for a question about one request.

    Engine, Scheduler ── calls ─► Recording ─► series(): at most `INTERVALS` intervals of equal length
                                          └──► story(): the events of a request that is followed

A recording holds as much for a day as for a minute. When time outgrows the intervals, neighbours are added together and
their length doubles; memory is asked for once per interval, at its first step. An event that goes on (a request waits,
a request decodes) is one event with an end, and of a request's events the first `EVENTS` are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtide.hma import Admission, MemoryByCause
from kvtide.hma.groups import ManagedGroup

from .job import Job, Scheduled, Step

if TYPE_CHECKING:
    from .scheduler import Outcome, Scheduler

INTERVALS = 256
EVENTS = 1000
# Shorter than any step, so that the first interval of a trace without arrival times is not a guess.
SHORTEST_S = 1e-3


@dataclass(slots=True)
class Interval:
    """Sums over the steps that were scheduled in it, over all ranks.

    `running` and `waiting` add up over steps: divide by `steps`. `computed_tokens` are those of prompts and of decode,
    drafts included. Hits are tokens of prompts at their first admission: on the device, and loaded from lower tiers
    (`tier_tokens` says from which, as the tiers' own counts so far). `memory` is at its first step, None without one.
    `is_idle`: from it on nothing runs, until an interval has steps again. Without that, no step merely began in it.
    """

    steps: int = 0
    busy_s: float = 0.0
    running: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    admitted: int = 0
    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    loaded_tokens: int = 0
    finished: int = 0
    preemptions: int = 0
    memory: MemoryByCause | None = None
    tier_tokens: tuple[float, ...] = ()
    is_idle: bool = False

    def add(self, later: Interval) -> None:
        """Become both intervals; the earlier one's memory stays."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(later, name))
        if self.memory is None:
            self.memory, self.tier_tokens = later.memory, later.tier_tokens
        self.is_idle |= later.is_idle


_SUMS = tuple(name for name in Interval.__slots__ if name not in ("memory", "tier_tokens", "is_idle"))


@dataclass(slots=True)
class Event:
    """Something that happened to a request, at a moment or until `until_s`; `details` are figures and names."""

    time_s: float
    kind: str
    details: dict[str, Any] = field(default_factory=dict)
    until_s: float | None = None


@dataclass(slots=True)
class Story:
    """The events of one request, in order; `dropped` more were not kept.

    `limited_by` names the groups that kept the last look-up from a longer hit.
    """

    name: str
    input_tokens: int
    output_tokens: int
    events: list[Event] = field(default_factory=list)
    dropped: int = 0
    limited_by: tuple[str, ...] = ()

    def add(self, event: Event) -> None:
        """One event more."""
        if len(self.events) < EVENTS:
            self.events.append(event)
        else:
            self.dropped += 1


class Recording:
    """Records one run. `follow` names requests, by the trace's id or as `number/id`, whose stories are kept.

    `span_s` is about how long the run will take; a wrong guess costs a little time and no precision that lasts.
    """

    def __init__(self, *, span_s: float = 0.0, follow: Collection[str] = ()) -> None:
        self.now = 0.0
        self.start_s: float | None = None
        self.interval_s = max(span_s / INTERVALS, SHORTEST_S)
        self._intervals: list[Interval] = []
        self._follow = frozenset(follow)
        self._stories: dict[str, Story] = {}
        self._open: dict[str, Scheduler] = {}  # followed requests that have not ended, and whose they are

    # -- over time ----------------------------------------------------------------------------------------------------

    @property
    def intervals(self) -> Sequence[Interval]:
        """The intervals from `start_s` on, each `interval_s` long."""
        return self._intervals

    def step(
        self,
        schedulers: Sequence[Scheduler],
        wave: Sequence[Step | None],
        start_s: float,
        end_s: float,
        busy_s: float,
    ) -> None:
        """A step of all ranks was scheduled now; it will run from `start_s` to `end_s`, and `busy_s` on each device."""
        interval = self._at(self.now)
        interval.steps += 1
        interval.busy_s += busy_s
        for scheduler, step in zip(schedulers, wave, strict=True):
            interval.running += len(scheduler.running)
            interval.waiting += len(scheduler.waiting)
            if step is None:
                continue
            interval.preemptions += len(step.preempted)
            if step.decodes is not None:
                interval.decode_tokens += len(step.decodes.jobs)
            for part in step.singles:
                if _decodes(part):
                    interval.decode_tokens += part.num_tokens
                    continue
                interval.prefill_tokens += part.num_tokens
                if part.hit is not None and not part.job.preemptions:
                    interval.admitted += 1
                    interval.prompt_tokens += part.job.num_prompt
                    interval.device_hit_tokens += part.hit - part.loaded
                    interval.loaded_tokens += part.loaded
        if interval.memory is None:
            self._sample(interval, schedulers)
        if self._open:
            for scheduler, step in zip(schedulers, wave, strict=True):
                if step is not None:
                    self._tell_step(scheduler, step, start_s, end_s)

    def idle(self, schedulers: Sequence[Scheduler]) -> None:
        """Nothing runs from now on: an interval without a step holds what is cached now."""
        index = len(self._intervals)
        interval = self._at(self.now + self.interval_s)
        interval.is_idle = True
        if len(self._intervals) > index and interval.memory is None:
            self._sample(interval, schedulers)

    def series(self) -> list[tuple[float, Interval]]:
        """Start of each interval in seconds, and the interval; one without a memory sample has the last one's."""
        series = []
        last: Interval | None = None
        for number, interval in enumerate(self._intervals):
            if interval.memory is None and last is not None:
                interval.memory, interval.tier_tokens = last.memory, last.tier_tokens
            last = interval
            series.append(((self.start_s or 0.0) + number * self.interval_s, interval))
        return series

    def _at(self, time_s: float) -> Interval:
        if self.start_s is None:
            self.start_s = time_s
        number = int((time_s - self.start_s) / self.interval_s)
        while number >= INTERVALS:
            for earlier, later in zip(self._intervals[::2], self._intervals[1::2], strict=False):
                earlier.add(later)
            del self._intervals[1::2]
            self.interval_s *= 2
            number = int((time_s - self.start_s) / self.interval_s)
        while len(self._intervals) <= number:
            self._intervals.append(Interval())
        return self._intervals[number]

    @staticmethod
    def _sample(interval: Interval, schedulers: Sequence[Scheduler]) -> None:
        stats = [scheduler.manager.stats() for scheduler in schedulers]
        interval.memory = MemoryByCause(*(sum(cause) for cause in zip(*stats, strict=True)))
        used = [scheduler.offload.usage().tier_tokens for scheduler in schedulers if scheduler.offload is not None]
        interval.tier_tokens = tuple(map(sum, zip(*used, strict=True)))

    @property
    def follows(self) -> bool:
        """Whether it keeps the story of any request."""
        return bool(self._follow)

    # -- single requests ----------------------------------------------------------------------------------------------

    @property
    def stories(self) -> list[Story]:
        """Stories of the followed requests that the run has seen."""
        return list(self._stories.values())

    def arrived(self, scheduler: Scheduler, job: Job) -> None:
        """A request joins the queue of one rank."""
        name = job.request_id
        if self._follow and not self._follow.isdisjoint((name, name.partition("/")[2])):
            story = self._stories[name] = Story(name, job.num_prompt, len(job.output))
            self._open[name] = scheduler
            story.add(
                Event(job.arrival_s, "queued", {"ahead": len(scheduler.waiting), "running": len(scheduler.running)})
            )

    def refused(self, name: str, arrival_s: float, num_prompt: int, num_output: int, max_model_len: int) -> None:
        """A request is longer than the engine takes."""
        if self._follow and not self._follow.isdisjoint((name, name.partition("/")[2])):
            story = self._stories[name] = Story(name, num_prompt, num_output)
            story.add(Event(arrival_s, "refused", {"max_model_len": max_model_len}))

    def looked_up(self, job: Job, admission: Admission) -> None:
        """The cache was asked for a job's prefix."""
        if job.request_id in self._open:
            self._stories[job.request_id].limited_by = admission.limited_by

    def waits(self, scheduler: Scheduler, budget_left: int, preempted: bool) -> None:
        """A step is decided, and somebody still waits."""
        for name, rank in self._open.items():
            story = self._stories[name]
            last = story.events[-1]
            if rank is not scheduler or last.kind not in ("queued", "preempted", "waits"):
                continue
            if any(job.request_id == name for job in scheduler.running):  # admitted in this step
                continue
            head = scheduler.waiting.head
            if preempted:
                why = "a running request was preempted in this step, so nobody is admitted"
            elif len(scheduler.running) >= scheduler.settings.max_num_seqs:
                why = f"max_num_seqs {scheduler.settings.max_num_seqs} requests are running"
            elif budget_left <= 0:
                why = "the step's token budget is spent"
            elif head.is_loading:
                why = "its blocks are being loaded from a lower tier"
            else:
                why = "the pool has no room for the whole sequence of the next request"
            details = {"why": why, "head": head.request_id, "is_head": head.request_id == name, "steps": 1}
            if last.kind == "waits" and (last.details["why"], last.details["head"]) == (why, head.request_id):
                last.details["steps"] += 1
                last.until_s = self.now
            else:
                story.add(Event(self.now, "waits", details, self.now))

    def preempted(self, scheduler: Scheduler, victim: Job, by: Job, pages_short: int) -> None:
        """A running job is about to lose its blocks for another one's, or because its own do not fit."""
        for name in self._open.keys() & {victim.request_id, by.request_id}:
            self._stories[name].add(
                Event(
                    self.now,
                    "preempted" if name == victim.request_id else "preempts",
                    {
                        "victim": victim.request_id,
                        "by": by.request_id,
                        "pages_short": pages_short,
                        "lost_tokens": victim.computed,
                        "scheduling_policy": scheduler.settings.scheduling_policy,
                    },
                )
            )

    def completed(self, outcomes: Sequence[Outcome]) -> None:
        """A step's results are in."""
        finished = sum(outcome.finished for outcome in outcomes)
        if finished:
            self._at(self.now).finished += finished
        if not self._open:
            return
        for outcome in outcomes:
            job = outcome.job
            if job.request_id not in self._open or not outcome.num_sampled:
                continue
            story = self._stories[job.request_id]
            if job.num_output == outcome.num_sampled:
                story.add(Event(self.now, "first_token", {"after_s": self.now - job.arrival_s}))
            if outcome.finished:
                del self._open[job.request_id]
                story.add(
                    Event(
                        self.now,
                        "finished",
                        {
                            "after_s": self.now - job.arrival_s,
                            "output_tokens": job.num_output,
                            "preemptions": job.preemptions,
                        },
                    )
                )

    def _tell_step(self, scheduler: Scheduler, step: Step, start_s: float, end_s: float) -> None:
        for part in step.parts:
            if part.job.request_id not in self._open:
                continue
            story = self._stories[part.job.request_id]
            if part.hit is not None:
                story.add(
                    Event(
                        self.now,
                        "admitted" if not part.job.preemptions else "resumed",
                        {
                            "hit_tokens": part.hit,
                            "loaded_tokens": part.loaded,
                            "known_tokens": part.job.num_tokens,
                            "hits": {
                                g.name: group_hit(g, part.hit) for g in scheduler.manager.groups if not g.is_cross
                            },
                            "limited_by": list(story.limited_by),
                            "running": len(scheduler.running),
                        },
                    )
                )
            if _decodes(part):
                # The first token is known when the step after its own is scheduled already.
                before = [event for event in story.events[-2:] if event.kind != "first_token"]
                if before and before[-1].kind == "decode":
                    before[-1].details["steps"] += 1
                    before[-1].until_s = end_s
                else:
                    story.add(Event(start_s, "decode", {"steps": 1}, end_s))
                continue
            details = {
                "tokens": part.num_tokens,
                "upto": part.start + part.num_tokens,
                "step_tokens": step.num_tokens,
                "step_requests": len(step.parts),
            }
            story.add(Event(start_s, "chunk", details, end_s))


def _decodes(part: Scheduled) -> bool:
    """Whether a part of a step computes the newest token and drafts, and nothing of a prompt."""
    return part.hit is None and part.samples and part.num_tokens == 1 + part.num_drafts


def group_hit(group: ManagedGroup, num_tokens: int) -> dict[str, int]:
    """What a hit of `num_tokens` gives a group: blocks taken over, and the tokens in them that its next query needs."""
    if not num_tokens:
        return {"blocks": 0, "tokens": 0}
    if group.is_state:
        return {"blocks": 1, "tokens": num_tokens}
    end = num_tokens // group.fmt.block_size
    first = int(group.first_block(np.array(num_tokens))) if group.is_bounded else 0
    sinks = min(group.table.sink_blocks, end) if group.is_bounded else 0
    blocks = max(end - first, 0) + sinks
    return {"blocks": blocks * group.fmt.tables, "tokens": blocks * group.fmt.block_size}
