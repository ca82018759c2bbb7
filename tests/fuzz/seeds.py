"""What the fuzzer starts from: a right example of everything that is read, and the real configs and traces if there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

from kvtide.kvcache import preset_names, presets

SHARED = Path(os.environ.get("KVTIDE_SHARED", Path(__file__).parents[3] / "shared"))

TRACES = {
    "mooncake": '{"timestamp": 27, "input_length": 700, "output_length": 6, "hash_ids": [1, 2]}\n'
    '{"timestamp": 30, "input_length": 1400, "output_length": 60, "hash_ids": [1, 2, 3]}\n',
    "qwen-bailian": '{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 33, '
    '"output_length": 132, "type": "text", "turn": 1, "hash_ids": [5, 6, 7]}\n',
    "llmservingsim": '{"request_id": "bench-0", "input_toks": 2361, "output_toks": 532, "arrival_time": 17771.57}\n',
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
    "2023-11-16 18:17:04.1,110,1\n",
    "azure-2025": "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15T12:00:00.269Z,1,770,491\n",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,GPT-4,472,18,490,Conversation log\n9,ChatGPT,17,0,17,API log\n",
    "weka": '{"block_size": 64, "requests": [{"t": 0.5, "in": 99, "out": 5, "hash_ids": [1]}, '
    '{"t": 3, "requests": [{"t": 1, "in": 70, "out": 2, "hash_ids": [2]}]}]}',
}
SERVEGEN_DATASET = {
    "0": {
        "input_tokens": "{10: 0.25, 30: 0.75}",
        "output_tokens": "{100: 0.5}",
        "reason_ratio": "{0.0: 0.5, 0.5: 0.5}",
    },
    "600": {
        "text_tokens": "{40: 1.0}",
        "image_tokens": "{0: 0.0, 500: 0.5}",
        "image_count": "{0: 0.5, 2: 0.5}",
        "audio_tokens": "{7: 1.0}",
        "audio_count": "{1: 1.0}",
        "output_tokens": "{20: 1.0}",
    },
}
SERVEGEN_CURVE = "0,0.05,1.2,Gamma,0.7,3.0\n600,0,0,,0,0\n1200,0.1,2,Weibull,0.6,9\n"

LAYOUT_YAML = """\
name: tiny
max_model_len: 32768
dtype: bfloat16
specs:
  full: {kind: full_attention, num_kv_heads: 8, head_dim: 128}
  local: {kind: sliding_window, num_kv_heads: 8, head_dim: 128, window: 1024}
  state: {kind: recurrent_state, arrays: [{name: conv, shape: [3, 256]}, {name: ssm, shape: [8, 64], dtype: float32}]}
layers: 4*(5*local, full), 2*state
draft: full
notes: [typed in]
"""

TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
TINY_PARAMS = {
    "dim": 512,
    "n_layers": 4,
    "head_dim": 64,
    "n_heads": 8,
    "n_kv_heads": 2,
    "sliding_window": [128, None],
    "max_seq_len": 4096,
}

SPECULATIVE = [
    {"method": "mtp", "num_speculative_tokens": 2},
    {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    {"model": "draft", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1, "max_model_len": 100},
    {
        "method": "suffix",
        "num_speculative_tokens": 3,
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_spec_factor": 1.0,
        "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 8, 1]],
    },
]
RECORDED_META = {
    "engine_kwargs": {"tensor_parallel_size": 1, "data_parallel_size": 1, "enable_expert_parallel": False}
    | {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 4096}
}
RECORDED_REQUEST = {
    "request_id": "r",
    "input_toks": 100,
    "output_toks": 7,
    "queued_ts": 1.0,
    "first_token_ts": 2.0,
    "last_token_ts": 3.5,
}

CONNECTORS: list[dict[str, Any]] = [
    {"kv_connector": "LMDBConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"path": "kv"}},
    {
        "kv_connector": "SharedStorageConnector",
        "kv_connector_extra_config": {"shared_storage_path": "kv", "max_bytes": "1GiB", "codec": "raw"},
        "kv_load_failure_policy": "fail",
        "engine_id": "e",
    },
    {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {
            "connectors": [
                {"kv_connector": "HostConnector", "kv_connector_extra_config": {"max_bytes": 1 << 20}},
                {"kv_connector": "LMDBConnector", "kv_connector_extra_config": {"path": "kv", "durability": "strict"}},
            ]
        },
    },
]


def model_configs() -> list[dict[str, Any]]:
    """Real `config.json` objects; a small one if there are none."""
    found = [json.loads(path.read_text()) for path in sorted((SHARED / "model_configs").glob("*.json"))]
    return [*found, TINY_CONFIG]


def layouts() -> list[Any]:
    """YAML layouts as objects: the bundled presets and one of every kind."""
    return [yaml.safe_load(LAYOUT_YAML), *(dict(presets._entries()[name]) for name in preset_names())]


def trace_files() -> list[bytes]:
    """The beginnings of traces."""
    found = [text.encode() for text in TRACES.values()]
    for path in sorted(SHARED.glob("traces/*/*.csv")) + sorted(SHARED.glob("traces/*/*.jsonl")):
        with path.open("rb") as file:
            found.append(b"".join(file.readline(20_000) for _ in range(3)))
    return found
