"""The benchmarks run and write what they promise. What they measure is not asserted: see `benchmarks/`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(script: str, json_file: Path, *arguments: str, **environment: str) -> tuple[dict[str, Any], str]:
    """Run a benchmark in tiny sizes; its JSON, and what it said on stderr."""
    peers = ("KVTIDE_VLLM_PYTHON", "KVTIDE_KVCACHE_SIMULATOR_PYTHON")
    inherited = {name: value for name, value in os.environ.items() if name not in peers}
    done = subprocess.run(
        [sys.executable, BENCHMARKS / script, "--smoke", "--json", json_file, *arguments],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(json_file.read_text())
    assert set(document) == {"figures", "versions", "machine"}
    assert {"python", "kvtide", "numpy"} <= set(document["versions"])
    assert {"cpu", "cores", "load_average"} <= set(document["machine"])
    for name, figure in document["figures"].items():
        assert set(figure) == {"value", "unit", "peer", "ratio", "target", "met"}, name
        assert name[:20] in done.stdout
    return document["figures"], done.stderr


def test_allocator_without_a_peer_leaves_its_figures_null(tmp_path: Path) -> None:
    figures, complaint = run("allocator.py", tmp_path / "out.json")
    assert "no peer" in complaint
    for name in ("decode_step", "cold_prompt", "full_hit"):
        assert figures[name]["value"] > 0
        assert figures[name]["peer"] is figures[name]["ratio"] is figures[name]["met"] is None
        assert figures[name]["target"].startswith("ratio >= ")
    for name in ("state", "row_cost_growth", "batch_growth", "context_growth", "pool_construction", "pool_growth"):
        assert figures[name]["value"] > 0
        assert figures[name]["peer"] is None


@pytest.mark.parametrize("python", [sys.executable, "/nowhere/python"])
def test_a_python_without_vllm_is_no_peer(python: str, tmp_path: Path) -> None:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from peer_process import PeerError, PeerProcess
    finally:
        sys.path.remove(str(BENCHMARKS))
    with pytest.raises(PeerError, match=r"No module named|cannot be run"):
        PeerProcess(Path(python))


def test_waste(shared: Path, tmp_path: Path) -> None:
    figures, complaint = run("waste.py", tmp_path / "out.json", KVTIDE_SHARED=str(shared))
    assert not complaint
    kvtide = figures["gemma-3-27b/kvtide"]
    assert kvtide["peer"] == min(figures[f"gemma-3-27b/{policy}"]["value"] for policy in ("uniform", "grouped", "lcm"))
    assert kvtide["ratio"] == pytest.approx(kvtide["peer"] / kvtide["value"])
    assert kvtide["met"] is (kvtide["ratio"] > 1)


def test_waste_without_the_trace_is_null_and_says_so(tmp_path: Path) -> None:
    figures, complaint = run("waste.py", tmp_path / "out.json", KVTIDE_SHARED=str(tmp_path))
    assert "KVTIDE_SHARED" in complaint
    for figure in figures.values():
        assert figure["value"] is figure["peer"] is figure["met"] is None


def test_simulate(shared: Path, tmp_path: Path) -> None:
    figures, complaint = run("simulate.py", tmp_path / "out.json", KVTIDE_SHARED=str(shared))
    assert "no peer" in complaint
    for name in ("mooncake_cpu", "mooncake_step", "day_request", "day_step", "hit_rates"):
        assert figures[name]["value"] > 0
    assert figures["day_memory"]["value"] > 0
    assert figures["day_memory"]["target"] is None  # not the whole day
    assert figures["hit_rates"]["peer"] is figures["hit_rates"]["met"] is None


def test_simulate_without_traces_is_null(tmp_path: Path) -> None:
    figures, complaint = run("simulate.py", tmp_path / "out.json", KVTIDE_SHARED=str(tmp_path))
    assert "KVTIDE_SHARED" in complaint
    assert all(figure["value"] is None for figure in figures.values())


def test_soak(tmp_path: Path) -> None:
    figures, _ = run("soak.py", tmp_path / "out.json", "--seed", "3")
    for name in ("wrong_tokens", "unexpected_ends", "files_left_over"):
        assert (figures[name]["value"], figures[name]["met"]) == (0, True), name
    assert figures["tokens_checked"]["value"] > 0
    assert figures["injected/kill"]["value"] > 0
    assert figures["memory_growth"]["value"] is None  # too short to say


SABOTAGE = """
from kvtide.connectors.host import HostConnector

class Lying(HostConnector):
    def get_into(self, keys, buffers):
        statuses = super().get_into(keys, buffers)
        for buffer in buffers:
            memoryview(buffer).cast("B")[0] ^= 1
        return statuses

class Leaking(HostConnector):
    def close(self):
        self.file = open("/dev/null")
        kept.append(self)
        super().close()

kept = []
"""


@pytest.mark.parametrize(("kind", "complaint"), [("Lying", "the query at"), ("Leaking", "files and threads before")])
def test_a_soak_worker_sees_what_is_wrong(kind: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "sabotage.py").write_text(SABOTAGE)
    options = {
        "seed": "1",
        "layouts": ["gemma"],
        "connector": f"sabotage:{kind}",
        "config": {"max_bytes": "4MiB"},
        "read_only": False,
        "cleans": False,
        "rests": 1,
        "rest_s": 1.0,
        "pause_s": 0.0,
        "beginnings": 2,
    }
    with subprocess.Popen(
        [sys.executable, BENCHMARKS / "soak_worker.py", json.dumps(options)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdout is not None
        lines = [json.loads(line) for line in worker.stdout]
    assert worker.returncode == 1
    assert lines[-1]["what"] == "failed"
    assert complaint in lines[-1]["reason"]
