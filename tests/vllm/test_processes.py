"""vLLM as it runs by default, scheduler and workers in processes of their own; one worker, and two that share heads."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import MakeEngine, References, lmdb, prompt, transfer

PROMPTS = [prompt(100, 400), prompt(101, 333)]


@pytest.mark.parametrize("workers", [1, 2])
def test_processes(workers: int, make_engine: MakeEngine, reference: References, tmp_path: Path) -> None:
    expected = reference("hybrid", PROMPTS)
    store = transfer(lmdb(tmp_path / "kv" / "{rank}"))
    for cached in ([0, 0], [384, 320]):
        engine = make_engine("hybrid", store, processes=True, tensor_parallel_size=workers)
        answer = engine.generate(PROMPTS)
        assert answer["tokens"] == expected
        assert answer["cached"] == cached
        engine.reset()
        answer = engine.generate(PROMPTS)
        assert answer["tokens"] == expected
        assert answer["cached"] == [384, 320]
        engine.exit()
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == [str(rank) for rank in range(workers)]
