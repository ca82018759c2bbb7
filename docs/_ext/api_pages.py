"""The API reference: one page a package, with every public name of `public_api` and its docstring."""

from __future__ import annotations

import inspect
from importlib import import_module

import public_api

_OPENING = {
    "kvtide.kvcache": "What a KV cache is: layer specs, model layouts, page geometry, the arena of bytes.",
    "kvtide.hma": "Who owns which block now: the memory manager, drafts, thinking budgets.",
    "kvtide.kernels": "Who reads the bytes: paged attention, cache writes, the registry of backends.",
    "kvtide.offload": "When bytes move: the store interface, policies, transfers, the offload manager.",
    "kvtide.connectors": "Where bytes go: configuration and stores.",
    "kvtide.sims": "What would happen: waste, capacity, traces, serving in virtual time.",
}


def pages() -> dict[str, str]:
    """Pages by file name below `generated/`."""
    names = dict(public_api.public_modules())
    return {
        f"api/{package.removeprefix('kvtide.')}.rst": _page(package, {module: names[module] for module in modules})
        for package, modules in public_api.PACKAGES.items()
    }


def _page(package: str, modules: dict[str, list[str]]) -> str:
    parts = [package, "=" * len(package), "", _OPENING[package], ""]
    for module, names in modules.items():
        if module != package:
            parts += [module, "-" * len(module), ""]
        parts += [f".. automodule:: {module}", "   :no-index:" if module in parts[:1] else "", ""]
        for name in names:
            parts += _entry(module, name)
    return "\n".join(parts) + "\n"


def _entry(module: str, name: str) -> list[str]:
    value = getattr(import_module(module), name)
    path = f"{module}.{name}"
    if inspect.isclass(value):
        kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
        return [f".. {kind}:: {path}", "   :members:", ""]
    if callable(value):
        return [f".. autofunction:: {path}", ""]
    return [f".. py:data:: {path}", f"   :value: {_shown(value)}", ""]


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return "…" if len(text) > 80 or "<" in text else text
