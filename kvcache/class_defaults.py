"""What the model classes of transformers assume when a config leaves a key out, as data.

Published configs omit keys that equal their class's default (Gemma-3-4B leaves out its head counts), so reading them
needs these numbers. They were read from the config classes of transformers 5.24; the rows marked [remote] belong to
classes that ship with the checkpoint instead. A key that a row lacks has no default: the class derives it
(`num_key_value_heads` from `num_attention_heads`, `head_dim` from `hidden_size`), or nobody should guess it
(`num_hidden_layers`).
"""

from __future__ import annotations

from collections.abc import Mapping


def _row(
    heads: int,
    kv_heads: int | None,
    head_dim: int | None,
    max_len: int,
    **more: int,
) -> Mapping[str, int | None]:
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_len,
        **more,
    }


_GEMMA3 = _row(8, 4, 256, 131072, sliding_window=4096, hidden_size=2304)
_GEMMA3N = _row(8, 2, 256, 32768, sliding_window=512, hidden_size=2048, num_kv_shared_layers=15)
_GEMMA4 = _row(8, 4, 256, 131072, sliding_window=512, hidden_size=2304, global_head_dim=512)
_LLAMA4 = _row(40, 8, 128, 131072, attention_chunk_size=8192, no_rope_layer_interval=4)
_MLLAMA = _row(32, 8, None, 131072, hidden_size=4096)
_QWEN2_VL = _row(64, 8, None, 32768, hidden_size=8192, sliding_window=4096, max_window_layers=80)
_QWEN3_VL = _row(32, 32, 128, 128000)
_QWEN3_VL_MOE = _row(16, 16, None, 128000, hidden_size=2048)
_GDN = {
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
_QWEN3_5 = _row(16, 4, 256, 32768, **_GDN)
_QWEN3_5_MOE = _row(16, 2, 256, 32768, **_GDN)
_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_STEP = _row(64, 8, 128, 128000)

CLASS_DEFAULTS: Mapping[str, Mapping[str, int | None]] = {
    "llama": _row(32, None, None, 2048, hidden_size=4096),
    "mistral": _row(32, 8, None, 131072, hidden_size=4096, sliding_window=4096),
    "ministral": _row(32, 8, None, 131072, hidden_size=4096, sliding_window=4096),
    "ministral3": _row(32, 8, 128, 262144),
    "mixtral": _row(32, 8, None, 131072, hidden_size=4096),
    "gemma": _row(16, 16, 256, 8192),
    "gemma2": _row(8, 4, 256, 8192, sliding_window=4096),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma3n": _GEMMA3N,
    "gemma3n_text": _GEMMA3N,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "gpt_oss": _row(64, 8, 64, 131072, sliding_window=128),
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "mllama": _MLLAMA,
    "mllama_text_model": _MLLAMA,
    "cohere": _row(64, None, None, 8192, hidden_size=8192),
    "cohere2": _row(64, None, None, 8192, hidden_size=8192, sliding_window=4096, sliding_window_pattern=4),
    "phi3": _row(32, None, None, 4096, hidden_size=3072),
    "phi4flash": _row(  # [remote]
        40, 4, None, 4096, hidden_size=2560, sliding_window=2047, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2
    ),
    "qwen2": _row(32, 32, None, 32768, hidden_size=4096, sliding_window=4096, max_window_layers=28),
    "qwen2_moe": _row(16, 16, None, 32768, hidden_size=2048, sliding_window=4096),
    "qwen2_vl": _QWEN2_VL,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3": _row(32, 32, 128, 32768, sliding_window=4096, max_window_layers=28),
    "qwen3_moe": _row(32, 4, None, 32768, hidden_size=2048, sliding_window=4096),
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_text": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL_MOE,
    "qwen3_vl_moe_text": _QWEN3_VL_MOE,
    "qwen3_next": _row(16, 2, 256, 32768, **_GDN),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5_MOE,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "deepseek_v2": {**_MLA, "max_position_embeddings": 2048},
    "deepseek_v3": {**_MLA, "max_position_embeddings": 4096},
    "deepseek_v32": {**_MLA, "max_position_embeddings": 163840, "index_head_dim": 128},
    "glm_moe_dsa": {**_MLA, "max_position_embeddings": 202752, "index_head_dim": 128},
    "mimo_v2_flash": _row(64, 4, 192, 131072, v_head_dim=128, sliding_window=129),
    "step3p5": _STEP,
    "step3p7": _STEP,
    "exaone4": _row(32, 32, None, 2048, hidden_size=4096, sliding_window=4096, sliding_window_pattern=4),
    "olmo2": _row(32, None, None, 2048, hidden_size=4096),
    "olmo3": _row(32, None, None, 2048, hidden_size=4096, sliding_window=4096),
    "minimax_m2": _row(48, 8, 128, 196608),
    "minimax": _row(32, 8, None, 131072, hidden_size=4096),
    "jamba": _row(
        32,
        8,
        None,
        262144,
        hidden_size=4096,
        attn_layer_period=8,
        attn_layer_offset=4,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
    ),
    "glm4_moe": _row(96, 8, None, 131072, hidden_size=4096),
}

MLLAMA_CROSS_ATTENTION_LAYERS = (3, 8, 13, 18, 23, 28, 33, 38)
