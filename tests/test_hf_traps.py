"""The traps of real model configs, one test each: a field that is absent, inert, inverted, or means something else."""

from __future__ import annotations

from typing import Any

import pytest

from kvtide.kvcache import (
    MLA,
    ChunkedLocal,
    ConfigError,
    CrossAttention,
    FullAttention,
    ModelLayout,
    SlidingWindow,
    Source,
)

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def full(heads: int, dim: int, dim_v: int | None = None, dtype: str = "bfloat16") -> FullAttention:
    return FullAttention(heads, dim, dim_v or dim, dtype)


def sliding(heads: int, dim: int, window: int, dim_v: int | None = None) -> SlidingWindow:
    return SlidingWindow(heads, dim, dim_v or dim, window=window)


def specs(layout: ModelLayout) -> list[Any]:
    return [layer.spec for layer in layout.layers]


def read(model_type: str, layers: int, **fields: Any) -> ModelLayout:
    return ModelLayout.from_hf({"model_type": model_type, "num_hidden_layers": layers, **fields})


def origin(layout: ModelLayout, field: str) -> str:
    [source] = [source for source in layout.sources if source.field == field]
    return source.origin


HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}


# ---- absent is not null --------------------------------------------------------------------------------------------


def test_mistral_absent_window_is_the_class_default() -> None:
    layout = read("mistral", 2, **HEADS)
    assert specs(layout) == [sliding(8, 128, 4096)] * 2
    assert origin(layout, "sliding_window") == "class default of mistral"


def test_mistral_null_window_is_full_attention() -> None:
    assert specs(read("mistral", 2, **HEADS, sliding_window=None)) == [full(8, 128)] * 2


def test_mixtral_absent_window_is_full_attention() -> None:
    assert specs(read("mixtral", 2, **HEADS)) == [full(8, 128)] * 2


def test_gemma3_4b_omits_heads_and_they_are_class_defaults() -> None:
    layout = ModelLayout.from_hf(
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "num_hidden_layers": 34,
                "sliding_window": 1024,
            },
        }
    )
    local, whole = sliding(4, 256, 1024), full(4, 256)
    assert specs(layout) == ([local] * 5 + [whole]) * 5 + [local] * 4
    assert layout.max_model_len == 131072
    assert Source("num_key_value_heads", "4", "class default of gemma3_text") in layout.sources
    assert Source("sliding_window", "1024", "mapping: text_config.sliding_window") in layout.sources


def test_gemma3_absent_window_is_4096_not_1024() -> None:
    assert specs(read("gemma3_text", 6))[0] == sliding(4, 256, 4096)


def test_qwen2_absent_kv_heads_are_class_default_while_null_means_one_per_head() -> None:
    fields = {"num_attention_heads": 64, "hidden_size": 8192}
    assert specs(read("qwen2", 1, **fields)) == [full(32, 128)]
    assert specs(read("qwen2", 1, **fields, num_key_value_heads=None)) == [full(64, 128)]


# ---- nested configs ------------------------------------------------------------------------------------------------


def test_nested_text_config_wins_over_the_top_level() -> None:
    layout = ModelLayout.from_hf(
        {
            "model_type": "qwen3_vl",
            "num_key_value_heads": 99,
            "torch_dtype": "float16",
            "text_config": {"model_type": "qwen3_vl_text", "num_hidden_layers": 3, **HEADS},
        }
    )
    assert specs(layout) == [full(8, 128, dtype="float16")] * 3
    assert origin(layout, "num_key_value_heads") == "mapping: text_config.num_key_value_heads"
    assert origin(layout, "dtype") == "mapping: torch_dtype"


def test_nested_model_type_that_is_unknown_falls_back_to_the_outer_one() -> None:
    layout = ModelLayout.from_hf(
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text_v9", "num_hidden_layers": 6}}
    )
    assert specs(layout)[5] == full(4, 256)
    assert layout.notes == ()


# ---- windows that do not count, or count differently ---------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3_moe"])
def test_qwen_window_is_inert_without_use_sliding_window(model_type: str) -> None:
    layout = read(model_type, 4, **HEADS, sliding_window=131072, use_sliding_window=False, max_window_layers=2)
    assert specs(layout) == [full(8, 128)] * 4
    assert "sliding_window is inert because use_sliding_window is false" in layout.notes


def test_qwen_window_starts_at_max_window_layers() -> None:
    layout = read("qwen2", 4, **HEADS, sliding_window=512, use_sliding_window=True, max_window_layers=3)
    assert specs(layout) == [full(8, 128)] * 3 + [sliding(8, 128, 512)]


def test_qwen_moe_with_a_window_but_no_layer_types_is_refused() -> None:
    with pytest.raises(ConfigError, match="layer_types is missing"):
        read("qwen2_moe", 4, **HEADS, use_sliding_window=True)


def test_qwen3_moe_window_holds_for_every_layer() -> None:
    layout = read("qwen3_moe", 3, **HEADS, sliding_window=512, use_sliding_window=True, max_window_layers=2)
    assert specs(layout) == [sliding(8, 128, 512)] * 3


def test_qwen_window_switched_on_but_null_is_full() -> None:
    layout = read("qwen2", 2, **HEADS, sliding_window=None, use_sliding_window=True)
    assert specs(layout) == [full(8, 128)] * 2


def test_qwen_sliding_layer_types_without_use_sliding_window_keep_every_token() -> None:
    layout = read("qwen3", 2, **HEADS, layer_types=[FULL, SLIDING])
    assert specs(layout) == [full(8, 128)] * 2
    assert "keep every token" in layout.notes[0]
    assert origin(layout, "use_sliding_window") == "class default of qwen3"


def test_null_window_with_sliding_layers_keeps_every_token_and_says_so() -> None:
    for model_type in ("gemma2", "cohere2"):
        layout = read(model_type, 4, **HEADS, sliding_window=None)
        assert specs(layout) == [full(8, 128)] * 4
        assert layout.notes == ("sliding_window is null, so the sliding_attention layers keep every token",)


def test_ministral_hf_config_slides_everywhere_and_says_that_params_json_differs() -> None:
    for model_type in ("ministral", "mistral"):
        layout = read(model_type, 36, **HEADS, sliding_window=32768, max_position_embeddings=32768)
        assert specs(layout) == [sliding(8, 128, 32768)] * 36
        [note] = layout.notes
        assert "params.json" in note
        assert "one full layer for every three" in note


def test_ministral_params_json_list_repeats_over_the_layers() -> None:
    layout = ModelLayout.from_mistral_params(
        {
            "n_layers": 36,
            "n_heads": 32,
            "n_kv_heads": 8,
            "dim": 4096,
            "head_dim": 128,
            "sliding_window": [None, 32768, 32768, 32768],
            "max_seq_len": 131072,
        }
    )
    assert specs(layout) == ([full(8, 128)] + [sliding(8, 128, 32768)] * 3) * 9
    assert layout.layers == ModelLayout.preset("ministral-8b-2410").layers
    assert layout.max_model_len == 131072
    assert origin(layout, "num_key_value_heads") == "mapping: n_kv_heads"


def test_window_list_in_config_json_decides_per_layer() -> None:
    layout = read("mistral", 4, **HEADS, sliding_window=[None, 64])
    assert specs(layout) == [full(8, 128), sliding(8, 128, 64)] * 2


def test_window_list_that_does_not_divide_the_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 entries; that must divide the 4 layers"):
        read("mistral", 4, **HEADS, sliding_window=[None, 64, 64])


def test_window_list_that_contradicts_layer_types_is_refused() -> None:
    with pytest.raises(ConfigError, match="layer 1 disagree"):
        read("mistral", 2, **HEADS, sliding_window=[None, 64], layer_types=[FULL, FULL])


def test_llama_scalar_window_is_inert() -> None:
    layout = read("llama", 2, **HEADS, sliding_window=4096)
    assert specs(layout) == [full(8, 128)] * 2
    assert "sliding_window 4096 is inert" in layout.notes[0]


def test_gemma2_even_layers_slide_although_the_file_lists_no_types() -> None:
    layout = read("gemma2", 4, num_attention_heads=16, num_key_value_heads=8, head_dim=256, sliding_window=4096)
    assert specs(layout) == [sliding(8, 256, 4096), full(8, 256)] * 2


def test_gpt_oss_even_layers_slide_without_layer_types() -> None:
    assert specs(read("gpt_oss", 3)) == [sliding(8, 64, 128), full(8, 64), sliding(8, 64, 128)]


def test_cohere2_window_counts_the_tokens_before_the_query() -> None:
    fields = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "sliding_window": 4096}
    for pattern in ("sliding_window_pattern", "layer_switch"):
        layout = read("cohere2", 32, **fields, **{pattern: 4})
        assert specs(layout) == ([sliding(8, 128, 4097)] * 3 + [full(8, 128)]) * 8
        assert "4097" in layout.notes[0]
    assert origin(layout, "window") == "derived: sliding_window + 1"


def test_cohere_v01_has_one_kv_head_per_attention_head() -> None:
    assert specs(read("cohere", 1)) == [full(64, 128)]


def test_bidirectional_gemma_halves_its_window() -> None:
    assert specs(read("gemma3_text", 1, sliding_window=512, use_bidirectional_attention=True)) == [sliding(4, 256, 257)]
    assert specs(read("gemma3_text", 1, sliding_window=512, use_bidirectional_attention=False)) == [
        sliding(4, 256, 512)
    ]
    vision = read("gemma4_text", 2, sliding_window=1024, use_bidirectional_attention="vision")
    assert specs(vision)[0] == sliding(4, 256, 1024)


def test_exaone4_pattern_in_letters_and_numbers() -> None:
    local, whole = sliding(8, 128, 4096), full(8, 128)
    for pattern in ("LLLG", 4):
        layout = read("exaone4", 8, **HEADS, sliding_window=4096, sliding_window_pattern=pattern)
        assert specs(layout) == ([local] * 3 + [whole]) * 2
    # In letters the last layer is global whatever its letter says.
    assert specs(read("exaone4", 6, **HEADS, sliding_window=4096, sliding_window_pattern="LLLG"))[-1] == whole
    with pytest.raises(ConfigError, match="letters L and G"):
        read("exaone4", 8, **HEADS, sliding_window_pattern="LXLG")


def test_exaone4_small_null_window_is_full_everywhere() -> None:
    layout = read("exaone4", 4, **HEADS, sliding_window=None, sliding_window_pattern="LLLG")
    assert specs(layout) == [full(8, 128)] * 4


def test_olmo3_is_three_to_one_from_its_class() -> None:
    layout = read("olmo3", 8, num_attention_heads=32, hidden_size=4096)
    assert specs(layout) == ([sliding(32, 128, 4096)] * 3 + [full(32, 128)]) * 2


# ---- Llama-4: inverted names and chunks ----------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"no_rope_layers": []}, {"no_rope_layers": None}])
def test_llama4_without_a_list_keeps_every_fourth_layer_full(fields: dict[str, Any]) -> None:
    layout = read("llama4_text", 8, **fields)
    chunked = ChunkedLocal(8, 128, 128, chunk=8192)
    assert specs(layout) == ([chunked] * 3 + [full(8, 128)]) * 2


def test_llama4_no_rope_layers_is_inverted() -> None:
    layout = read("llama4_text", 4, no_rope_layers=[1, 0, 0, 1], attention_chunk_size=512)
    chunked = ChunkedLocal(8, 128, 128, chunk=512)
    assert specs(layout) == [chunked, full(8, 128), full(8, 128), chunked]


def test_llama4_null_chunk_is_full_everywhere() -> None:
    assert specs(read("llama4_text", 4, attention_chunk_size=None)) == [full(8, 128)] * 4


def test_llama4_layer_types_win_over_no_rope_layers() -> None:
    layout = read("llama4_text", 2, no_rope_layers=[1, 1], layer_types=[FULL, CHUNKED])
    assert specs(layout) == [full(8, 128), ChunkedLocal(8, 128, 128, chunk=8192)]


# ---- widths that differ, layers that store nothing -----------------------------------------------------------------


def mimo(**changes: Any) -> dict[str, Any]:
    fields = {
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
        "sliding_window_size": 128,
        "hybrid_layer_pattern": [0, 1, 0],
    }
    return {**fields, **changes}


def test_mimo_hybrid_pattern_and_keys_wider_than_values() -> None:
    layout = read("mimo_v2_flash", 3, **mimo())
    assert specs(layout) == [full(4, 192, 128), sliding(8, 192, 128, dim_v=128), full(4, 192, 128)]
    assert [spec.bytes_per_token for spec in specs(layout)] == [2560, 5120, 2560]


def test_mimo_attention_chunk_size_is_inert() -> None:
    layout = read("mimo_v2_flash", 3, **mimo(attention_chunk_size=128))
    assert layout.layers == read("mimo_v2_flash", 3, **mimo()).layers
    assert "attention_chunk_size 128 is inert" in layout.notes[0]


def test_mimo_as_transformers_saves_it() -> None:
    saved = mimo(sliding_window=129, layer_types=[FULL, SLIDING, FULL])
    for key in ("hybrid_layer_pattern", "sliding_window_size", "swa_num_key_value_heads", "swa_head_dim"):
        del saved[key]
    assert specs(read("mimo_v2_flash", 3, **saved))[1] == sliding(8, 192, 129, dim_v=128)


def test_mimo_without_a_pattern_follows_its_class() -> None:
    fields = mimo(hybrid_layer_pattern=None)
    layout = read("mimo_v2_flash", 48, **fields)
    assert layout.layers == ModelLayout.preset("mimo-v2-flash").layers


def test_mimo_pattern_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="hybrid_layer_pattern has 3 entries"):
        read("mimo_v2_flash", 4, **mimo())


def test_gemma3n_shared_layers_store_nothing_and_read_their_own_kind() -> None:
    layout = read("gemma3n_text", 35)
    assert [layer.index for layer in layout.layers if layer.spec is not None] == list(range(20))
    assert specs(layout)[18:20] == [sliding(2, 256, 512), full(2, 256)]
    shares = {layer.index: layer.shares for layer in layout.layers[20:]}
    assert shares == {i: 19 if (i + 1) % 5 == 0 else 18 for i in range(20, 35)}
    assert layout.bytes_per_token == 40960


def test_gemma4_full_layers_have_their_own_width_and_heads() -> None:
    layout = read(
        "gemma4_text",
        6,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        global_head_dim=512,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        sliding_window=1024,
    )
    assert specs(layout) == [sliding(8, 256, 1024)] * 5 + [full(2, 512)]


def test_gemma4_attention_k_eq_v_does_not_halve_the_cache() -> None:
    fields = {"num_attention_heads": 16, "num_key_value_heads": 8}
    tied = read("gemma4_text", 6, **fields, attention_k_eq_v=True)
    assert tied.bytes_per_token == read("gemma4_text", 6, **fields).bytes_per_token
    assert "engines still cache both" in tied.notes[0]


def test_gemma4_global_heads_count_only_with_attention_k_eq_v() -> None:
    layout = read("gemma4_text", 6, num_global_key_value_heads=1, attention_k_eq_v=False)
    assert specs(layout)[5] == full(4, 512)
    assert "inert" in layout.notes[0]


def test_gemma4_last_layer_is_full_whatever_the_list_says() -> None:
    layout = read("gemma4_text", 2, layer_types=[FULL, SLIDING])
    assert specs(layout) == [full(4, 512), full(4, 512)]


def test_gemma4_shared_layers() -> None:
    layout = read("gemma4_text", 12, num_kv_shared_layers=6)
    assert [layer.shares for layer in layout.layers] == [None] * 6 + [4] * 5 + [5]


def test_gemma4_as_transformers_5_saves_it() -> None:
    fields = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "attention_k_eq_v": True}
    saved = read("gemma4_text", 6, **fields, per_layer_config={"05": {"head_dim": 512, "num_key_value_heads": 2}})
    assert specs(saved)[5] == full(2, 512)


def test_per_layer_overrides_of_other_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="per_layer_config overrides head_dim"):
        read("llama", 2, **HEADS, per_layer_config={"01": {"head_dim": 64}})
    # Query heads do not change the cache.
    assert specs(read("llama", 1, **HEADS, per_layer_config={"00": {"num_attention_heads": 96}})) == [full(8, 128)]


def test_sharing_without_an_earlier_layer_of_the_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="no earlier layer has the KV that layer 4"):
        read("gemma3n_text", 5, num_kv_shared_layers=4, layer_types=[SLIDING] * 4 + [FULL])
    with pytest.raises(ConfigError, match="less than the 5 layers"):
        read("gemma3n_text", 5, num_kv_shared_layers=5)


def test_phi4_flash_cross_layers_read_layer_17_and_memory_units_read_nothing() -> None:
    layout = read(
        "phi4flash",
        32,
        num_attention_heads=40,
        num_key_value_heads=20,
        hidden_size=2560,
        sliding_window=512,
        mb_per_layer=2,
        max_position_embeddings=262144,
    )
    assert layout.layers == ModelLayout.preset("phi-4-mini-flash").layers
    assert [layer.index for layer in layout.layers if layer.shares == 17] == list(range(19, 32, 2))
    assert [layer.index for layer in layout.layers if layer.spec is None and layer.shares is None] == list(
        range(18, 32, 2)
    )
    kinds = {group.name: group.layers for group in layout.groups}
    assert kinds["recurrent_state"] == tuple(range(0, 17, 2))
    assert kinds["sliding_window"] == tuple(range(1, 16, 2))
    assert kinds["full_attention"] == (17,)


def test_phi4_flash_window_as_a_list_and_what_is_refused() -> None:
    scalar = read("phi4flash", 8, sliding_window=64)
    assert read("phi4flash", 8, sliding_window=[None, 64, None, 64, None, None, None, None]).layers == scalar.layers
    with pytest.raises(ConfigError, match="one window for all sliding layers"):
        read("phi4flash", 8, sliding_window=[32, 64])
    with pytest.raises(ConfigError, match="num_hidden_layers is 6; it must be a multiple of 4"):
        read("phi4flash", 6)
    with pytest.raises(ConfigError, match="mb_per_layer is 3"):
        read("phi4flash", 8, mb_per_layer=3)


def test_phi4_flash_draft_layers_are_left_out_and_noted() -> None:
    layout = read("phi4flash", 8, num_nextn_predict_layers=2)
    assert layout.draft_specs == ()
    assert "2 draft layers of a kind that is not known" in layout.notes[-1]


def test_phi3_small_block_sparse_layers_store_every_token() -> None:
    layout = read("phi3small", 2, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096, blocksparse_vert=8)
    assert specs(layout) == [full(8, 128)] * 2
    assert "still stores" in layout.notes[0]


def test_mllama_layer_count_includes_the_cross_layers() -> None:
    layout = read("mllama_text_model", 40)
    cross = CrossAttention(8, 128, 128)
    assert [layer.index for layer in layout.layers if layer.spec == cross] == [3, 8, 13, 18, 23, 28, 33, 38]
    assert layout.bytes_per_token == 163840
    listed = read("mllama_text_model", 5, cross_attention_layers=[3])
    assert specs(listed) == [full(8, 128)] * 3 + [cross, full(8, 128)]
    with pytest.raises(ConfigError, match="cross_attention_layers is missing"):
        read("mllama_text_model", 20)


# ---- MLA -----------------------------------------------------------------------------------------------------------


def test_mla_ignores_key_value_heads_and_head_dim() -> None:
    for model_type in ("deepseek_v2", "deepseek_v3", "kimi_k2"):
        layout = read(model_type, 2, num_key_value_heads=128, head_dim=64, kv_lora_rank=512, qk_rope_head_dim=64)
        assert specs(layout) == [MLA(512, 64)] * 2
    assert layout.bytes_per_token == 2 * 1152


def test_deepseek_v32_indexer_adds_132_bytes() -> None:
    layout = read("deepseek_v32", 1, kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128)
    assert specs(layout) == [MLA(512, 64, index_head_dim=128)]
    assert layout.bytes_per_token == 1152 + 132
    assert layout.with_dtype("fp8_ds_mla").bytes_per_token == 656 + 132


def test_shared_indexers_of_glm_store_no_index_keys() -> None:
    layout = read("glm_moe_dsa", 3, indexer_types=["full", "shared", "full"])
    assert specs(layout) == [MLA(512, 64, index_head_dim=128), MLA(512, 64), MLA(512, 64, index_head_dim=128)]
    with pytest.raises(ConfigError, match=r"indexer_types\[1\] is 'half'; it must be full or shared"):
        read("glm_moe_dsa", 2, indexer_types=["full", "half"])
    with pytest.raises(ConfigError, match="index_topk_freq needs indexer_types"):
        read("glm_moe_dsa", 3, index_topk_freq=4)


def test_deepseek_v4_compression_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="compress_ratios"):
        read("deepseek_v4", 2, num_attention_heads=64, num_key_value_heads=1, head_dim=512, compress_ratios=[0, 4])


# ---- layer lists and draft layers ----------------------------------------------------------------------------------


def step(**changes: Any) -> ModelLayout:
    fields = {
        "num_attention_heads": 64,
        "num_attention_groups": 8,
        "head_dim": 128,
        "sliding_window": 512,
        "max_seq_len": 262144,
        "layer_types": [FULL if i % 4 == 0 else SLIDING for i in range(48)],
        "num_nextn_predict_layers": 3,
        "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8, "head_dim": 128},
    }
    return read("step3p5", 45, **{**fields, **changes})


def test_step_trailing_layer_types_are_draft_layers() -> None:
    layout = step()
    assert layout.layers == ModelLayout.preset("step-3.5-flash").layers
    assert layout.draft_specs == (sliding(8, 128, 512),) * 3
    assert layout.max_model_len == 262144


def test_step_other_setting_changes_the_sliding_layers_only() -> None:
    layout = step(attention_other_setting={"num_attention_groups": 4, "head_dim": 64})
    assert specs(layout)[:2] == [full(8, 128), sliding(4, 64, 512)]


def test_trailing_layer_types_without_a_count_are_drafts_and_noted() -> None:
    layout = step(num_nextn_predict_layers=None)
    assert len(layout.draft_specs) == 3
    assert "3 layers more than num_hidden_layers" in layout.notes[0]
    assert step(num_nextn_predict_layers=0).draft_specs == ()


def test_trailing_layer_types_fewer_than_declared_are_refused() -> None:
    with pytest.raises(ConfigError, match="lists 3 draft layers and the config declares 4"):
        step(num_nextn_predict_layers=4)


def test_drafts_of_sliding_models_whose_kind_is_not_said_are_full_and_noted() -> None:
    layout = step(layer_types=[FULL, SLIDING, SLIDING] * 15)
    assert layout.draft_specs == (full(8, 128),) * 3
    assert "does not say whether its draft layers slide" in layout.notes[0]


def test_step_without_layer_types_or_other_setting_is_full() -> None:
    layout = step(layer_types=None, attention_other_setting=None, num_nextn_predict_layers=0)
    assert specs(layout) == [full(8, 128)] * 45


@pytest.mark.parametrize(("model_type", "spec"), [("qwen3", full(8, 128)), ("deepseek_v3", MLA(512, 64))])
def test_trailing_layer_types_of_uniform_models_are_drafts(model_type: str, spec: Any) -> None:
    assert read(model_type, 2, **HEADS, layer_types=[FULL] * 3).draft_specs == (spec,)


def test_layer_types_shorter_than_the_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="layer_types has 1 entries"):
        read("qwen3", 2, **HEADS, layer_types=[FULL])


def test_unknown_layer_type_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"layer_types\[1\] is 'conv'"):
        read("gemma3_text", 2, layer_types=[FULL, "conv"])


def test_deepseek_draft_layer_is_mla_and_kimi_has_none() -> None:
    fields = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert read("deepseek_v3", 2, **fields, num_nextn_predict_layers=1).draft_specs == (MLA(512, 64),)
    assert read("kimi_k2", 2, **fields, num_nextn_predict_layers=0).draft_specs == ()
    assert read("deepseek_v3", 2, **fields).draft_specs == ()
    indexed = read("deepseek_v32", 1, **fields, num_nextn_predict_layers=1)
    assert indexed.draft_specs == (MLA(512, 64, index_head_dim=128),)


def test_qwen35_draft_layer_is_full_attention() -> None:
    layout = read("qwen3_5_text", 4, mtp_num_hidden_layers=1)
    assert layout.draft_specs == (full(4, 256),)


def test_minimax_m2_modules_times_layers_are_drafts_unless_switched_off() -> None:
    fields = {"num_mtp_modules": 3, "mtp_transformer_layers": 1}
    assert read("minimax_m2", 2, **fields, use_mtp=True).draft_specs == (full(8, 128),) * 3
    assert read("minimax_m2", 2, **fields, use_mtp=False).draft_specs == ()


# ---- cache dtype ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "bfloat16"),
        ({"quant_method": "mxfp4"}, "bfloat16"),
        ({"kv_cache_quant_algo": "FP8"}, "float8_e4m3"),
        ({"kv_cache_quant_algo": None}, "bfloat16"),
        ({"kv_cache_quant_algo": "auto"}, "bfloat16"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "float8_e4m3"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "int8"),
        ({"kv_cache_scheme": "FP8"}, "float8_e4m3"),
        ({"kv_cache_scheme": None}, "bfloat16"),
    ],
)
def test_only_a_declared_cache_scheme_changes_the_cache_dtype(quantization: dict[str, Any], dtype: str) -> None:
    layout = read("llama", 1, **HEADS, torch_dtype="bfloat16", quantization_config=quantization)
    assert specs(layout) == [full(8, 128, dtype=dtype)]
    assert any("8-bit KV cache" in note for note in layout.notes) == (dtype != "bfloat16")


def test_four_bit_cache_scheme_is_refused() -> None:
    for quantization in ({"kv_cache_quant_algo": "NVFP4"}, {"kv_cache_scheme": {"num_bits": 4, "type": "float"}}):
        with pytest.raises(ConfigError, match=r"quantization_config\.kv_cache_"):
            read("llama", 1, **HEADS, quantization_config=quantization)


def test_eight_bit_cache_leaves_recurrent_states_alone() -> None:
    plain = read("qwen3_next", 4)
    eight = read("qwen3_next", 4, quantization_config={"kv_cache_quant_algo": "FP8"})
    assert eight.state_bytes == plain.state_bytes
    assert eight.bytes_per_token * 2 == plain.bytes_per_token


def test_dtype_is_kept_or_defaults_to_bfloat16() -> None:
    assert specs(read("llama", 1, **HEADS, torch_dtype="float32")) == [full(8, 128, dtype="float32")]
    absent = read("llama", 1, **HEADS)
    assert specs(absent) == [full(8, 128)]
    assert Source("dtype", "bfloat16", "default") in absent.sources
    with pytest.raises(ConfigError, match="torch_dtype is 'float8_e4m3fn'"):
        read("llama", 1, **HEADS, torch_dtype="float8_e4m3fn")


# ---- recurrent states ----------------------------------------------------------------------------------------------


def test_gdn_state_without_mamba_ssm_dtype_is_the_model_dtype() -> None:
    layout = read("qwen3_next", 48)
    [state] = {spec for spec in specs(layout) if spec.state_bytes}
    assert [(a.name, a.shape, a.dtype) for a in state.components()] == [
        ("conv", (8192, 3), "bfloat16"),
        ("ssm", (32, 128, 128), "bfloat16"),
    ]
    assert state.state_bytes == 1097728
    assert state.max_shards == 16
    assert layout.layers == ModelLayout.preset("qwen3-next-80b").layers


def test_gdn_layers_from_interval_and_from_layer_types_agree() -> None:
    linear = "linear_attention"
    listed = read("qwen3_next", 4, layer_types=[linear, linear, linear, FULL])
    assert listed.layers == read("qwen3_next", 4).layers == read("qwen3_next", 4, full_attention_interval=4).layers
    assert [spec.state_bytes > 0 for spec in specs(read("qwen3_next", 4, full_attention_interval=2))] == [
        True,
        False,
    ] * 2


def test_jamba_layers_from_layer_types() -> None:
    layout = read("jamba", 3, layer_types=["mamba", "attention", "mamba"])
    assert [spec.state_bytes > 0 for spec in specs(layout)] == [True, False, True]


def test_gdn_state_with_float32() -> None:
    layout = read("qwen3_5_text", 4, mamba_ssm_dtype="float32")
    assert specs(layout)[0].state_bytes == 2146304
    with pytest.raises(ConfigError, match="mamba_ssm_dtype is 'fp99'"):
        read("qwen3_5_text", 4, mamba_ssm_dtype="fp99")


def test_jamba_state_follows_the_model_dtype_and_notes_float32() -> None:
    fields = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    layout = read("jamba", 32, **fields)
    assert layout.layers == ModelLayout.preset("jamba-1.5-mini").layers
    assert specs(layout)[0].state_bytes == 311296
    assert "float32" in layout.notes[0]
    assert specs(read("jamba", 32, **fields, mamba_ssm_dtype="float32"))[0].state_bytes == 573440
    with pytest.raises(ConfigError, match="attn_layer_offset"):
        read("jamba", 32, **fields, attn_layer_period=4, attn_layer_offset=4)


def test_minimax_text_01_list_is_one_for_full_and_the_class_default_is_not_its_layout() -> None:
    fields = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 6144}
    codes = [int((i + 1) % 8 == 0) for i in range(80)]
    layout = read("minimax_text_01", 80, **fields, attn_type_list=codes)
    assert layout.layers == ModelLayout.preset("minimax-text-01").layers
    assert specs(layout)[0].state_bytes == 4194304
    with pytest.raises(ConfigError, match="attn_type_list is missing"):
        read("minimax_text_01", 80, **fields)
    typed = read("minimax_text_01", 2, **fields, layer_types=[FULL, "linear_attention"])
    assert [spec.state_bytes > 0 for spec in specs(typed)] == [False, True]
    alternating = read("minimax", 4, **fields)
    assert [spec.state_bytes > 0 for spec in specs(alternating)] == [False, True, False, True]


@pytest.mark.parametrize(
    ("fields", "tp_size"),
    [({"model_type": "qwen3_next"}, 16), ({"model_type": "jamba"}, 8192 // 512)],
)
def test_states_divide_over_tensor_parallel_ranks(fields: dict[str, Any], tp_size: int) -> None:
    layout = ModelLayout.from_hf({"num_hidden_layers": 8, **fields})
    [state] = {spec for spec in specs(layout) if spec.state_bytes}
    assert state.shard(tp_size).state_bytes * tp_size == state.state_bytes
