"""vLLM engines for tests, models for them, and what the models say without a connector (`engines.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engines import BLOCK, HERE, Engine, MakeEngine, References

KINDS = ("hybrid", "full", "state")


@pytest.fixture(scope="session")
def vllm_python() -> str:
    python = os.environ.get("KVTIDE_VLLM_PYTHON")
    if not python:
        pytest.skip("KVTIDE_VLLM_PYTHON does not name a Python that has vLLM")
    return python


@pytest.fixture(scope="session")
def models(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        subprocess.run([vllm_python, str(HERE / "make_model.py"), kind, str(root / kind)], check=True)
    return {kind: root / kind for kind in KINDS}


@pytest.fixture(scope="session")
def make_engine(
    vllm_python: str, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeEngine]:
    logs = tmp_path_factory.mktemp("logs")
    engines: list[Engine] = []

    def make(kind: str, transfer: dict[str, Any] | None = None, *, started: bool = True, **settings: Any) -> Engine:
        everything = {
            "model": str(models[kind]),
            "max_model_len": 1024,
            "dtype": "float32",
            "block_size": BLOCK,
            "num_gpu_blocks_override": 400,
            **settings,
        }
        if transfer is not None:
            everything["kv_transfer_config"] = transfer
        engine = Engine(vllm_python, logs / f"{len(engines)}.log", everything)
        engines.append(engine)
        return engine.start() if started else engine

    yield make
    for engine in engines:
        engine.kill()


@pytest.fixture(scope="session")
def reference(make_engine: MakeEngine) -> References:
    return References(make_engine)
