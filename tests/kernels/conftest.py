"""Puts this folder's helpers on the import path, keeps torch to one thread (small tensors gain from no other), and
makes every test draw the same random numbers on every run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """For this folder's tests only."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Bounds hold for all inputs, but a test that fails once in a thousand runs tells nobody anything."""
    torch.manual_seed(0)
