"""The numbers of a model, read from the metadata of a GGUF file."""

from collections.abc import Mapping
from typing import Final

from worker_svc.errors import ModelError
from worker_svc.model.fields import Fields
from worker_svc.model.gguf_file import GgufFile
from worker_svc.model.model_config import (
    FULL,
    MAX_LAYERS,
    ExpertsConfig,
    Family,
    ModelConfig,
    RopeScaling,
    gemma3_layer_types,
    unknown,
)

KNOWN_GGUF_ARCHITECTURES: Final[Mapping[str, Family]] = {
    "llama": Family.LLAMA,
    "qwen2": Family.LLAMA,
    "qwen3": Family.QWEN3,
    "gemma3": Family.GEMMA3,
    "qwen3moe": Family.QWEN3_MOE,
}
"""Mixtral is a llama with experts."""

_GEMMA3_27B_LAYERS: Final = 62


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Return the config that a GGUF file's metadata gives.

    Raises: ModelError if the file is damaged, or holds what is not built.
    """
    fields = Fields(file.metadata, file.path.name)
    arch = fields.text("general.architecture")
    if arch not in KNOWN_GGUF_ARCHITECTURES:
        raise unknown("architecture", arch, KNOWN_GGUF_ARCHITECTURES)
    if fields.has("split.count") and fields.count("split.count") > 1:
        raise ModelError(f"{file.path.name} is one part of a split GGUF file; merge the parts")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.has(f"{arch}.{name}"):
            raise ModelError(f"{arch}.{name} is set, which is not supported")
    family, experts = _experts(fields, arch)
    num_heads = fields.count(f"{arch}.attention.head_count")
    hidden_size = fields.count(f"{arch}.embedding_length")
    head_dim = fields.count(f"{arch}.attention.key_length", hidden_size // num_heads)
    if (rotated := fields.count(f"{arch}.rope.dimension_count", head_dim)) != head_dim:
        raise ModelError(f"{arch}.rope.dimension_count is {rotated}, must be {head_dim}")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path.name}: token_embd.weight is missing")
    num_layers = fields.count(f"{arch}.block_count", most=MAX_LAYERS)
    window, full_layers, local_theta = _windows(fields, arch, num_layers)
    return ModelConfig(
        architecture=arch,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=fields.count(f"{arch}.feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.count(f"{arch}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=fields.count(f"{arch}.context_length"),
        rms_norm_eps=fields.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number(
            f"{arch}.rope.freq_base", 1e6 if family is Family.GEMMA3 else 10000.0
        ),
        rope_scaling=_rope_scaling(fields, arch),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        family=family,
        sliding_window=window,
        full_layers=full_layers,
        local_rope_theta=local_theta,
        # The largest Gemma 3 divides by its hidden size per head. The file does not say so.
        attention_scale=(hidden_size / num_heads) ** -0.5
        if family is Family.GEMMA3 and num_layers == _GEMMA3_27B_LAYERS
        else None,
        # Gemma's converter has added the 1 to the weights of norms.
        norm_offset=0.0,
        experts=experts,
    )


def _experts(fields: Fields, arch: str) -> tuple[Family, ExpertsConfig | None]:
    """Return the family, and its experts if it has them."""
    family = KNOWN_GGUF_ARCHITECTURES[arch]
    if not fields.has(f"{arch}.expert_count"):
        return family, None
    if arch not in {"llama", "qwen3moe"}:
        raise ModelError(f"{arch}.expert_count is set, which is not supported")
    experts = ExpertsConfig(
        num_experts=fields.count(f"{arch}.expert_count"),
        num_chosen=fields.count(f"{arch}.expert_used_count"),
        intermediate_size=fields.count(
            f"{arch}.expert_feed_forward_length", fields.count(f"{arch}.feed_forward_length")
        ),
        sums_to_one=True,
    )
    return Family.MIXTRAL if arch == "llama" else family, experts


def _windows(
    fields: Fields, arch: str, num_layers: int
) -> tuple[int | None, frozenset[int], float | None]:
    """Return the window, the layers without one, and rope_theta of layers with one."""
    if not fields.has(f"{arch}.attention.sliding_window"):
        return None, frozenset(), None
    window = fields.count(f"{arch}.attention.sliding_window")
    if arch != "gemma3":
        raise ModelError(f"{arch}.attention.sliding_window is {window}, which is not supported")
    period = fields.count(f"{arch}.attention.sliding_window_pattern", 6)
    kinds = gemma3_layer_types(num_layers, period)
    full_layers = frozenset(layer for layer, kind in enumerate(kinds) if kind == FULL)
    return window, full_layers, fields.number(f"{arch}.rope.freq_base_swa", 10000.0)


def _rope_scaling(fields: Fields, arch: str) -> RopeScaling | None:
    kind = fields.text(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise unknown(f"{arch}.rope.scaling.type", kind, ("none", "linear"))
    return RopeScaling("linear", fields.number(f"{arch}.rope.scaling.factor"))
