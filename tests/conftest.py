"""Shared setup: hypothesis profiles, and the test helpers (`layouts.py`) on the import path.

`ci` (the default) is bounded and the same on every run. `KVTIDE_HYPOTHESIS=long` (or `HYPOTHESIS_PROFILE=long`) tries
many more random cases; what it finds is kept in `.hypothesis` and tried first the next time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("ci", max_examples=60, derandomize=True, deadline=None)
settings.register_profile("long", max_examples=20_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("KVTIDE_HYPOTHESIS") or os.environ.get("HYPOTHESIS_PROFILE") or "ci")

SHARED = Path(os.environ.get("KVTIDE_SHARED", Path(__file__).parents[2] / "shared"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real configs and traces, beside the repository unless `KVTIDE_SHARED` names it."""
    if not SHARED.is_dir():
        pytest.skip(f"no real configs and traces in {SHARED}; set KVTIDE_SHARED")
    return SHARED
