"""What each benchmark measures and how it is run, from the docstrings of `benchmarks/`: nothing is run here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
USAGE = re.compile(r"^    (?:\S+/)?python (benchmarks/\w+\.py)", re.MULTILINE)


def pages() -> dict[str, str]:
    """The page, to be included in the performance reference."""
    parts = [
        f"### {script.name}\n\n{text}\n"
        for script in sorted(BENCHMARKS.glob("*.py"))
        if USAGE.search(text := docstring(script))
    ]
    return {"benchmarks.md": "\n".join(parts)}


def docstring(script: Path) -> str:
    """A script's docstring, without importing it."""
    return ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
