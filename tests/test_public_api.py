"""The public surface is what `docs/public-api.txt` announces, and every name in it is documented."""

from __future__ import annotations

import difflib
import enum
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"
sys.path.insert(0, str(DOCS / "_ext"))
public_api = importlib.import_module("public_api")

pytest.importorskip("torch", reason="kvtide.kernels is a part of the surface")
pytest.importorskip("transformers", reason="kvtide.connectors.transformers is a part of the surface")


def test_the_surface_is_the_announced_one() -> None:
    announced = public_api.LIST.read_text().splitlines()
    changes = list(difflib.unified_diff(announced, public_api.surface(), "announced", "found", lineterm="", n=0))
    assert not changes, "\n".join(
        ["the public API has changed; if that is meant, run: python docs/_ext/public_api.py --write", *changes]
    )


NAMES = [(module, name) for module, names in public_api.public_modules() for name in names]


def value_of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{module}.{name}" for module, name in NAMES])
def test_every_name_is_documented(module: str, name: str) -> None:
    value = value_of(module, name)
    if not (inspect.isclass(value) or callable(value)):
        return  # constants; their modules say what they are
    own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    generated = f"{name}("  # what dataclasses and named tuples make up
    assert own, f"{module}.{name} has no docstring"
    assert not own.startswith(generated), f"{module}.{name} has no docstring of its own"
    if inspect.isclass(value):
        for member, _ in public_api.public_members(value).items():
            assert inspect.getdoc(getattr(value, member)), f"{module}.{name}.{member} has no docstring"


def test_listing_is_the_same_in_every_run() -> None:
    lines = public_api.surface()
    assert len(lines) == len(set(lines))
    assert not [line for line in lines if " at 0x" in line]
    assert "kvtide.hma.HybridMemoryManager.release(row)" in lines
    assert any(
        isinstance(value_of(module, name), type) and issubclass(value_of(module, name), enum.Enum)
        for module, name in NAMES
    )
