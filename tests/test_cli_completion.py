"""Completion in real shells, as they ask for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(sys.executable).parent


def run(command: list[str], **environment: str) -> str:
    path = f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": path, **environment})
    return done.stdout


@pytest.mark.parametrize(
    ("line", "offered"),
    [("kvtide sto", "store"), ("kvtide store ver", "verify"), ("kvtide waste --mod", "--model")],
)
def test_bash_completes_commands_and_options(line, offered):
    if shutil.which("bash") is None:
        pytest.skip("no bash here")
    words = line.split()
    # As bash does it: source the script, then call the function that it registers, with the words of the line.
    script = f"""
eval "$(kvtide completion bash)"
COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}
function=$(complete -p kvtide | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function kvtide {words[-1]} {words[-2]}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    assert run(["bash", "-c", script]).split() == [offered]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_is_printed(shell):
    script = run(["kvtide", "completion", shell])
    assert "_KVTIDE_COMPLETE" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=20)


def test_another_shell_is_one_sentence_and_exit_code_2():
    done = subprocess.run([SCRIPTS / "kvtide", "completion", "csh"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'csh' is not one of" in done.stderr
    assert done.stderr.count("\n") == 1
