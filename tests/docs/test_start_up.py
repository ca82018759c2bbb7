"""The benchmark of starting runs, and what it counts on holds: the allocator brings no torch along."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks/start_up.py"


def test_the_benchmark_writes_what_it_promises(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--smoke", "--json", tmp_path / "out.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert set(figures) == {"hma", "offload", "config", "help", "torch"}
    assert figures["torch"]["value"] == 0
    for name in ("hma", "offload", "config", "help"):
        assert figures[name]["value"] is not None
        assert figures[name]["unit"] == "ms"
