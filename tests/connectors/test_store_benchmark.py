"""The benchmark of the stores runs and writes what it promises; what it measures is not asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "offload.py"


def test_it_runs_without_a_peer(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--smoke", "--path", tmp_path, "--json", out],
        env={name: value for name, value in os.environ.items() if name != "KVTIDE_LMCACHE_PYTHON"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no LMCache" in done.stderr
    figures = json.loads(out.read_text())["figures"]
    for name in ("read_64KiB", "write_64KiB", "strict_write_64KiB", "inline_get_64KiB"):
        assert figures[name]["ratio"] > 0
    for name in ("checksum_64KiB", "lookup_writer", "lookup_reader", "memory_bytes_per_object", "open_without_index"):
        assert figures[name]["value"] > 0
    assert list(tmp_path.iterdir()) == [out]
