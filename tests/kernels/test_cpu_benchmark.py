"""`benchmarks/cpu_mla.py` runs and writes what it promises; what it measures is not asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "cpu_mla.py"


def test_a_tiny_run(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--smoke", "--json", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert set(document) == {"figures", "versions", "machine"}
    assert "torch" in document["versions"]
    for name in ("decode_float32", "decode_bfloat16"):
        figure = document["figures"][name]
        assert figure["value"] > 0
        assert figure["peer"] > 0
        assert figure["target"] == "ratio >= 1.2"
    assert document["figures"]["float32_of_matmul"]["value"] > 0
    assert done.stdout.count("prefill of") == 2
