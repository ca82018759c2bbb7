"""Completion in real shells: the script is read by one, and it then completes commands and options."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}


def script(shell: str) -> str:
    done = subprocess.run([BIN / "kvtide", "completion", shell], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [("kvtide st", "store"), ("kvtide store ver", "verify"), ("kvtide waste --max-num", "--max-num-batched-tokens")],
)
def test_bash_completes(words: str, expected: str, tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    (tmp_path / "completion.bash").write_text(script("bash"))
    parts = words.split()
    code = (
        f"source {tmp_path}/completion.bash; COMP_WORDS=({words}); COMP_CWORD={len(parts) - 1}; "
        '_kvtide_completion kvtide; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert expected in done.stdout.split()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_accept_their_script(shell: str, tmp_path: Path) -> None:
    text = script(shell)
    assert "_KVTIDE_COMPLETE" in text
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    (tmp_path / "script").write_text(text)
    subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)


def test_fish_completes(tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("no fish")
    (tmp_path / "kvtide.fish").write_text(script("fish"))
    code = f"source {tmp_path}/kvtide.fish; complete -C 'kvtide store ver'"
    environment = {**ENVIRONMENT, "HOME": str(tmp_path)}
    done = subprocess.run(
        ["fish", "--no-config", "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["verify"]


def test_an_unknown_shell_is_one_sentence() -> None:
    done = subprocess.run([BIN / "kvtide", "completion", "tcsh"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("kvtide: Invalid value for '{bash|zsh|fish}'")
