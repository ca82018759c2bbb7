"""The steps that the families share: head counts, per-layer types, windows, layers that read another layer's KV.

A family rule takes a `Model` (the config's `Fields` plus what is known before any layer is) and returns a `Plan`. The
steps here turn one aspect of a config into types or specs and raise `ConfigError` where the config contradicts itself;
which aspects a model class has, and in which order they win, is the rule's business (`families`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .config_fields import Fields
from .documents import shown
from .errors import ConfigError
from .layout import Layer
from .specs import FullAttention, LayerSpec, SlidingWindow

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
LINEAR = "linear_attention"

# What configs call the layers whose KV (or state) is the same thing.
_SYNONYMS = {
    "attention": FULL,
    "indexed_attention": FULL,
    "deepseek_sparse_attention": FULL,
    "mamba": LINEAR,
}


@dataclass(frozen=True)
class Model:
    """A config before its layers are known. `cache_dtype` is the KV cache's, `model_dtype` the activations'."""

    fields: Fields
    num_layers: int
    cache_dtype: str
    model_dtype: str


class Plan(NamedTuple):
    """The layers of a model; `draft` is one multi-token-prediction layer, `trailing` what a list says about them."""

    layers: tuple[Layer, ...]
    draft: LayerSpec | None
    trailing: tuple[LayerSpec, ...] = ()


Rule = Callable[[Model], Plan]


class LayerTypes(NamedTuple):
    """A per-layer list: the types of the model's own layers, and those that follow them (draft layers)."""

    own: tuple[str, ...]
    trailing: tuple[str, ...] = ()


def plan(types: LayerTypes, specs: Mapping[str, LayerSpec]) -> Plan:
    """One stored layer per type."""
    layers = tuple(Layer(index, specs[name]) for index, name in enumerate(types.own))
    return Plan(layers, specs.get(FULL), tuple(specs[name] for name in types.trailing))


def attention(model: Model, *kv_head_keys: str) -> FullAttention:
    """The spec of a layer that keeps every token, from head counts and `head_dim`."""
    fields = model.fields
    heads = num_kv_heads(fields, *(kv_head_keys or ("num_key_value_heads",)))
    dim = head_dim(fields)
    return FullAttention(heads, dim, dim, model.cache_dtype)


def num_kv_heads(fields: Fields, *keys: str) -> int:
    """KV heads; a config (or class) without them means one per attention head."""
    kv_heads = fields.optional_integer(*keys)
    heads = fields.optional_integer("num_attention_heads") if kv_heads else fields.integer("num_attention_heads")
    if kv_heads is None:
        assert heads is not None
        fields.record(keys[0], heads, "derived: num_attention_heads")
        return heads
    if heads is not None and heads % kv_heads:
        raise fields.bad("num_attention_heads", f"a multiple of the {kv_heads} KV heads ({fields.key(keys[0])})", heads)
    return kv_heads


def head_dim(fields: Fields) -> int:
    """`head_dim`, or `hidden_size / num_attention_heads` when the config and its class leave it out."""
    dim = fields.optional_integer("head_dim")
    if dim is None:
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        if hidden % heads:
            raise fields.bad("hidden_size", f"a multiple of num_attention_heads ({heads}), or head_dim given", hidden)
        dim = hidden // heads
        fields.record("head_dim", dim, "derived: hidden_size / num_attention_heads")
    return dim


def windowed(dims: FullAttention, window: int) -> SlidingWindow:
    """The same heads behind a window."""
    return SlidingWindow(dims.num_kv_heads, dims.head_dim, dims.head_dim_v, dims.dtype, window=window)


def read_layer_types(model: Model, *allowed: str) -> LayerTypes | None:
    """`layer_types`, checked; None when the config has none. Entries beyond the layer count belong to MTP layers."""
    fields = model.fields
    names = fields.names("layer_types")
    if names is None:
        return None
    types = tuple(_SYNONYMS.get(name, name) for name in names)
    for index, name in enumerate(types):
        if name not in allowed:
            raise ConfigError(
                f"{fields.key('layer_types')}[{index}] is {shown(names[index])}; allowed here: {', '.join(allowed)}"
            )
    require_length(model, "layer_types", len(types), at_least=True)
    return LayerTypes(types[: model.num_layers], types[model.num_layers :])


def require_length(model: Model, key: str, length: int, at_least: bool = False) -> None:
    """A per-layer list must have one entry per layer, or `at_least` one."""
    if length < model.num_layers or (length > model.num_layers and not at_least):
        raise ConfigError(
            f"{model.fields.key(key)} has {length} entries; it must have one for each of the "
            f"{model.num_layers} layers (num_hidden_layers)"
        )


def every_nth_full(num_layers: int, period: int) -> LayerTypes:
    """Layer `period - 1`, `2 * period - 1`, ... full, the others sliding."""
    return LayerTypes(tuple(SLIDING if (index + 1) % period else FULL for index in range(num_layers)))


def all_of(num_layers: int, name: str) -> LayerTypes:
    """Every layer of one type."""
    return LayerTypes((name,) * num_layers)


def read_window(fields: Fields) -> int | None:
    """The scalar `sliding_window`: the class default when absent, None when null."""
    return fields.nullable_integer("sliding_window")


def sliding_layers(
    model: Model,
    full: FullAttention,
    default_types: Callable[[int | None], LayerTypes],
    sliding: FullAttention | None = None,
    window_of: Callable[[Fields], int | None] = read_window,
) -> Plan:
    """Full and sliding layers: from a list of windows, else from `layer_types`, else from `default_types(window)`.

    `sliding` are the heads of the sliding layers where they differ from the full ones.
    """
    fields = model.fields
    sliding = sliding or full
    types = read_layer_types(model, FULL, SLIDING)
    listed = fields.windows("sliding_window")
    if listed is not None:
        return _plan_of_windows(model, full, sliding, listed, types)
    window = window_of(fields)
    if types is None:
        types = default_types(window)
    if SLIDING not in types.own + types.trailing:
        return plan(types, {FULL: full})
    if window is None:
        if "sliding_window" not in fields.data:
            raise ConfigError(f"{fields.key('sliding_window')} is missing; there are sliding_attention layers")
        fields.note("sliding_window is null, so the sliding_attention layers keep every token")
        return plan(types, {FULL: full, SLIDING: sliding})
    return plan(types, {FULL: full, SLIDING: windowed(sliding, window)})


def windows_per_layer(model: Model, key: str, windows: Sequence[int | None]) -> tuple[int | None, ...]:
    """A list of windows repeated over the layers."""
    if model.num_layers % len(windows):
        raise ConfigError(
            f"{model.fields.key(key)} has {len(windows)} entries; that must divide the {model.num_layers} layers"
        )
    return tuple(windows) * (model.num_layers // len(windows))


def _plan_of_windows(
    model: Model,
    full: FullAttention,
    sliding: FullAttention,
    listed: Sequence[int | None],
    types: LayerTypes | None,
) -> Plan:
    windows = windows_per_layer(model, "sliding_window", listed)
    if types is not None:
        for index, (window, name) in enumerate(zip(windows, types.own, strict=True)):
            if (window is None) != (name == FULL):
                raise ConfigError(
                    f"sliding_window and layer_types of layer {index} disagree: {shown(window)} and {shown(name)}"
                )
    layers = tuple(
        Layer(index, full if window is None else windowed(sliding, window)) for index, window in enumerate(windows)
    )
    return Plan(layers, full)


def share_tail(model: Model, whole: Plan, num_shared: int) -> Plan:
    """The last `num_shared` layers store nothing and read the last earlier layer that has their spec."""
    if num_shared >= model.num_layers:
        raise model.fields.bad("num_kv_shared_layers", f"less than the {model.num_layers} layers", num_shared)
    first_shared = model.num_layers - num_shared
    owner = {layer.spec: layer.index for layer in whole.layers[:first_shared]}
    shared = []
    for layer in whole.layers[first_shared:]:
        if layer.spec not in owner:
            raise ConfigError(
                f"num_kv_shared_layers is {num_shared}, but no earlier layer has the KV that layer {layer.index} reads"
            )
        shared.append(Layer(layer.index, None, shares=owner[layer.spec]))
    return whole._replace(layers=(*whole.layers[:first_shared], *shared))
