"""Tiny models of `transformers` as GGUF files, named and changed as llama.cpp's converter does."""

# mypy: allow-untyped-calls

from collections import defaultdict
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from gguf_writer import pairs_together

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}


def write_gguf(model: PreTrainedModel, path: Path) -> Path:
    """Write a model in fp32, without a tokenizer."""
    config = model.config
    kind = ARCHITECTURES[config.model_type]
    arch = gguf.MODEL_ARCH_NAMES[kind]
    writer = gguf.GGUFWriter(path, arch)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if arch == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    if hasattr(config, "num_local_experts"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for name, tensor in _converted(model, arch).items():
        writer.add_tensor(name, np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _converted(model: PreTrainedModel, arch: str) -> dict[str, torch.Tensor]:
    config = model.config
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    tensors, experts = {}, defaultdict(list)
    for name, tensor in _unfused(model).items():
        module, _, kind = name.rpartition(".")
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch == "gemma3" and "norm" in name:
            tensor = tensor + 1  # noqa: PLW2901
        if arch == "llama" and "q_proj" in name:
            tensor = pairs_together(tensor, config.num_attention_heads)  # noqa: PLW2901
        if arch == "llama" and "k_proj" in name:
            tensor = pairs_together(tensor, config.num_key_value_heads)  # noqa: PLW2901
        front, is_expert, back = module.partition(".experts.")
        if is_expert:
            part = back.partition(".")[2]
            experts[f"{front}.experts.{part}"].append(tensor)
            continue
        tensors[f"{names.get_name(module)}.{kind}"] = tensor
    for module, stack in experts.items():
        tensors[f"{names.get_name(module)}.weight"] = torch.stack(stack)
    assert not any(name.startswith("None") for name in tensors)
    return tensors


def _unfused(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the weights as a checkpoint names them: each expert's on its own."""
    tensors = {}
    mixtral = {"gate": "w1", "up": "w3", "down": "w2"}
    is_mixtral = model.config.model_type == "mixtral"
    for name, tensor in model.state_dict().items():
        if is_mixtral:
            name = name.replace(".mlp.", ".block_sparse_moe.")  # noqa: PLW2901
        front, is_expert, part = name.partition(".experts.")
        if not is_expert:
            tensors[name] = tensor
            continue
        for number, matrix in enumerate(tensor):
            parts = {"down": matrix}
            if part == "gate_up_proj":
                parts = dict(zip(("gate", "up"), matrix.chunk(2), strict=True))
            for key, piece in parts.items():
                last = mixtral[key] if is_mixtral else f"{key}_proj"
                tensors[f"{front}.experts.{number}.{last}.weight"] = piece
    return tensors
