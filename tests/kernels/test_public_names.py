"""The package's names, with torch and without."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvtide.kernels


def test_every_name_is_there() -> None:
    assert sorted(kvtide.kernels._HOMES) == kvtide.kernels.__all__ == dir(kvtide.kernels)
    for name in kvtide.kernels.__all__:
        assert getattr(kvtide.kernels, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'mla_encode'"):
        _ = kvtide.kernels.mla_encode


def test_without_torch_a_name_says_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None\nimport kvtide.kernels\nkvtide.kernels.mla_decode"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip().endswith("pip install 'kvtide[torch]'")
