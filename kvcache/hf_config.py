"""From a model's own config file to a `ModelLayout`: Hugging Face `config.json` and Mistral's `params.json`.

`read_hf_config` finds the text model in the file, its type, its layer count and the cache dtype, lets the type's rule
(`families`, or `generic_layout`) decide the layers, and adds the multi-token-prediction layers that the file declares.
Whatever the input, the result is a layout that lists the origin of each deciding value, or a `ConfigError` of one
sentence that starts with the name of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PureWindowsPath

from .class_defaults import CLASS_DEFAULTS
from .config_fields import MAX_LAYERS, Fields
from .documents import Document, Input, read_json
from .errors import ConfigError
from .families import FAMILIES, mla
from .generic_layout import generic, require_plain
from .layer_rules import FULL, SLIDING, LayerTypes, Model, Plan, all_of, attention, sliding_layers
from .layout import ModelLayout
from .specs import ChunkedLocal, LayerSpec, SlidingWindow

MODEL_DTYPES = ("bfloat16", "float16", "float32")

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
_DRAFT_COUNTS = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_layers",
    "mtp_num_layers",
)
_MAX_DRAFT_LAYERS = 64
_MAX_LEN_KEYS = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "seq_length", "n_positions")

# What params.json calls the fields that the rules read.
_PARAMS_KEYS = {
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "hidden_size": "dim",
    "max_position_embeddings": "max_seq_len",
}


def read_hf_config(source: Input) -> ModelLayout:
    """The layout of a `config.json`: its path, its folder, or its parsed content.

    Raises `ConfigError` for a file that is not a usable config, for a bad value, and for a model whose layers the
    fields do not settle.
    """
    document = read_json(source, "config.json")
    try:
        return _layout_of(document)
    except ConfigError as error:
        raise ConfigError(f"{document.label}: {error}") from None


def read_mistral_params(source: Input) -> ModelLayout:
    """The layout of a Mistral `params.json`: its path, its folder, or its parsed content; raises `ConfigError`."""
    document = read_json(source, "params.json")
    try:
        return _layout_of_params(document)
    except ConfigError as error:
        raise ConfigError(f"{document.label}: {error}") from None


def _layout_of(document: Document) -> ModelLayout:
    if not any(key in document.data for key in ("num_hidden_layers", *_TEXT_CONFIGS)) and any(
        key in document.data for key in ("n_layers", "n_kv_heads")
    ):
        raise ConfigError("this is Mistral's params.json (it has n_layers); read it with from_mistral_params")
    outer = Fields(document.data, document.place)
    fields = _text_fields(outer)
    if fields.class_name not in FAMILIES:
        require_plain(fields)
    layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    model_dtype = _model_dtype(fields, outer)
    cache_dtype = _cache_dtype(fields, outer, model_dtype)
    if fields.class_name not in ("gemma4", "gemma4_text"):
        _refuse_overrides(fields)
    model = Model(fields, layers, cache_dtype, model_dtype)
    plan = FAMILIES.get(fields.class_name, generic)(model)
    drafts = _draft_specs(fields, plan)
    max_len = fields.optional_integer(*_MAX_LEN_KEYS)
    return ModelLayout(
        name=_name(fields, outer, document),
        layers=plan.layers,
        max_model_len=max_len,
        draft_specs=drafts,
        sources=fields.sources,
        notes=tuple(fields.notes),
    )


def _text_fields(outer: Fields) -> Fields:
    """The object that holds the text model's fields, with the defaults of the most specific known model type."""
    outer_type = outer.text("model_type") or ""
    for key in _TEXT_CONFIGS:
        inner = outer.nested(key)
        if inner is None:
            continue
        inner_type = inner.text("model_type") or ""
        known = next((name for name in (inner_type, outer_type) if name in FAMILIES), inner_type or outer_type)
        fields = Fields(inner.data, outer.place, f"{key}.", known, CLASS_DEFAULTS.get(known))
        origin = f"{outer.place}: {fields.key('model_type') if known == inner_type else 'model_type'}"
        break
    else:
        known = outer_type
        fields = Fields(outer.data, outer.place, "", known, CLASS_DEFAULTS.get(known))
        origin = f"{outer.place}: model_type"
    if known:
        fields.record("model_type", known, origin)
    return fields


def _model_dtype(fields: Fields, outer: Fields) -> str:
    for source in (fields, outer):
        for key in ("dtype", "torch_dtype"):
            name = source.text(key)
            if name is None or name == "auto":
                continue
            dtype = name.removeprefix("torch.")
            if dtype not in MODEL_DTYPES:
                raise source.bad(key, f"one of {', '.join(MODEL_DTYPES)}")
            fields.record("dtype", dtype, f"{source.place}: {source.key(key)}")
            return dtype
    fields.record("dtype", "bfloat16", "default")
    return "bfloat16"


def _cache_dtype(fields: Fields, outer: Fields, model_dtype: str) -> str:
    """The KV cache's dtype: the model's, unless a quantisation config speaks of the cache itself."""
    for source in (fields, outer):
        for key in ("quantization_config", "compression_config"):
            quantization = source.nested(key)
            if quantization is None:
                continue
            declared = _declared_cache_dtype(quantization)
            if declared is not None:
                dtype, name = declared
                fields.record("kv_cache_dtype", dtype, f"{source.place}: {quantization.key(name)}")
                fields.note(f"{quantization.key(name)} declares an 8-bit KV cache; laid out as {dtype}")
                return dtype
    return model_dtype


def _declared_cache_dtype(quantization: Fields) -> tuple[str, str] | None:
    for name in ("kv_cache_quant_algo", "kv_cache_scheme"):
        value = quantization.data.get(name)
        if value is None:
            continue
        if isinstance(value, Mapping):
            bits, kind = value.get("num_bits"), value.get("type", "float")
            if bits == 8 and kind in ("float", "int"):
                return ("float8_e4m3" if kind == "float" else "int8"), name
        elif isinstance(value, str):
            algorithm = value.upper()
            if algorithm in ("FP8", "INT8"):
                return ("float8_e4m3" if algorithm == "FP8" else "int8"), name
            if algorithm in ("NONE", "AUTO"):
                continue
        raise quantization.bad(name, "null, FP8, INT8, or an object with num_bits 8 and type float or int")
    return None


def _refuse_overrides(fields: Fields) -> None:
    """transformers 5 may save dims per layer; a rule that reads them once per model would be wrong without a word."""
    value = fields.data.get("per_layer_config")
    if not isinstance(value, Mapping):
        return
    for entry in value.values():
        for key in ("head_dim", "num_key_value_heads", "sliding_window"):
            if isinstance(entry, Mapping) and key in entry:
                raise ConfigError(
                    f"{fields.key('per_layer_config')} overrides {key} for single layers of model type "
                    f"{fields.class_name!r}, which no rule here knows"
                )


def _draft_specs(fields: Fields, plan: Plan) -> tuple[LayerSpec, ...]:
    """The layers of the multi-token-prediction modules that the config declares."""
    count = fields.optional_integer(*_DRAFT_COUNTS, minimum=0, maximum=_MAX_DRAFT_LAYERS, field="draft layers")
    if count is None and fields.data.get("use_mtp") is not False:
        modules = fields.optional_integer("num_mtp_modules", minimum=0, maximum=_MAX_DRAFT_LAYERS)
        if modules is not None:
            count = modules * (fields.optional_integer("mtp_transformer_layers", maximum=_MAX_DRAFT_LAYERS) or 1)
            fields.record("draft layers", count, "derived: num_mtp_modules * mtp_transformer_layers")
    extra = len(plan.trailing)
    if count is None:
        if extra:
            fields.note(
                f"layer_types lists {extra} layers more than num_hidden_layers; they are taken for draft layers"
            )
        return plan.trailing
    if extra and count <= extra:
        return plan.trailing[:count]
    if extra:
        raise ConfigError(f"layer_types lists {extra} draft layers and the config declares {count}")
    if count and plan.draft is None:
        fields.note(f"the config declares {count} draft layers of a kind that is not known; they are left out")
        return ()
    if count and any(isinstance(layer.spec, SlidingWindow | ChunkedLocal) for layer in plan.layers):
        fields.note("the config does not say whether its draft layers slide; they are laid out as full attention")
    return () if plan.draft is None else (plan.draft,) * count


def _name(fields: Fields, outer: Fields, document: Document) -> str:
    given = outer.text("_name_or_path") or fields.text("_name_or_path")
    if given and given.strip("./\\"):
        local = given.startswith((".", "/", "~")) or "\\" in given
        return PureWindowsPath(given).name if local else given
    return document.stem or outer.text("model_type") or fields.class_name or "model"


def _layout_of_params(document: Document) -> ModelLayout:
    if "n_layers" not in document.data and any(key in document.data for key in ("num_hidden_layers", *_TEXT_CONFIGS)):
        raise ConfigError("this is a Hugging Face config.json (it has num_hidden_layers); read it with from_hf")
    file_keys = {name: key for name, key in _PARAMS_KEYS.items() if key in document.data or name not in document.data}
    data = {name: document.data[key] for name, key in file_keys.items() if key in document.data}
    fields = Fields({**document.data, **data}, document.place, class_name="params.json", file_keys=file_keys)
    layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    fields.record("dtype", "bfloat16", "default")
    model = Model(fields, layers, "bfloat16", "bfloat16")

    def types(window: int | None) -> LayerTypes:
        return all_of(layers, SLIDING if window else FULL)

    plan = mla(model) if fields.has("kv_lora_rank") else sliding_layers(model, attention(model), types)
    return ModelLayout(
        name=document.stem or "model",
        layers=plan.layers,
        max_model_len=fields.optional_integer("max_position_embeddings"),
        sources=fields.sources,
        notes=tuple(fields.notes),
    )
