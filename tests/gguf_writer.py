"""Writes a small Llama as a GGUF file, through the `gguf` package's own writer."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch

from tiny_llama import HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, LAYERS, tiny_weights

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_tiny_gguf(
    path: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    seed: int = 0,
    metadata: Mapping[str, int | float | str] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write the model of `write_tiny_llama`, its matrices packed as `kind`.

    `metadata` and `tensors` are added to it, or stand in for its own.
    """
    writer = gguf.GGUFWriter(path, "llama")
    fields: dict[str, int | float | str] = {
        "llama.block_count": LAYERS,
        "llama.context_length": 512,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INTERMEDIATE,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        **(metadata or {}),
    }
    for name, value in fields.items():
        match value:
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)
            case str():
                writer.add_string(name, value)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "€"])
    writer.add_array("tokenizer.ggml.token_type", [1, 1, 3])
    for name, tensor in {**_gguf_tensors(seed), **(tensors or {})}.items():
        array = tensor.numpy()
        if array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            packed = gguf.quantize(np.ascontiguousarray(array), kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_tensors(seed: int) -> dict[str, torch.Tensor]:
    renamed = {}
    for name, tensor in tiny_weights(seed).items():
        module = name.removesuffix(".weight")
        if module.startswith("model.layers."):
            layer, _, part = module.removeprefix("model.layers.").partition(".")
            heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(part)
            ordered = tensor if heads is None else pairs_together(tensor, heads)
            renamed[f"blk.{layer}.{_NAMES[part]}.weight"] = ordered
        else:
            renamed[f"{_NAMES[module]}.weight"] = tensor
    return renamed


def pairs_together(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Order rows as llama.cpp's converter does (`LlamaModel.permute`)."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )
