"""The published traces themselves, against figures computed from them independently of kvtide's readers."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from kvtide.sims.traces import Request, open_trace

SHARED = Path(os.environ.get("KVTIDE_SHARED") or Path(__file__).parents[2] / "shared") / "traces"


def real(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{path} is absent; set KVTIDE_SHARED to the folder that holds traces/")
    return path


def lengths(requests: list[Request]) -> tuple[float, float, list[int]]:
    inputs = sorted(request.input_tokens for request in requests)
    p50, p90 = (inputs[int(q * len(inputs))] for q in (0.5, 0.9))
    outputs = np.mean([request.output_tokens for request in requests])
    return round(float(np.mean(inputs)), 1), round(float(outputs), 1), [p50, p90, inputs[-1]]


@pytest.mark.parametrize(
    ("name", "format", "count", "want", "block"),
    [
        ("mooncake/synthetic_trace.jsonl", "mooncake", 3993, (15325.5, 149.1, [11587, 38615, 191378]), 512),
        ("azure/AzureLLMInferenceTrace_code.csv", "azure", 8819, (2047.8, 27.9, [1469, 5194, 7437]), 0),
        ("llmservingsim/RTXPRO6000_Qwen3-32B", "llmservingsim", 300, None, 0),
        ("llmservingsim/RTXPRO6000_Qwen3-30B-A3B-Instruct-2507/requests.jsonl", "llmservingsim", 300, None, 0),
        ("llmservingsim/sharegpt-qwen3-32b-300-sps10.blk16.jsonl", "mooncake", 300, None, 16),
        ("llmservingsim/sharegpt-qwen3-30b-a3b-300-sps10.blk16.jsonl", "mooncake", 300, None, 16),
        ("weka_claude_code", "weka", 102, None, 64),
        ("weka_claude_code/trace_0026.json", "weka", 3, None, 64),
    ],
)
def test_published_traces(name, format, count, want, block):
    trace = open_trace(real(name))
    requests = list(trace)
    assert (trace.format, len(requests)) == (format, count)
    assert {request.hash_block for request in requests} == {block}
    assert len({request.request_id for request in requests}) == count
    assert trace.bytes_read == trace.num_bytes > 0
    if want is not None:
        assert lengths(requests) == want


def test_derived_hash_trace_agrees_with_the_measured_requests():
    measured = list(open_trace(real("llmservingsim/RTXPRO6000_Qwen3-32B")))
    derived = list(open_trace(real("llmservingsim/sharegpt-qwen3-32b-300-sps10.blk16.jsonl")))
    assert [r.input_tokens for r in measured] == [r.input_tokens for r in derived]
    assert [r.output_tokens for r in measured] == [r.output_tokens for r in derived]


def test_weka_totals_and_sharing():
    requests = list(open_trace(real("weka_claude_code")))
    # `totals.combined_tokens` of the six files
    assert sum(r.input_tokens for r in requests) == 4873373 + 649460 + 943452 + 627951 + 52760 + 114011
    assert sum(r.output_tokens for r in requests) == 27119 + 4130 + 2607 + 10690 + 5294 + 1821
    seen: dict[str, set[int]] = {}
    for request in requests:
        seen.setdefault(request.request_id.split("/")[0], set()).update(request.hash_ids or ())
    assert len(seen) == 6
    assert sum(map(len, seen.values())) == len(set().union(*seen.values()))


def test_servegen_reasoning_is_sampled_from_its_histograms():
    trace = open_trace(real("servegen/deepseek-r1"), num_requests=40_000, seed=7)
    requests = list(trace)
    arrivals = [r.arrival_s for r in requests]
    assert (trace.format, trace.num_bytes, len(requests)) == ("servegen", 0, 40_000)
    assert arrivals == sorted(arrivals)
    assert all(0 <= (r.reasoning_tokens or 0) <= r.output_tokens for r in requests)
    assert {r.image_tokens for r in requests} == {0}
    assert requests == list(open_trace(SHARED / "servegen/deepseek-r1", num_requests=40_000, seed=7))
    assert requests[:100] == list(open_trace(SHARED / "servegen/deepseek-r1", num_requests=100, seed=7))
    assert requests[:100] != list(open_trace(SHARED / "servegen/deepseek-r1", num_requests=100, seed=8))


def test_servegen_images():
    requests = list(open_trace(real("servegen/mm-image"), duration_s=600))
    # Clients 0, 2, 5 and 14 have a rate in the first window: 483, 21, 234 and 104 requests of 600 s.
    assert len(requests) == 483 + 21 + 234 + 104
    assert all(0 < r.image_tokens < r.input_tokens for r in requests)
    assert {r.reasoning_tokens for r in requests} == {None}
