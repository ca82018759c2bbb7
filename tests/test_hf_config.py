"""Reading config files: provenance, names, unknown models, and every way in which a file can be broken."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.kvcache import MLA, ChunkedLocal, ConfigError, FullAttention, ModelLayout, SlidingWindow, Source

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
PARAMS = {"n_layers": 4, "n_heads": 32, "n_kv_heads": 8, "dim": 4096}
FULL = FullAttention(8, 128, 128)


def write(folder: Path, content: Any, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def message(error: pytest.ExceptionInfo[ConfigError]) -> str:
    """The text of an error, which must be one sentence on one line."""
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 600
    return text


def refused(config: Any, *expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        ModelLayout.from_hf(config)
    for part in expected:
        assert part in message(error)


# ---- provenance ----------------------------------------------------------------------------------------------------


def test_every_deciding_field_has_a_source(tmp_path: Path) -> None:
    layout = ModelLayout.from_hf(write(tmp_path, LLAMA))
    assert layout.sources == (
        Source("model_type", "llama", "config.json: model_type"),
        Source("num_hidden_layers", "2", "config.json: num_hidden_layers"),
        Source("dtype", "bfloat16", "config.json: torch_dtype"),
        Source("num_key_value_heads", "8", "config.json: num_key_value_heads"),
        Source("num_attention_heads", "32", "config.json: num_attention_heads"),
        Source("hidden_size", "4096", "config.json: hidden_size"),
        Source("head_dim", "128", "derived: hidden_size / num_attention_heads"),
        Source("max_position_embeddings", "131072", "config.json: max_position_embeddings"),
    )
    assert [layer.spec for layer in layout.layers] == [FULL, FULL]
    assert layout.max_model_len == 131072
    assert layout.notes == ()


def test_sources_of_lists_are_counts() -> None:
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    layout = ModelLayout.from_hf({"model_type": "gemma3_text", "num_hidden_layers": 3, "layer_types": types})
    assert Source("layer_types", "2 × sliding_attention, 1 × full_attention", "mapping: layer_types") in layout.sources


def test_derived_kv_heads_and_draft_layers_have_sources() -> None:
    layout = ModelLayout.from_hf(
        {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_mtp_modules": 2,
        }
    )
    origins = {source.field: source.origin for source in layout.sources}
    assert origins["num_key_value_heads"] == "derived: num_attention_heads"
    assert origins["draft layers"] == "derived: num_mtp_modules * mtp_transformer_layers"
    assert layout.draft_specs == (FullAttention(4, 16, 16),) * 2


# ---- names ---------------------------------------------------------------------------------------------------------


def test_name_comes_from_the_config_the_file_the_folder_or_the_type(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    path = write(folder, LLAMA)
    assert ModelLayout.from_hf(path).name == "tiny-llama"
    assert ModelLayout.from_hf(folder).name == "tiny-llama"
    assert ModelLayout.from_hf(str(write(folder, LLAMA, "other.json"))).name == "other"
    assert ModelLayout.from_hf(LLAMA).name == "llama"
    assert ModelLayout.from_hf({**LLAMA, "_name_or_path": "meta-llama/Llama-3.1-8B"}).name == "meta-llama/Llama-3.1-8B"
    assert ModelLayout.from_hf({**LLAMA, "_name_or_path": "/data/ckpt/mine"}).name == "mine"
    assert ModelLayout.from_hf({**LLAMA, "_name_or_path": "C:\\ckpt\\mine"}).name == "mine"
    assert ModelLayout.from_hf({**LLAMA, "_name_or_path": "./"}).name == "llama"


def test_name_of_a_snapshot_in_the_hugging_face_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--org--tiny" / "blobs", tmp_path / "models--org--tiny" / "snapshots" / "f00"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to(write(blobs, LLAMA, "abc"))
    assert ModelLayout.from_hf(snapshot).name == "org/tiny"
    assert ModelLayout.from_hf(snapshot / "config.json").name == "org/tiny"


# ---- files that are no config --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "is empty"),
        ("  \n", "is empty"),
        ('{\n"a": 1,\n"b": }', "line 3: not JSON"),
        ("[1, 2]", "holds a list of 2 entries, not a JSON object"),
        ("3", "holds 3, not a JSON object"),
        ("null", "holds null, not a JSON object"),
        ("{}", "is empty; it must hold a JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"num_hidden_layers": ' + "9" * 5000 + "}", "not a usable JSON config"),
        ('{"model_type": "llama", "num_hidden_layers": NaN}', "num_hidden_layers is nan"),
        ('{"model_type": 7}', "model_type is 7; it must be text"),
        ('{"text_config": []}', "text_config is a list of 0 entries; it must be an object"),
    ],
)
def test_broken_files(tmp_path: Path, content: str, expected: str) -> None:
    path = write(tmp_path, content)
    refused(path, str(path), expected)


def test_binary_missing_unreadable_and_huge_files(tmp_path: Path) -> None:
    binary = tmp_path / "model.safetensors"
    binary.write_bytes(b"\x08\x00\xff\xfe\x00garbage")
    refused(binary, str(binary), "is not JSON: byte 2 is not UTF-8 text")
    refused(tmp_path / "nothing.json", "cannot read", "No such file")
    refused("nul\0byte", "cannot read")
    refused(tmp_path, "holds no config.json")
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(17 * 2**20)
    refused(huge, "is larger than 16777216 bytes")
    refused(12, "cannot read 12; give a path, a folder or a mapping")
    refused({1: 2}, "has the key 1; every key must be text")


def test_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert len(ModelLayout.from_hf(path).layers) == 2


def test_params_and_config_given_to_each_other(tmp_path: Path) -> None:
    refused(PARAMS, "from_mistral_params")
    with pytest.raises(ConfigError, match="from_hf"):
        ModelLayout.from_mistral_params(LLAMA)
    with pytest.raises(ConfigError, match="n_layers is missing"):
        ModelLayout.from_mistral_params({"dim": 4096})
    with pytest.raises(ConfigError, match=r"holds no params\.json"):
        ModelLayout.from_mistral_params(tmp_path)


# ---- params.json ---------------------------------------------------------------------------------------------------


def test_params_json_windows(tmp_path: Path) -> None:
    local = SlidingWindow(8, 128, 128, window=4096)
    assert [x.spec for x in ModelLayout.from_mistral_params(PARAMS).layers] == [FULL] * 4
    assert [x.spec for x in ModelLayout.from_mistral_params({**PARAMS, "sliding_window": None}).layers] == [FULL] * 4
    assert [x.spec for x in ModelLayout.from_mistral_params({**PARAMS, "sliding_window": 4096}).layers] == [local] * 4
    folder = tmp_path / "mini"
    folder.mkdir()
    write(folder, {**PARAMS, "sliding_window": [4096, None]}, "params.json")
    layout = ModelLayout.from_mistral_params(folder)
    assert [x.spec for x in layout.layers] == [local, FULL] * 2
    assert layout.name == "mini"
    assert Source("num_hidden_layers", "4", "params.json: n_layers") in layout.sources


def test_params_json_bad_values_name_its_own_keys() -> None:
    for change, expected in (
        ({"n_kv_heads": 0}, "n_kv_heads is 0; it must be a whole number from 1"),
        ({"n_heads": 30}, "n_heads is 30; it must be a multiple of the 8 KV heads (n_kv_heads)"),
        ({"sliding_window": []}, "sliding_window is a list of 0 entries"),
        ({"sliding_window": [1, 2, 3]}, "must divide the 4 layers"),
    ):
        with pytest.raises(ConfigError) as error:
            ModelLayout.from_mistral_params({**PARAMS, **change})
        assert expected in message(error)


# ---- bad values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a whole number from 1 to 10000"),
        ({"num_hidden_layers": 10001}, "num_hidden_layers is 10001"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_key_value_heads": -8}, "num_key_value_heads is -8; it must be a whole number from 1"),
        ({"num_key_value_heads": 8.0}, "num_key_value_heads is 8.0"),
        ({"num_key_value_heads": 7}, "num_attention_heads is 32; it must be a multiple of the 7 KV heads"),
        ({"hidden_size": 4097}, "hidden_size is 4097; it must be a multiple of num_attention_heads (32)"),
        ({"head_dim": float("nan")}, "head_dim is nan"),
        ({"head_dim": 10**40}, "head_dim is a number of 133 bits"),
        ({"head_dim": [128]}, "head_dim is a list of 1 entries"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings is 'long'"),
        ({"torch_dtype": "complex64"}, "torch_dtype is 'complex64'; it must be one of bfloat16, float16, float32"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention'; it must be a list of names"),
        ({"layer_types": ["full_attention", 3]}, "layer_types[1] is 3"),
        ({"layer_types": ["full_attention"] * 20_001}, "it must be a list of at most 20000 entries"),
        ({"num_nextn_predict_layers": 65}, "num_nextn_predict_layers is 65; it must be a whole number from 0 to 64"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8'; it must be an object"),
    ],
)
def test_bad_values_name_key_value_and_choice(change: dict[str, Any], expected: str) -> None:
    refused({**LLAMA, **change}, "the given mapping: ", expected)


def test_bad_value_in_a_nested_config_names_its_path(tmp_path: Path) -> None:
    path = write(tmp_path, {"model_type": "gemma3", "text_config": {"num_hidden_layers": 6, "sliding_window": 0}})
    refused(path, f"{path}: text_config.sliding_window is 0; it must be a whole number from 1")


# ---- unknown models ------------------------------------------------------------------------------------------------

UNKNOWN = {
    "model_type": "nova",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def test_unknown_model_with_enough_fields_is_laid_out_with_a_note() -> None:
    layout = ModelLayout.from_hf(UNKNOWN)
    assert [layer.spec for layer in layout.layers] == [FullAttention(2, 64, 64)] * 2
    assert layout.notes == ("model type nova is not known; laid out from its head counts and per-layer list alone",)


def test_unknown_model_with_layer_types() -> None:
    types = ["sliding_attention", "full_attention"]
    layout = ModelLayout.from_hf({**UNKNOWN, "layer_types": types, "sliding_window": 128})
    assert [layer.spec for layer in layout.layers] == [SlidingWindow(2, 64, 64, window=128), FullAttention(2, 64, 64)]
    refused({**UNKNOWN, "layer_types": types}, "sliding_window is missing")
    refused({**UNKNOWN, "layer_types": ["linear_attention", "full_attention"]}, "layer_types[0] is 'linear_attention'")
    chunks = {**UNKNOWN, "layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 256}
    assert ModelLayout.from_hf(chunks).layers[0].spec == ChunkedLocal(2, 64, 64, chunk=256)
    refused({**chunks, "layer_types": ["chunked_attention", "sliding_attention"]}, "mixes")
    inert = ModelLayout.from_hf({**chunks, "layer_types": types, "sliding_window": 128})
    assert inert.layers == layout.layers


def test_unknown_model_with_a_scalar_window_is_full_and_says_so() -> None:
    layout = ModelLayout.from_hf({**UNKNOWN, "sliding_window": 4096})
    assert [layer.spec for layer in layout.layers] == [FullAttention(2, 64, 64)] * 2
    assert "sliding_window 4096 has no per-layer list" in layout.notes[1]
    off = ModelLayout.from_hf({**UNKNOWN, "sliding_window": 4096, "use_sliding_window": False})
    assert "sliding_window is inert because use_sliding_window is false" in off.notes


def test_unknown_mla_model() -> None:
    layout = ModelLayout.from_hf(
        {"model_type": "nova", "num_hidden_layers": 3, "kv_lora_rank": 256, "qk_rope_head_dim": 32}
    )
    assert [layer.spec for layer in layout.layers] == [MLA(256, 32)] * 3
    refused({"model_type": "nova", "num_hidden_layers": 3, "kv_lora_rank": 256}, "missing: qk_rope_head_dim")


def test_unknown_model_names_all_missing_fields() -> None:
    refused(
        {"model_type": "nova", "vocab_size": 3},
        "missing: num_hidden_layers, num_key_value_heads or num_attention_heads, head_dim or hidden_size",
    )
    refused({"text_config": {"vocab_size": 3}}, "text_config.num_hidden_layers")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mamba_d_state", 16),
        ("ssm_state_size", 128),
        ("linear_attn_config", {"kda_layers": [1]}),
        ("linear_num_key_heads", 16),
        ("layers_block_type", ["mamba", "attention"]),
        ("hybrid_override_pattern", "M*"),
        ("attn_layer_period", 8),
        ("attn_type_list", [0, 1]),
        ("compress_ratios", [0, 4]),
        ("blocksparse_block_size", 64),
        ("sparse_attention_config", {"sparse_topk_blocks": 16}),
        ("block_configs", [{}]),
        ("cross_attention_layers", [3]),
        ("num_kv_shared_layers", 4),
        ("swa_num_key_value_heads", 8),
        ("multi_query", True),
        ("is_encoder_decoder", True),
    ],
)
def test_unknown_model_with_hybrid_fields_is_refused_by_name(key: str, value: Any) -> None:
    refused({**UNKNOWN, key: value}, f"its {key} describe layers")


def test_hybrid_fields_that_are_off_do_not_matter() -> None:
    off = {"is_encoder_decoder": False, "mamba_d_state": None, "compress_ratios": [], "num_kv_shared_layers": 0}
    assert len(ModelLayout.from_hf({**UNKNOWN, **off}).layers) == 2


# ---- nothing but ConfigError ---------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
SEEDS: tuple[dict[str, Any], ...] = (
    LLAMA,
    UNKNOWN,
    {**UNKNOWN, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128},
    {"model_type": "gemma3", "text_config": {"num_hidden_layers": 6, "sliding_window": 1024}},
    {"model_type": "gemma3n_text", "num_hidden_layers": 10, "num_kv_shared_layers": 3},
    {
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "per_layer_config": {"05": {"head_dim": 512}},
        "sliding_window": 512,
    },
    {"model_type": "llama4_text", "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": 64},
    {"model_type": "mllama_text_model", "num_hidden_layers": 5, "cross_attention_layers": [3]},
    {"model_type": "exaone4", "num_hidden_layers": 8, "sliding_window_pattern": "LLLG", "sliding_window": 64},
    {"model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 2},
    {
        "model_type": "mimo_v2_flash",
        "num_hidden_layers": 3,
        "hybrid_layer_pattern": [0, 1, 0],
        "sliding_window_size": 128,
        "swa_head_dim": 192,
        "swa_num_key_value_heads": 8,
    },
    {
        "model_type": "step3p5",
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "sliding_window": 512,
        "attention_other_setting": {"num_attention_groups": 8},
        "num_nextn_predict_layers": 1,
    },
    {"model_type": "glm_moe_dsa", "num_hidden_layers": 2, "indexer_types": ["full", "shared"], "index_topk_freq": 1},
    {"model_type": "qwen3_next", "num_hidden_layers": 4, "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32"},
    {"model_type": "jamba", "num_hidden_layers": 8, "attn_layer_period": 4, "attn_layer_offset": 1},
    {
        "model_type": "minimax_text_01",
        "num_hidden_layers": 2,
        "attn_type_list": [0, 1],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    {"model_type": "phi4flash", "num_hidden_layers": 8, "sliding_window": [None, 4], "mb_per_layer": 2},
    {"model_type": "cohere2", "num_hidden_layers": 4, "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}},
    {"model_type": "minimax_m2", "num_hidden_layers": 4, "num_mtp_modules": 2, "mtp_transformer_layers": 1},
)


def read_or_refuse(config: Any) -> ModelLayout | None:
    try:
        return ModelLayout.from_hf(config)
    except ConfigError as error:
        text = str(error)
        assert text
        assert "\n" not in text
        return None


def test_the_seeds_of_the_fuzzer_are_readable() -> None:
    for seed in SEEDS:
        assert read_or_refuse(seed) is not None, seed


@given(st.dictionaries(st.sampled_from(sorted({key for seed in SEEDS for key in seed})) | st.text(), json_values))
def test_random_objects_give_a_layout_or_a_config_error(config: dict[str, Any]) -> None:
    read_or_refuse(config)


@given(st.data())
def test_mutated_configs_give_a_layout_or_a_config_error(data: st.DataObject) -> None:
    config = copy.deepcopy(data.draw(st.sampled_from(SEEDS)))
    target = config
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(sorted(target)))
        if isinstance(target[key], dict) and target[key] and data.draw(st.booleans()):
            target = target[key]
            continue
        small = st.integers(-2, 10) | st.sampled_from([[], {}, "", "full_attention", 2**31, [0, 1], [None], ["full"]])
        target[key] = data.draw(small | json_values)
    layout = read_or_refuse(config)
    if layout is not None:
        assert len(layout.layers) == config.get(
            "num_hidden_layers", config.get("text_config", {}).get("num_hidden_layers")
        )
        assert layout.bytes_per_token + layout.state_bytes > 0


@given(st.binary(max_size=200))
def test_random_bytes_give_a_config_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        ModelLayout.from_hf(path)
