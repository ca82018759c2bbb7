"""The API reference: one page a package, with every public name of `public_api` and its docstring."""

from __future__ import annotations

import enum
import inspect
from importlib import import_module

import public_api


def pages() -> dict[str, str]:
    """Pages by file name below `generated/`."""
    names = dict(public_api.public_modules())
    return {
        f"api/{package.removeprefix('kvtide.')}.rst": _page(package, {module: names[module] for module in modules})
        for package, modules in public_api.PACKAGES.items()
    }


def _page(package: str, modules: dict[str, list[str]]) -> str:
    parts = [package, "=" * len(package), "", f".. automodule:: {package}", ""]
    for module, names in modules.items():
        if module != package:
            parts += [module, "-" * len(module), "", f".. automodule:: {module}", ""]
        for name in names:
            parts += _entry(module, name)
    return "\n".join(parts) + "\n"


def _entry(module: str, name: str) -> list[str]:
    value = getattr(import_module(module), name)
    path = f"{module}.{name}"
    if inspect.isclass(value):
        kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
        options = ["   :members:", *(["   :undoc-members:"] if issubclass(value, enum.Enum) else [])]
        if hidden := public_api.hidden_bases(value):
            others = [base.__name__ for base in value.__mro__[1:] if base not in hidden]
            options.append(f"   :inherited-members: {', '.join(others)}")
        return [f".. {kind}:: {path}", *options, ""]
    if callable(value):
        return [f".. autofunction:: {path}", ""]
    return [f".. py:data:: {name}", f"   :module: {module}", f"   :value: {_shown(value)}", ""]


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return "…" if len(text) > 80 or "<" in text else text
