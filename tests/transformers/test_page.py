"""What the documentation's page shows runs, and prints what stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")

PAGE = (Path(__file__).parents[2] / "docs/integrations/transformers.md").read_text()


def test_the_page_shows_what_happens(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "Gemma3TextConfig" in block)
    exec(compile(code, "transformers.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert "\n".join(printed[:2]) in PAGE
    assert printed[2].startswith("MemoryByCause(needed=")
