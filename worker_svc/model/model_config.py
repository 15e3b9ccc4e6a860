"""The numbers of a model, read from a `config.json` and checked."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Literal

from worker_svc.errors import ModelError
from worker_svc.model.fields import Fields
from worker_svc.model.layer_groups import LayerGroup, group_layers


class Family(Enum):
    """Models that one file of code runs."""

    LLAMA = auto()
    QWEN3 = auto()
    GEMMA3 = auto()
    MIXTRAL = auto()
    QWEN3_MOE = auto()


KNOWN_HF_ARCHITECTURES: Final[Mapping[str, Family]] = {
    "LlamaForCausalLM": Family.LLAMA,
    "MistralForCausalLM": Family.LLAMA,
    "Qwen2ForCausalLM": Family.LLAMA,
    "Qwen3ForCausalLM": Family.QWEN3,
    "Gemma3ForCausalLM": Family.GEMMA3,
    "MixtralForCausalLM": Family.MIXTRAL,
    "Qwen3MoeForCausalLM": Family.QWEN3_MOE,
}
MAX_LAYERS: Final = 1024
"""More than any model has: a bound on what one number in a file can make us do."""

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
KNOWN_ROPE_SCALINGS: Final = ("default", "linear", "llama3")

# Where transformers has another default than hidden_size / num_attention_heads, and than 10,000.
_HEAD_DIMS: Final = {Family.QWEN3: 128, Family.GEMMA3: 256}
_THETAS: Final = {Family.GEMMA3: 1e6, Family.MIXTRAL: 1e6}


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
class ExpertsConfig:
    """The sparse MLPs of a mixture of experts."""

    num_experts: int

    num_chosen: int
    """Experts that each token goes to; at most num_experts."""

    intermediate_size: int
    """Width of one expert."""

    sums_to_one: bool
    """Whether the weights of a token's experts are divided by their sum."""

    dense_layers: frozenset[int] = frozenset()
    """Layers with a plain MLP instead."""

    def __post_init__(self) -> None:
        """Raise ModelError, naming the field, its value and its bound."""
        if self.num_chosen > self.num_experts:
            raise ModelError(
                f"num_experts_per_tok is {self.num_chosen}, must be at most {self.num_experts}"
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model of the Llama shape, and in what it differs."""

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

    family: Family = Family.LLAMA

    sliding_window: int | None = None
    """Tokens a token sees, itself included, in layers with a window. None: there are none."""

    full_layers: frozenset[int] = frozenset()
    """Layers without a window, if there is one."""

    local_rope_theta: float | None = None
    """rope_theta of layers with a window, which are then not stretched. None: as the others'."""

    attention_scale: float | None = None
    """Multiplies dot products of queries and keys. None: head_dim ** -0.5."""

    norm_offset: float = 0.0
    """To be added to the weights of norms as they are stored."""

    experts: ExpertsConfig | None = None
    """None: all MLPs are plain."""

    def __post_init__(self) -> None:
        """Raise ModelError, naming the field, its value and its bound."""
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_key_value_heads is {self.num_kv_heads}, must divide "
                f"num_attention_heads ({self.num_heads})"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}, must be even")

    @property
    def kv_groups(self) -> tuple[LayerGroup, ...]:
        """Which layers share block tables, and what they see."""
        return group_layers(self.num_layers, self.sliding_window, self.full_layers)


def config_from_hf(values: Mapping[str, object]) -> ModelConfig:
    """Return the config that a `config.json` gives.

    Raises: ModelError if a field is missing or impossible, or asks for what is not built.
    """
    fields = Fields(values, "config.json")
    architecture = _hf_architecture(fields)
    family = KNOWN_HF_ARCHITECTURES[architecture]
    _refuse_unknown_variants(fields, family)
    attention_bias = fields.flag("attention_bias", default=False)
    num_heads = fields.count("num_attention_heads")
    hidden_size = fields.count("hidden_size")
    rope, local_rope = _rope_fields(fields, family)
    max_position = fields.count("max_position_embeddings", 2048)
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    window, full_layers = _windows(fields, architecture, num_layers)
    is_gemma = family is Family.GEMMA3
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.count("num_key_value_heads", num_heads),
        head_dim=fields.count("head_dim", _HEAD_DIMS.get(family, hidden_size // num_heads)),
        max_position_embeddings=max_position,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5 if family is Family.MIXTRAL else 1e-6),
        rope_theta=rope.number("rope_theta", fields.number("rope_theta", _THETAS.get(family, 1e4))),
        rope_scaling=_rope_scaling(rope, max_position),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=is_gemma),
        # Qwen2 has these biases without saying so.
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", default=False),
        family=family,
        sliding_window=window,
        full_layers=full_layers,
        local_rope_theta=None
        if local_rope is None
        else local_rope.number("rope_theta", fields.number("rope_local_base_freq", 1e4)),
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5 if is_gemma else None,
        norm_offset=1.0 if is_gemma else 0.0,
        experts=_experts(fields, family, num_layers),
    )


def _hf_architecture(fields: Fields) -> str:
    named = fields.texts("architectures") if fields.has("architectures") else ()
    for architecture in named:
        if architecture in KNOWN_HF_ARCHITECTURES:
            return architecture
    if not named and fields.has("model_type"):
        kind = fields.text("model_type", "")
        raise unknown("architectures is missing, model_type", kind, KNOWN_HF_ARCHITECTURES)
    raise unknown("architectures", ", ".join(named), KNOWN_HF_ARCHITECTURES)


def _refuse_unknown_variants(fields: Fields, family: Family) -> None:
    """Raise ModelError for what would change the numbers and is not built."""
    name, known = "hidden_act", "silu"
    if family is Family.GEMMA3:
        name, known = "hidden_activation", "gelu_pytorch_tanh"
    if (activation := fields.text(name, known)) != known:
        raise unknown(name, activation, (known,))
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.has(name):
            raise ModelError(f"{name} is {fields.number(name)}, must be null")
    if fields.flag("use_bidirectional_attention", default=False):
        raise ModelError("use_bidirectional_attention is true, must be false")


def _experts(fields: Fields, family: Family, num_layers: int) -> ExpertsConfig | None:
    """Return the experts of a family that has them."""
    if family is Family.MIXTRAL:
        return ExpertsConfig(
            num_experts=fields.count("num_local_experts", 8),
            num_chosen=fields.count("num_experts_per_tok", 2),
            intermediate_size=fields.count("intermediate_size"),
            sums_to_one=True,
        )
    if family is not Family.QWEN3_MOE:
        return None
    every = fields.count("decoder_sparse_step", 1)
    dense = {layer for layer in range(num_layers) if (layer + 1) % every}
    # Renamed with transformers 5.
    name = "num_local_experts" if fields.has("num_local_experts") else "num_experts"
    return ExpertsConfig(
        num_experts=fields.count(name, 128),
        num_chosen=fields.count("num_experts_per_tok", 8),
        intermediate_size=fields.count("moe_intermediate_size", 768),
        sums_to_one=fields.flag("norm_topk_prob", default=False),
        dense_layers=frozenset(dense.union(fields.indices("mlp_only_layers"))),
    )


def _rope_fields(fields: Fields, family: Family) -> tuple[Fields, Fields | None]:
    """Return what describes the rotation, and that of layers with a window if it is another."""
    # Rope moved from two fields into one, `rope_parameters`, with transformers 5.
    is_new = fields.has("rope_parameters")
    rope = fields.group("rope_parameters" if is_new else "rope_scaling")
    local = None
    if family is Family.GEMMA3:
        local = rope.group(SLIDING) if is_new else Fields({}, "config.json")
        rope = rope.group(FULL) if is_new else rope
        if (kind := local.text("rope_type", "default")) != "default":
            raise unknown(f"rope_type of {SLIDING}", kind, ("default",))
    if (rotated := rope.number("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"partial_rotary_factor is {rotated}, must be 1")
    return rope, local


def _windows(
    fields: Fields, architecture: str, num_layers: int
) -> tuple[int | None, frozenset[int]]:
    """Return the window of layers that have one, and the layers that have none."""
    # Qwen gives a window that is off unless it says otherwise; the others give one that is on.
    is_on = fields.flag("use_sliding_window", default="Qwen" not in architecture)
    if not is_on or not fields.has("sliding_window"):
        return None, frozenset()
    window = fields.count("sliding_window")
    if architecture == "LlamaForCausalLM":
        raise ModelError(
            f"sliding_window is {window}, must be null: windows of {architecture} are not supported"
        )
    full = frozenset(
        layer
        for layer, kind in enumerate(_layer_types(fields, architecture, num_layers))
        if kind == FULL
    )
    return (window, full) if len(full) < num_layers else (None, frozenset())


def _layer_types(fields: Fields, architecture: str, num_layers: int) -> list[str]:
    """Return FULL or SLIDING for each layer."""
    if fields.has("layer_types"):
        kinds = fields.texts("layer_types")
        for kind in kinds:
            if kind not in {FULL, SLIDING}:
                raise unknown("layer_types", kind, (FULL, SLIDING))
        if len(kinds) != num_layers:
            raise ModelError(f"layer_types has {len(kinds)} entries, must have {num_layers}")
        return kinds
    if architecture == "Gemma3ForCausalLM":
        return gemma3_layer_types(num_layers, fields.count("sliding_window_pattern", 6))
    first_sliding = 0
    if architecture in {"Qwen2ForCausalLM", "Qwen3ForCausalLM"}:
        first_sliding = fields.count("max_window_layers", 28)
    return [FULL if layer < first_sliding else SLIDING for layer in range(num_layers)]


def gemma3_layer_types(num_layers: int, period: int = 6) -> list[str]:
    """Return FULL for the last of each so many layers, SLIDING for the others."""
    return [SLIDING if (layer + 1) % period else FULL for layer in range(num_layers)]


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
            raise unknown("rope_type", kind, KNOWN_ROPE_SCALINGS)


def unknown(field: str, value: str, known: Iterable[str]) -> ModelError:
    """Return the error of a field whose value is not supported, which names those that are."""
    return ModelError(
        f"{field} is {value[:100]!r}, which is not supported; known: {', '.join(known)}"
    )
