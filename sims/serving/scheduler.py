"""Which requests run in the next step, and on how many tokens: vLLM's rules, over the real memory manager.

    add(job) ─► schedule() ─► Step ─► the engine computes it ─► complete(step, accepted) ─► Outcomes ─┐
                   ▲                                                                                  │
                   └──────────────────────────────────────────────────────────────────────────────────┘

The scheduler decides and knows no time. Running jobs come first, in order of admission; each gets what it lacks, as far
as the step's budget goes. When blocks run out the last job (or the one of lowest priority) is preempted: it loses its
blocks, computes again later, and is first in the queue. Only in a step without preemption are waiting jobs admitted,
from the head of the queue and no further than the first that does not fit.

Differences from vLLM that come from kvtide's manager, each pinned by a test against vLLM:

- *Deferred free*: blocks of a job with a step in flight are not given away before that step is done. So such a job is
  no victim, and the step stops there; vLLM follows the same rule when a KV consumer is attached.
- *Keys at commit*: a block can be hit once its tokens are committed; in vLLM from the moment they are scheduled.
- *Dead blocks at commit*: blocks out of the window come back when the step is done; in vLLM when the request is
  scheduled next, so that it sees less room in a hybrid model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvtide.hma import DraftAccounting, HybridMemoryManager
from kvtide.kvcache import ConfigError, Exhausted, KvtideError
from kvtide.kvcache.geometry import PageGeometry
from kvtide.kvcache.specs import Int64Array

from .admission import AdmissionRules, Batch
from .job import Columns, Decodes, Job, Scheduled, Step
from .offloading import OffloadedRows
from .queue import WaitingQueue
from .room import Room
from .settings import MAX_DRAFTS, EngineSettings
from .steady import SteadyJobs


class Outcome(NamedTuple):
    """What a step did for a job: tokens sampled (0 inside a prompt), drafts verified and accepted, whether it ended."""

    job: Job
    num_sampled: int
    num_drafts: int
    num_accepted: int
    finished: bool


class Scheduler(AdmissionRules):
    """The scheduler of one engine and the memory manager under it.

    `memory` is the pool in bytes, of one rank. `offload` puts tiers under the manager. `ConfigError` when the pool
    cannot hold one request of `max_model_len`, or for a combination that the manager cannot run.
    """

    def __init__(
        self,
        geometry: PageGeometry,
        memory: int,
        settings: EngineSettings,
        offload: Callable[[HybridMemoryManager], OffloadedRows] | None = None,
    ) -> None:
        self.settings = settings
        has_states = any(fmt.block_size == 0 for fmt in geometry.formats)
        drafts = settings.num_speculative_tokens
        if has_states and drafts and settings.steps_in_flight > 1:
            raise ConfigError(
                f"{geometry.layout.name} has recurrent states: with drafts only one step may be in flight; "
                "turn async_scheduling off and run without pipeline stages"
            )
        self.manager = HybridMemoryManager(
            geometry,
            memory,
            # One more for the waiting job that is tried, and as many as may run for those that are being loaded.
            max_requests=settings.max_num_seqs * (1 if offload is None else 2) + 1,
            max_model_len=settings.max_model_len,
            max_step_tokens=settings.max_num_batched_tokens,
            max_steps_in_flight=settings.steps_in_flight,
            lookahead=max(settings.lookahead_tokens, drafts) if has_states else settings.lookahead_tokens,
            prefix_caching=settings.enable_prefix_caching,
        )
        self.offload = None if offload is None else offload(self.manager)
        self.room = Room(self.manager, settings.charged_in_flight, settings.watermark)
        self.waiting = WaitingQueue(settings.scheduling_policy)
        self.running: list[Job] = []
        # Running jobs that only decode, at the head of the others, and those others; jobs at their end are in neither.
        self._steady = SteadyJobs(settings.max_model_len, ahead=settings.async_scheduling)
        self._others: list[Job] = []
        # Whether jobs may be steady: all but the last of their outcomes are left out then.
        self.in_bulk = not drafts and settings.pipeline_parallel_size == 1
        self._num_admitted = 0
        # Counted here and not by the manager: vLLM counts accepted drafts beyond the output's end as well.
        self.drafts = DraftAccounting(MAX_DRAFTS)
        self.num_preemptions = 0
        # How many drafts a job gets, at most so many, where that depends on its text; None: as many as may be.
        self.propose: Callable[[Job, int], int] | None = None
        self._call = 0
        self.recording = None
        self._preempted: list[Job] = []  # since the last step; a call that ends without one can preempt too
        self._in_flight: deque[Step] = deque()

    def add(self, job: Job) -> None:
        """A request arrives. `ConfigError` when it is longer than the engine takes."""
        if job.num_prompt >= self.settings.max_model_len:
            raise ConfigError(
                f"the prompt of request {job.request_id!r} has {job.num_prompt} tokens; max_model_len "
                f"{self.settings.max_model_len} leaves no room for an output"
            )
        self.waiting.add(job)

    @property
    def has_work(self) -> bool:
        """Whether a request is running or waiting, or a step in flight."""
        return bool(self.running or len(self.waiting) or self._in_flight)

    @property
    def can_schedule(self) -> bool:
        """Whether one more step may be in flight."""
        return len(self._in_flight) < self.settings.steps_in_flight

    @property
    def awaits_turn(self) -> bool:
        """Whether a running job only waits for its turn among pipeline stages: `schedule` again, at the same time."""
        return any(job.eligible > self._call for job in self.running)

    # -- one step -----------------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """Decide the next step and reserve its blocks; None when nothing can be computed now.

        `KvtideError` when too many steps are in flight.
        """
        if not self.can_schedule:
            raise KvtideError(f"{len(self._in_flight)} steps are in flight; complete one first")
        if self.offload is not None:
            self.offload.poll()
        self._call += 1
        threshold = self.settings.long_prefill_token_threshold
        if len(self.running) + len(self.waiting) <= 1:
            threshold = 0
        if self.in_bulk and self._others:
            self._join_steady()
        batch = Batch(self.settings, self.room, len(self._steady))
        preempted: list[Job] = []
        # Nearly always all running jobs fit; only when they do not is room made job by job.
        self._run_all(batch, threshold)
        columns = self._steady.columns(batch.parts)
        if self._may_admit(batch) or not self._reserve(columns):
            batch.needs = self.room.of_step(columns)
            if not self.room.fits(batch.needs):
                self._dissolve_steady()
                batch = Batch(self.settings, self.room)
                self._run_in_room(batch, threshold, preempted)
            if not preempted:
                self._admit_waiting(batch, threshold)
            columns = self._steady.columns(batch.parts)
            has_room = self._reserve(columns)
            assert has_room
        self._preempted += preempted
        if self.recording is not None and len(self.waiting):
            self.recording.waits(self, batch.limit, bool(preempted))
        if not len(columns.rows):
            return None
        step = Step(batch.parts, self._preempted, self._steady.schedule(self._call), columns)
        self._preempted = []
        self._advance(step)
        self._in_flight.append(step)
        return step

    def complete(self, step: Step, accepted: Sequence[int]) -> list[Outcome]:
        """The oldest step is done: `accepted[i]` of the drafts of its part i were right.

        Returns what became of each job that is still running, in the step's order; with `in_bulk`, jobs are left out
        that have decoded one token more and go on. `KvtideError` for another step or impossible counts.
        """
        if not self._in_flight or self._in_flight[0] is not step:
            raise KvtideError("steps are completed in the order in which they were scheduled")
        if len(accepted) != step.num_requests:
            raise KvtideError(f"accepted has {len(accepted)} counts for a step of {step.num_requests} requests")
        for part, count in zip(step.parts, accepted, strict=True) if any(accepted) else ():
            most = part.num_drafts if part.samples and not part.is_padding else 0
            if not 0 <= count <= most:
                raise KvtideError(f"request {part.job.request_id!r} has {count} accepted of {most} drafts")
        self._in_flight.popleft()
        singles = zip(step.singles, accepted[step.num_requests - len(step.singles) :], strict=True)
        alive = [(part, count) for part, count in singles if not part.job.finished]
        self._commit(step.decodes, alive)
        if self.settings.num_speculative_tokens:
            drafted = [(part.num_drafts, count) for part, count in alive if part.num_drafts and not part.is_padding]
            if drafted:
                self.drafts.record(*zip(*drafted, strict=True))
        following = self.settings.drafts_after(step.num_requests)
        ahead, longest = self.settings.async_scheduling, self.settings.max_model_len
        outcomes = []
        if step.decodes is not None:
            outcomes += [self._settle(job, 1, 0, 0, 0) for job in self._steady.complete()]
        for part, count in alive:
            job = part.job
            room = min(job.longest, longest) - job.num_prompt - job.num_output
            if ahead and part.samples and not part.num_drafts and room > 1:
                # What `_settle` comes to for nearly all parts of nearly all steps.
                job.in_flight -= part.num_tokens
                job.num_output += 1
                job.placeholders -= 1
                outcomes.append(Outcome(job, 1, 0, 0, False))
            elif part.samples:
                outcomes.append(self._settle(job, part.num_tokens, part.num_drafts, count, following))
            else:
                job.in_flight -= part.num_tokens
                outcomes.append(Outcome(job, 0, part.num_drafts, count, False))
        if any(outcome.finished for outcome in outcomes):
            self.running = [job for job in self.running if not job.finished]
            self._others = [job for job in self._others if not job.finished]
        return outcomes

    # -- running jobs -------------------------------------------------------------------------------------------------

    def _run_all(self, batch: Batch, threshold: int) -> None:
        """Give every running job its tokens while the budget lasts, as if there were room for all of them.

        Written out, as this is done for every job in every step: what `_run_in_room` does with `_wanted` and `_part`.
        """
        call, longest, each = self._call, self.settings.max_model_len, batch.slots_each
        tokens, slots, parts = batch.tokens, batch.slots, batch.parts
        has_prefill = False
        for job in self._others:
            limit = min(tokens, slots - each)
            if limit <= 0:
                break
            computed, placeholders = job.computed, job.placeholders
            if call < job.eligible or (placeholders > 0 and computed + 2 - placeholders >= job.longest):
                continue
            known = job.num_prompt + job.num_output + placeholders
            num = known + job.drafts - computed
            if 0 < threshold < num:
                num = threshold
            if num > 1:
                num = min(num, limit)
            num = min(num, longest - computed - 1)
            if num <= 0:
                continue
            beyond = computed + num - known
            drafts = min(job.drafts, beyond) if beyond > 0 else 0
            parts.append(Scheduled(job, job.row, computed, num, drafts, beyond >= 0))  # type: ignore[arg-type]
            tokens -= num
            slots -= num + each
            has_prefill |= job.is_prefill_chunk
        batch.tokens, batch.slots = tokens, slots
        batch.has_running |= bool(parts)
        batch.has_prefill = has_prefill

    def _join_steady(self) -> None:
        """Jobs that only decode from now on join those that do, up to the first that still computes its prompt."""
        joining: list[Job] = []
        for job in self._others:
            if self._steady.steps_left(job) <= 0:
                continue  # its last token is on its way
            lacks = job.num_tokens + job.placeholders - job.computed
            if job.is_prefill_chunk or lacks != 1 or job.num_output + job.placeholders == 0:
                break
            joining.append(job)
        if joining:
            self._steady.join(joining)
            joined = set(joining)
            self._others = [job for job in self._others if job not in joined]

    def _dissolve_steady(self) -> None:
        self._steady.dissolve()
        self._others = self.running.copy()

    def _reserve(self, columns: Columns) -> bool:
        """Take the blocks of a step; False when they do not fit."""
        if not len(columns.rows):
            return True
        try:
            self.manager.reserve(columns.rows, columns.counts)
        except Exhausted:
            return False
        return True

    def _run_in_room(self, batch: Batch, threshold: int, preempted: list[Job]) -> None:
        """The same job by job, and room is made for the blocks of each."""
        at = 0
        while at < len(self.running) and batch.limit > 0:
            job = self.running[at]
            at += 1
            is_due = self._call >= job.eligible and not job.will_end_in_flight
            num = self._wanted(job, batch, threshold) if is_due else 0
            if num <= 0:
                continue
            part = self._part(job, num)
            need = self._needs([part])
            if not self._make_room(job, need, batch, preempted):
                break
            batch.needs = batch.needs + need
            at = self.running.index(job) + 1  # victims before it may have gone
            batch.add(part)

    def _wanted(self, job: Job, batch: Batch, threshold: int) -> int:
        num = job.num_tokens + job.drafts + job.placeholders - job.computed
        if 0 < threshold < num:
            num = threshold
        # The token that is sampled after the last one computed must have a position too.
        return min(num, batch.limit, self.settings.max_model_len - job.computed - 1)

    def _part(self, job: Job, num: int) -> Scheduled:
        known = job.num_tokens + job.placeholders
        drafts = min(job.drafts, max(job.computed + num - known, 0))
        assert job.row is not None
        return Scheduled(job, job.row, job.computed, num, drafts, samples=job.computed + num >= known)

    def _make_room(self, job: Job, need: Int64Array, batch: Batch, preempted: list[Job]) -> bool:
        """Preempt until the job's blocks fit beside the batch's; False when it has itself gone, or no victim can."""
        while not self.room.fits(batch.needs + need):
            if self.settings.scheduling_policy == "priority":
                victim = max(self.running, key=lambda other: other.rank[:2])
            else:
                victim = self.running[-1]
            if victim.in_flight:
                return False
            if self.recording is not None:
                short = self.manager.pool.pages_short((batch.needs + need).tolist())
                self.recording.preempted(self, victim, job, short)
            self.running.remove(victim)
            self._others.remove(victim)
            if batch.drop(victim):
                batch.needs = self._needs(batch.parts)
            self._preempt(victim)
            preempted.append(victim)
            if victim is job:
                return False
        return True

    def _preempt(self, job: Job) -> None:
        assert job.row is not None
        (self.offload or self.manager).preempt(job.row)
        job.computed = job.placeholders = job.drafts = 0
        job.preemptions += 1
        self.num_preemptions += 1
        self.waiting.put_back(job)

    # -- before and after a step --------------------------------------------------------------------------------------

    def _advance(self, step: Step) -> None:
        """Count a step's tokens as computed, and with steps in flight its samples as known."""
        ahead = self.settings.async_scheduling
        # Stages hand sampled tokens on in turn: a decode's next step comes a whole round later.
        eligible = self._call + self.settings.pipeline_parallel_size
        drafts = self.settings.drafts_after(step.num_requests)
        for part in step.singles:
            job = part.job
            job.computed += part.num_tokens
            job.in_flight += part.num_tokens
            job.is_prefill_chunk = not part.samples
            job.drafts = 0
            if ahead and part.samples:
                job.placeholders += 1 + part.num_drafts
                job.eligible = eligible
                job.drafts = drafts

    def _commit(self, decodes: Decodes | None, alive: Sequence[tuple[Scheduled, int]]) -> None:
        manager = self.manager
        if decodes is not None and not alive:
            ones = np.ones(len(decodes.jobs), dtype=np.int64)
            (self.offload or manager).commit(decodes.rows, ones, decodes.tokens)
            return
        rows = np.array([part.row for part, _ in alive], dtype=np.int64)
        counts: list[int] = [] if decodes is None else [1] * len(decodes.jobs)
        tokens: list[int] = [] if decodes is None else decodes.tokens.tolist()
        for (part, accepted), committed in zip(alive, manager.committed[rows].tolist(), strict=True):
            job = part.job
            # Accepted drafts beyond the output's end have no token; the request ends here anyway.
            count = min(part.num_tokens - part.num_drafts + accepted, job.longest - committed)
            counts.append(count)
            known = manager.num_tokens(part.row)
            if committed + count == known + 1:
                tokens.append(job.output.item(known - job.num_prompt))
            elif committed + count > known:
                tokens += job.tokens_between(known, committed + count).tolist()
        if decodes is not None:
            rows = np.concatenate([decodes.rows, rows])
        (self.offload or manager).commit(rows, counts, np.array(tokens, dtype=np.int64))

    def _settle(self, job: Job, num_tokens: int, num_drafts: int, accepted: int, following_drafts: int) -> Outcome:
        """The job has sampled: roll rejected drafts back, append what it got, end it when its output is whole."""
        settings = self.settings
        job.in_flight -= num_tokens
        rejected = num_drafts - accepted
        job.computed -= rejected
        room = min(job.longest, settings.max_model_len) - job.num_prompt - job.num_output
        sampled = min(1 + accepted, room)
        job.num_output += sampled
        if settings.async_scheduling:
            job.placeholders -= rejected + sampled
        if sampled == room:
            self._finish(job)
        if not settings.async_scheduling:
            job.drafts = self.propose(job, following_drafts) if self.propose else following_drafts
        return Outcome(job, sampled, num_drafts, accepted, job.finished)

    def _finish(self, job: Job) -> None:
        job.finished = True
        self._give_up_row(job)
