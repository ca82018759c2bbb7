"""The benchmark of the stores in other processes runs, and writes what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import services
from services import skipping

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "offload_remote.py"


def test_figures_of_a_store_and_of_a_peer(tmp_path: Path) -> None:
    if find_spec("redis") is None or find_spec("nixl") is None:
        pytest.skip("redis or nixl is not installed")
    with skipping():
        services.program("redis-server")
    command = [sys.executable, SCRIPT, "--smoke", "--only", "redis", "--only", "nixl_peer", "--json", tmp_path / "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "json").read_text())["figures"]
    assert set(figures) == {
        *(f"redis {what}" for what in ("put 64 KiB", "get 64 KiB", "lookup", "first byte")),
        *(f"nixl_peer {what}" for what in ("get 64 KiB", "first byte")),
    }
    for name in ("redis put 64 KiB", "redis get 64 KiB"):
        assert figures[name]["ratio"] > 0
    assert "Traceback" not in done.stderr
