"""What the README shows must work as it stands there."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from kvtide.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert "MemoryByCause(needed=" in capsys.readouterr().out


def test_the_pasted_demo_output_is_what_the_demo_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = re.search(
        r"exec \.venv/bin/kvtide (.*) \"\$@\"", (Path(__file__).parents[1] / "scripts/demo").read_text()
    )
    assert command is not None
    monkeypatch.setattr(sys, "argv", ["kvtide", *shlex.split(command[1])])
    monkeypatch.setenv("COLUMNS", "140")
    main.run()
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines())
    assert printed in README


COMMAND_LINE = re.compile(r"^kvtide ((?:waste|plan|layout|models)(?!.*path/to).*?)(?:  +#.*)?$", re.MULTILINE)


@pytest.mark.parametrize("line", COMMAND_LINE.findall(README))
def test_every_command_of_the_readme_runs(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = ["--num-requests", "30"] if "--trace" in line else []
    monkeypatch.setattr(sys, "argv", ["kvtide", *shlex.split(line), *extra])
    main.run()
    assert capsys.readouterr().out
