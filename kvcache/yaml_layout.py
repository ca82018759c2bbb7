"""A layout written out by hand, in YAML: named layer specs and one pattern that lists the layers.

    name: tiny-gemma
    max_model_len: 32768            # optional
    dtype: bfloat16                 # optional, the specs' default
    specs:
      full: {kind: full_attention, num_kv_heads: 8, head_dim: 128}
      local: {kind: sliding_window, num_kv_heads: 8, head_dim: 128, window: 1024}
    layers: 4*(5*local, full), 2*local
    draft: full                     # optional: the model's multi-token-prediction layers

A spec's keys are those of its kind in `specs` (`head_dim_v` defaults to `head_dim`); `layer_pattern` says what patterns
mean. The bundled presets use the same schema. An unknown key or a wrong value is a `ConfigError` that names the key,
the value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from .documents import Document, Input, read_yaml, shown
from .dtypes import ELEMENT_BYTES, canonical_dtype
from .errors import ConfigError
from .layer_pattern import expand
from .layout import Layer, ModelLayout, Source
from .specs import (
    MLA,
    ChunkedLocal,
    Component,
    CrossAttention,
    FullAttention,
    Kind,
    LayerSpec,
    RecurrentState,
    SinkWindow,
    SlidingWindow,
    SlidingWindowMLA,
)

SPEC_CLASSES: Mapping[Kind, type[LayerSpec]] = {
    cls.kind: cls
    for cls in (
        FullAttention,
        SlidingWindow,
        ChunkedLocal,
        CrossAttention,
        SinkWindow,
        MLA,
        SlidingWindowMLA,
        RecurrentState,
    )
}
NONE = "none"
_KEYS = ("name", "max_model_len", "dtype", "specs", "layers", "draft", "notes")
_MAX_NUMBER = 2**31 - 1


def read_yaml_layout(source: Input) -> ModelLayout:
    """The layout that a YAML file (or its parsed content) writes out; raises `ConfigError`."""
    document = read_yaml(source, "layout.yaml")
    try:
        return _layout_of(document)
    except ConfigError as error:
        raise ConfigError(f"{document.label}: {error}") from None


def _layout_of(document: Document) -> ModelLayout:
    data = document.data
    _known_keys(data, "", _KEYS)
    name = data.get("name", document.stem)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"name is {shown(name)}; it must be text")
    specs = _specs(data)
    return ModelLayout(
        name=name,
        layers=_layers(_pattern(data, "layers", required=True), specs),
        max_model_len=_number("max_model_len", data["max_model_len"]) if "max_model_len" in data else None,
        draft_specs=_draft(_pattern(data, "draft", required=False), specs),
        sources=tuple(Source(key, _text(data[key]), f"{document.place}: {key}") for key in _KEYS[1:6] if key in data),
        notes=_notes(data.get("notes", [])),
    )


def _specs(data: Mapping[str, Any]) -> Mapping[str, LayerSpec]:
    dtype = _dtype("dtype", data.get("dtype", "bfloat16"))
    entries = data.get("specs")
    if not isinstance(entries, Mapping) or not entries:
        raise ConfigError(f"specs is {shown(entries)}; it must map labels to layer specs")
    for label in entries:
        if not isinstance(label, str) or not label.replace("-", "_").replace(".", "_").isidentifier() or label == NONE:
            raise ConfigError(f"specs has the label {shown(label)}; it must be a word other than {NONE!r}")
    return {label: _spec(f"specs.{label}", entry, dtype) for label, entry in entries.items()}


def _spec(key: str, entry: object, dtype: str) -> LayerSpec:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{key} is {shown(entry)}; it must be an object with a kind")
    kind = entry.get("kind")
    if not isinstance(kind, str) or kind not in SPEC_CLASSES:
        raise ConfigError(f"{key}.kind is {shown(kind)}; it must be one of {', '.join(SPEC_CLASSES)}")
    cls = SPEC_CLASSES[Kind(kind)]
    names = [field.name for field in fields(cls)]
    _known_keys(entry, f"{key}.", ("kind", *names))
    values: dict[str, Any] = {}
    for field in fields(cls):
        if field.name in entry:
            values[field.name] = _value(f"{key}.{field.name}", field.name, entry[field.name], dtype)
        elif field.name == "dtype":
            values["dtype"] = dtype
        elif field.name == "head_dim_v" and "head_dim" in values:
            values["head_dim_v"] = values["head_dim"]
        elif field.default is MISSING:
            raise ConfigError(f"{key}.{field.name} is missing; a {kind} layer needs it")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def _value(key: str, name: str, value: object, dtype: str) -> object:
    if name == "dtype":
        return _dtype(key, value)
    if name == "arrays":
        return _arrays(key, value, dtype)
    return _number(key, value, minimum=0 if name == "index_head_dim" else 1)


def _arrays(key: str, value: object, dtype: str) -> tuple[Component, ...]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{key} is {shown(value)}; it must be a list of arrays with name, shape and dtype")
    arrays = []
    for index, entry in enumerate(value):
        place = f"{key}[{index}]"
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{place} is {shown(entry)}; it must be an object with name, shape and dtype")
        _known_keys(entry, f"{place}.", ("name", "shape", "dtype"))
        name, shape = entry.get("name"), entry.get("shape")
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{place}.name is {shown(name)}; it must be text")
        if not isinstance(shape, list) or not shape:
            raise ConfigError(f"{place}.shape is {shown(shape)}; it must be a list of whole numbers")
        sizes = tuple(_number(f"{place}.shape[{i}]", size) for i, size in enumerate(shape))
        arrays.append(Component(name, sizes, _dtype(f"{place}.dtype", entry.get("dtype", dtype), plain=True)))
    return tuple(arrays)


def _layers(words: tuple[str, ...], specs: Mapping[str, LayerSpec]) -> tuple[Layer, ...]:
    layers: list[Layer] = []
    last: dict[str, int] = {}
    for index, word in enumerate(words):
        label = word.removeprefix("@")
        if word == NONE:
            layers.append(Layer(index, None))
        elif label not in specs:
            raise ConfigError(f"layers names {shown(word)}, which specs does not have ({', '.join((*specs, NONE))})")
        elif word == label:
            layers.append(Layer(index, specs[label]))
            last[label] = index
        elif label in last:
            layers.append(Layer(index, None, shares=last[label]))
        else:
            raise ConfigError(f"layer {index} is {shown(word)}, but no {label} layer comes before it")
    return tuple(layers)


def _draft(words: tuple[str, ...], specs: Mapping[str, LayerSpec]) -> tuple[LayerSpec, ...]:
    for word in words:
        if word not in specs:
            raise ConfigError(f"draft names {shown(word)}, which specs does not have ({', '.join(specs)})")
    return tuple(specs[word] for word in words)


def _pattern(data: Mapping[str, Any], key: str, *, required: bool) -> tuple[str, ...]:
    value = data.get(key)
    if value is None and not required:
        return ()
    if not isinstance(value, str):
        raise ConfigError(f"{key} is {shown(value)}; it must be a pattern such as '10*(5*local, full), 2*local'")
    return expand(value, key)


def _known_keys(data: Mapping[Any, Any], place: str, allowed: tuple[str, ...]) -> None:
    for key in data:
        if key not in allowed:
            name = f"{place}{key}" if isinstance(key, str) and len(key) <= 60 else f"{place}{shown(key)}"
            raise ConfigError(f"{name} is not a known key; allowed: {', '.join(allowed)}")


def _number(key: str, value: object, minimum: int = 1) -> int:
    if type(value) is not int or not minimum <= value <= _MAX_NUMBER:
        raise ConfigError(f"{key} is {shown(value)}; it must be a whole number from {minimum} to {_MAX_NUMBER}")
    return value


def _dtype(key: str, value: object, *, plain: bool = False) -> str:
    if not isinstance(value, str) or len(value) > 60:
        raise ConfigError(f"{key} is {shown(value)}; it must be the name of a dtype such as bfloat16")
    try:
        dtype = canonical_dtype(value)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    if plain and dtype not in ELEMENT_BYTES:
        raise ConfigError(f"{key} is {value!r}; it must be one of {', '.join(ELEMENT_BYTES)}")
    return dtype


def _notes(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(note, str) for note in value):
        raise ConfigError(f"notes is {shown(value)}; it must be a list of texts")
    return tuple(value)


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, Mapping) else str(value)
