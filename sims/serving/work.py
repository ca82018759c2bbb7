"""What a model costs to run: parameters, FLOPs and bytes per token, read from its Hugging Face config.

Counts are of the large matrices (attention projections, MLPs, experts, the output head); norms and biases are left out,
which is less than a thousandth. Embedding rows are looked up, not multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtide.kvcache import ConfigError, ModelLayout

_QUANTISED = {"fp8": 1.0, "mxfp4": 0.53125, "awq": 0.5, "gptq": 0.5, "compressed-tensors": 1.0}


@dataclass(frozen=True)
class ModelWork:
    """One whole model. Parameter counts; `weight_bytes` per parameter of the layers; `layers` of them.

    A token goes through all `dense_params` of the layers and through `experts_per_token` of `experts` routed experts in
    each of `expert_layers`. `head_params` is the output head, run for sampled positions only. `query_size` is query
    heads times head dimension, over which attention's FLOPs are counted; `heads` are 0 where they are not known.
    """

    layers: int
    hidden: int
    dense_params: int
    head_params: int
    embedding_params: int
    query_size: int
    expert_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_params: int = 0
    weight_bytes: float = 2.0
    heads: int = 0

    @property
    def routed_params(self) -> int:
        """Parameters of all routed experts."""
        return self.expert_layers * self.experts * self.expert_params

    @property
    def total_params(self) -> int:
        """All parameters."""
        return self.dense_params + self.routed_params + self.head_params + self.embedding_params

    @property
    def active_params(self) -> int:
        """Parameters of the layers that one token is multiplied with."""
        return self.dense_params + self.expert_layers * self.experts_per_token * self.expert_params

    @property
    def bytes_total(self) -> float:
        """Bytes of all weights; head and embedding stay in 16 bits."""
        return self.weight_bytes * (self.dense_params + self.routed_params) + 2.0 * (
            self.head_params + self.embedding_params
        )

    def experts_touched(self, tokens: float) -> float:
        """Expected share of the routed experts that a step of so many tokens reads, with even routing."""
        if not self.experts:
            return 0.0
        return float(1 - (1 - self.experts_per_token / self.experts) ** tokens)


def read_work(config: Mapping[str, Any]) -> ModelWork:
    """From a parsed `config.json`. `ConfigError` when a size that everything depends on is missing."""
    nested = config.get("text_config") or config.get("llm_config")
    text: Mapping[str, Any] = nested if isinstance(nested, Mapping) else config

    def size(*names: str, default: int | None = None) -> int:
        for name in names:
            value = text.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
        if default is None:
            raise ConfigError(f"the model's config has no {names[0]}, which its cost depends on")
        return default

    hidden, layers, heads = size("hidden_size"), size("num_hidden_layers"), size("num_attention_heads")
    head_dim = size("head_dim", default=hidden // max(heads, 1))
    if rank := size("kv_lora_rank", default=0):
        nope, rope, value = size("qk_nope_head_dim"), size("qk_rope_head_dim"), size("v_head_dim")
        q_rank = size("q_lora_rank", default=0)
        query = q_rank * (hidden + heads * (nope + rope)) if q_rank else hidden * heads * (nope + rope)
        attention = query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
        query_size = heads * (2 * rank + rope) // 2  # absorbed: scores over latent and rope, values over the latent
    else:
        attention = 2 * hidden * head_dim * (heads + size("num_key_value_heads", default=heads))
        query_size = heads * head_dim
    experts = size("num_experts", "num_local_experts", "n_routed_experts", default=0)
    dense_layers = layers
    expert = shared = 0
    if experts:
        expert = 3 * hidden * size("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")
        shared = expert * size("n_shared_experts", default=0) + hidden * experts
        if size("shared_expert_intermediate_size", default=0):
            shared += 3 * hidden * size("shared_expert_intermediate_size")
        dense_layers = size("first_k_dense_replace", default=0)
    dense = 3 * hidden * size("intermediate_size", default=0)
    vocabulary = size("vocab_size") * hidden
    tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    quantised = text.get("quantization_config") or config.get("quantization_config")
    method = str(quantised.get("quant_method")) if isinstance(quantised, Mapping) else ""
    return ModelWork(
        layers=layers,
        hidden=hidden,
        dense_params=layers * attention + dense_layers * dense + (layers - dense_layers) * shared,
        head_params=vocabulary,
        embedding_params=0 if tied else vocabulary,
        query_size=query_size,
        expert_layers=layers - dense_layers,
        experts=experts,
        experts_per_token=size("num_experts_per_tok", default=0) if experts else 0,
        expert_params=expert,
        weight_bytes=_QUANTISED.get(method, 2.0),
        heads=heads,
    )


def estimate_work(
    layout: ModelLayout, params: float, active_params: float | None = None, weight_bytes: float = 2.0
) -> ModelWork:
    """From a parameter count alone, for models known by their layout: shapes of a usual transformer of that size.

    Hidden size follows 12·layers·hidden² = active parameters. With fewer active than total parameters the model is
    taken for a mixture of experts of which one in `params / active_params` is read per token.
    """
    active = params if active_params is None else active_params
    if not 1e6 <= active <= params <= 1e14:
        raise ConfigError(f"parameters {params:g} ({active:g} active) must be from 1e6 to 1e14, active at most all")
    if not 0.1 <= weight_bytes <= 8:
        raise ConfigError(f"a parameter of {weight_bytes:g} bytes is none: it must have from 0.1 to 8")
    layers = len(layout.layers)
    hidden = max(64, round((active / (12 * layers)) ** 0.5 / 64) * 64)
    experts = round(params / active) if active < params else 0
    per_token = active / 2 if experts > 1 else 0.0  # half in the experts, as in the public mixtures of experts
    if experts > 1:
        experts = max(2, round((params - active / 2) / per_token))
    return ModelWork(
        layers=layers,
        hidden=hidden,
        dense_params=int(active - per_token),
        head_params=0,
        embedding_params=0,
        query_size=hidden,
        expert_layers=layers if experts > 1 else 0,
        experts=experts if experts > 1 else 0,
        experts_per_token=1 if experts > 1 else 0,
        expert_params=int(per_token / layers) if experts > 1 else 0,
        weight_bytes=weight_bytes,
    )
