"""The rule for model types that `families` does not know: what the fields say, or an error that names what is unclear.

A config whose per-layer lists and head counts say everything is laid out from them. One that carries fields of a hybrid
or recurrent design is refused by name, because such a field changes what a layer stores in ways that only its model
class knows. A scalar `sliding_window` (or chunk) without a per-layer list does not say which layers it holds for:
every layer is then laid out as full attention, which never drops a token that a query needs, and a note says so.
"""

from __future__ import annotations

from .config_fields import Fields
from .errors import ConfigError
from .families import mla, qwen
from .layer_rules import CHUNKED, FULL, SLIDING, Model, Plan, all_of, attention, plan, read_layer_types, sliding_layers
from .specs import ChunkedLocal

# Fields (and beginnings of fields) of designs whose cache only the model class can tell.
_MARKERS = (
    "attention_other_setting",
    "attn_config",
    "attn_layer_indices",
    "attn_layer_period",
    "attn_type_list",
    "block_configs",
    "block_types",
    "cla_share_factor",
    "compress_ratios",
    "conv_kernel",
    "cross_attention_layers",
    "full_attention_interval",
    "full_attn_idxs",
    "global_head_dim",
    "hybrid_layer_ids",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "is_encoder_decoder",
    "layer_block_types",
    "layer_group_size",
    "layers_block_type",
    "multi_query",
    "new_decoder_architecture",
    "num_global_key_value_heads",
    "num_kv_shared_layers",
    "sparse_attention_config",
    "state_size",
)
_MARKER_PREFIXES = (
    "block_sparse",
    "blocksparse",
    "gdn_",
    "linear_attn",
    "linear_conv",
    "linear_key",
    "linear_num",
    "linear_value",
    "mamba_",
    "rwkv",
    "ssm_",
    "swa_",
    "xlstm",
)


def require_plain(fields: Fields) -> None:
    """Raise when a model type that no family knows has fields that are not understood, or lacks needed ones."""
    _refuse_markers(fields)
    _require(fields)


def generic(model: Model) -> Plan:
    """Lay out a model type that no family knows, after `require_plain`."""
    fields = model.fields
    name = fields.class_name or "without a model_type"
    if fields.has("kv_lora_rank"):
        fields.note(f"model type {name} is not known; laid out as MLA from kv_lora_rank and qk_rope_head_dim")
        return mla(model)
    fields.note(f"model type {name} is not known; laid out from its head counts and per-layer list alone")
    listed = isinstance(fields.data.get("sliding_window"), list)
    if fields.has("attention_chunk_size") and fields.has("layer_types"):
        return _chunked(model)
    if listed or fields.has("layer_types"):
        return sliding_layers(model, attention(model), lambda window: all_of(model.num_layers, FULL))
    if fields.data.get("use_sliding_window") is False:
        return qwen(model)
    for key in ("sliding_window", "attention_chunk_size"):
        size = fields.optional_integer(key)
        if size is not None:
            fields.note(
                f"{key} {size} has no per-layer list to say where it holds: every layer is laid out as full attention, "
                "an upper bound; add layer_types to be exact"
            )
    return plan(all_of(model.num_layers, FULL), {FULL: attention(model)})


def _refuse_markers(fields: Fields) -> None:
    """Raise when a field marks a layout that the generic rule does not understand."""
    found = [
        fields.key(key)
        for key, value in fields.data.items()
        if isinstance(key, str)
        and (key in _MARKERS or key.startswith(_MARKER_PREFIXES))
        and value not in (None, False, 0)
        and value not in ([], {})
    ]
    if found:
        raise ConfigError(
            f"model type {fields.class_name!r} is not known and its {', '.join(found)} describe layers that only its "
            "model class can interpret; write the layers out in a YAML layout instead"
        )


def _require(fields: Fields) -> None:
    """All missing fields in one error."""
    needed = {"num_hidden_layers": fields.has("num_hidden_layers")}
    if fields.has("kv_lora_rank"):
        needed["qk_rope_head_dim"] = fields.has("qk_rope_head_dim")
    else:
        heads = fields.has("num_attention_heads")
        needed["num_key_value_heads or num_attention_heads"] = fields.has("num_key_value_heads") or heads
        needed["head_dim or hidden_size"] = fields.has("head_dim") or (fields.has("hidden_size") and heads)
    missing = [fields.key(name) for name, there in needed.items() if not there]
    if missing:
        raise ConfigError(
            f"model type {fields.class_name!r} is not known and these fields are missing: {', '.join(missing)}"
        )


def _chunked(model: Model) -> Plan:
    fields = model.fields
    full = attention(model)
    types = read_layer_types(model, FULL, CHUNKED, SLIDING)
    assert types is not None
    if SLIDING in types.own + types.trailing:
        if CHUNKED in types.own + types.trailing:
            raise ConfigError("layer_types mixes sliding_attention and chunked_attention, which no rule here knows")
        return sliding_layers(model, full, lambda window: all_of(model.num_layers, FULL))
    chunk = fields.integer("attention_chunk_size")
    chunked = ChunkedLocal(full.num_kv_heads, full.head_dim, full.head_dim_v, full.dtype, chunk=chunk)
    return plan(types, {FULL: full, CHUNKED: chunked})
