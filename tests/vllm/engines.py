"""Real vLLM engines, each in a process of the Python that `KVTIDE_VLLM_PYTHON` names, and what to ask them.

    KVTIDE_VLLM_PYTHON=VENV/bin/python .venv/bin/pytest tests/vllm

That Python has vLLM for CPUs, kvtide (`pip install --no-deps -e .`) and what kvtide needs. Models are small, random
and float32, so that the order of sums does not decide between two tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
BLOCK = 32
WINDOW = 64


class Engine:
    """One vLLM engine. `ask` sends a command and waits for the answer; `send` and `hear` are its halves."""

    def __init__(self, python: str, log: Path, settings: dict[str, Any]) -> None:
        self._log = log
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [python, str(HERE / "engine_process.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)},
            )
        self.send(llm=settings)

    def start(self) -> Engine:
        self.facts = self.hear()
        return self

    def send(self, **command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            pytest.fail(f"the engine died:\n{self._log.read_text()[-3000:]}")
        return dict(json.loads(line))

    def ask(self, do: str, **command: Any) -> dict[str, Any]:
        self.send(do=do, **command)
        return self.hear()

    def generate(self, prompts: list[list[int]], tokens: int = 24, **more: Any) -> dict[str, Any]:
        return self.ask("generate", prompts=prompts, tokens=tokens, **more)

    def reset(self) -> None:
        assert self.ask("reset")["done"]

    def exit(self) -> dict[str, Any]:
        answer = self.ask("exit")
        assert self._process.wait(60) == 0
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


MakeEngine = Callable[..., Engine]


class References:
    """What a model says without any connector; one engine a model, started when it is first asked."""

    def __init__(self, make: MakeEngine) -> None:
        self._make = make
        self._engines: dict[str, Engine] = {}

    def __call__(self, kind: str, prompts: list[list[int]], tokens: int = 24) -> list[list[int]]:
        if kind not in self._engines:
            self._engines[kind] = self._make(kind, enable_prefix_caching=False)
        answer = self._engines[kind].generate(prompts, tokens)
        return [list(one) for one in answer["tokens"]]


def prompt(seed: int, length: int) -> list[int]:
    """Tokens that no prompt of another seed begins with."""
    return [5 + (seed * 131 + at * (7 + seed % 11) + at * at % (3 + seed % 5)) % 500 for at in range(length)]


def transfer(store: dict[str, Any], role: str = "kv_both", **settings: Any) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` for a store of kvtide."""
    return {
        "kv_connector": "KvtideConnector",
        "kv_connector_module_path": "kvtide.connectors.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": store, **settings},
    }


def lmdb(path: Path) -> dict[str, Any]:
    return {"kv_connector": "LMDBConnector", "kv_connector_extra_config": {"path": str(path), "max_bytes": "256MiB"}}


def shared(path: Path) -> dict[str, Any]:
    return {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": {"shared_storage_path": str(path)}}
