"""Write a small model with random weights: `make_model.py hybrid|full|state DIRECTORY`; run by vLLM's Python."""

from __future__ import annotations

import sys

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

torch.manual_seed(0)
# Weights larger than usual, and attention that looks at few tokens, so that a wrong key or value changes the answer.
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
}
if sys.argv[1] == "hybrid":
    config = Gemma3TextConfig(**SIZES, num_hidden_layers=6, sliding_window=64, query_pre_attn_scalar=32)
    model: torch.nn.Module = Gemma3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():  # norms scale by 1 + weight
            if name.endswith(("q_norm.weight", "post_attention_layernorm.weight")):
                weight.fill_(3.0)
elif sys.argv[1] == "state":
    linear = {f"linear_{name}_head_dim": 64 for name in ("key", "value")}
    model = Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **SIZES | {"head_dim": 64},
            **linear,
            num_hidden_layers=4,
            layer_types=["linear_attention", "full_attention"] * 2,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
        )
    )
else:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=4))
model.save_pretrained(sys.argv[2])
