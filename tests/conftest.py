"""Shared setup: hypothesis profiles, and the test helpers (`layouts.py`) on the import path.

`ci` (the default) is bounded and the same on every run. `KVTIDE_HYPOTHESIS=long` (or `HYPOTHESIS_PROFILE=long`) tries
many more random cases; what it finds is kept in `.hypothesis` and tried first the next time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("ci", max_examples=60, derandomize=True, deadline=None)
settings.register_profile("long", max_examples=20_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("KVTIDE_HYPOTHESIS") or os.environ.get("HYPOTHESIS_PROFILE") or "ci")
