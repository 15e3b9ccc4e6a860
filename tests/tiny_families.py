"""Tiny random models of every family, made by `transformers`, whose next tokens vary."""

# mypy: allow-untyped-calls

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB = 96
WINDOW = 7

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
QWEN_WINDOWS: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_window_layers": 1,
}
SEVEN_LAYERS = SHAPE | {"num_hidden_layers": 7}

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3)),
    "llama 2": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LINEAR)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=WINDOW)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen2 with windows": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, **QWEN_WINDOWS)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "qwen3 with biases": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, attention_bias=True)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SEVEN_LAYERS,
            sliding_window=WINDOW,
            query_pre_attn_scalar=24,
            rope_parameters=GEMMA_ROPE,
        )
    ),
    "gemma3 as GGUF knows it": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SEVEN_LAYERS, sliding_window=WINDOW, query_pre_attn_scalar=16)
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4)),
    "mixtral with a window": lambda: MixtralForCausalLM(
        MixtralConfig(**SHAPE, num_local_experts=4, sliding_window=WINDOW)
    ),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32)
    ),
    "qwen3-moe normalised": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SHAPE,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            norm_topk_prob=True,
        )
    ),
    "qwen3-moe with dense layers": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SHAPE,
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            norm_topk_prob=True,
            mlp_only_layers=[1],
        )
    ),
}


def write_family(name: str, directory: Path, seed: int = 0) -> PreTrainedModel:
    """Write the model into `directory` and return it.

    Random initialisation leaves biases 0 and norms 1 (Gemma: 0); none of these would be missed.
    """
    torch.manual_seed(seed)
    model = FAMILIES[name]()
    model.eval()
    norms_begin_at = 0.0 if name.startswith("gemma3") else 1.0
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            mean = 0.0 if parameter_name.endswith("bias") else norms_begin_at
            torch.nn.init.normal_(parameter, mean=mean, std=0.3)
    model.save_pretrained(directory)
    return model
