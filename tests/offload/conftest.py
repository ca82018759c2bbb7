"""The helpers of these tests (`awkward.py`) on the import path; the conformance suite's assertions readable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("kvtide.offload.conformance")
