"""Recordings: what they add up to, that they change nothing, and the stories they tell."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from layouts import layout_of

from kvtide.hma import MemoryByCause
from kvtide.kvcache import FullAttention, SlidingWindow
from kvtide.sims.report.figures import series_of
from kvtide.sims.serving import recording as module
from kvtide.sims.serving.build import Deployment
from kvtide.sims.serving.engine import Run
from kvtide.sims.serving.gpus import GPUS
from kvtide.sims.serving.recording import EVENTS, INTERVALS, Event, Interval, Recording, Story, group_hit
from kvtide.sims.serving.work import estimate_work
from kvtide.sims.traces import Request

LAYOUT = replace(
    layout_of("tiny", (2, FullAttention(2, 64, 64)), (4, SlidingWindow(2, 64, 64, window=128))), max_model_len=2048
)
PLAN = Deployment(
    LAYOUT,
    estimate_work(LAYOUT, 1e9),
    GPUS["l4"],
    max_num_seqs=8,
    max_num_batched_tokens=256,
    kv_cache_memory_bytes=12 << 20,
)
# Prompts share their first block of 64 tokens; eight of them do not fit at once.
CROWD = [
    Request(str(i), 0.01 * i, 700, 500, hash_ids=(0, *range(100 * i, 100 * i + 10)), hash_block=64) for i in range(1, 9)
]


def record(requests: list[Request], plan: Deployment = PLAN, **options: object) -> tuple[Run, Recording]:
    recording = Recording(**options)  # type: ignore[arg-type]
    return plan.engine(recording=recording).run(requests), recording


shapes = st.lists(
    st.tuples(st.floats(0, 30), st.integers(1, 900), st.integers(1, 60), st.integers(0, 3)), min_size=1, max_size=14
)


@given(shapes=shapes, span=st.sampled_from([0.0, 0.01, 40.0]))
@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.generate])
def test_a_series_adds_up_to_the_run_and_changes_nothing(
    shapes: list[tuple[float, int, int, int]], span: float
) -> None:
    requests = [
        Request(str(i), at, prompt, output, hash_ids=tuple(range(shared)), hash_block=64)
        for i, (at, prompt, output, shared) in enumerate(shapes)
    ]
    run, recording = record(requests, span_s=span, follow=["0", "3"])
    alone = PLAN.engine().run(requests)
    assert run == alone
    series = recording.series()
    assert 0 < len(series) <= INTERVALS
    intervals = [interval for _, interval in series]

    def total(name: str) -> float:
        return sum(getattr(interval, name) for interval in intervals)

    assert total("steps") == run.steps
    assert total("busy_s") == pytest.approx(run.busy_s)
    assert total("prefill_tokens") + total("decode_tokens") == run.computed_tokens
    assert total("admitted") == total("finished") == len(run.served)
    assert total("prompt_tokens") == sum(item.input_tokens for item in run.served)
    assert total("device_hit_tokens") == sum(item.hit_tokens for item in run.served)
    assert total("preemptions") == run.preemptions
    starts = [start for start, _ in series]
    assert starts[0] <= min(request.arrival_s for request in requests) + 1e-9
    assert all(later > earlier for earlier, later in pairwise(starts))
    for interval in intervals:
        assert interval.memory is not None
        assert sum(interval.memory) == sum(run.samples[0].memory)


def test_time_can_outgrow_the_intervals_many_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVALS", 8)
    requests = [Request(str(i), 1.7 * i, 20, 3) for i in range(100)]
    run, recording = record(requests)
    assert 4 <= len(recording.intervals) <= 8
    assert sum(interval.steps for interval in recording.intervals) == run.steps
    end = recording.series()[-1][0] + recording.interval_s
    assert end >= max(item.last_token_s for item in run.served)


def test_two_intervals_become_one() -> None:
    memory = MemoryByCause(*range(9))
    first, second = Interval(steps=1, busy_s=0.5), Interval(steps=2, busy_s=0.25, memory=memory)
    first.add(second)
    assert first == Interval(steps=3, busy_s=0.75, memory=memory)


def test_an_idle_engine_holds_only_its_cache() -> None:
    """Between two requests far apart nothing is needed; the last step's memory would say otherwise."""
    _, recording = record([Request("a", 0, 500, 20), Request("b", 100, 500, 20)], span_s=101)
    middle = recording.series()[128][1]
    assert middle.steps == 0
    assert middle.memory is not None
    assert middle.memory.needed == 0
    assert middle.memory.idle_cached > 0


def test_a_step_longer_than_an_interval_leaves_no_gap() -> None:
    """Intervals in which no step begins show what is running; those of an idle engine show nothing."""
    run, recording = record([Request("a", 0, 2000, 3), Request("b", 20, 2000, 3)], PLAN, span_s=0.0)
    shortest = 0.2 * run.busy_s / run.steps
    run, recording = record(
        [Request("a", 0, 2000, 3), Request("b", 4 * run.busy_s, 2000, 3)], PLAN, span_s=shortest * INTERVALS
    )
    series = series_of(recording, run)
    empty = [item for item in series if not item["steps"]]
    assert len(empty) > 20
    for item in series:
        is_busy = any(
            served.admitted_s <= item["time_s"] and item["time_s"] + item["duration_s"] <= served.last_token_s
            for served in run.served
        )
        if is_busy:
            assert item["running"] == 1
    middle = 3 * run.busy_s
    assert all(item["running"] == 0 for item in series if abs(item["time_s"] - middle) < 0.2 * run.busy_s)


def test_nobody_waits_in_the_step_that_admits_it() -> None:
    _, recording = record(CROWD, follow=[str(i) for i in range(1, 9)])
    for story in recording.stories:
        for event, following in pairwise(story.events):
            if event.kind == "waits" and following.kind == "admitted":
                assert event.until_s is not None
                assert event.until_s < following.time_s


def test_the_story_of_a_request_alone() -> None:
    run, recording = record([Request("a", 1.0, 600, 5), Request("b", 9.0, 600, 1)], follow=["a"])
    (story,) = recording.stories
    assert (story.name, story.input_tokens, story.output_tokens, story.dropped) == ("0/a", 600, 5, 0)
    kinds = [event.kind for event in story.events]
    assert kinds == ["queued", "admitted", "chunk", "chunk", "chunk", "decode", "first_token", "finished"]
    chunks = [event.details["tokens"] for event in story.events if event.kind == "chunk"]
    assert chunks == [256, 256, 88]
    assert [event.details["upto"] for event in story.events if event.kind == "chunk"] == [256, 512, 600]
    decode = story.events[5]
    assert decode.details["steps"] == 4
    served = run.served[0]
    assert story.events[0].time_s == served.arrival_s
    assert story.events[1].time_s == served.admitted_s
    assert story.events[6].time_s == served.first_token_s
    assert story.events[7].time_s == decode.until_s == served.last_token_s


def test_the_story_names_who_preempted_whom_and_what_was_hit() -> None:
    plan = replace(PLAN, kv_cache_memory_bytes=4 << 20)
    run, recording = record(CROWD, plan, follow=[str(i) for i in range(1, 9)])
    assert run.preemptions
    stories = {story.name: story for story in recording.stories}
    assert len(stories) == 8
    seen = 0
    for story in stories.values():
        kinds = [event.kind for event in story.events]
        assert (kinds[0], kinds[-1]) == ("queued", "finished")
        assert kinds.count("preempted") == kinds.count("resumed")
        for event in story.events:
            if event.kind == "preempted":
                seen += 1
                assert event.details["victim"] == story.name
                assert event.details["pages_short"] > 0
                by = stories[event.details["by"]]
                if by is not story:
                    assert any(e.kind == "preempts" and e.details["victim"] == story.name for e in by.events)
            if event.kind == "waits":
                assert event.details["steps"] >= 1
                assert event.details["head"] in stories
    assert seen == run.preemptions
    hits = [event.details for event in stories["7/8"].events if event.kind == "admitted"]
    assert hits[0]["hit_tokens"] == 64
    assert sum(group["tokens"] for group in hits[0]["hits"].values()) > 64


def test_a_hit_by_group_is_what_the_manager_takes_over() -> None:
    """The figures of a story against the block tables of a manager that admits the same prompt again."""
    engine = PLAN.engine()
    engine.run([Request("a", 0, 640, 2, hash_ids=tuple(range(10)), hash_block=64)])
    manager = engine.schedulers[0].manager
    from kvtide.sims.tokens import prompt_tokens

    prompt = prompt_tokens(1, Request("b", 0, 640, 2, hash_ids=tuple(range(10)), hash_block=64))
    admission = manager.admit("again", prompt)
    assert admission.num_cached_tokens >= 600
    for group in manager.groups:
        table = group.table
        held = int(table.end[admission.row] - table.first[admission.row]) * group.fmt.tables
        assert group_hit(group, admission.num_cached_tokens)["blocks"] == held


def test_refused_requests_and_unknown_ones() -> None:
    _, recording = record([Request("long", 0, 5000, 5), Request("a", 0, 50, 5)], follow=["long", "nobody"])
    (story,) = recording.stories
    assert [event.kind for event in story.events] == ["refused"]
    assert story.events[0].details == {"max_model_len": 2048}


def test_a_story_is_bounded() -> None:
    story = Story("a", 1, 1)
    for i in range(EVENTS + 5):
        story.add(Event(float(i), "chunk"))
    assert (len(story.events), story.dropped) == (EVENTS, 5)
