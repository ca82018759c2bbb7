"""The conformance suite's assertions are to be readable when they fail."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("kvtide.offload.conformance")
