"""The numbers of a model, read from its files and checked."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from worker_svc.errors import ModelError
from worker_svc.model.fields import Fields
from worker_svc.model.gguf_file import GgufFile, read_gguf

KNOWN_HF_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
KNOWN_GGUF_ARCHITECTURES = ("llama",)
KNOWN_ROPE_SCALINGS = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length a model was first trained on."""

    kind: Literal["linear", "llama3"]

    factor: float
    """How far. `linear` divides every frequency by it; `llama3` only the slow ones."""

    low_freq_factor: float = 1.0
    """llama3: wavelengths longer than original_max_position / this are stretched in full."""

    high_freq_factor: float = 4.0
    """llama3: wavelengths shorter than original_max_position / this are left alone."""

    original_max_position: int = 8192
    """llama3: the length the model was first trained on, in tokens."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model of the Llama shape."""

    architecture: str
    """As its files name it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the MLP."""

    num_layers: int
    num_heads: int
    """Query heads."""

    num_kv_heads: int
    """Key/value heads; divides num_heads."""

    head_dim: int
    """Elements of a head. Even."""

    max_position_embeddings: int
    """Longest sequence the model was made for, in tokens."""

    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None

    tie_word_embeddings: bool
    """The head is the embedding."""

    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool

    sliding_window: int | None = None
    """Tokens a token sees, itself included, in every layer. None: all before it."""

    def __post_init__(self) -> None:
        """Raise ModelError, naming the field, its value and its bound."""
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_key_value_heads is {self.num_kv_heads}, must divide "
                f"num_attention_heads ({self.num_heads})"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}, must be even")


def read_model_config(path: Path) -> ModelConfig:
    """Read the config of a Hugging Face directory or a GGUF file.

    Raises: ModelError if the files are damaged, or hold a model of another shape.
    """
    if path.is_dir():
        return config_from_hf(_read_json(path / "config.json"))
    return config_from_gguf(read_gguf(path))


def config_from_hf(values: Mapping[str, object]) -> ModelConfig:
    """Return the config that a `config.json` gives.

    Raises: ModelError as `read_model_config` does.
    """
    fields = Fields(values, "config.json")
    architecture = _hf_architecture(fields)
    _refuse_unknown_variants(fields)
    attention_bias = fields.flag("attention_bias", default=False)
    num_heads = fields.count("num_attention_heads")
    hidden_size = fields.count("hidden_size")
    # Rope moved from two fields into one, `rope_parameters`, with transformers 5.
    rope = fields.group("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    if (rotated := rope.number("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"partial_rotary_factor is {rotated}, must be 1")
    max_position = fields.count("max_position_embeddings", 2048)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.count("num_key_value_heads", num_heads),
        head_dim=fields.count("head_dim", hidden_size // num_heads),
        max_position_embeddings=max_position,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", fields.number("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(rope, max_position),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        # Qwen2 has these biases without saying so.
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", default=False),
        sliding_window=_sliding_window(fields, architecture),
    )


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Return the config that a GGUF file's metadata gives.

    Raises: ModelError as `read_model_config` does.
    """
    fields = Fields(file.metadata, file.path.name)
    architecture = fields.text("general.architecture")
    if architecture not in KNOWN_GGUF_ARCHITECTURES:
        raise _unknown("architecture", architecture, KNOWN_GGUF_ARCHITECTURES)
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
        raise _unknown("llama.rope.scaling.type", kind, ("none", "linear"))
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path.name}: token_embd.weight is missing")
    return ModelConfig(
        architecture=architecture,
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


def _read_json(path: Path) -> Mapping[str, object]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path.name} is not a JSON object")
    return values


def _hf_architecture(fields: Fields) -> str:
    named = fields.texts("architectures")
    for architecture in named:
        if architecture in KNOWN_HF_ARCHITECTURES:
            return architecture
    raise _unknown("architectures", ", ".join(named), KNOWN_HF_ARCHITECTURES)


def _refuse_unknown_variants(fields: Fields) -> None:
    """Raise ModelError for what would change the numbers and is not built."""
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise _unknown("hidden_act", activation, ("silu",))
    if fields.has("quantization_config"):
        raise ModelError("quantization_config is set: quantised weights are read from GGUF only")


def _sliding_window(fields: Fields, architecture: str) -> int | None:
    """Return the window of all layers, if there is one."""
    # Qwen2 gives a window that is off, or on in some layers; Mistral gives one that is on.
    if not fields.has("sliding_window") or not fields.flag("use_sliding_window", default=True):
        return None
    window = fields.count("sliding_window")
    if architecture != "MistralForCausalLM":
        raise ModelError(
            f"sliding_window is {window}, must be null: windows of {architecture} are not supported"
        )
    return window


def _rope_scaling(rope: Fields, max_position: int) -> RopeScaling | None:
    """Read a rope scaling, whose kind old files call `type`."""
    match kind := rope.text("rope_type", rope.text("type", "default")):
        case "default":
            return None
        case "linear":
            return RopeScaling("linear", rope.number("factor"))
        case "llama3":
            return RopeScaling(
                "llama3",
                rope.number("factor"),
                rope.number("low_freq_factor"),
                rope.number("high_freq_factor"),
                rope.count("original_max_position_embeddings", max_position),
            )
        case _:
            raise _unknown("rope_type", kind, KNOWN_ROPE_SCALINGS)


def _unknown(field: str, value: str, known: tuple[str, ...]) -> ModelError:
    return ModelError(
        f"{field} is {value[:100]!r}, which is not supported; known: {', '.join(known)}"
    )
