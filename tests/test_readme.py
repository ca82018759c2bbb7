"""What the README shows must work as it stands there."""

from __future__ import annotations

import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from kvtide.cli import main
from kvtide.connectors.config import load_config

README = (Path(__file__).parents[1] / "README.md").read_text()


EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


PRINTED = ["MemoryByCause(needed=", "torch.Size([1, 1, 16, 512])", "0\n992\n"]


@pytest.mark.parametrize(("number", "printed"), list(enumerate(PRINTED)))
def test_the_python_examples_run(number: int, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(EXAMPLES[number], "README.md", "exec"), {})
    assert printed in capsys.readouterr().out
    assert len(EXAMPLES) == len(PRINTED)


def test_the_stores_configuration_is_valid_and_its_commands_exist() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    config = load_config(yaml.safe_load(text), environ={})
    assert config.kv_connector == "MultiConnector"
    for group, name in re.findall(r"^kvtide (config|store) (\w+)", README, re.MULTILINE):
        assert name in import_module(f"kvtide.cli.{group}").command.commands


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


COMMAND_LINE = re.compile(r"^kvtide ((?:waste|plan|layout|models|simulate)(?!.*path/to).*?)(?:  +#.*)?$", re.MULTILINE)


@pytest.mark.parametrize("line", COMMAND_LINE.findall(README))
def test_every_command_of_the_readme_runs(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = ["--num-requests", "30"] if "--trace" in line else []
    monkeypatch.setattr(sys, "argv", ["kvtide", *shlex.split(line), *extra])
    main.run()
    assert capsys.readouterr().out
