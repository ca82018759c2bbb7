"""What the pages show runs as it stands: Python blocks one after the other, commands in a shell, the example store."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BIN = Path(sys.executable).parent
PAGES = sorted(path for folder in ("quickstart", "concepts", "howto") for path in (DOCS / folder).glob("*.md"))
PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"^```\{code-block\} yaml\n:caption: (\S+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Installing is the packaging tests' business; the doctor has tests of its own, and takes long.
NOT_RUN = ("pip install", "kvtide doctor")


def pages_with(pattern: re.Pattern[str]) -> list[Path]:
    return [path for path in PAGES if pattern.search(path.read_text())]


@pytest.mark.parametrize("page", pages_with(PYTHON), ids=lambda path: path.stem)
def test_python_runs(page: Path, tmp_path: Path) -> None:
    """In a process of its own: one page registers a kernel."""
    pytest.importorskip("torch")
    code = "\n".join(PYTHON.findall(page.read_text()))
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", pages_with(CONSOLE), ids=lambda path: path.stem)
def test_commands_run(page: Path, place: Path) -> None:
    text = page.read_text()
    for name, content in FILE.findall(text):
        (place / name).write_text(content)
    shutil.rmtree(place / "kv")
    lines = [line for block in CONSOLE.findall(text) for line in block.splitlines()]
    assert all(line.startswith("$ ") for line in lines)
    commands = [re.sub(r"  +#.*", "", line[2:]) for line in lines]
    commands = [command for command in commands if not command.startswith(NOT_RUN)]
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(place)}
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command], cwd=place, env=environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), command


def test_the_example_store_keeps_the_promises(tmp_path: Path) -> None:
    for name in ("sqlite_store.py", "sqlite_store_test.py"):
        shutil.copy(DOCS / "howto" / name, tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "sqlite_store_test.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 25


FIGURES = (ROOT / "README.md").read_text().partition("## Figures")[2].partition("\n## ")[0]
COMMAND = re.compile(r"`(?:\S+/)?python (benchmarks/\w+\.py)([^`]*)`|`(kvtide [^`]*)`")


def test_every_figure_names_the_command_that_prints_it() -> None:
    """A paragraph with figures begins with its command; a table belongs to the paragraph before it."""
    paragraphs = [part for part in FIGURES.strip().split("\n\n") if not part.startswith("|")]
    assert len(paragraphs) >= 4
    for paragraph in paragraphs:
        if re.search(r"\d", paragraph):
            assert COMMAND.search(paragraph), paragraph[:80]


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *PAGES, *sorted((DOCS / "reference").glob("*.md"))], ids=lambda path: path.stem
)
def test_commands_that_are_named_exist(page: Path) -> None:
    from kvtide.cli.main import COMMANDS

    for script, options, command in COMMAND.findall(page.read_text()):
        if script:
            source = (ROOT / script).read_text()
            assert "__main__" in source
            for option in re.findall(r"--[a-z-]+", options):
                named = f'"{option}"' in source or option in ("--quick", "--json")  # which benchmarks/report.py has
                assert named, f"{script} {option}"
        else:
            assert shlex.split(command)[1] in COMMANDS, command
