"""What names a model's weights, so that no two models ever share stored values.

A model of the hub is named by its name and commit. A local directory's name says nothing (a new checkpoint is often
written over the old one), so there the files themselves are sampled: a few kilobytes at sixteen places of each.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_SAMPLES = 16
_SAMPLE_BYTES = 4096


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


def sample_files(directory: Path) -> str:
    """A digest of the names, lengths and samples of the weight files in a directory."""
    digest = blake2b(digest_size=16)
    for path in sorted({path for pattern in _WEIGHTS for path in directory.glob(pattern)}):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for at in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * at // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


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
