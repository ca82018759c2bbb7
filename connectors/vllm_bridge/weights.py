"""What names a model's weights in vLLM, so that no two models ever share stored values.

A model of the hub is named by its name and commit, a local one by its files (`weight_files`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvtide.connectors.weight_files import sample_files


def weights_name(vllm_config: Any, given: str | None) -> str:
    """The name of a model's weights, with what else changes its keys and values: config, formats, quantization."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    config = model.hf_config.to_dict()
    for key in ("_name_or_path", "transformers_version"):
        config.pop(key, None)
    parts = [
        given if given is not None else _identity(vllm_config),
        json.dumps(config, sort_keys=True, default=str),
        str(model.dtype),
        str(model.quantization),
        str(cache.cache_dtype),
    ]
    return json.dumps(parts)


def _identity(vllm_config: Any) -> str:
    model, load_format = vllm_config.model_config, str(vllm_config.load_config.load_format)
    if load_format == "dummy":
        return f"{model.model} dummy {model.seed}"
    path = Path(model.model)
    if path.is_dir():
        return f"files {sample_files(path)}"
    if path.is_file():
        return f"file {sample_files(path.parent)}"
    commit = getattr(model.hf_config, "_commit_hash", None)
    return f"{model.model}@{commit or model.revision or ''}"
