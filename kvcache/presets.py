"""Bundled layouts of public models, by name: `preset_names()` and `load_preset(name)`.

`presets.yaml` holds one entry per model in the schema of `yaml_layout`, plus a one-line `summary` and `aliases`. Names
are matched without regard to case, `_`, an `org/` prefix, or a suffix such as `-instruct`; a name that still matches
nothing is a `ConfigError` that suggests the nearest ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from .documents import shown
from .errors import ConfigError
from .layout import ModelLayout, Source
from .yaml_layout import read_yaml_layout

# Variants of one model that share its layers: tuning, weight format, publishing style.
_SUFFIXES = ("-it", "-instruct", "-chat", "-base", "-pt", "-hf", "-fp8", "-reasoning")


def preset_names() -> tuple[str, ...]:
    """The names that `load_preset` knows, without aliases, sorted."""
    return tuple(sorted(_entries()))


def preset_summary(name: str) -> str:
    """One line about a preset: its size and what its layers are."""
    return str(_entries()[_resolve(name)]["summary"])


def load_preset(name: str) -> ModelLayout:
    """The layout of a bundled model; `ConfigError` with the nearest names when there is none."""
    key = _resolve(name)
    entry = {field: value for field, value in _entries()[key].items() if field not in ("summary", "aliases")}
    layout = read_yaml_layout({"name": key, **entry})
    sources = tuple(Source(field, value, f"preset {key}") for field, value, _ in layout.sources)
    return replace(layout, sources=sources)


@cache
def _entries() -> Mapping[str, Mapping[str, Any]]:
    # Imported here: whoever brings a layout of its own need not pay for it.
    from importlib.resources import files

    import yaml

    text = files(__package__).joinpath("presets.yaml").read_text(encoding="utf-8")
    entries: Mapping[str, Mapping[str, Any]] = yaml.safe_load(text)
    return entries


@cache
def _names() -> Mapping[str, str]:
    """Every understood name to its preset."""
    names = {name: name for name in _entries()}
    for name, entry in _entries().items():
        names.update(dict.fromkeys(entry.get("aliases", ()), name))
    return names


def _resolve(name: str) -> str:
    if not isinstance(name, str):
        raise ConfigError(f"preset name {shown(name)} is not text")
    names = _names()
    wanted = name.strip().lower().replace("_", "-").rsplit("/", 1)[-1]
    candidate = wanted
    while candidate not in names:
        shorter = next((candidate.removesuffix(s) for s in _SUFFIXES if candidate.endswith(s)), None)
        if shorter is None:
            break
        candidate = shorter
    if candidate in names:
        return names[candidate]
    from difflib import get_close_matches

    near = get_close_matches(wanted[:80], names, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(preset_names())}"
    raise ConfigError(f"preset {shown(name)} is not known; {hint}")
