"""Every reader of foreign input, fuzzed: it takes what it is given or refuses it in a sentence, within bounds.

The quick profile is the same on every run. `KVTIDE_FUZZ_MINUTES=60` fuzzes that long in all, with seeds that
`KVTIDE_FUZZ_SEED` numbers from. What was found is in plain tests beside the code that it was found in.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("child.py")
NAMES = (
    "models",
    "layouts",
    "connectors",
    "traces",
    "speculation",
    "recorded runs",
    "values",
    "shared files",
    "lmdb files",
    "commands",
)
MINUTES = float(os.environ.get("KVTIDE_FUZZ_MINUTES", "0"))
FIRST_SEED = int(os.environ.get("KVTIDE_FUZZ_SEED", "1"))


def fuzz(name: str, seed: int, folder: Path, *more: str) -> None:
    done = subprocess.run(
        [sys.executable, CHILD, name, "--seed", str(seed), *more],
        cwd=folder,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=1800,
        check=False,
    )
    if done.returncode:
        example = (folder / "example").read_text("utf-8", "replace") if (folder / "example").exists() else ""
        pytest.fail(
            f"{name}, seed {seed}, exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-8000:]}\n"
            f"last example: {example[:2000]}",
            pytrace=False,
        )


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_read_is_taken_or_refused(name: str, tmp_path: Path) -> None:
    fuzz(name, 0, tmp_path)
    ends = time.monotonic() + 60 * MINUTES / len(NAMES)
    seed = FIRST_SEED
    while time.monotonic() < ends:
        fuzz(name, seed, tmp_path, "--examples", "1000")
        seed += 1
