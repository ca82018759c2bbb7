"""The scheduler's laws, on random requests and settings: nothing is lost, nothing starves, the manager stays whole."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import layout_of

from kvtide.kvcache import ChunkedLocal, ConfigError, FullAttention, KvtideError, SlidingWindow
from kvtide.kvcache.policies import plan_geometry
from kvtide.sims.serving.job import Job, Step
from kvtide.sims.serving.scheduler import Scheduler
from kvtide.sims.serving.settings import RULES, EngineSettings, rules_of

DIMS = (2, 32, 32)
LAYOUTS = {
    "full": layout_of("full", (2, FullAttention(*DIMS))),
    "window": layout_of("window", (2, FullAttention(*DIMS)), (3, SlidingWindow(*DIMS, window=40))),
    "chunk": layout_of("chunk", (1, FullAttention(*DIMS)), (3, ChunkedLocal(*DIMS, chunk=64))),
}
BASE = EngineSettings(max_num_seqs=4, max_num_batched_tokens=48, max_model_len=256)


def scheduler_of(layout: str, pages: int, settings: EngineSettings = BASE) -> Scheduler:
    geometry = replace(plan_geometry("kvtide", LAYOUTS[layout]), one_table=False)
    return Scheduler(geometry, pages * geometry.page_bytes, settings)


def jobs_of(seed: int, count: int) -> list[Job]:
    rng = np.random.default_rng(seed)
    return [
        Job(
            str(number),
            rng.integers(0, 50, rng.integers(1, 150)),
            rng.integers(0, 50, rng.integers(1, 40)),
            number,
            int(rng.integers(0, 3)),
        )
        for number in range(count)
    ]


def run_all(scheduler: Scheduler, jobs: list[Job], seed: int = 0) -> list[Step]:
    """Serve everything; random acceptance; the manager is checked after every step."""
    rng = np.random.default_rng(seed)
    coming, queue, steps = deque(jobs), deque[Step](), []
    while coming or scheduler.has_work:
        if coming:
            scheduler.add(coming.popleft())
        if scheduler.can_schedule and (step := scheduler.schedule()):
            assert step.num_tokens <= scheduler.settings.step_budget
            assert len(scheduler.running) <= scheduler.settings.max_num_seqs
            queue.append(step)
            steps.append(step)
            if scheduler.can_schedule:
                continue
        if queue:
            step = queue.popleft()
            most = [0 if part.is_padding or not part.samples else part.num_drafts for part in step.parts]
            scheduler.complete(step, [int(rng.integers(0, count + 1)) for count in most])
            scheduler.manager.check()
            assert sum(scheduler.manager.stats()) == scheduler.manager.pool.num_pages * (
                scheduler.manager.geometry.page_bytes
            )
    return steps


@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    seed=st.integers(0, 1000),
    drafts=st.integers(0, 3),
    asynchronous=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    version=st.sampled_from(sorted(RULES)),
    gate=st.booleans(),
    pages=st.integers(40, 120),
)
def test_every_token_is_served_once(
    layout: str, seed: int, drafts: int, asynchronous: bool, policy: str, version: str, gate: bool, pages: int
) -> None:
    settings = replace(
        BASE,
        num_speculative_tokens=drafts,
        lookahead_tokens=drafts,
        async_scheduling=asynchronous,
        scheduling_policy=policy,
        rules=rules_of(version),
        scheduler_reserve_full_isl=gate,
    )
    scheduler = scheduler_of(layout, pages, settings)
    jobs = jobs_of(seed, 10)
    steps = run_all(scheduler, jobs, seed)
    assert all(job.finished and job.num_output == len(job.output) for job in jobs)
    # What was computed is what was hit or committed, plus what preemption and rejected drafts threw away.
    computed = sum(part.num_tokens + (part.hit or 0) for step in steps for part in step.parts)
    assert computed >= sum(job.longest - 1 for job in jobs)
    if not drafts and not scheduler.num_preemptions:
        assert computed == sum(job.longest - 1 for job in jobs)
    assert sum(job.preemptions for job in jobs) == scheduler.num_preemptions
    assert not scheduler.manager.running_rows.size


@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    seed=st.integers(0, 1000),
    asynchronous=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    longest=st.integers(160, 256),
    pages=st.integers(40, 120),
)
def test_jobs_that_decode_together_are_served_as_one_by_one(
    layout: str, seed: int, asynchronous: bool, policy: str, longest: int, pages: int
) -> None:
    settings = replace(BASE, async_scheduling=asynchronous, scheduling_policy=policy, max_model_len=longest)
    told, ends = [], []
    # With little room for tokens to come it is made often.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtide.sims.serving.steady.TOKENS", 8)
        for in_bulk in (True, False):
            scheduler = scheduler_of(layout, pages, settings)
            assert scheduler.in_bulk
            scheduler.in_bulk = in_bulk
            jobs = jobs_of(seed, 10)
            steps = run_all(scheduler, jobs)
            assert any(step.decodes for step in steps) == in_bulk
            told.append(
                [
                    (
                        [(part.job.request_id, *part[1:]) for part in step.parts],
                        [job.request_id for job in step.preempted],
                        (step.num_requests, step.num_tokens, step.num_samples),
                        [column.tolist() for column in step.columns],
                    )
                    for step in steps
                ]
            )
            ends.append(
                [(job.computed, job.num_output, job.placeholders, job.in_flight, job.preemptions) for job in jobs]
            )
            assert not len(scheduler.running)
    assert told[0] == told[1]
    assert ends[0] == ends[1]


@given(seed=st.integers(0, 1000), pages=st.integers(40, 80))
def test_first_come_is_first_admitted(seed: int, pages: int) -> None:
    jobs = jobs_of(seed, 12)
    steps = run_all(scheduler_of("full", pages), jobs)
    first: list[str] = []
    for step in steps:
        first += [p.job.request_id for p in step.parts if p.hit is not None and p.job.request_id not in first]
    assert first == [job.request_id for job in jobs]


def test_a_prompt_without_room_for_an_output_is_refused() -> None:
    scheduler = scheduler_of("full", 60)
    with pytest.raises(ConfigError, match="max_model_len 256 leaves no room"):
        scheduler.add(Job("a", np.arange(256), np.arange(1)))


def test_steps_are_completed_in_order_with_possible_counts() -> None:
    scheduler = scheduler_of("full", 60)
    scheduler.add(Job("a", np.arange(60), np.arange(4)))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    with pytest.raises(KvtideError, match="2 steps are in flight"):
        scheduler.schedule()
    with pytest.raises(KvtideError, match="in the order"):
        scheduler.complete(second, [0])
    with pytest.raises(KvtideError, match="1 accepted of 0 drafts"):
        scheduler.complete(first, [1])
    with pytest.raises(KvtideError, match="2 counts for a step of 1"):
        scheduler.complete(first, [0, 0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": 3}, "must be at least max_num_seqs 4"),
        ({"enable_chunked_prefill": False}, "without chunked prefill"),
        ({"scheduling_policy": "lifo"}, "allowed: fcfs, priority"),
        ({"watermark": 1.0}, "watermark is 1.0"),
        ({"long_prefill_token_threshold": 300}, "above max_model_len 256"),
        ({"draft_slots": 12, "rules": RULES["0.20.2"]}, "leaves no token"),
        ({"draft_slots": 48}, "leaves no token"),
    ],
    ids=str,
)
def test_settings_that_vllm_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(BASE, **changes)


def test_versions() -> None:
    old = replace(BASE, draft_slots=2, rules=rules_of("0.20.2"))
    new = replace(BASE, draft_slots=2)
    assert (old.step_budget, new.step_budget) == (40, 48)
    assert (old.charged_in_flight, new.charged_in_flight) == (48, 96)
    with pytest.raises(ConfigError, match=r"allowed: 0\.20\.2, 0\.33"):
        rules_of("0.1")


def test_the_number_of_drafts_follows_the_batch() -> None:
    settings = replace(BASE, num_speculative_tokens=3, draft_schedule=(0, 3, 3, 1, 1))
    assert [settings.drafts_after(batch) for batch in (1, 2, 3, 4, 9)] == [3, 3, 1, 1, 1]
