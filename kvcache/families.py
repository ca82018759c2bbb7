"""Which layers each model class has: one small rule per family, and the table from `model_type` to rule.

A rule reads the fields that decide its family's layout and returns a `Plan`; what a class assumes for absent keys is in
`class_defaults`. Where engines and files disagree (a window that one of them counts differently, a key that looks
decisive and is not), the rule follows what engines store and leaves a note. Model types that no rule knows are laid
out by `generic_layout`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .class_defaults import MLLAMA_CROSS_ATTENTION_LAYERS
from .config_fields import Fields
from .documents import shown
from .errors import ConfigError
from .layer_rules import (
    CHUNKED,
    FULL,
    SLIDING,
    LayerTypes,
    Model,
    Plan,
    Rule,
    all_of,
    attention,
    every_nth_full,
    plan,
    read_layer_types,
    require_length,
    share_tail,
    sliding_layers,
)
from .layout import Layer
from .recurrent_families import gated_delta_net, jamba, lightning, phi4_flash
from .specs import MLA, ChunkedLocal, CrossAttention


def uniform(model: Model) -> Plan:
    """Every layer keeps every token; the class does not read `sliding_window`."""
    _note_inert(model.fields, "sliding_window")
    types = read_layer_types(model, FULL) or all_of(model.num_layers, FULL)
    return plan(types, {FULL: attention(model)})


def llama(model: Model) -> Plan:
    """Llama: full attention, unless `layer_types` or a list of windows says otherwise; a scalar window is inert."""
    if model.fields.has("layer_types") or isinstance(model.fields.data.get("sliding_window"), list):
        return sliding_layers(model, attention(model), lambda window: all_of(model.num_layers, FULL))
    return uniform(model)


def one_window(model: Model) -> Plan:
    """Mistral, Mixtral, Phi-3: a scalar window holds for all layers, null means none."""
    fields = model.fields

    def types(window: int | None) -> LayerTypes:
        ministral_8b = (model.num_layers, window) == (36, 32768)
        if window and (fields.class_name == "ministral" or ministral_8b):
            fields.note(
                f"the scalar sliding_window {window} makes every layer slide; Ministral-8B's params.json holds a list "
                "instead (one full layer for every three sliding), which from_mistral_params reads"
            )
        return all_of(model.num_layers, SLIDING if window else FULL)

    return sliding_layers(model, attention(model), types)


def qwen(model: Model) -> Plan:
    """Qwen2 and Qwen3: a window counts only with `use_sliding_window`, from layer `max_window_layers` on."""
    fields = model.fields
    if not fields.flag("use_sliding_window"):
        if "use_sliding_window" not in fields.data:
            fields.record("use_sliding_window", "false", f"class default of {fields.class_name}")
        if fields.has("sliding_window"):
            fields.note("sliding_window is inert because use_sliding_window is false")
        types = read_layer_types(model, FULL, SLIDING)
        if types is not None and SLIDING in types.own:
            fields.note("use_sliding_window is false, so the sliding_attention layers keep every token")
        trailing = (FULL,) * len(types.trailing) if types is not None else ()
        return plan(LayerTypes((FULL,) * model.num_layers, trailing), {FULL: attention(model)})

    def types_for(window: int | None) -> LayerTypes:
        if window is None:
            return all_of(model.num_layers, FULL)
        if fields.class_name == "qwen3_moe":
            return all_of(model.num_layers, SLIDING)  # this class has no max_window_layers
        if fields.class_name == "qwen2_moe":
            raise ConfigError(
                f"{fields.key('layer_types')} is missing; with use_sliding_window, qwen2_moe needs it to say which "
                "layers slide"
            )
        first = fields.integer("max_window_layers", minimum=0)
        return LayerTypes(tuple(SLIDING if index >= first else FULL for index in range(model.num_layers)))

    return sliding_layers(model, attention(model), types_for)


def alternating(model: Model) -> Plan:
    """Gemma-2 and gpt-oss: even layers slide."""
    return sliding_layers(model, attention(model), lambda window: _periodic(model, 2))


def olmo3(model: Model) -> Plan:
    """OLMo-3: every fourth layer is full."""
    return sliding_layers(model, attention(model), lambda window: _periodic(model, 4))


def gemma3(model: Model) -> Plan:
    """Gemma-3: every `sliding_window_pattern`-th layer is full (6)."""
    return sliding_layers(
        model,
        attention(model),
        lambda window: _periodic(model, 6, "sliding_window_pattern", "_sliding_window_pattern"),
        window_of=_gemma_window,
    )


def gemma3n(model: Model) -> Plan:
    """Gemma-3n: every fifth layer is full; the last `num_kv_shared_layers` read the KV of earlier layers."""
    whole = sliding_layers(model, attention(model), lambda window: _periodic(model, 5), window_of=_gemma_window)
    return share_tail(model, whole, model.fields.optional_integer("num_kv_shared_layers", minimum=0) or 0)


def gemma4(model: Model) -> Plan:
    """Gemma-4: full layers have `global_head_dim` and their own KV heads; the last layer is always full."""
    fields = model.fields
    sliding = attention(model)
    heads = sliding.num_kv_heads
    overrides = fields.nested("per_layer_config")
    if overrides is not None and overrides.data:  # transformers 5 saves the full layers' dims there, one entry for each
        entry = overrides.nested(next(iter(overrides.data))) or fields
        dim = entry.integer("head_dim", field="global_head_dim")
        heads = entry.optional_integer("num_key_value_heads", field="num_global_key_value_heads") or heads
    else:
        dim = fields.integer("global_head_dim")
        if fields.flag("attention_k_eq_v"):
            heads = fields.optional_integer("num_global_key_value_heads") or heads
        elif fields.has("num_global_key_value_heads"):
            fields.note("num_global_key_value_heads is inert because attention_k_eq_v is false")
    if fields.flag("attention_k_eq_v"):
        fields.note("attention_k_eq_v ties the projections of K and V; engines still cache both")
    full = replace(sliding, num_kv_heads=heads, head_dim=dim, head_dim_v=dim)
    whole = sliding_layers(model, full, lambda window: _periodic(model, 6), sliding=sliding, window_of=_gemma_window)
    if whole.layers[-1].spec != full:
        fields.note("the last layer is full attention whatever layer_types says")
        whole = whole._replace(layers=(*whole.layers[:-1], Layer(model.num_layers - 1, full)))
    return share_tail(model, whole, fields.optional_integer("num_kv_shared_layers", minimum=0) or 0)


def cohere2(model: Model) -> Plan:
    """Command-R7B: every fourth layer is full; a query sees `sliding_window` tokens before itself."""

    def window_of(fields: Fields) -> int | None:
        window = fields.nullable_integer("sliding_window")
        if window is None:
            return None
        fields.note(f"sliding_window {window} counts the tokens before the query, so the layers keep {window + 1}")
        fields.record("window", window + 1, "derived: sliding_window + 1")
        return window + 1

    return sliding_layers(
        model,
        attention(model),
        lambda window: every_nth_full(model.num_layers, model.fields.integer("sliding_window_pattern", "layer_switch")),
        window_of=window_of,
    )


def exaone4(model: Model) -> Plan:
    """EXAONE-4: `sliding_window_pattern` is a number n (every n-th full) or letters (L slides, G does not)."""
    fields = model.fields

    def types(window: int | None) -> LayerTypes:
        pattern = fields.data.get("sliding_window_pattern", 4)
        if window is None or pattern is None:
            return all_of(model.num_layers, FULL)
        if not isinstance(pattern, str):
            return every_nth_full(model.num_layers, fields.integer("sliding_window_pattern"))
        if not pattern or set(pattern) - set("LG"):
            raise fields.bad("sliding_window_pattern", "a whole number or letters L and G such as LLLG")
        fields.record("sliding_window_pattern", pattern, f"{fields.place}: {fields.key('sliding_window_pattern')}")
        letters = [pattern[index % len(pattern)] for index in range(model.num_layers)]
        letters[-1] = "G"  # the last layer is global whatever the letters say
        return LayerTypes(tuple(SLIDING if letter == "L" else FULL for letter in letters))

    return sliding_layers(model, attention(model), types)


def llama4(model: Model) -> Plan:
    """Llama-4: layers with rope (1 in `no_rope_layers`, despite its name) attend within a chunk, the others to all."""
    fields = model.fields
    full = attention(model)
    types = read_layer_types(model, FULL, CHUNKED)
    rope = fields.integers("no_rope_layers", 0, 1)
    if types is None and rope:
        require_length(model, "no_rope_layers", len(rope))
        types = LayerTypes(tuple(CHUNKED if code else FULL for code in rope))
    elif types is None:
        period = fields.integer("no_rope_layer_interval")
        types = LayerTypes(tuple(CHUNKED if (i + 1) % period else FULL for i in range(model.num_layers)))
    chunk = fields.nullable_integer("attention_chunk_size")
    if chunk is None:
        return plan(types, {FULL: full, CHUNKED: full})
    chunked = ChunkedLocal(full.num_kv_heads, full.head_dim, full.head_dim_v, full.dtype, chunk=chunk)
    return plan(types, {FULL: full, CHUNKED: chunked})


def mllama(model: Model) -> Plan:
    """Llama-3.2-Vision: `num_hidden_layers` includes the cross-attention layers, which hold image tokens only."""
    fields = model.fields
    full = attention(model)
    cross = fields.integers("cross_attention_layers", 0, model.num_layers - 1)
    if cross is None:
        cross = MLLAMA_CROSS_ATTENTION_LAYERS
        if model.num_layers <= cross[-1]:
            raise ConfigError(f"{fields.key('cross_attention_layers')} is missing; it must list layer indices")
        fields.record("cross_attention_layers", ", ".join(map(str, cross)), f"class default of {fields.class_name}")
    image = CrossAttention(full.num_kv_heads, full.head_dim, full.head_dim_v, full.dtype)
    layers = tuple(Layer(index, image if index in set(cross) else full) for index in range(model.num_layers))
    return Plan(layers, full)


def phi3_small(model: Model) -> Plan:
    """Phi-3-small: block-sparse attention reads fewer tokens, and engines store all of them."""
    model.fields.note("block-sparse attention (blocksparse_*) still stores the KV of every token")
    return uniform(model)


def mla(model: Model) -> Plan:
    """DeepSeek, Kimi-K2, GLM-5: one latent per token; `num_key_value_heads` and `head_dim` mean nothing here.

    `index_head_dim` adds the sparse-attention indexer; GLM-5.2 layers whose `indexer_types` say shared have none.
    """
    fields = model.fields
    types = read_layer_types(model, FULL)
    indexer = fields.optional_integer("index_head_dim") or 0
    spec = MLA(
        fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim"), model.cache_dtype, index_head_dim=indexer
    )
    layers = tuple(Layer(index, own) for index, own in enumerate(_with_indexers(model, spec)))
    return Plan(layers, spec, (spec,) * len(types.trailing) if types is not None else ())


def _with_indexers(model: Model, spec: MLA) -> tuple[MLA, ...]:
    fields = model.fields
    modes = fields.names("indexer_types")
    if modes is None:
        for key in ("index_topk_pattern", "index_topk_freq"):
            if fields.data.get(key) not in (None, 1):
                raise ConfigError(
                    f"{fields.key(key)} needs indexer_types, which must say full or shared for each layer"
                )
        return (spec,) * model.num_layers
    require_length(model, "indexer_types", len(modes))
    shared = replace(spec, index_head_dim=0)
    for index, mode in enumerate(modes):
        if mode not in ("full", "shared"):
            raise ConfigError(f"{fields.key('indexer_types')}[{index}] is {shown(mode)}; it must be full or shared")
    return tuple(spec if mode == "full" else shared for mode in modes)


def mimo_v2_flash(model: Model) -> Plan:
    """MiMo-V2-Flash: `hybrid_layer_pattern` 1 slides; sliding layers have `swa_*` heads; K and V differ in width."""
    fields = model.fields
    full = replace(attention(model), head_dim_v=fields.integer("v_head_dim"))
    heads = fields.optional_integer("swa_num_key_value_heads")
    if heads is None:
        heads = 2 * full.num_kv_heads
        fields.record("swa_num_key_value_heads", heads, "derived: 2 * num_key_value_heads")
    sliding = replace(
        full,
        num_kv_heads=heads,
        head_dim=fields.optional_integer("swa_head_dim") or full.head_dim,
        head_dim_v=fields.optional_integer("swa_v_head_dim") or full.head_dim_v,
    )
    _note_inert(fields, "attention_chunk_size")

    def types(window: int | None) -> LayerTypes:
        codes = fields.integers("hybrid_layer_pattern", 0, 1)
        if codes is None:
            own = every_nth_full(model.num_layers, 6).own
            fields.record("hybrid_layer_pattern", "layer 0 and one in 6 full", "class default of mimo_v2_flash")
            return LayerTypes((FULL, *own[1:]))
        require_length(model, "hybrid_layer_pattern", len(codes))
        return LayerTypes(tuple(SLIDING if code else FULL for code in codes))

    def window_of(fields: Fields) -> int | None:
        return fields.integer("sliding_window_size", "sliding_window", field="sliding_window")

    return sliding_layers(model, full, types, sliding=sliding, window_of=window_of)


def step3p5(model: Model) -> Plan:
    """Step-3.5: `num_attention_groups` KV heads; `attention_other_setting` overrides them for the sliding layers."""
    fields = model.fields
    full = attention(model, "num_attention_groups", "num_key_value_heads")
    sliding = full
    other = fields.nested("attention_other_setting")
    if other is not None:
        name = "attention_other_setting."
        dim = other.optional_integer("head_dim", field=f"{name}head_dim") or full.head_dim
        groups = other.optional_integer("num_attention_groups", field=f"{name}num_attention_groups")
        sliding = replace(full, num_kv_heads=groups or full.num_kv_heads, head_dim=dim, head_dim_v=dim)
    return sliding_layers(model, full, lambda window: all_of(model.num_layers, FULL), sliding=sliding)


def _periodic(model: Model, period: int, *keys: str) -> LayerTypes:
    """Every `period`-th layer full, as the class does it; `keys` are those that it reads the period from."""
    fields = model.fields
    given = fields.optional_integer(*keys) if keys else None
    if given is None:
        fields.record("layer_types", f"one full layer in {period}", f"class default of {fields.class_name}")
    return every_nth_full(model.num_layers, given or period)


def _gemma_window(fields: Fields) -> int | None:
    """Gemma halves its window when tokens also look ahead (embedding models); the file holds the whole one."""
    window = fields.nullable_integer("sliding_window")
    if window is not None and fields.data.get("use_bidirectional_attention") in (True, "all"):
        window = window // 2 + 1
        fields.note(f"use_bidirectional_attention halves sliding_window to {window} on each side")
        fields.record("window", window, "derived: sliding_window / 2 + 1")
    return window


def _note_inert(fields: Fields, key: str) -> None:
    if fields.has(key):
        fields.note(f"{key} {shown(fields.data[key])} is inert: the class {fields.class_name} does not read it")


FAMILIES: Mapping[str, Rule] = {
    "llama": llama,
    "mistral": one_window,
    "ministral": one_window,
    "ministral3": one_window,
    "mixtral": one_window,
    "phi3": one_window,
    "phi3small": phi3_small,
    "phi4flash": phi4_flash,
    "gemma": uniform,
    "gemma2": alternating,
    "gemma3": gemma3,
    "gemma3_text": gemma3,
    "gemma3n": gemma3n,
    "gemma3n_text": gemma3n,
    "gemma4": gemma4,
    "gemma4_text": gemma4,
    "gpt_oss": alternating,
    "llama4": llama4,
    "llama4_text": llama4,
    "mllama": mllama,
    "mllama_text_model": mllama,
    "cohere": uniform,
    "cohere2": cohere2,
    "qwen2": qwen,
    "qwen2_moe": qwen,
    "qwen2_vl": qwen,
    "qwen2_vl_text": qwen,
    "qwen2_5_vl": qwen,
    "qwen2_5_vl_text": qwen,
    "qwen3": qwen,
    "qwen3_moe": qwen,
    "qwen3_vl": uniform,
    "qwen3_vl_text": uniform,
    "qwen3_vl_moe": uniform,
    "qwen3_vl_moe_text": uniform,
    "qwen3_next": gated_delta_net,
    "qwen3_5": gated_delta_net,
    "qwen3_5_text": gated_delta_net,
    "qwen3_5_moe": gated_delta_net,
    "qwen3_5_moe_text": gated_delta_net,
    "deepseek_v2": mla,
    "deepseek_v3": mla,
    "deepseek_v32": mla,
    "kimi_k2": mla,
    "glm_moe_dsa": mla,
    "mimo_v2_flash": mimo_v2_flash,
    "step3p5": step3p5,
    "step3p7": step3p5,
    "exaone4": exaone4,
    "olmo2": uniform,
    "olmo3": olmo3,
    "minimax_m2": uniform,
    "minimax": lightning,
    "minimax_text_01": lightning,
    "minimax_m1": lightning,
    "jamba": jamba,
    "glm4_moe": uniform,
}
