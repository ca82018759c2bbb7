"""A store that is damaged, emptied, unwritable or hangs between two runs costs time only, and is counted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import Engine, MakeEngine, References, prompt, shared, transfer

PROMPTS = [prompt(seed, 300) for seed in range(40, 43)]
NONE = [0, 0, 0]


def values(path: Path) -> list[Path]:
    """The files of a shared store that hold values (of a block's kilobytes)."""
    return [file for file in path.rglob("*") if file.is_file() and file.stat().st_size > 4096]


def flip(file: Path) -> None:
    with file.open("r+b") as data:
        data.seek(-1000, os.SEEK_END)
        byte = data.read(1)
        data.seek(-1000, os.SEEK_END)
        data.write(bytes([byte[0] ^ 1]))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def run(engine: Engine, expected: list[list[int]]) -> dict[str, Any]:
    """A run of all prompts with an empty device; what was counted meanwhile."""
    engine.reset()
    before = engine.ask("counts")["counts"]
    answer = engine.generate(PROMPTS)
    assert answer["tokens"] == expected
    assert set(answer["reasons"]) == {"length"}
    return {**answer, "counts": {name: n - before.get(name, 0) for name, n in answer["counts"].items()}}


def mend(engine: Engine, expected: list[list[int]]) -> None:
    """Runs until all prompts are hit again: after failures in a row the store is left alone, up to a minute."""
    expires = time.monotonic() + 120
    while min(run(engine, expected)["cached"]) == 0:
        assert time.monotonic() < expires
        engine.ask("wait", seconds=1)


@pytest.mark.parametrize("kind", ["hybrid", "full"])
def test_faults_between_runs(kind: str, make_engine: MakeEngine, reference: References, tmp_path: Path) -> None:
    path = tmp_path / "kv"
    store = shared(path)
    store["kv_connector"] = "faulty_store:HangingStore"
    engine = make_engine(kind, transfer(store, look_up_timeout_s=0.3, transfer_timeout_s=0.5))
    expected = reference(kind, PROMPTS)
    assert engine.generate(PROMPTS)["tokens"] == expected
    assert min(run(engine, expected)["cached"]) > 0

    damages: list[Callable[[Path], None]] = [flip, cut]
    for damage in damages:
        files = values(path)
        assert files
        for file in files:
            damage(file)
        answer = run(engine, expected)
        assert answer["counts"].get("load_corrupt", 0) > 0, damage
        assert min(run(engine, expected)["cached"]) > 0, damage  # mended by what was computed anew

    # One value of many: what it fails is the request, or the blocks from it on, that it belongs to.
    flip(sorted(values(path), key=lambda file: file.stat().st_mtime)[0])
    run(engine, expected)
    run(engine, expected)

    for file in values(path):
        file.unlink()
    answer = run(engine, expected)
    assert answer["cached"] == NONE
    assert min(run(engine, expected)["cached"]) > 0

    for what, counted in (("look", "fault: deadline"), ("get", "load_error"), ("put", None)):
        hang = tmp_path / f"hang-{what}"
        if what == "put":
            for file in values(path):
                file.unlink()
        hang.touch()
        answer = run(engine, expected)
        if counted is not None:
            assert answer["counts"].get(counted, 0) > 0, what
        assert answer["seconds"] < 30
        hang.unlink()
        mend(engine, expected)

    for file in values(path):
        file.unlink()
    engine.ask("unwritable")
    answer = run(engine, expected)
    assert answer["counts"].get("save_error", 0) + answer["counts"].get("save_full", 0) > 0
    assert run(engine, expected)["cached"] == NONE
    engine.ask("writable")
    mend(engine, expected)
    engine.exit()
