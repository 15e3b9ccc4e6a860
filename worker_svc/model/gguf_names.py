"""The tensors of a GGUF file by their Hugging Face names."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from worker_svc.errors import ModelError
from worker_svc.model.gguf_file import GgufFile, GgufTensor
from worker_svc.model.model_config import Family, ModelConfig

ROPE_DIVISORS: Final = "rope_freqs.weight"

_OUTSIDE: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    ROPE_DIVISORS: ROPE_DIVISORS,
}
_IN_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OF_FAMILY: Final[Mapping[Family, Mapping[str, str]]] = {
    Family.GEMMA3: {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    Family.MIXTRAL: {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
        "ffn_up_exps": "block_sparse_moe.experts.*.w3",
        "ffn_down_exps": "block_sparse_moe.experts.*.w2",
    },
    Family.QWEN3_MOE: {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.*.gate_proj",
        "ffn_up_exps": "mlp.experts.*.up_proj",
        "ffn_down_exps": "mlp.experts.*.down_proj",
    },
}
"""What a family has beside, or instead. A star is the number of an expert: GGUF stacks them."""


def hf_tensors(file: GgufFile, config: ModelConfig) -> dict[str, GgufTensor]:
    """Return all tensors; one without a Hugging Face name has its own.

    Raises: ModelError if a stack of experts is none.
    """
    parts = {**_IN_LAYER, **_OF_FAMILY.get(config.family, {})}
    return dict(
        entry
        for tensor in file.tensors.values()
        for entry in _named(tensor, _hf_name(tensor.name, parts))
    )


def _hf_name(name: str, parts: Mapping[str, str]) -> str:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match name.split("."):
        case ["blk", layer, part, kind] if part in parts:
            return f"model.layers.{layer}.{parts[part]}.{kind}"
    return name


def _named(tensor: GgufTensor, name: str) -> Iterator[tuple[str, GgufTensor]]:
    """Yield a tensor, or each expert of a stack, with its name."""
    if "*" not in name:
        yield name, tensor
        return
    if len(tensor.shape) != 3:
        raise ModelError(f"{tensor.name} is {list(tensor.shape)}, must have three dimensions")
    num_experts, *shape = tensor.shape
    num_bytes = tensor.num_bytes // num_experts
    for number in range(num_experts):
        yield (
            name.replace("*", str(number)),
            replace(
                tensor,
                shape=tuple(shape),
                offset=tensor.offset + number * num_bytes,
                num_bytes=num_bytes,
            ),
        )
