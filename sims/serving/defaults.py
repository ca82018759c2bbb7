"""vLLM's defaults for `max_num_batched_tokens` and `max_num_seqs`, by device and by how the engine is used.

The table is vLLM 0.33's; 0.20.2 has no row for devices of 160 GiB. The caller's own values win; what is left is bounded
by what can be used, as vLLM does.
"""

from __future__ import annotations

from typing import NamedTuple

from kvtide.kvcache import ConfigError

from .gpus import GIB, GpuSpec

CONTEXTS = ("api-server", "llm-class")
MODES = ("balanced", "interactivity", "throughput")
_HUGE, _LARGE = 160 * GIB, 70 * GIB


class Limits(NamedTuple):
    """Tokens per step, and running requests."""

    max_num_batched_tokens: int
    max_num_seqs: int


def default_limits(gpu: GpuSpec, context: str, version: str) -> Limits:
    """What vLLM takes on this device when nothing is given."""
    serves = context == "api-server"
    if gpu.memory >= _HUGE and version != "0.20.2":
        return Limits(16384, 1024)
    if gpu.memory >= _LARGE and not gpu.name.startswith("a100"):
        return Limits(8192 if serves else 16384, 1024)
    return Limits(2048 if serves else 8192, 256)


def resolve_limits(
    gpu: GpuSpec,
    *,
    max_model_len: int,
    version: str,
    context: str = "api-server",
    performance_mode: str = "balanced",
    max_num_batched_tokens: int | None = None,
    max_num_seqs: int | None = None,
    enable_chunked_prefill: bool = True,
) -> Limits:
    """Fill in what was not given. `ConfigError` for a context or mode that vLLM does not have."""
    if context not in CONTEXTS:
        raise ConfigError(f"usage context {context!r} is not known; allowed: {', '.join(CONTEXTS)}")
    if performance_mode not in MODES:
        raise ConfigError(f"performance_mode {performance_mode!r} is not known; allowed: {', '.join(MODES)}")
    default = default_limits(gpu, context, version)
    factor = 2 if performance_mode == "throughput" else 1
    seqs = factor * default.max_num_seqs if max_num_seqs is None else max_num_seqs
    tokens = max_num_batched_tokens
    if tokens is None:
        tokens = factor * default.max_num_batched_tokens
        if not enable_chunked_prefill:
            tokens = max(tokens, max_model_len)
        tokens = min(tokens, seqs * max_model_len)
    if max_num_seqs is None:
        seqs = min(seqs, tokens)
    return Limits(tokens, seqs)
