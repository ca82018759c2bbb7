"""Replaying traces through the real manager: nothing is computed twice or left out, and the averages are what they say.

A recorder stands where the replay makes its manager: it notes every call, so that tests can add up what was computed
for each request, and average the bytes by themselves.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from layouts import attention_specs, gemma_3_27b, layout_of, mllama_11b, qwen_3_5_27b, state_specs

from kvtide.cli import main
from kvtide.hma import Admission, HybridMemoryManager, MemoryByCause
from kvtide.hma.accounting import account_active
from kvtide.kvcache import ConfigError, FullAttention, ModelLayout, SlidingWindow
from kvtide.kvcache.policies import POLICIES, plan_geometry
from kvtide.sims import replay as replay_module
from kvtide.sims.replay import SAMPLE, ReplayWaste, replay
from kvtide.sims.traces import Request, open_trace

CAUSES = set(MemoryByCause._fields)


class Recorder(HybridMemoryManager):
    """A manager that notes what each request got, by request id, and samples its own bytes."""

    made: Recorder

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        Recorder.made = self
        self.prompts: dict[str, int] = {}
        self.images: dict[str, int] = {}
        self.cached: dict[str, int] = {}
        self.computed: Counter[str] = Counter()
        self.released: set[str] = set()
        self.admitted_at: dict[str, int] = {}
        self.step_tokens: list[int] = []
        self.samples: list[MemoryByCause] = []

    def admit(self, request_id: str, token_ids: Any, **options: Any) -> Admission:
        admission = super().admit(request_id, token_ids, **options)
        self.prompts[request_id] = len(token_ids)
        self.images[request_id] = options.get("image_tokens", 0)
        self.cached[request_id] = admission.num_cached_tokens
        self.admitted_at[request_id] = len(self.step_tokens)
        return admission

    def reserve(self, rows: Any, num_tokens: Any, **options: Any) -> Any:
        plan = super().reserve(rows, num_tokens, **options)
        if len(self.step_tokens) % SAMPLE == 0:
            self.samples.append(account_active(self))
        self.step_tokens.append(sum(num_tokens))
        return plan

    def commit(self, rows: Any, num_accepted: Any, token_ids: Any = None) -> None:
        super().commit(rows, num_accepted, token_ids)
        for row, count in zip(rows, num_accepted, strict=True):
            self.computed[str(self._request_of[row])] += count

    def release(self, row: int) -> None:
        assert self._request_of[row] not in self.released
        self.released.add(str(self._request_of[row]))
        super().release(row)


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "HybridMemoryManager", Recorder)


def check_result(result: ReplayWaste, requests: Sequence[Request], concurrency: int, step_tokens: int) -> None:
    """All tokens of all requests once, budgets kept, and the averages recomputed from the recorder's own samples."""
    made = Recorder.made
    assert set(made.prompts) == made.released == {str(number) for number in range(len(requests))}
    for number, request in enumerate(requests):
        name = str(number)
        assert made.prompts[name] + made.images[name] == request.input_tokens
        stored = made.prompts[name] + max(request.output_tokens, 1) - 1
        assert made.computed[name] == stored - made.cached[name]
        assert made.cached[name] < made.prompts[name]
    assert max(made.step_tokens) <= step_tokens
    assert len(made.step_tokens) == result.steps
    assert made.max_requests == min(concurrency, len(requests))
    assert result.cached_tokens == sum(made.cached.values())
    assert result.prompt_tokens == sum(request.input_tokens for request in requests)
    assert set(result.mean_bytes) == CAUSES
    for cause, mean in result.mean_bytes.items():
        own = sum(getattr(sample, cause) for sample in made.samples) / len(made.samples)
        assert math.isfinite(mean)
        assert mean >= 0
        assert mean == pytest.approx(own)
    assert 0 <= result.waste_fraction <= 1
    assert 0 <= result.hit_rate < 1
    held = sum(mean for cause, mean in result.mean_bytes.items() if cause != "idle_cached")
    assert result.held_bytes == pytest.approx(held)
    assert made.running_rows.tolist() == []
    made.check()


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    """A few small requests; half of them in sessions that share prefix blocks."""
    requests = []
    for number in range(draw(st.integers(1, 12))):
        prompt = draw(st.integers(1, 90))
        image = draw(st.sampled_from([0, 0, 0, prompt // 2]))
        output = draw(st.sampled_from([0, 1, 2, 7, 40]))
        hashes, block = None, 0
        if draw(st.booleans()):
            block = draw(st.sampled_from([8, 16, 24]))
            stem = draw(st.integers(0, 1))
            parts = draw(st.integers(0, 4))
            hashes = tuple(
                100 * (number if i >= parts else stem) + i for i in range(draw(st.integers(0, prompt // block + 1)))
            )
            assume(len(hashes) * block < prompt + block)
        requests.append(Request(str(number), 0.0, prompt, output, image, hash_ids=hashes, hash_block=block))
    return requests


@st.composite
def layouts_of_any_kind(draw: st.DrawFn) -> ModelLayout:
    specs = draw(st.lists(attention_specs(st.integers(1, 40)) | state_specs(2, 2), min_size=1, max_size=3, unique=True))
    if all(spec.per_image for spec in specs):
        specs.append(FullAttention(1, 2, 2))
    return layout_of("random", *[(draw(st.integers(1, 3)), spec) for spec in specs])


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    layout=layouts_of_any_kind(),
    requests=traces(),
    policy=st.sampled_from(list(POLICIES)),
    concurrency=st.integers(1, 6),
    step_tokens=st.sampled_from([1, 7, 16, 64, 512]),
    from_activations=st.booleans(),
)
def test_every_token_of_every_request_is_computed_once(
    layout: ModelLayout,
    requests: list[Request],
    policy: str,
    concurrency: int,
    step_tokens: int,
    from_activations: bool,
) -> None:
    try:
        geometry = plan_geometry(policy, layout, 8)
        finished: list[None] = []
        result = replay(
            geometry,
            requests,
            concurrency=concurrency,
            step_tokens=step_tokens,
            kv_from_activations=from_activations,
            on_request=lambda: finished.append(None),
        )
    except ConfigError:
        assume(False)
    assert len(finished) == len(requests)
    if not (layout.has_cross_attention and any(r.image_tokens >= r.input_tokens for r in requests)):
        check_result(result, requests, concurrency, step_tokens)


# -- by hand -----------------------------------------------------------------------------------------------------------

SMALL = layout_of("small", (1, FullAttention(1, 1, 1)))  # 4 bytes per token


def test_one_request_by_hand() -> None:
    """20 + 3 tokens in steps of 8: three chunks of the prompt, and two tokens of the answer that are stored."""
    requests = [Request("a", 0.0, 20, 3)]
    result = replay(plan_geometry("kvtide", SMALL, 16), requests, concurrency=1, step_tokens=8)
    assert result.steps == 5
    # Sampled in the first step alone: 8 tokens in flight, in a block of 16.
    assert result.mean_bytes == {**dict.fromkeys(CAUSES, 0.0), "in_flight_reserve": 32.0, "block_tail": 32.0}
    assert result.waste_fraction == 1
    check_result(result, requests, 1, 8)


def test_samples_lie_a_fixed_number_of_steps_apart() -> None:
    """One token a step: the samples see 1, 17 and 33 tokens, the last of them in flight, in blocks of 16."""
    requests = [Request("a", 0.0, 40, 1)]
    result = replay(plan_geometry("kvtide", SMALL, 16), requests, concurrency=1, step_tokens=1)
    assert SAMPLE == 16
    assert result.steps == 40
    assert result.mean_bytes["needed"] == 4 * (0 + 16 + 32) / 3
    assert result.mean_bytes["in_flight_reserve"] == 4
    assert result.mean_bytes["block_tail"] == 4 * 15
    assert result.waste_fraction == pytest.approx(1 - 16 / 32)


def test_requests_are_admitted_in_order_as_others_finish() -> None:
    requests = [Request("", 0.0, 4, 1 + n) for n in (9, 1, 1, 1, 1)]
    replay(plan_geometry("kvtide", SMALL, 16), requests, concurrency=2, step_tokens=8)
    # The first takes 10 steps; the others share the second place, 2 steps each.
    assert Recorder.made.admitted_at == {"0": 0, "1": 0, "2": 2, "3": 4, "4": 6}
    assert Recorder.made.step_tokens == [8, 2, 5, 2, 5, 2, 5, 2, 1, 1]


def test_images_go_to_the_layers_that_keep_them() -> None:
    """Mllama keeps images beside the text, other models inside it."""
    requests = [Request("a", 0.0, 100, 1, image_tokens=60)]
    for layout, expected in ((mllama_11b(), (40, 60)), (gemma_3_27b(), (100, 0))):
        replay(plan_geometry("kvtide", layout), requests, concurrency=1)
        assert (Recorder.made.prompts["0"], Recorder.made.images["0"]) == expected


# -- hit rate ----------------------------------------------------------------------------------------------------------


def expected_hits(requests: Sequence[Request], concurrency: int, step_tokens: int, block: int) -> list[int]:
    """Cached tokens per request: the schedule acted out, and prefixes compared token by token.

    A token is named by its prefix block and its place in it, or belongs to the request alone. Nothing is ever evicted.
    """
    texts = []
    for number, request in enumerate(requests):
        named = [(h, i) for h in request.hash_ids or () for i in range(request.hash_block)]
        own = [(f"own {number}", i) for i in range(request.input_tokens)]
        texts.append((named + own[len(named) :])[: request.input_tokens])
    totals = [r.input_tokens + max(r.output_tokens, 1) - 1 for r in requests]
    hits = [0] * len(requests)
    done = [0] * len(requests)
    waiting, running, started = list(range(len(requests))), [], []
    while waiting or running:
        while waiting and len(running) < concurrency:
            number = waiting.pop(0)
            text = texts[number]
            for other in started:
                computed = texts[other][: done[other]]
                same = 0
                while same < min(len(text) - 1, len(computed)) and text[same] == computed[same]:
                    same += 1
                hits[number] = max(hits[number], same // block * block)
            done[number] = hits[number]
            running.append(number)
            started.append(number)
        budget = step_tokens
        for number in running:
            count = min(max(requests[number].input_tokens - done[number], 1), budget)
            budget -= count
            done[number] += count
        running = [number for number in running if done[number] < totals[number]]
    return hits


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=traces(), concurrency=st.integers(1, 4), step_tokens=st.sampled_from([7, 32, 512]))
def test_hits_are_what_the_trace_shares(requests: list[Request], concurrency: int, step_tokens: int) -> None:
    # A long request at the end makes the pool so large that nothing is evicted.
    requests = [*requests, Request("long", 0.0, 2_000, 1)]
    result = replay(plan_geometry("kvtide", SMALL, 16), requests, concurrency=concurrency, step_tokens=step_tokens)
    hits = expected_hits(requests, concurrency, step_tokens, 16)
    assert [Recorder.made.cached[str(number)] for number in range(len(requests))] == hits
    assert result.hit_rate == sum(hits) / sum(request.input_tokens for request in requests)


def test_the_hit_rate_of_a_chat_by_hand() -> None:
    """Three turns on blocks of 64 tokens; the last has the first two blocks of the others, and then its own."""
    requests = [
        Request("a", 0.0, 200, 10, hash_ids=(1, 2, 3), hash_block=64),
        Request("b", 1.0, 330, 10, hash_ids=(1, 2, 3, 4, 5), hash_block=64),
        Request("c", 2.0, 192, 10, hash_ids=(1, 2, 9), hash_block=64),
        Request("d", 3.0, 192, 10, hash_ids=(1, 2, 9), hash_block=64),
        Request("long", 4.0, 2_000, 1),
    ]
    result = replay(plan_geometry("kvtide", SMALL, 16), requests, concurrency=1)
    # b: three blocks; c: two; d: all but the block that holds its last token.
    assert result.cached_tokens == 192 + 128 + 176
    assert result.hit_rate == (192 + 128 + 176) / (200 + 330 + 192 + 192 + 2_000)


# -- policies ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> list[Request]:
    return list(open_trace("demo", num_requests=100))


def test_kvtide_wastes_no_more_than_the_baselines_on_a_hybrid_model(demo: list[Request]) -> None:
    layout = gemma_3_27b()
    results = {}
    for policy in POLICIES:
        results[policy] = replay(plan_geometry(policy, layout), demo, concurrency=16)
        check_result(results[policy], demo, 16, 8192)
    own = results["kvtide"]
    for policy, result in results.items():
        assert own.waste_fraction <= result.waste_fraction, policy
        assert own.held_bytes <= result.held_bytes, policy
        # The schedule and the hits are the trace's, so all policies need the same bytes.
        assert result.steps == own.steps
        assert result.mean_bytes["needed"] == pytest.approx(own.mean_bytes["needed"], rel=0.01)
    assert own.waste_fraction < 0.02
    assert results["grouped"].mean_bytes["group_padding"] > 0
    assert results["uniform"].mean_bytes["out_of_window"] > results["uniform"].mean_bytes["needed"]


def test_new_keys_from_activations_lower_what_steps_in_flight_hold(demo: list[Request]) -> None:
    plan = plan_geometry("kvtide", gemma_3_27b())
    with_slots = replay(plan, demo[:25], concurrency=16)
    without = replay(plan, demo[:25], concurrency=16, kv_from_activations=True)
    assert without.mean_bytes["in_flight_reserve"] < 0.75 * with_slots.mean_bytes["in_flight_reserve"]
    check_result(without, demo[:25], 16, 8192)


def test_states_replay_under_every_policy(demo: list[Request]) -> None:
    for policy in ("kvtide", "grouped", "uniform"):
        result = replay(plan_geometry(policy, qwen_3_5_27b()), demo[:20], concurrency=8)
        check_result(result, demo[:20], 8, 8192)
        assert result.cached_tokens == 0  # nobody takes checkpoints


# -- errors ------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_replayed_is_said_in_one_sentence() -> None:
    plan = plan_geometry("kvtide", SMALL)
    request = Request("a", 0.0, 10, 1)
    with pytest.raises(ConfigError, match="concurrency 0 must be at least 1"):
        replay(plan, [request], concurrency=0)
    for requests in ([], [Request("a", 0.0, 0, 5)]):
        with pytest.raises(ConfigError, match="no request with a prompt"):
            replay(plan, requests, concurrency=1)
    with pytest.raises(ConfigError, match="max_step_tokens 0"):
        replay(plan, [request], concurrency=1, step_tokens=0)
    with pytest.raises(ConfigError, match="leave uniform out"):
        replay(plan_geometry("uniform", mllama_11b()), [request], concurrency=1)


def test_requests_without_a_prompt_are_left_out() -> None:
    requests = [Request("a", 0.0, 0, 5), Request("b", 0.0, 10, 1)]
    result = replay(plan_geometry("kvtide", SMALL), requests, concurrency=1)
    assert (result.prompt_tokens, result.steps) == (10, 1)


def test_requests_of_one_length_never_want_for_memory() -> None:
    """The pool is made for the longest request; when all are as long, all of it is used."""
    layout = layout_of("hybrid", (2, FullAttention(1, 4, 4)), (5, SlidingWindow(1, 3, 3, window=64)))
    requests = [Request("", 0.0, 150 + n % 7, 150 - n % 7) for n in range(60)]
    for policy in POLICIES:
        result = replay(plan_geometry(policy, layout), requests, concurrency=12, step_tokens=64)
        check_result(result, requests, 12, 64)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvtide", *map(str, arguments)])
        code = 0
        try:
            main.run()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    return run


DEMO = ("waste", "--model", "gemma-3-27b", "--trace", "demo", "--num-requests", 40, "--replay")


def test_the_command_prints_json_with_stable_keys(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = run(*DEMO, "--concurrency", 8, "--json")
    assert (code, err) == (0, "")
    value = json.loads(out)
    assert set(value) == {
        "model",
        "trace",
        "requests",
        "total_tokens",
        "accounting",
        "concurrency",
        "policies",
        "notes",
    }
    assert value["accounting"] == "time-integrated"
    assert (value["model"], value["trace"], value["concurrency"]) == ("gemma-3-27b", "demo", 8)
    assert list(value["policies"]) == list(POLICIES)
    keys = {"allocated_bytes", "needed_bytes", "waste_fraction", "by_cause", "by_kind", "idle_cached_bytes"}
    keys |= {"hit_rate", "steps"}
    for policy in value["policies"].values():
        assert set(policy) == keys
        assert set(policy["by_cause"]) == CAUSES - {"idle_cached"}
        held = sum(policy["by_cause"].values())
        assert policy["allocated_bytes"] == pytest.approx(held)
        assert policy["needed_bytes"] == policy["by_cause"]["needed"]
        assert policy["waste_fraction"] == pytest.approx(1 - policy["needed_bytes"] / held)


def test_the_command_prints_a_table_of_the_same_figures(run: Callable[..., tuple[int, str, str]]) -> None:
    arguments = (*DEMO[:-2], 12, "--replay", "--concurrency", 4, "--policy", "kvtide,grouped")
    figures = json.loads(run(*arguments, "--json")[1])["policies"]
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    for policy, values in figures.items():
        line = next(line for line in out.splitlines() if policy in line)
        assert f"{values['waste_fraction']:.2%}" in line
        assert f"{values['hit_rate']:.1%}" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*DEMO, "--concurrency", 0), "--concurrency"),
        ((*DEMO, "--max-num-batched-tokens", 0), "--max-num-batched-tokens"),
        (("waste", "--model", "gemma-3-27b", "--tokens", 10, "--replay"), "--replay"),
        (
            ("waste", "--model", "llama-3.2-11b-vision", "--trace", "demo", "--replay", "--policy", "uniform"),
            "uniform",
        ),
    ],
)
def test_wrong_use_of_the_command_is_one_sentence(
    run: Callable[..., tuple[int, str, str]], arguments: tuple[object, ...], message: str
) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1
