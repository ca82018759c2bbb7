"""Which waiting requests are admitted: the second half of vLLM's scheduling rules.

    head of the queue ─► its row, and what it hits ─► loaded from below? ─► what it would compute ─► room? ─► running
                                                                                                      └─ no: stop here

A request is admitted only if the blocks of its whole sequence fit, where the settings say so, and those of this step
with its lookahead. What does not fit gives its hit back and is tried again at the next step; requests that are being
loaded from lower tiers are passed over. `scheduler` decides about the running ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtide.hma import HybridMemoryManager
from kvtide.kvcache import Exhausted
from kvtide.kvcache.specs import Int64Array

from .job import Job, Scheduled, columns_of
from .offloading import OffloadedRows
from .queue import WaitingQueue
from .recording import Recording
from .room import Room
from .settings import EngineSettings

NOBODY: Int64Array = np.empty(0, dtype=np.int64)


class Batch:
    """A step in the making: its parts, the tokens still to give away, the blocks that its rows will take."""

    def __init__(self, settings: EngineSettings, room: Room, decodes: int = 0) -> None:
        self.parts: list[Scheduled] = []
        # That `decodes` jobs get one token each is settled; the budget is never below the number of jobs.
        self.tokens = settings.step_budget - decodes
        # Slots that the model's input has left; a drafter may need some beyond the scheduled tokens.
        self.slots = settings.max_num_batched_tokens - decodes
        self.slots_each = settings.draft_slots if settings.rules.draft_slots_per_request else 0
        self.needs = room.none()
        self.has_running = decodes > 0
        self.has_prefill = False

    @property
    def limit(self) -> int:
        """The most tokens that one more job can get."""
        return min(self.tokens, self.slots - self.slots_each)

    def add(self, part: Scheduled) -> None:
        self.parts.append(part)
        self.tokens -= part.num_tokens
        self.slots -= part.num_tokens + self.slots_each
        if part.hit is None:
            self.has_running = True
            self.has_prefill |= part.job.is_prefill_chunk

    def drop(self, job: Job) -> bool:
        """Take a job out again, if it is in."""
        for part in self.parts:
            if part.job is job:
                self.parts.remove(part)
                self.tokens += part.num_tokens
                self.slots += part.num_tokens + self.slots_each
                return True
        return False


class AdmissionRules:
    """A scheduler as far as waiting jobs are concerned; `Scheduler` makes what is declared here."""

    settings: EngineSettings
    manager: HybridMemoryManager
    offload: OffloadedRows | None
    room: Room
    waiting: WaitingQueue
    running: list[Job]
    recording: Recording | None
    _others: list[Job]
    _num_admitted: int

    def _needs(self, parts: Sequence[Scheduled]) -> Int64Array:
        return self.room.of_step(columns_of(NOBODY, NOBODY, parts))

    def _may_admit(self, batch: Batch) -> bool:
        return len(self.waiting) > 0 and batch.limit > 0 and len(self.running) < self.settings.max_num_seqs

    def _admit_waiting(self, batch: Batch, threshold: int) -> None:
        """Admit from the head of the queue until one does not fit; those that are being loaded are passed over."""
        loading: list[Job] = []
        while self._may_admit(batch):
            job = self.waiting.head
            entered = self._take_row(job, batch, len(loading))
            if job.is_loading:
                loading.append(self.waiting.pop())
                continue
            part = None if entered is None else self._first_part(job, *entered, batch, threshold)
            need = None if part is None else self._room_for(part, batch)
            if part is None or need is None:
                if self._leave_waiting(job):
                    continue
                break
            batch.needs = batch.needs + need
            self.waiting.pop()
            self.running.append(job)
            self._others.append(job)
            self._num_admitted += 1
            job.place = self._num_admitted
            job.computed = part.start
            job.is_loaded = False
            batch.add(part)
        for job in reversed(loading):
            self.waiting.put_back(job)

    def _leave_waiting(self, job: Job) -> bool:
        """The job does not fit, and what it hit goes back; True if it may be tried again.

        What was loaded for a job stays, unless that keeps all jobs from running: then the last of them lets go.
        """
        assert job.row is not None
        if self.offload is None:
            self.manager.preempt(job.row)
            return False
        if not job.is_loaded and job.row in self.manager.running_rows:
            self.offload.give_up(job.row)
        holder = None if self.running else self.waiting.last_loaded(job)
        if holder is None:
            return False
        assert holder.row is not None
        self.offload.give_up(holder.row)
        holder.is_loaded = False
        return True

    def _first_part(self, job: Job, row: int, hit: int, batch: Batch, threshold: int) -> Scheduled | None:
        """What the job would compute in this step; None when the budget is too small for it."""
        settings = self.settings
        num, padding = job.num_tokens - hit, 0
        drafts = 0 if settings.draft_schedule else settings.num_speculative_tokens
        full_width = hit + drafts + 2 <= settings.max_model_len
        if drafts and num == 1 and full_width and not batch.has_prefill and (batch.has_running or hit):
            if 1 + drafts > batch.limit:
                return None
            num, padding = 1 + drafts, drafts
        if 0 < threshold < num:
            num = threshold
        if not settings.enable_chunked_prefill and num > batch.limit:
            return None
        num = min(num, batch.limit)
        samples = hit + num >= job.num_tokens
        loaded = max(hit - job.device_hit, 0) if self.offload is not None else 0
        return Scheduled(job, row, hit, num, padding, samples, hit, padding > 0, loaded)

    def _room_for(self, part: Scheduled, batch: Batch) -> Int64Array | None:
        """Blocks for the job's step with its lookahead; None when they, or those for its whole sequence, do not fit."""
        if self.settings.scheduler_reserve_full_isl and not self._whole_fits(part.job, part.row, batch):
            return None
        need = self._needs([part])
        return need if self.room.fits(batch.needs + need, with_watermark=bool(self.running)) else None

    def _whole_fits(self, job: Job, row: int, batch: Batch) -> bool:
        whole = self.room.of_sequence(row, min(job.num_tokens, self.settings.max_model_len))
        return self.room.fits(batch.needs + whole, with_watermark=bool(self.running))

    def _take_row(self, job: Job, batch: Batch, num_loading: int) -> tuple[int, int] | None:
        """Bring the job into the manager and pin its hit: its row, and tokens hit. None when its blocks cannot be had.

        With offload it looks further in the tiers; then the job may be loading afterwards.
        """
        if self.offload is None:
            return self._start_row(job)
        if job.is_loading or job.is_loaded:
            assert job.row is not None
            if job.is_loading and self.offload.ready(job.row):
                job.is_loading, job.is_loaded = False, True
            return job.row, int(self.manager.committed[job.row])
        if job.row is not None and not self._could_fit(job, batch):
            return None
        row, job.device_hit = self._start_row(job)
        if num_loading >= self.settings.max_num_seqs or not self._whole_fits(job, row, batch):
            return None
        self.offload.poll()
        job.is_loading = not self.offload.ready(row)
        return row, int(self.manager.committed[row])

    def _could_fit(self, job: Job, batch: Batch) -> bool:
        """Whether a job that was tried before would fit now; asks the manager alone, as a look-up would be wasted."""
        assert job.row is not None
        self.manager.resume(job.row)
        fits = self._whole_fits(job, job.row, batch)
        self.manager.preempt(job.row)
        return fits

    def _start_row(self, job: Job) -> tuple[int, int]:
        if job.row is not None:
            if job.num_output != 1 or self.manager.num_tokens(job.row) > job.num_prompt:
                resumed = (self.offload or self.manager).resume(job.row)
                if self.recording is not None:
                    self.recording.looked_up(job, resumed)
                return job.row, resumed.num_cached_tokens
            # The manager has not seen the first sampled token, without which it would not look for the whole prompt.
            self._give_up_row(job)
        try:
            admission = self._admit(job)
        except Exhausted:
            # Jobs preempted long ago hold rows behind jobs of higher priority. The last of them starts afresh later.
            holder = self.waiting.last_with_row(job)
            assert holder is not None
            self._give_up_row(holder)
            admission = self._admit(job)
        job.row = admission[0]
        return admission

    def _give_up_row(self, job: Job) -> None:
        assert job.row is not None
        (self.offload or self.manager).release(job.row)
        job.row = None
        job.is_loading = job.is_loaded = False

    def _admit(self, job: Job) -> tuple[int, int]:
        options: dict[str, Any] = {"image_tokens": job.image_tokens}
        if self.offload is not None:
            options["turn_ends"] = job.turn_ends
        admission = (self.offload or self.manager).admit(job.request_id, job.known_tokens(), **options)
        if self.recording is not None:
            self.recording.looked_up(job, admission)
        return admission.row, admission.num_cached_tokens
