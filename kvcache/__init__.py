"""What a KV cache is: layer specs, model layouts, page geometry, the arena of bytes."""

from .errors import BackendUnavailable, ConfigError, Exhausted, KvtideError, MissingExtra, TraceError
from .layout import Group, Layer, ModelLayout, Source
from .presets import preset_names
from .specs import (
    MLA,
    ChunkedLocal,
    Component,
    CrossAttention,
    FullAttention,
    Kind,
    LayerSpec,
    Needed,
    RecurrentState,
    SinkWindow,
    SlidingWindow,
    SlidingWindowMLA,
)

__all__ = [
    "MLA",
    "BackendUnavailable",
    "ChunkedLocal",
    "Component",
    "ConfigError",
    "CrossAttention",
    "Exhausted",
    "FullAttention",
    "Group",
    "Kind",
    "KvtideError",
    "Layer",
    "LayerSpec",
    "MissingExtra",
    "ModelLayout",
    "Needed",
    "RecurrentState",
    "SinkWindow",
    "SlidingWindow",
    "SlidingWindowMLA",
    "Source",
    "TraceError",
    "preset_names",
]
