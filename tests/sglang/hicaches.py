"""SGLang's hierarchical cache in a process of the Python that `KVTIDE_SGLANG_PYTHON` names, and what to ask it.

    KVTIDE_SGLANG_PYTHON=VENV/bin/python .venv/bin/pytest tests/sglang

That Python can import SGLang's cache controllers (no GPU is needed, nor `sglang-kernel`), and has kvtide
(`pip install --no-deps -e .`) and what kvtide needs.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PAGE = 4


class HiCaches:
    """A process with any number of schedulers' caches. Those that are opened under one name follow each other."""

    def __init__(self, python: str, log: Path) -> None:
        self._log = log
        answers, its_end = os.pipe()
        with log.open("a") as everything:
            self._process = subprocess.Popen(
                [python, "-W", "ignore", str(HERE / "hicache_process.py"), str(its_end)],
                stdin=subprocess.PIPE,
                stdout=everything,
                stderr=everything,
                text=True,
                pass_fds=[its_end],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)},
            )
        os.close(its_end)
        self._answers = os.fdopen(answers)

    def ask(self, do: str, name: str = "", **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, "name": name, **command}) + "\n")
        self._process.stdin.flush()
        line = self._answers.readline()
        if not line:
            pytest.fail(f"SGLang's process died:\n{self.said()[-3000:]}")
        return dict(json.loads(line))

    def said(self) -> str:
        """Everything that SGLang and the backend have logged."""
        return self._log.read_text()

    def open(self, name: str, store: dict[str, Any], **more: Any) -> Cache:
        answer = self.try_open(name, store, **more)
        assert "error" not in answer, answer["error"]
        return Cache(self, name)

    def try_open(
        self,
        name: str,
        store: dict[str, Any],
        *,
        model: str = "m",
        pool: dict[str, Any] | None = None,
        rank: dict[str, int] | None = None,
        server: dict[str, Any] | None = None,
        **settings: Any,
    ) -> dict[str, Any]:
        extra = {
            "backend_name": "kvtide",
            "module_path": "kvtide.connectors.sglang",
            "class_name": "KvtideHiCacheStorage",
            "interface_v1": 1,
            "prefetch_threshold": PAGE,
            "store": store,
            **settings,
        }
        pool = {"kind": "mha", "layout": "page_first", "page": PAGE, **(pool or {})}
        return self.ask("open", name, pool=pool, rank=rank or {}, extra=extra, model=model, server=server)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._answers.close()


class Cache:
    """One scheduler's. `write` answers tokens that are stored, `fetch` what was hit, loaded, and sound of it."""

    def __init__(self, process: HiCaches, name: str) -> None:
        self._process = process
        self.name = name

    def write(self, tokens: list[int], data: int = 1, **more: Any) -> int:
        return int(self._process.ask("write", self.name, tokens=tokens, data=data, **more)["written"])

    def fetch(self, tokens: list[int], data: int = 1, **more: Any) -> dict[str, Any]:
        return self._process.ask("fetch", self.name, tokens=tokens, data=data, **more)

    def hits(self, tokens: list[int], data: int = 1, **more: Any) -> tuple[int, int, int]:
        answer = self.fetch(tokens, data, **more)
        return answer["hit"], answer["loaded"], answer["sound"]

    def counts(self) -> dict[str, int]:
        return dict(self._process.ask("counts", self.name)["counts"])

    def clear(self) -> bool:
        return bool(self._process.ask("clear", self.name)["cleared"])

    def stats(self) -> dict[str, Any]:
        return self._process.ask("stats", self.name)

    def close(self) -> None:
        self._process.ask("close", self.name)


def lmdb(path: Path) -> dict[str, Any]:
    return {"kv_connector": "LMDBConnector", "kv_connector_extra_config": {"path": str(path), "max_bytes": "64MiB"}}


def shared(path: Path) -> dict[str, Any]:
    return {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": {"shared_storage_path": str(path)}}


def late(path: Path) -> dict[str, Any]:
    return {**shared(path), "kv_connector": "LateStore", "kv_connector_module_path": "late_store"}


def prompt(seed: int, length: int) -> list[int]:
    """Tokens that no prompt of another seed begins with."""
    return [seed * 1000 + at for at in range(length)]
