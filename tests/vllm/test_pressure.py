"""A pool so small that requests are preempted, with a store behind it: the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import MakeEngine, References, lmdb, prompt, transfer

PROMPTS = [prompt(seed, 40 + 37 * seed % 90) for seed in range(20, 30)]


@pytest.mark.parametrize(("kind", "blocks"), [("hybrid", 52), ("full", 30)])
def test_preemption(kind: str, blocks: int, make_engine: MakeEngine, reference: References, tmp_path: Path) -> None:
    expected = reference(kind, PROMPTS, 150)
    small = {"num_gpu_blocks_override": blocks, "max_model_len": 512, "max_num_batched_tokens": 128}
    engine = make_engine(kind, transfer(lmdb(tmp_path / "kv")), **small)
    first = engine.generate(PROMPTS, 150)
    assert first["preemptions"] > 0
    assert first["tokens"] == expected
    assert first["counts"]["load_hit"] > 0  # preempted requests come back from the store
    second = engine.generate(PROMPTS, 150)
    assert second["tokens"] == expected
    assert second["preemptions"] > first["preemptions"]
    engine.reset()
    third = engine.generate(PROMPTS[::-1], 150)
    assert third["tokens"] == expected[::-1]
    engine.exit()
