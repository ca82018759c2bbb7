"""The benchmark of offload policies: it runs, and says null where there is no trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "offload_policies.py"


def figures_of(folder: Path, shared: Path) -> dict[str, dict[str, float | None]]:
    file = folder / "figures.json"
    subprocess.run(
        [sys.executable, SCRIPT, "--smoke", "--json", file],
        env=os.environ | {"KVTIDE_SHARED": str(shared)},
        check=True,
        capture_output=True,
    )
    found: dict[str, dict[str, float | None]] = json.loads(file.read_text())["figures"]
    return found


def test_without_traces_every_figure_is_null(tmp_path: Path) -> None:
    figures = figures_of(tmp_path, tmp_path)
    assert len(figures) > 20
    assert {figure["value"] for figure in figures.values()} == {None}


def test_conversations_are_hit_where_prompts_end(tmp_path: Path, shared: Path) -> None:
    """A dozen requests of six conversations: windows at the ends of prompts complete nearly all hits there are."""
    figures = figures_of(tmp_path, shared)
    ends, none = (figures[f"window/weka/gemma-3-12b/{where}"] for where in ("prompt_ends", "none"))
    assert (none["value"] or 0) < (ends["value"] or 0) <= (ends["peer"] or 0)
    assert (ends["ratio"] or 9) < 1.05
    tail, head = (figures[f"evict/weka/0.2/lru{order}"]["value"] or 0 for order in ("+prefix", ""))
    assert tail > head
