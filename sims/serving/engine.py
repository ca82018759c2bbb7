"""A trace through the engine in virtual time: arrivals, steps one after another, what became of every request.

    arrivals ─► scheduler ─► step, step, ... (up to two in flight) ─► the device runs them back to back ─► tokens

The scheduler runs whenever a step's result is in; with asynchronous scheduling that is while the next step computes, so
the device never waits for it. Data-parallel ranks run in lockstep, as vLLM runs them when experts are shared out; a
request goes to the rank with the fewest `4 * waiting + running`. Memory is sampled at most `SAMPLES` times, and the
causes must add up to the pool each time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvtide.hma import MemoryByCause
from kvtide.hma.drafts import DraftCounts
from kvtide.kvcache import ConfigError, KvtideError

from ..tokens import output_tokens, prompt_tokens
from ..traces import Request
from .cost import CostModel
from .job import Job, Step
from .measured import MeasuredAcceptance
from .offloading import OffloadUse
from .reasoning import Reasoning, ReasoningCounts
from .recording import Recording
from .scheduler import Scheduler
from .speculation import Acceptance

SAMPLES = 200


class Served(NamedTuple):
    """One request's story, in seconds of virtual time; tokens of prompt, output, and prompt tokens from the cache.

    `loaded_tokens` of the `hit_tokens` came from lower tiers.
    """

    request_id: str
    arrival_s: float
    admitted_s: float
    first_token_s: float
    last_token_s: float
    input_tokens: int
    output_tokens: int
    hit_tokens: int
    preemptions: int
    loaded_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)


class Sample(NamedTuple):
    """The engine at one moment: requests running and waiting, and the pool's bytes by cause, over all ranks.

    `offload` says per rank what the tiers hold and have done so far; none without tiers.
    """

    time_s: float
    running: int
    waiting: int
    memory: MemoryByCause
    offload: tuple[OffloadUse, ...] = ()


class Run(NamedTuple):
    """What a simulation saw. `refused` are ids of requests longer than `max_model_len`; `busy_s` is device time, with
    pipeline stages that of one of them.

    `reasoning` says what a thinking budget did, None without one. `break_even_length` is the mean acceptance length at
    which steps with drafts are worth their time, averaged over sampled steps that only decode; None without any.
    `draft_shape` is the mean batch and context of those steps. `offload` is what offload did in all, per rank.
    """

    served: list[Served]
    refused: list[str]
    samples: list[Sample]
    steps: int
    busy_s: float
    preemptions: int
    computed_tokens: int
    drafts: DraftCounts
    reasoning: ReasoningCounts | None
    break_even_length: float | None
    offload: tuple[OffloadUse, ...] = ()
    draft_shape: tuple[float, float] | None = None

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the last token."""
        return max(item.last_token_s for item in self.served) - min(item.arrival_s for item in self.served)


class _Times:
    """Moments of one request that is being served."""

    __slots__ = ("admitted", "first", "hit", "loaded")

    def __init__(self) -> None:
        self.admitted = self.first = -1.0
        self.hit = self.loaded = 0


class Engine:
    """One engine: a scheduler per data-parallel rank, a cost model, and a clock that only goes forward."""

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        cost: CostModel,
        acceptance: Acceptance | MeasuredAcceptance,
        *,
        seed: int = 0,
        thinking_budget: int | None = None,
        recording: Recording | None = None,
    ) -> None:
        if not schedulers:
            raise ConfigError("an engine needs at least one rank")
        self.schedulers = list(schedulers)
        self._in_text = not self.schedulers[0].manager.geometry.layout.has_cross_attention
        self._cost = cost
        self._acceptance = acceptance
        if isinstance(acceptance, MeasuredAcceptance):
            for scheduler in self.schedulers:
                scheduler.propose = acceptance.drafts_for
        self._thinking_budget = thinking_budget
        self._recording = recording
        # Whoever follows single requests must hear of every token.
        follows = thinking_budget is not None or (recording is not None and recording.follows)
        for scheduler in self.schedulers:
            scheduler.recording = recording
            scheduler.in_bulk &= not follows
        self._reasoning: Reasoning | None = None
        self._random = np.random.default_rng(seed)
        self._times: dict[str, _Times] = {}
        self._served: list[Served] = []
        self._samples: list[Sample] = []
        self._stride = 1
        self._break_even: list[float] = []
        self._shapes: list[tuple[float, float]] = []
        self._steps = self._computed = 0
        self._busy = 0.0

    def run(self, requests: Sequence[Request], on_request: Callable[[], None] = lambda: None) -> Run:
        """Serve the requests to their ends; `on_request` is called as each finishes.

        Requests without a prompt or an output are left out; `ConfigError` when none can be served.
        """
        usable = [request for request in requests if request.input_tokens > 0 and request.output_tokens > 0]
        if self._thinking_budget is not None:
            self._reasoning = Reasoning(self._thinking_budget, usable)
        order = sorted(range(len(usable)), key=lambda i: usable[i].arrival_s)
        coming = deque((number, usable[number]) for number in order)
        refused: list[str] = []
        in_flight: deque[tuple[list[Step | None], float]] = deque()
        now = coming[0][1].arrival_s if coming else 0.0
        stages_free = [now] * self._cost.parallel.pipeline
        while coming or in_flight or any(scheduler.has_work for scheduler in self.schedulers):
            while coming and coming[0][1].arrival_s <= now:
                self._arrive(*coming.popleft(), refused)
            self._tell_time(now)
            if all(scheduler.can_schedule for scheduler in self.schedulers):
                wave = [scheduler.schedule() for scheduler in self.schedulers]
                if any(wave):
                    start = max(now, stages_free[0])
                    for scheduler in self.schedulers:
                        if scheduler.offload is not None:
                            start = scheduler.offload.stall(start)
                    seconds = self._cost.stage_seconds(wave)
                    begin = start
                    for stage, free in enumerate(stages_free):
                        start = stages_free[stage] = max(start, free) + seconds
                    self._busy += seconds
                    in_flight.append((wave, start))
                    self._note(wave, now)
                    if self._recording is not None:
                        self._recording.step(self.schedulers, wave, begin, start, seconds)
                    if len(in_flight) < self.schedulers[0].settings.steps_in_flight:
                        continue
            if in_flight:
                wave, end = in_flight.popleft()
                now = max(now, end)
                self._tell_time(now)
                for scheduler, step in zip(self.schedulers, wave, strict=True):
                    if step is not None:
                        self._complete(scheduler, step, now, on_request)
            elif any(scheduler.awaits_turn for scheduler in self.schedulers):
                continue
            elif moments := self._moments(coming):
                if self._recording is not None:
                    self._recording.idle(self.schedulers)
                now = max(now, min(moments))
            elif any(scheduler.has_work for scheduler in self.schedulers):
                raise KvtideError("the pool is too small: a request waits for blocks that nothing will give back")
        if not self._served:
            raise ConfigError("the trace has no request that this engine can serve")
        return Run(
            self._served,
            refused,
            self._samples,
            self._steps,
            self._busy,
            sum(scheduler.num_preemptions for scheduler in self.schedulers),
            self._computed,
            _sum_of([scheduler.drafts.counts() for scheduler in self.schedulers]),
            self._reasoning.counts() if self._reasoning else None,
            float(np.mean(self._break_even)) if self._break_even else None,
            self._offload_use(),
            tuple(np.mean(self._shapes, axis=0).tolist()) if self._shapes else None,
        )

    def _tell_time(self, now: float) -> None:
        if self._recording is not None:
            self._recording.now = now
        for scheduler in self.schedulers:
            if scheduler.offload is not None:
                scheduler.offload.transfers.now = now

    def _moments(self, coming: deque[tuple[int, Request]]) -> list[float]:
        """When something will happen that no step in flight is needed for."""
        moments = [coming[0][1].arrival_s] if coming else []
        for scheduler in self.schedulers:
            if scheduler.offload is not None and (due := scheduler.offload.transfers.next_event_s) is not None:
                moments.append(due)
        return moments

    def _arrive(self, number: int, request: Request, refused: list[str]) -> None:
        # The number makes names unique; traces repeat theirs.
        name = f"{number}/{request.request_id}"
        in_text = self._in_text
        prompt = prompt_tokens(number, request)
        if not in_text:
            prompt = prompt[: max(request.input_tokens - request.image_tokens, 1)]
        output = output_tokens(number, request)
        if len(prompt) >= self.schedulers[0].settings.max_model_len:
            refused.append(request.request_id)
            if self._recording is not None:
                longest = self.schedulers[0].settings.max_model_len
                self._recording.refused(name, request.arrival_s, len(prompt), len(output), longest)
            return
        if self._reasoning and self._reasoning.thinks(request):
            output = self._reasoning.start(number, request, name, prompt, output)
        job = Job(
            name,
            prompt,
            output,
            request.arrival_s,
            image_tokens=0 if in_text else request.image_tokens,
            turn_ends=request.turn_ends,
        )
        self._times[name] = _Times()
        least = min(self.schedulers, key=lambda scheduler: 4 * len(scheduler.waiting) + len(scheduler.running))
        if self._recording is not None:
            self._recording.arrived(least, job)
        least.add(job)

    def _note(self, wave: Sequence[Step | None], now: float) -> None:
        for step in wave:
            if step is None:
                continue
            self._computed += step.num_tokens
            for part in step.singles:
                if part.hit is not None:
                    times = self._times[part.job.request_id]
                    if times.admitted < 0:
                        times.admitted, times.hit = now, part.hit
                        times.loaded = part.loaded
        if self._steps % self._stride == 0:
            self._sample(now)
            if all(step is None or _has_drafts(step) for step in wave):
                self._break_even.append(self._cost.break_even(wave))
                parts = [part for step in wave if step for part in step.parts]
                self._shapes.append((len(parts) / len(wave), float(np.mean([part.start for part in parts]))))
        self._steps += 1

    def _complete(self, scheduler: Scheduler, step: Step, now: float, on_request: Callable[[], None]) -> None:
        accepted = self._acceptance.accept(step, self._random)
        if self._reasoning:
            accepted = self._reasoning.bound(step.parts, accepted)
        outcomes = scheduler.complete(step, accepted)
        if self._recording is not None:
            self._recording.completed(outcomes)
        for outcome in outcomes:
            if not outcome.num_sampled:
                continue
            job = outcome.job
            if self._reasoning:
                self._reasoning.committed(job, outcome.num_sampled)
            times = self._times[job.request_id]
            if times.first < 0:
                times.first = now
            if outcome.finished:
                del self._times[job.request_id]
                self._served.append(
                    Served(
                        job.request_id.partition("/")[2],
                        job.arrival_s,
                        times.admitted,
                        times.first,
                        now,
                        job.num_prompt,
                        job.num_output,
                        times.hit,
                        job.preemptions,
                        times.loaded,
                    )
                )
                on_request()

    def _offload_use(self) -> tuple[OffloadUse, ...]:
        return tuple(s.offload.usage() for s in self.schedulers if s.offload is not None)

    def _sample(self, now: float) -> None:
        """Memory now. When there are too many samples, every second one goes and they are taken half as often."""
        stats = [scheduler.manager.stats() for scheduler in self.schedulers]
        memory = MemoryByCause(*(sum(cause) for cause in zip(*stats, strict=True)))
        running = sum(len(scheduler.running) for scheduler in self.schedulers)
        waiting = sum(len(scheduler.waiting) for scheduler in self.schedulers)
        self._samples.append(Sample(now, running, waiting, memory, self._offload_use()))
        if len(self._samples) > SAMPLES:
            del self._samples[1::2]
            self._stride *= 2


def _has_drafts(step: Step) -> bool:
    """Whether every part of a step has drafts."""
    return step.decodes is None and all(part.num_drafts for part in step.singles)


def _sum_of(counts: Sequence[DraftCounts]) -> DraftCounts:
    """Counts of several ranks together."""
    return DraftCounts(
        sum(item.num_drafts for item in counts),
        sum(item.num_draft_tokens for item in counts),
        sum(item.num_accepted_tokens for item in counts),
        tuple(map(sum, zip(*(item.num_accepted_tokens_per_position for item in counts), strict=True))),
    )
