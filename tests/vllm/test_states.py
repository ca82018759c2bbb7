"""Recurrent states (a small Qwen3-Next): stored where vLLM keeps them, loaded at the end of a hit, tokens unchanged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from engines import Engine, MakeEngine, prompt, shared, transfer

BLOCK = 256  # vLLM makes blocks of attention as large as a state
# vLLM's recurrent layers run in bfloat16 on a CPU, so that other batches could give other tokens: one prompt at a time.
SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "block_size": None, "max_model_len": 2048, "mamba_cache_mode": "align"}
FIRST = prompt(1, 900)
LONGER = [*FIRST, *prompt(2, 40)]
SHORT = prompt(1, 560)
BRANCH = [*prompt(1, 520), *prompt(3, 100)]


def run(engine: Engine, tokens: list[int]) -> tuple[int, list[int]]:
    """Cached tokens and the answer, of an engine whose device is empty."""
    engine.reset()
    answer = engine.generate([tokens], 16)
    return answer["cached"][0], list(answer["tokens"][0])


def test_states_survive_a_restart(make_engine: MakeEngine, tmp_path: Path) -> None:
    settings = {**SETTINGS, "enable_prefix_caching": True}
    plain = make_engine("state", **settings)
    assert plain.facts["groups"] == ["MambaSpec", "FullAttentionSpec"]
    expected = {name: run(plain, tokens)[1] for name, tokens in (("first", FIRST), ("longer", LONGER))}
    expected |= {name: run(plain, tokens)[1] for name, tokens in (("short", SHORT), ("branch", BRANCH))}
    plain.exit()

    path = tmp_path / "kv"
    engine = make_engine("state", transfer(shared(path)), **settings)
    assert engine.facts["groups"] == ["MambaSpec", "FullAttentionSpec"]
    assert run(engine, FIRST) == (0, expected["first"])
    engine.exit()

    engine = make_engine("state", transfer(shared(path)), **settings)
    assert run(engine, FIRST) == (3 * BLOCK, expected["first"])
    assert engine.ask("counts")["counts"]["load_hit"] == 3 + 1  # all blocks of attention, and one state
    assert run(engine, LONGER) == (3 * BLOCK, expected["longer"])
    # A prompt that leaves the first one before its state finds none; the next that shares so much finds its own.
    assert run(engine, SHORT) == (0, expected["short"])
    assert run(engine, BRANCH) == (2 * BLOCK, expected["branch"])

    # A damaged value costs time, no token.
    for file in path.rglob("*"):
        if file.is_file() and file.stat().st_size > 4096:
            with file.open("r+b") as data:
                data.seek(-1000, os.SEEK_END)
                data.write(bytes(10))
    cached, tokens = run(engine, FIRST)
    assert (cached, tokens) == (0, expected["first"])
    assert engine.ask("counts")["counts"]["load_corrupt"] > 0
    assert run(engine, FIRST) == (3 * BLOCK, expected["first"])

    # And these tests would notice wrong states: with zeros in the place of those that were loaded, tokens differ.
    engine.ask("sabotage", groups=[0])
    cached, tokens = run(engine, FIRST)
    assert cached == 3 * BLOCK
    assert tokens != expected["first"]
    engine.exit()
