"""Write a small model with random weights: `make_model.py hybrid|full DIRECTORY`; run by the Python that has vLLM."""

from __future__ import annotations

import sys

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

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
else:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=4))
model.save_pretrained(sys.argv[2])
