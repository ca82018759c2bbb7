"""`--help` teaches: every command shows examples, and the examples run as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kvtide.cli import main
from kvtide.cli.main import cli

BIN = Path(sys.executable).parent
NOT_RUN = {
    "kvtide calibrate": "needs a recorded run",
    "KV_SECRET=... kvtide store serve": "serves until it is stopped",
    "kvtide sweep --model config.json --trace demo --grid": "needs a Dask cluster",
    "kvtide doctor": "takes as long as importing everything; see test_doctor",
}
SHELL = re.compile(r"[>$|]|^[A-Z_]+=")  # what only a shell understands
SHORTER = {"--trace demo": " --num-requests 30", "kvtide store bench": " --total 1MiB"}


def commands(
    command: click.Command = cli, path: tuple[str, ...] = ("kvtide",)
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command and group, by its path."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path[-1])
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands(found, (*path, name))


def examples() -> list[str]:
    found = []
    for _, command in commands():
        _, _, text = (command.help or "").partition("Examples:\n")
        joined = re.sub(r"\\\n\s*", "", text)  # a command may go on on the next line
        found += [line.strip() for line in joined.splitlines() if "kvtide" in line]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("path", [" ".join(path) for path, _ in commands()])
def test_every_command_explains_itself_and_shows_examples(path: str) -> None:
    command = {" ".join(parts): found for parts, found in commands()}[path]
    text = command.help or ""
    _, _, shown = text.partition("Examples:\n")
    assert re.search(r"^ *(\S+=\S+ )?kvtide ", shown, re.MULTILINE), f"{path} shows no example"
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert parameter.help, f"{path}: {parameter.opts} has no help"


@pytest.mark.parametrize("line", examples())
def test_examples_run(
    line: str, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for beginning, reason in NOT_RUN.items():
        if line.startswith(beginning):
            pytest.skip(reason)
    line = re.sub(r"--num-requests \d+", "", line)
    for part, more in SHORTER.items():
        if part in line:
            line += more
    if SHELL.search(line):
        environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(place)}
        done = subprocess.run(["bash", "-c", line], cwd=place, env=environment, check=False)
        code = done.returncode
    else:
        monkeypatch.chdir(place)
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        code = 0
        try:
            main.run()
        except SystemExit as stop:
            code = int(stop.code or 0)
    printed = capfd.readouterr()
    assert (code, printed.err) == (0, "")
    assert ">" in line or printed.out


def test_examples_are_found() -> None:
    assert len(examples()) > 25
    assert any(line.startswith("kvtide store explain") for line in examples())
