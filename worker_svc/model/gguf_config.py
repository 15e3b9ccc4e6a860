"""The numbers of a model, read from the metadata of a GGUF file."""

from collections.abc import Mapping
from typing import Final

from worker_svc.errors import ModelError
from worker_svc.model.fields import Fields
from worker_svc.model.gguf_file import GgufFile
from worker_svc.model.model_config import Family, ModelConfig, RopeScaling, unknown

KNOWN_GGUF_ARCHITECTURES: Final[Mapping[str, Family]] = {
    "llama": Family.LLAMA,
}


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Return the config that a GGUF file's metadata gives.

    Raises: ModelError if the file is damaged, or holds what is not built.
    """
    fields = Fields(file.metadata, file.path.name)
    architecture = fields.text("general.architecture")
    if architecture not in KNOWN_GGUF_ARCHITECTURES:
        raise unknown("architecture", architecture, KNOWN_GGUF_ARCHITECTURES)
    if fields.has("split.count") and fields.count("split.count") > 1:
        raise ModelError(f"{file.path.name} is one part of a split GGUF file; merge the parts")
    if fields.has("llama.expert_count"):
        raise ModelError(f"{file.path.name} is a mixture of experts, which is not supported")
    num_heads = fields.count("llama.attention.head_count")
    hidden_size = fields.count("llama.embedding_length")
    head_dim = fields.count("llama.attention.key_length", hidden_size // num_heads)
    if (rotated := fields.count("llama.rope.dimension_count", head_dim)) != head_dim:
        raise ModelError(f"llama.rope.dimension_count is {rotated}, must be {head_dim}")
    scaling = None
    if (kind := fields.text("llama.rope.scaling.type", "none")) == "linear":
        scaling = RopeScaling("linear", fields.number("llama.rope.scaling.factor"))
    elif kind != "none":
        raise unknown("llama.rope.scaling.type", kind, ("none", "linear"))
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path.name}: token_embd.weight is missing")
    return ModelConfig(
        architecture=architecture,
        family=KNOWN_GGUF_ARCHITECTURES[architecture],
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=fields.count("llama.feed_forward_length"),
        num_layers=fields.count("llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.count("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=fields.count("llama.context_length"),
        rms_norm_eps=fields.number("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("llama.rope.freq_base", 10000.0),
        rope_scaling=scaling,
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
    )
