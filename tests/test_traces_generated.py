"""Generated traces: ServeGen sampling against its own distributions, and the bundled demo."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from kvtide.kvcache import TraceError
from kvtide.sims.traces import open_trace

TEXT = {"input_tokens": "{10: 0.25, 30: 0.75}", "output_tokens": "{100: 0.5, 300: 0.5}"}
IMAGES = {
    "text_tokens": "{40: 1.0}",
    "image_tokens": "{0: 0.0, 500: 0.5, 1500: 0.5}",
    "image_count": "{0: 0.5, 2: 0.5}",
    "audio_tokens": "{7: 1.0}",
    "audio_count": "{1: 1.0}",
    "output_tokens": "{20: 1.0}",
}
EMPTY = {"input_tokens": "{}", "output_tokens": "{}"}


def client(folder: Path, number: int, dataset: object, windows: str) -> Path:
    (folder / f"chunk-{number}-dataset.json").write_text(json.dumps(dataset))
    (folder / f"chunk-{number}-trace.csv").write_text(windows)
    return folder


def test_rates_lengths_and_reasoning(tmp_path):
    dataset = {"0": TEXT | {"reason_ratio": "{0.0: 0.5, 0.5: 0.5}"}}
    client(tmp_path, 0, dataset, "0,4.0,1.2,Gamma,0.7,3.0\n600,0,0,,0,0\n1200,12.5,2,Weibull,0.6,9\n")
    requests = list(open_trace(tmp_path, seed=3))
    arrivals = np.array([r.arrival_s for r in requests])
    assert np.histogram(arrivals, [0, 600, 1200, 1800])[0].tolist() == [2400, 0, 7500]
    assert (np.diff(arrivals) >= 0).all()
    first_gaps = np.diff(arrivals[:2400])
    # A Gamma of shape 0.7 varies by 1 / sqrt(0.7).
    assert first_gaps.std() / first_gaps.mean() == pytest.approx(0.7**-0.5, rel=0.1)
    assert np.mean([r.input_tokens for r in requests]) == pytest.approx(25, rel=0.03)
    assert np.mean([r.output_tokens for r in requests]) == pytest.approx(200, rel=0.03)
    assert np.mean([r.reasoning_tokens for r in requests]) == pytest.approx(50, rel=0.05)


def test_image_tokens_are_the_mean_per_image_times_the_count(tmp_path):
    client(tmp_path, 0, {"0": IMAGES}, "0,10,1,Gamma,1,1\n")
    requests = list(open_trace(tmp_path))
    assert len(requests) == 6000  # a lone window lasts 600 s
    assert {r.image_tokens for r in requests} == {0, 1000, 3000}
    assert np.mean([r.image_tokens for r in requests]) == pytest.approx(1000, rel=0.05)
    assert {r.input_tokens - r.image_tokens for r in requests} == {47}


def test_windows_without_data_take_the_nearest_and_clients_without_any_are_skipped(tmp_path):
    curve = "0,1,1,Gamma,1,1\n600,1,1,Gamma,1,1\n1200,1,1,Gamma,1,1\n"
    late = {"input_tokens": "{7: 1.0}", "output_tokens": "{1: 1.0}"}
    client(tmp_path, 2, {"0": EMPTY, "600": TEXT, "1200": late}, curve)
    client(tmp_path, 10, {"0": EMPTY}, curve)
    client(tmp_path, 11, {"0": {"input_tokens": "{0: 1.0}", "output_tokens": "{0: 1.0}"}}, curve)
    trace = open_trace(tmp_path)
    requests = list(trace)
    assert len(requests) == 1800
    assert {r.input_tokens for r in requests if r.arrival_s < 1200} == {10, 30}
    assert {r.input_tokens for r in requests if r.arrival_s >= 1200} == {7}
    assert trace.num_skipped == 3600


@pytest.mark.parametrize(
    ("dataset", "windows", "message"),
    [
        ({"0": TEXT}, "0,1,1,Pareto,1,1\n", r"chunk-0-trace.csv, line 1: pattern is 'Pareto' .* Gamma or Weibull"),
        ({"0": TEXT}, "0,nan,1,Gamma,1,1\n", r"line 1: rate_rps is 'nan'"),
        ({"0": TEXT}, "0,1e9,1,Gamma,1,1\n", r"line 1: rate_rps is 1e\+09, but must be at most 10000"),
        ({"0": TEXT}, "0,1,1,Gamma,1,1\n9999999,9,1,Gamma,1,1\n", r"line 2: a window of .* more than 10,000,000"),
        ({"0": TEXT}, "0,1,1,Gamma,1,1\n0,1,1,Gamma,1,1\n", r"line 2: window_start_s is 0"),
        ({"0": TEXT}, "0,1,1\n", r"line 1: has 3 fields"),
        ({"0": TEXT}, "", r"has no requests"),
        ([1], "0,1,1,Gamma,1,1\n", r"chunk-0-dataset.json: must hold a JSON object"),
        ({"x": TEXT}, "0,1,1,Gamma,1,1\n", r"a window is 'x'"),
        ({"0": 5}, "0,1,1,Gamma,1,1\n", r"window '0' is 5"),
        ({"0": {"input_tokens": "{1: 1}"}}, "0,1,1,Gamma,1,1\n", r"has no key 'output_tokens'"),
        ({"0": TEXT | {"input_tokens": 5}}, "0,1,1,Gamma,1,1\n", r"input_tokens in window '0' is 5"),
        ({"0": TEXT | {"input_tokens": "__import__('os')"}}, "0,1,1,Gamma,1,1\n", r"must look like \{17: 0.25"),
        ({"0": TEXT | {"input_tokens": "{1: 1, 2}"}}, "0,1,1,Gamma,1,1\n", r"must look like"),
        ({"0": TEXT | {"input_tokens": "{1:2:3: 1}"}}, "0,1,1,Gamma,1,1\n", r"must look like"),
        ({"0": TEXT | {"input_tokens": "{1.5: 1}"}}, "0,1,1,Gamma,1,1\n", r"not a whole number"),
        ({"0": TEXT | {"input_tokens": "{-1: 1}"}}, "0,1,1,Gamma,1,1\n", r"outside 0 to 2\*\*30"),
        ({"0": TEXT | {"input_tokens": "{1e99: 1}"}}, "0,1,1,Gamma,1,1\n", r"outside 0 to 2\*\*30"),
        ({"0": TEXT | {"input_tokens": "{1: nan}"}}, "0,1,1,Gamma,1,1\n", r"outside 0 to 2\*\*30"),
        ({"0": TEXT | {"reason_ratio": "{1.5: 1}"}}, "0,1,1,Gamma,1,1\n", r"outside 0 to 1"),
        ({"0": TEXT | {"input_tokens": "{1: 0.5}"}}, "0,1,1,Gamma,1,1\n", r"do not add up to 1"),
        ({"0": TEXT | {"input_tokens": "{1: 2, 2: -1}"}}, "0,1,1,Gamma,1,1\n", r"negative or do not add up"),
    ],
)
def test_servegen_errors(tmp_path, dataset, windows, message):
    client(tmp_path, 0, dataset, windows)
    with pytest.raises(TraceError, match=message):
        list(open_trace(tmp_path))


def test_servegen_clients_must_share_their_windows(tmp_path):
    client(tmp_path, 0, {"0": TEXT}, "0,1,1,Gamma,1,1\n")
    client(tmp_path, 1, {"0": TEXT}, "60,1,1,Gamma,1,1\n")
    with pytest.raises(TraceError, match=r"chunk-1-dataset.json: the client's windows do not start"):
        list(open_trace(tmp_path))


def test_servegen_without_its_rate_curve(tmp_path):
    (tmp_path / "chunk-0-dataset.json").write_text("{}")
    with pytest.raises(TraceError, match=r"chunk-0-trace.csv: cannot be read: No such file"):
        list(open_trace(tmp_path))


def test_demo_is_the_same_everywhere():
    trace = open_trace("demo")
    requests = list(trace)
    assert (trace.name, trace.format, trace.num_bytes, len(requests)) == ("demo", "demo", 0, 2000)
    digest = hashlib.sha256(json.dumps([request[:8] for request in requests]).encode()).hexdigest()
    assert digest == "4a8020e4e1f06a02bac979352039394e48425d7272043ff7c7508be23a54e42d"
    assert list(open_trace("demo", num_requests=50)) == requests[:50]
    assert list(open_trace("demo", num_requests=50, seed=1)) != requests[:50]
    assert max(r.arrival_s for r in open_trace("demo", duration_s=60)) < 60


def test_demo_is_plausible():
    requests = list(open_trace("demo"))
    arrivals = [r.arrival_s for r in requests]
    assert arrivals == sorted(arrivals)
    inputs = np.array([r.input_tokens for r in requests])
    assert inputs.max() > 4 * np.median(inputs)  # heavy tail
    assert inputs.max() <= 120_000
    assert {r.request_id.split("-")[0] for r in requests} == {"chat", "document", "agent"}
    assert len({r.request_id for r in requests}) == len(requests)
    assert any(r.image_tokens for r in requests)
    assert any(r.reasoning_tokens for r in requests)
    for r in requests:
        assert r.hash_block == 64
        assert len(r.hash_ids) == r.input_tokens // 64
        assert r.image_tokens < r.input_tokens
        assert 0 <= r.reasoning_tokens < r.output_tokens
    # Equal id, equal prefix: an id has one place, and always the same one before it.
    before: dict[int, int] = {}
    for r in requests:
        for left, right in zip((-1, *r.hash_ids), r.hash_ids, strict=False):
            assert before.setdefault(right, left) == left
    sessions: dict[int, set[str]] = {}
    for r in requests:
        for block in r.hash_ids:
            sessions.setdefault(block, set()).add(r.request_id.split("/")[0])
    assert sum(len(users) > 1 for users in sessions.values()) > 1000  # sharing between sessions, not only within
