"""The engine in virtual time: conservation, order, latencies that follow from the cost model, defaults, calibration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import layout_of

from kvtide.kvcache import ConfigError, FullAttention, ModelLayout, SlidingWindow, TraceError
from kvtide.sims.serving.build import Deployment, stage_layers
from kvtide.sims.serving.calibrate import deployment_of, fit, measure_run, read_run, relative_errors, simulate_run
from kvtide.sims.serving.cost import Efficiency, Parallel
from kvtide.sims.serving.defaults import resolve_limits
from kvtide.sims.serving.engine import Engine, Run
from kvtide.sims.serving.gpus import GPUS
from kvtide.sims.serving.settings import EngineSettings, rules_of
from kvtide.sims.serving.speculation import Acceptance, read_speculative_config
from kvtide.sims.serving.work import estimate_work, read_work
from kvtide.sims.traces import Request

LAYOUT = replace(
    layout_of("tiny", (2, FullAttention(2, 64, 64)), (4, SlidingWindow(2, 64, 64, window=128))), max_model_len=2048
)
WIDE = replace(layout_of("wide", (8, FullAttention(2, 64, 64))), max_model_len=2048)
MTP = read_speculative_config({"method": "ngram", "num_speculative_tokens": 3})


def deployment(**changes: Any) -> Deployment:
    base = Deployment(
        LAYOUT,
        estimate_work(LAYOUT, 1e9),
        GPUS["l4"],
        max_num_seqs=8,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=12 << 20,
    )
    return replace(base, **changes)


def requests_of(*shapes: tuple[float, int, int]) -> list[Request]:
    return [Request(str(i), arrival, prompt, output) for i, (arrival, prompt, output) in enumerate(shapes)]


stages = st.sampled_from([1, 1, 2, 3])
shapes = st.lists(st.tuples(st.floats(0, 2), st.integers(1, 900), st.integers(1, 60)), min_size=1, max_size=12)


@given(
    shapes=shapes,
    policy=st.sampled_from(["kvtide", "grouped", "lcm"]),
    drafts=st.booleans(),
    ahead=st.booleans(),
    stages=stages,
)
@settings(max_examples=40)
def test_what_goes_in_comes_out(
    shapes: list[tuple[float, int, int]], policy: str, drafts: bool, ahead: bool, stages: int
) -> None:
    plan = deployment(policy=policy, async_scheduling=ahead, parallel=Parallel(pipeline=stages))
    if drafts:
        plan = replace(plan, speculative=MTP, acceptance=Acceptance([0.8, 0.5, 0.2]))
    engine = plan.engine(seed=3)
    run = engine.run(requests_of(*shapes))
    assert sorted((item.request_id, item.input_tokens, item.output_tokens) for item in run.served) == sorted(
        (str(i), prompt, output) for i, (_, prompt, output) in enumerate(shapes)
    )
    for item in run.served:
        assert item.arrival_s <= item.admitted_s < item.first_token_s <= item.last_token_s
    times = [sample.time_s for sample in run.samples]
    assert times == sorted(times)
    pool = plan.pool_bytes() // plan.geometry().page_bytes * plan.geometry().page_bytes
    assert {sum(sample.memory) for sample in run.samples} == {pool}
    assert run.busy_s <= run.makespan_s * (1 + 1e-9)
    if drafts:
        assert run.drafts.num_accepted_tokens <= run.drafts.num_draft_tokens
    else:
        assert run.drafts.num_drafts == 0


def test_the_same_seed_is_the_same_run() -> None:
    plan = deployment(speculative=MTP, acceptance=Acceptance([0.8, 0.5, 0.2]))
    requests = requests_of((0, 300, 50), (0.1, 500, 40))
    assert plan.engine(1).run(requests) == plan.engine(1).run(requests)


def serve(plan: Deployment, *shapes: tuple[float, int, int]) -> Run:
    return plan.engine().run(requests_of(*shapes))


def test_a_lone_request_takes_its_steps() -> None:
    """256 tokens a step: a prompt of 512 is two steps, and every further token one."""
    run = serve(deployment(), (5.0, 512, 11))
    assert run.steps == 12
    (item,) = run.served
    assert item.last_token_s - item.arrival_s == pytest.approx(run.busy_s)
    assert item.ttft_s > 1.5 * (item.tpot_s or 0)


def test_drafts_that_come_true_are_faster_and_false_ones_slower() -> None:
    plain = serve(deployment(), (0, 200, 300)).makespan_s
    good = serve(deployment(speculative=MTP, acceptance=Acceptance([1, 1, 1])), (0, 200, 300)).makespan_s
    bad = serve(deployment(speculative=MTP, acceptance=Acceptance([0, 0, 0])), (0, 200, 300)).makespan_s
    assert good < plain / 3
    assert bad > plain


def test_the_break_even_length_says_whether_drafts_pay() -> None:
    """Acceptance just above it is faster than no drafts, and just below it slower."""
    shape = (0, 200, 400)
    plain = serve(deployment(), shape).makespan_s
    found = serve(deployment(speculative=MTP, acceptance=Acceptance([0, 0, 0])), shape).break_even_length
    assert found is not None
    assert 1 < found < 4
    for length, faster in ((found + 0.1, True), (max(found - 0.1, 1.0), False)):
        acceptance = Acceptance.from_length(length, 3)
        assert (serve(deployment(speculative=MTP, acceptance=acceptance), shape).makespan_s < plain) is faster
    assert serve(deployment(), shape).break_even_length is None


def test_requests_that_are_too_long_are_refused() -> None:
    run = serve(deployment(), (0, 3000, 10), (0, 2047, 10))
    assert run.refused == ["0"]
    assert [item.output_tokens for item in run.served] == [1]


def test_data_parallel_ranks_share_the_load() -> None:
    work = replace(estimate_work(LAYOUT, 2e9, 1e9))
    plan = deployment(work=work, parallel=Parallel(1, 2))
    run = plan.engine().run(requests_of(*[(0.0, 200, 40)] * 16))
    assert len(run.served) == 16
    assert max(sample.running for sample in run.samples) == 16  # eight each
    assert run.makespan_s < serve(deployment(work=work), *[(0.0, 200, 40)] * 16).makespan_s


def test_pipeline_stages_overlap() -> None:
    """Four stages each hold a quarter of the layers: prompts run nearly four times as fast, a lone request does not.

    Decoding reads each stage's weights for every step, so it is as fast as the steps are full; and the limit of running
    requests is for all stages together: with 32 a step has eight, and four times as many cost hardly more.
    """
    quick = Efficiency(overhead_s=0.0, per_request_s=0.0)
    base = deployment(layout=WIDE, work=estimate_work(WIDE, 1e9), max_num_seqs=32, efficiency=quick)
    base = replace(base, kv_cache_memory_bytes=256 << 20)
    staged = replace(base, parallel=Parallel(pipeline=4))
    assert staged.cost().weight_bytes == pytest.approx(base.cost().weight_bytes / 4)
    assert staged.geometry().layout.bytes_per_token == WIDE.bytes_per_token // 4
    prompts = [(0.0, 1500, 2)] * 16
    assert 2 < serve(base, *prompts).makespan_s / serve(staged, *prompts).makespan_s < 4
    alone = serve(staged, (0, 10, 100)).makespan_s / serve(base, (0, 10, 100)).makespan_s
    assert 1 < alone < 1.1
    many = [(0.0, 10, 200)] * 128
    wider = replace(staged, max_num_seqs=128)
    assert serve(wider, *many).makespan_s < serve(staged, *many).makespan_s / 2.5
    assert any("raise it 4-fold" in note for note in staged.notes())
    assert not base.notes()


@pytest.mark.parametrize(("layers", "stages", "expected"), [(8, 4, [2] * 4), (10, 4, [2, 3, 3, 2]), (7, 2, [4, 3])])
def test_layers_of_stages(layers: int, stages: int, expected: list[int]) -> None:
    assert stage_layers(layers, stages) == expected


def test_the_old_rules_run_stages_without_async_scheduling() -> None:
    staged = deployment(layout=WIDE, parallel=Parallel(pipeline=2))
    assert staged.settings().steps_in_flight == 3
    old = replace(staged, version="0.20.2").settings()
    assert (old.async_scheduling, old.steps_in_flight) == (False, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": Parallel(pipeline=9)}, "cannot be 9 pipeline stages"),
        ({"kv_cache_memory_bytes": 1 << 20}, "one request of max_model_len 2048 needs"),
        ({"kv_cache_memory_bytes": None, "work": estimate_work(LAYOUT, 70e9)}, r"use more ranks \(--tp\)"),
        ({"gpu_memory_utilization": 1.5, "kv_cache_memory_bytes": None}, "gpu_memory_utilization is 1.5"),
        ({"speculative": MTP}, "give --acceptance-rate"),
        ({"layout": replace(LAYOUT, max_model_len=None)}, "give --max-model-len"),
        ({"usage_context": "x"}, "allowed: api-server, llm-class"),
        ({"performance_mode": "x"}, "allowed: balanced"),
        ({"version": "1"}, "has no rule set"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_deployments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deployment(**changes).engine()


def test_an_engine_needs_something_to_serve() -> None:
    with pytest.raises(ConfigError, match="no request that this engine can serve"):
        deployment().engine().run(requests_of((0, 0, 5), (0, 5, 0)))
    with pytest.raises(ConfigError, match="at least one rank"):
        Engine([], deployment().cost(), Acceptance([]))


@pytest.mark.parametrize(
    ("gpu", "context", "version", "expected"),
    [
        ("b200", "api-server", "0.33", (16384, 1024)),
        ("b200", "api-server", "0.20.2", (8192, 1024)),
        ("h200", "llm-class", "0.33", (16384, 1024)),
        ("h200", "api-server", "0.33", (8192, 1024)),
        ("a100", "api-server", "0.33", (2048, 256)),
        ("l4", "llm-class", "0.33", (8192, 256)),
    ],
)
def test_default_limits(gpu: str, context: str, version: str, expected: tuple[int, int]) -> None:
    given = {"max_model_len": 32768, "version": version, "context": context}
    assert resolve_limits(GPUS[gpu], **given) == expected
    doubled = resolve_limits(GPUS[gpu], **given, performance_mode="throughput")
    assert doubled == (2 * expected[0], 2 * expected[1])


def test_limits_are_bounded_by_what_can_be_used() -> None:
    given = {"version": "0.33", "max_model_len": 100}
    assert resolve_limits(GPUS["l4"], **given, max_num_seqs=4) == (400, 4)
    assert resolve_limits(GPUS["l4"], **given, max_num_batched_tokens=64) == (64, 64)
    assert resolve_limits(GPUS["l4"], version="0.33", max_model_len=9000, enable_chunked_prefill=False) == (9000, 256)


def recorded(folder: Path, plan: Deployment, shapes: list[tuple[float, int, int]]) -> Path:
    """A recorded run that a simulation with these efficiencies made."""
    run = plan.engine().run(requests_of(*shapes))
    arguments = {"max_num_seqs": plan.max_num_seqs, "max_num_batched_tokens": plan.max_num_batched_tokens}
    (folder / "meta.json").write_text(json.dumps({"engine_kwargs": arguments}))
    rows = [
        {
            "request_id": item.request_id,
            "input_toks": item.input_tokens,
            "output_toks": item.output_tokens,
            "queued_ts": 100 + item.arrival_s,
            "first_token_ts": 100 + item.first_token_s,
            "last_token_ts": 100 + item.last_token_s,
        }
        for item in run.served
    ]
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_calibration_finds_the_efficiencies_that_made_a_run(tmp_path: Path) -> None:
    truth = Efficiency(compute=0.4, memory=0.6)
    plan = deployment(policy="grouped", efficiency=truth, kv_cache_memory_bytes=None)
    run = read_run(recorded(tmp_path, plan, [(0.01 * i, 300 + 37 * i % 700, 5 + 7 * i % 20) for i in range(24)]))
    start = deployment_of(run, plan.layout, plan.work, plan.gpu)
    result = fit(run, start)
    assert max(map(abs, result.errors.values())) < 0.02
    assert result.efficiency.memory == pytest.approx(truth.memory, rel=0.05)
    assert result.efficiency.link == pytest.approx(Efficiency().link, rel=0.01)  # it was not used


ROW = (
    '{"request_id": "r", "input_toks": 100, "output_toks": 7, "queued_ts": 1.5, "first_token_ts": 2.0, '
    '"last_token_ts": 3.5}'
)


@pytest.mark.parametrize("value", ['"2"', "0", "-1", "1.5", "true", "[]", "1" + "0" * 30])
def test_an_argument_of_a_run_that_is_no_count(tmp_path: Path, value: str) -> None:
    (tmp_path / "meta.json").write_text(f'{{"engine_kwargs": {{"max_num_seqs": {value}}}}}')
    (tmp_path / "requests.jsonl").write_text(ROW)
    plan = deployment()
    with pytest.raises(TraceError, match=r"max_num_seqs is .* but must be a whole number from 1"):
        deployment_of(read_run(tmp_path), plan.layout, plan.work, plan.gpu)


@pytest.mark.parametrize(
    ("meta", "rows", "message"),
    [
        (None, "", r"meta\.json: cannot be read"),
        ("[]", "", "no JSON object with engine_kwargs"),
        ('{"engine_kwargs": {}}', "", "has no requests"),
        ('{"engine_kwargs": []}', "", "no JSON object with engine_kwargs"),
        ("[" * 3000, "", "nests JSON too deeply"),
        ('{"engine_kwargs": {}}', "{}", "line 1: has no key 'request_id'"),
        ('{"engine_kwargs": {}}', "[]", "line 1: must hold a JSON object"),
        ('{"engine_kwargs": {}}', ROW.replace("100", "-100"), "line 1: input_toks is -100, but"),
        ('{"engine_kwargs": {}}', ROW.replace("1.5", "NaN"), "line 1: line 1 has a number that cannot be read"),
        (
            '{"engine_kwargs": {}}',
            ROW.replace("1.5", "9.0"),
            "the first token at 2.0 and the last at 3.5 do not follow",
        ),
    ],
    ids=["missing", "list", "empty", "arguments", "nested", "row", "no row", "negative", "nan", "order"],
)
def test_broken_runs(tmp_path: Path, meta: str | None, rows: str, message: str) -> None:
    if meta is not None:
        (tmp_path / "meta.json").write_text(meta)
        (tmp_path / "requests.jsonl").write_text(rows)
    with pytest.raises(TraceError, match=message):
        read_run(tmp_path)


def test_a_real_run_of_another_model_is_predicted(shared: Path) -> None:
    """Efficiencies fitted to Qwen3-32B under TP 2 (see `kvtide calibrate`) on a mixture of experts under DP 2."""
    raw = json.loads((shared / "model_configs/Qwen--Qwen3-30B-A3B.json").read_text())
    run = read_run(shared / "traces/llmservingsim/RTXPRO6000_Qwen3-30B-A3B-Instruct-2507")
    plan = deployment_of(run, ModelLayout.from_hf(raw), read_work(raw), GPUS["rtx-pro-6000"])
    plan = replace(plan, efficiency=Efficiency(compute=0.589, memory=0.5948, link=0.293))
    errors = relative_errors(simulate_run(run, plan), run.measured)
    assert max(map(abs, errors.values())) < 0.055, errors


def test_measures_need_a_second_token() -> None:
    with pytest.raises(ConfigError, match="two output tokens"):
        measure_run(serve(deployment(), (0, 5, 1)))


THINKERS = [Request(str(i), 0.2 * i, 100, 120, reasoning_tokens=90 if i % 2 else 10) for i in range(6)]


@pytest.mark.parametrize("rates", [None, [1, 1, 1], [0.9, 0.6, 0.3]], ids=["plain", "all", "some"])
def test_a_thinking_budget_is_the_same_with_and_without_drafts(rates: list[float] | None) -> None:
    """Thirty of ninety tokens, the end marker, and the answer of thirty (one of the trace's is the marker)."""
    plan = deployment(thinking_token_budget=30)
    if rates is not None:
        plan = replace(plan, speculative=MTP, acceptance=Acceptance(rates))
    run = plan.engine().run(THINKERS)
    assert run.reasoning == (6, 3, 300, 120)
    assert [item.output_tokens for item in sorted(run.served)] == [120, 60] * 3


def test_the_old_rules_ignore_a_budget_with_drafts() -> None:
    """vLLM 0.20.2 had no budget where any speculation was configured; what that costs is the difference."""
    plan = deployment(thinking_token_budget=30, speculative=MTP, acceptance=Acceptance([1, 1, 1]))
    old = replace(plan, version="0.20.2")
    assert [item.output_tokens for item in old.engine().run(THINKERS).served] == [120] * 6
    assert any("ignores thinking budgets" in note for note in old.notes())
    plain = replace(old, speculative=None, acceptance=None)
    assert sorted(item.output_tokens for item in plain.engine().run(THINKERS).served) == [60] * 3 + [120] * 3
    assert not plain.notes()


@pytest.mark.parametrize(
    ("version", "budget", "charged"),
    [("0.33", 64, 128), ("0.20.2", 64 - 8, 64)],
)
def test_what_the_versions_count_differently(version: str, budget: int, charged: int) -> None:
    """A drafter's slot: of every scheduled request, or once for all that may run. In flight: all steps, or one."""
    rules = rules_of(version)
    settings = EngineSettings(8, 64, 512, num_speculative_tokens=2, draft_slots=1, rules=rules)
    assert settings.step_budget == budget
    assert settings.charged_in_flight == charged


def test_sparse_mla_with_mtp_is_said_to_run_eagerly(shared: Path) -> None:
    raw = json.loads((shared / "model_configs/deepseek-ai--DeepSeek-V3.2.json").read_text())
    layout = ModelLayout.from_hf(raw)
    drafter = read_speculative_config({"method": "mtp", "num_speculative_tokens": 1}, n_predict=1)
    plan = deployment(layout=layout, work=read_work(raw), speculative=drafter)
    assert any("eagerly" in note for note in plan.notes())
    assert not replace(plan, speculative=None).notes()


def test_the_old_rules_have_no_watermark() -> None:
    with pytest.raises(ConfigError, match=r"watermark is 0\.1, but vLLM 0\.20\.2 has none"):
        deployment(version="0.20.2", watermark=0.1).engine()


def test_drafts_beyond_the_budget_are_not_accepted() -> None:
    """All drafts are right, but at the budget the draft that thinks on is not the forced end."""
    plan = deployment(speculative=MTP, acceptance=Acceptance([1, 1, 1]))
    one = [Request("a", 0, 100, 120, reasoning_tokens=90)]
    free = plan.engine().run(one).drafts
    cut = replace(plan, thinking_token_budget=30).engine().run(one).drafts
    assert free.acceptance_rate == 1
    # The first token comes from the prompt. Then 29 = 7 * 4 + 1: the eighth draft crosses the budget at its second.
    assert cut.num_draft_tokens - cut.num_accepted_tokens == 2


def test_a_budget_nobody_reaches_changes_nothing() -> None:
    plan = deployment()
    assert replace(plan, thinking_token_budget=1000).engine().run(THINKERS).makespan_s == pytest.approx(
        plan.engine().run(THINKERS).makespan_s, rel=1e-6
    )
    with pytest.raises(ConfigError, match="thinking budget is -1"):
        replace(plan, thinking_token_budget=-1).engine().run(THINKERS)
