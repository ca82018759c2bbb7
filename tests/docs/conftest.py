"""What the documentation's tests share: a folder with the files that its commands name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtide.connectors.config import make_store


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the files that the examples name."""
    config = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 12,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "vocab_size": 32000,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
    }
    for folder in (tmp_path, tmp_path / "path/to"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "log.csv").write_text("prompt,completion\n2000,100\n3000,20\n")
    (tmp_path / "azure.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    (tmp_path / "requests.jsonl").write_text(
        '{"timestamp": 0, "input_length": 900, "output_length": 30, "hash_ids": [0, 1]}\n'
        '{"timestamp": 9, "input_length": 1500, "output_length": 80, "hash_ids": [0, 2, 3]}\n'
    )
    (tmp_path / ".config/fish/completions").mkdir(parents=True)
    store = {"kv_connector": "LMDBConnector", "kv_connector_extra_config": {"path": "kv", "max_bytes": "1GiB"}}
    (tmp_path / "kv.yaml").write_text(json.dumps(store))
    with make_store("LMDBConnector", {"path": str(tmp_path / "kv"), "max_bytes": "1GiB"}) as opened:
        opened.put([bytes(32), bytes(31) + b"1"], [b"a" * 5000, b"b" * 70000])
    return tmp_path
