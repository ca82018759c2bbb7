"""Tiny models of every family that the bridge serves, with random weights that make their tokens vary."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 97
WINDOW = 24
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MLA: dict[str, Any] = {
    **_COMMON,
    "num_key_value_heads": 4,
    "head_dim": None,
    "num_hidden_layers": 3,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
# Model class, config class, and what its config has beyond the common part.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_COMMON, "num_hidden_layers": 2}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_COMMON, "num_hidden_layers": 2, "sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**_COMMON, "num_hidden_layers": 4, "sliding_window": WINDOW, "attn_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **_COMMON,
            "num_hidden_layers": 6,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention"] * 2
            + ["full_attention"]
            + ["sliding_attention"] * 2
            + ["full_attention"],
        },
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **_COMMON,
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek-v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", {**_MLA, "topk_method": "greedy"}),
    "deepseek-v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**_MLA, "n_shared_experts": 1}),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **_COMMON,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
}

_ALTERNATING = {
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_EXPERTS = {"num_hidden_layers": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_QWEN3_5 = {key: value for key, value in FAMILIES["qwen3-next"][2].items() if "expert" not in key and "moe" not in key}
# What runs without having been asked for.
MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**_COMMON, "num_hidden_layers": 2}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_COMMON, "num_hidden_layers": 2}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_COMMON, **_EXPERTS, "num_experts": 4}),
    "qwen3.5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", _QWEN3_5),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_COMMON, "num_hidden_layers": 2, "num_local_experts": 4}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**_COMMON, "num_hidden_layers": 2, "sliding_window": WINDOW}),
    "olmo3": ("Olmo3ForCausalLM", "Olmo3Config", {**_COMMON, **_ALTERNATING}),
    "cohere2": ("Cohere2ForCausalLM", "Cohere2Config", {**_COMMON, **_ALTERNATING}),
    "exaone4": ("Exaone4ForCausalLM", "Exaone4Config", {**_COMMON, **_ALTERNATING}),
    "glm4-moe": ("Glm4MoeForCausalLM", "Glm4MoeConfig", {**_COMMON, **_EXPERTS, "n_routed_experts": 4}),
}


def tiny_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model of a family, the same weights for the same seed."""
    model_class, config_class, fields = {**FAMILIES, **MORE}[family]
    config = getattr(transformers, config_class)(**{**fields, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        # The library's own start values are so small that every prompt would end in the same token.
        weight.data.normal_(0, 0.3 if weight.ndim > 1 else 0.5, generator=generator)
    return model.to(dtype)


def ragged(seed: int, lengths: list[int]) -> dict[str, torch.Tensor]:
    """Prompts of these lengths, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(1, VOCABULARY, (len(lengths), width), generator=generator)
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}
