"""One process with SGLang for all tests of the session, so that its slow start is paid once (`hicaches.py`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hicaches import HiCaches


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], HiCaches]]:
    python = os.environ.get("KVTIDE_SGLANG_PYTHON")
    if not python:
        pytest.skip("KVTIDE_SGLANG_PYTHON does not name a Python that can import SGLang")
    logs = tmp_path_factory.mktemp("logs")
    processes: list[HiCaches] = []

    def make() -> HiCaches:
        processes.append(HiCaches(python, logs / f"{len(processes)}.log"))
        return processes[-1]

    yield make
    for process in processes:
        process.kill()


@pytest.fixture(scope="session")
def hicaches(start: Callable[[], HiCaches]) -> HiCaches:
    return start()
