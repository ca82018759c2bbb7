"""A store that is damaged, gone or hung costs SGLang misses, which are counted; never an error, never wrong data."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hicaches import PAGE, HiCaches, late, prompt, shared

TOKENS = prompt(1, 400)


@contextmanager
def hanging(path: Path, what: str) -> Iterator[None]:
    file = path / f"hang-{what}"
    file.touch()
    try:
        yield
    finally:
        file.unlink()


@pytest.mark.parametrize("zero_copy", [True, False])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damaged_values_are_misses(damage: str, zero_copy: bool, hicaches: HiCaches, tmp_path: Path) -> None:
    cache = hicaches.open("damaged", shared(tmp_path / "kv"), zero_copy=zero_copy)
    assert cache.write(TOKENS) == 400
    files = sorted(path for path in (tmp_path / "kv").rglob("*") if path.is_file() and path.stat().st_size > 300)
    assert len(files) == 2 * len(TOKENS) // PAGE
    rng = random.Random(f"{damage} {zero_copy}")
    for file in rng.sample(files, 5):
        data = bytearray(file.read_bytes())
        if damage == "flip":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            file.write_bytes(data)
        elif damage == "truncate":
            file.write_bytes(data[: rng.randrange(len(data))])
        else:
            file.unlink()
    while True:  # each round finds the first of what is left, and the next one a shorter prefix
        hit, loaded, sound = cache.hits(TOKENS)
        assert sound == loaded <= hit <= 400
        assert loaded < 400
        if loaded == hit:
            break
    counts = cache.counts()
    assert counts["look_up_miss_pages"] + counts.get("load_corrupt", 0) + counts.get("load_miss", 0) > 0
    if damage == "flip":
        assert counts["load_corrupt"] > 0
    # It is stored again, and whole.
    assert cache.write(TOKENS) == 400
    for _ in range(10):
        if cache.hits(TOKENS) == (400, 400, 400):
            break
        cache.write(TOKENS)
    assert cache.hits(TOKENS) == (400, 400, 400)
    cache.close()


def test_a_store_that_is_gone_is_a_miss(hicaches: HiCaches, tmp_path: Path) -> None:
    cache = hicaches.open("gone", shared(tmp_path / "kv"))
    assert cache.write(TOKENS) == 400
    shutil.rmtree(tmp_path / "kv")
    assert cache.hits(TOKENS) == (0, 0, 0)
    cache.close()


@pytest.mark.parametrize("zero_copy", [True, False])
def test_hung_look_ups_are_misses(zero_copy: bool, hicaches: HiCaches, tmp_path: Path) -> None:
    cache = hicaches.open("hung", late(tmp_path / "kv"), look_up_timeout_s=0.2, zero_copy=zero_copy)
    assert cache.write(TOKENS) == 400
    with hanging(tmp_path, "look"):
        answer = cache.fetch(TOKENS)
        assert (answer["hit"], answer["counts"]["fault: deadline"]) == (0, 1)
        for _ in range(4):
            assert cache.fetch(TOKENS)["hit"] == 0
        before = cache.fetch(TOKENS)["counts"]
        after = cache.fetch(TOKENS)["counts"]
        # By now it is left alone: nothing is asked that could hang.
        assert after["fault: left alone"] > before.get("fault: left alone", 0)
    cache.close()


def test_hung_loads_are_misses(hicaches: HiCaches, tmp_path: Path) -> None:
    cache = hicaches.open("hung", late(tmp_path / "kv"), transfer_timeout_s=0.3)
    assert cache.write(TOKENS) == 400
    with hanging(tmp_path, "get"):
        assert cache.hits(TOKENS) == (400, 0, 0)
        assert cache.counts()["fault: deadline"] > 0
        # The pages that it would have read into are somebody else's by now, who reads and writes them in peace.
        assert cache.write(prompt(2, 400)) == 400
    cache.close()
    cache = hicaches.open("again", late(tmp_path / "kv"))
    assert cache.hits(TOKENS) == (400, 400, 400)
    assert cache.hits(prompt(2, 400)) == (400, 400, 400)
    cache.close()


def test_hung_saves_are_not_stored(hicaches: HiCaches, tmp_path: Path) -> None:
    cache = hicaches.open("hung", late(tmp_path / "kv"), transfer_timeout_s=0.3)
    with hanging(tmp_path, "put"):
        assert cache.write(TOKENS) == 0
        assert cache.counts()["save_error"] > 0
        assert cache.fetch(TOKENS)["hit"] == 0
    cache.close()  # waits for what hung
    cache = hicaches.open("again", late(tmp_path / "kv"))
    hit, loaded, sound = cache.hits(TOKENS)  # what came late is whole, although its pages were given away
    assert hit == loaded == sound
    cache.close()


def test_failures_that_sglang_itself_injects(hicaches: HiCaches, tmp_path: Path) -> None:
    hicaches.ask("failures", probability=0.3)
    cache = hicaches.open("unlucky", shared(tmp_path / "kv"))
    hicaches.ask("failures", probability=None)
    for number in range(20):
        tokens = prompt(number % 5, 200)
        written = cache.write(tokens, data=number % 5)
        assert written in (0, 200)
        hit, loaded, sound = cache.hits(tokens, data=number % 5)
        assert sound == loaded <= hit
    cache.close()
