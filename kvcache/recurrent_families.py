"""Families with recurrent layers: gated delta net (Qwen3-Next, Qwen3.5), Mamba-1 (Jamba, Phi-4-mini-flash), lightning
attention (MiniMax-Text-01).

Each rule returns the layers of one model class; a recurrent layer's spec is the state that one sequence has. The first
dimension of every state array is the one that tensor parallelism divides, and `max_shards` is how far. State dtypes are
the model's own: an 8-bit KV cache does not change them.
"""

from __future__ import annotations

from math import gcd

from .config_fields import Fields
from .errors import ConfigError
from .layer_rules import (
    FULL,
    LINEAR,
    LayerTypes,
    Model,
    Plan,
    attention,
    plan,
    read_layer_types,
    require_length,
    windowed,
)
from .layout import Layer
from .specs import Component, RecurrentState

STATE_DTYPES = ("float32", "bfloat16", "float16")


def gated_delta_net(model: Model) -> Plan:
    """Qwen3-Next and Qwen3.5: every `full_attention_interval`-th layer is full attention, the others linear."""
    fields = model.fields
    types = read_layer_types(model, FULL, LINEAR)
    if types is None:
        period = fields.integer("full_attention_interval")
        types = LayerTypes(tuple(LINEAR if (i + 1) % period else FULL for i in range(model.num_layers)))
    key_heads, key_dim = fields.integer("linear_num_key_heads"), fields.integer("linear_key_head_dim")
    value_heads, value_dim = fields.integer("linear_num_value_heads"), fields.integer("linear_value_head_dim")
    columns = fields.integer("linear_conv_kernel_dim", minimum=2) - 1
    state = RecurrentState(
        arrays=(
            Component("conv", (2 * key_heads * key_dim + value_heads * value_dim, columns), model.model_dtype),
            Component("ssm", (value_heads, key_dim, value_dim), _state_dtype(fields, model.model_dtype)),
        ),
        max_shards=gcd(key_heads, value_heads),
    )
    return plan(types, {FULL: attention(model), LINEAR: state})


def jamba(model: Model) -> Plan:
    """Jamba: attention at `attn_layer_offset` of every `attn_layer_period` layers, Mamba-1 elsewhere."""
    fields = model.fields
    types = read_layer_types(model, FULL, LINEAR)
    if types is None:
        period = fields.integer("attn_layer_period")
        offset = fields.integer("attn_layer_offset", minimum=0, maximum=period - 1)
        types = LayerTypes(tuple(FULL if i % period == offset else LINEAR for i in range(model.num_layers)))
    return plan(types, {FULL: attention(model), LINEAR: _mamba1(model)})


def lightning(model: Model) -> Plan:
    """MiniMax-Text-01: `attn_type_list` holds 1 for full attention, 0 for linear attention with a float32 state."""
    fields = model.fields
    codes = fields.integers("attn_type_list", 0, 1)
    types = read_layer_types(model, FULL, LINEAR)
    if codes is not None:
        require_length(model, "attn_type_list", len(codes))
        types = LayerTypes(tuple(FULL if code else LINEAR for code in codes))
    elif types is None and fields.class_name == "minimax":
        types = LayerTypes(tuple(LINEAR if i % 2 else FULL for i in range(model.num_layers)))
        fields.record("layer_types", "full and linear in turns", "class default of minimax")
    elif types is None:
        raise ConfigError(f"{fields.key('attn_type_list')} is missing; it says which layers are full attention")
    full = attention(model)
    heads = fields.integer("num_attention_heads")
    state = RecurrentState((Component("state", (heads, full.head_dim, full.head_dim), "float32"),), max_shards=heads)
    return plan(types, {FULL: full, LINEAR: state})


def phi4_flash(model: Model) -> Plan:
    """Phi-4-mini-flash: Mamba and sliding layers in turns, one full layer, then layers that store nothing.

    In the upper half even layers are gated memory units (no cache) and odd ones read the KV of the one full layer.
    """
    fields, half = model.fields, model.num_layers // 2
    if model.num_layers % 4:
        raise fields.bad("num_hidden_layers", "a multiple of 4 for phi4flash", model.num_layers)
    if fields.optional_integer("mb_per_layer") not in (None, 2):
        raise fields.bad("mb_per_layer", "2 (other spacings are not known)")
    full, mamba = attention(model), _mamba1(model)
    listed = fields.windows("sliding_window")
    if listed is None:
        window = fields.integer("sliding_window")
    else:  # the class saves its window as a list with one entry per layer
        given = {value for value in listed if value is not None}
        if len(given) != 1:
            raise fields.bad("sliding_window", "one window for all sliding layers", listed)
        window = given.pop()
    sliding, layers = windowed(full, window), []
    for index in range(model.num_layers):
        if index % 2 == 0:
            layers.append(Layer(index, mamba if index <= half else None))
        elif index <= half + 1:
            layers.append(Layer(index, sliding if index < half else full))
        else:
            layers.append(Layer(index, None, shares=half + 1))
    fields.note(f"layers {half + 2} and up store nothing: gated memory units, and attention on the KV of {half + 1}")
    return Plan(tuple(layers), None)


def _mamba1(model: Model) -> RecurrentState:
    fields = model.fields
    inner = fields.integer("mamba_expand") * fields.integer("hidden_size")
    fields.record("mamba inner size", inner, "derived: mamba_expand * hidden_size")
    columns = fields.integer("mamba_d_conv", minimum=2) - 1
    if not fields.has("mamba_ssm_dtype"):
        fields.note(f"the Mamba state is laid out in {model.model_dtype}; engines told to keep it in float32 need more")
    return RecurrentState(
        arrays=(
            Component("conv", (inner, columns), model.model_dtype),
            Component("ssm", (inner, fields.integer("mamba_d_state")), _state_dtype(fields, model.model_dtype)),
        ),
        max_shards=inner,
    )


def _state_dtype(fields: Fields, model_dtype: str) -> str:
    name = fields.text("mamba_ssm_dtype")
    if name is None:
        fields.record("mamba_ssm_dtype", model_dtype, "default: the model's dtype")
        return model_dtype
    dtype = name.removeprefix("torch.")
    if dtype not in STATE_DTYPES:
        raise fields.bad("mamba_ssm_dtype", f"one of {', '.join(STATE_DTYPES)}")
    fields.record("mamba_ssm_dtype", dtype, f"{fields.place}: {fields.key('mamba_ssm_dtype')}")
    return dtype
