"""A config is read whole, or refused by an error that names field, value and what is known."""

import json
from pathlib import Path

import pytest

from tiny_llama import write_tiny_llama
from worker_svc.errors import ConfigError, ModelError
from worker_svc.model.checkpoint import read_model_config
from worker_svc.model.gguf_file import read_gguf
from worker_svc.model.model_config import (
    KNOWN_HF_ARCHITECTURES,
    ExpertsConfig,
    RopeScaling,
    config_from_hf,
)

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
OLD_LLAMA3 = {
    "type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_a_directory_is_read(tmp_path: Path) -> None:
    config = read_model_config(write_tiny_llama(tmp_path, max_position_embeddings=77))
    assert config.num_heads == 4
    assert config.num_kv_heads == 2
    assert config.head_dim == 16
    assert config.max_position_embeddings == 77
    assert not config.tie_word_embeddings
    assert config.rope_scaling is None


def test_a_gguf_file_is_read(demo_gguf: Path) -> None:
    config = read_model_config(demo_gguf)
    assert config.architecture == "llama"
    assert config.vocab_size == 49152
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.hidden_size, config.head_dim, config.intermediate_size) == (576, 64, 1536)
    assert config.rope_theta == 100000.0
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config.max_position_embeddings == 8192
    assert config.tie_word_embeddings


def test_what_is_left_out_has_the_defaults_of_transformers() -> None:
    config = config_from_hf(LLAMA)
    assert config.num_kv_heads == config.num_heads
    assert config.head_dim == 16
    assert config.rms_norm_eps == 1e-6
    assert config.rope_theta == 10000.0
    assert not config.qkv_bias
    assert not config.mlp_bias


def test_old_and_new_rope_fields_mean_the_same() -> None:
    old = config_from_hf(LLAMA | {"rope_theta": 5e5, "rope_scaling": OLD_LLAMA3})
    renamed = {"rope_type" if name == "type" else name: v for name, v in OLD_LLAMA3.items()}
    new = config_from_hf(LLAMA | {"rope_parameters": renamed | {"rope_theta": 5e5}})
    assert old == new
    assert new.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def test_qwen2_has_biases_without_saying_so() -> None:
    config = config_from_hf(LLAMA | {"architectures": ["Qwen2ForCausalLM"]})
    assert config.qkv_bias
    assert not config.output_bias


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match="GPT2LMHeadModel") as refusal:
        config_from_hf(LLAMA | {"architectures": ["GPT2LMHeadModel"]})
    assert all(known in str(refusal.value) for known in KNOWN_HF_ARCHITECTURES)
    assert isinstance(refusal.value, ConfigError)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "architectures is '', which is not supported; known: Llama"),
        ({"architectures": []}, "architectures is '', which is not supported; known: Llama"),
        (
            {"model_type": "gpt2"},
            "architectures is missing, model_type is 'gpt2', which is not supported; known: Llama",
        ),
    ],
)
def test_a_config_without_architectures_is_refused_with_the_known_ones(
    config: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        config_from_hf(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'.*known: silu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'.*default, linear, llama3"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"sliding_window": 4096}, "sliding_window is 4096, must be null"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "big"}, "hidden_size is 'big', must be a positive integer"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"vocab_size": 1 << 31}, "vocab_size is 2147483648, must be at most 2147483647"),
        ({"rope_theta": 10**400}, "rope_theta is 1000.*, must be a positive number"),
        ({"num_attention_heads": 128}, "head_dim is 0, must be a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, must be at most 1024"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, must be a positive number"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, must divide"),
        ({"head_dim": 15}, "head_dim is 15, must be even"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', must be true or false"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is .*, must be a list of strings"),
        ({"rope_scaling": 4}, "rope_scaling is 4, must be a mapping"),
    ],
)
def test_what_would_change_the_numbers_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_from_hf(LLAMA | change)


def test_a_window_that_is_off_is_no_window() -> None:
    config = config_from_hf(LLAMA | {"sliding_window": 4096, "use_sliding_window": False})
    assert config.sliding_window is None
    # Qwen's is off unless it is said to be on.
    qwen = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 4096}
    assert config_from_hf(qwen).sliding_window is None


def test_windows_may_be_in_some_layers_only() -> None:
    qwen = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 4}
    qwen |= {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 3}
    config = config_from_hf(qwen)
    assert config.sliding_window == 7
    assert config.full_layers == {0, 1, 2}
    assert [group.layers for group in config.kv_groups] == [(0,), (1,), (2,), (3,)]
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    assert config_from_hf(qwen | {"layer_types": kinds}).full_layers == {1, 3}
    assert config_from_hf(qwen | {"layer_types": ["full_attention"] * 4}).sliding_window is None
    with pytest.raises(ModelError, match=r"layer_types is 'chunked_attention'.*known: full_att"):
        config_from_hf(qwen | {"layer_types": ["chunked_attention"] * 4})
    with pytest.raises(ModelError, match="layer_types has 1 entries, must have 4"):
        config_from_hf(qwen | {"layer_types": ["full_attention"]})


GEMMA: dict[str, object] = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 12,
    "sliding_window": 512,
    "query_pre_attn_scalar": 64,
}


def test_gemma3_is_read_from_old_and_new_fields() -> None:
    old = config_from_hf(
        GEMMA
        | {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "sliding_window_pattern": 3}
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    )
    new = config_from_hf(
        GEMMA
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 4}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            }
        }
    )
    assert old == new
    assert new.full_layers == {2, 5, 8, 11}
    assert (new.rope_theta, new.local_rope_theta, new.attention_scale) == (5e5, 2e4, 0.125)
    assert (new.head_dim, new.norm_offset, new.tie_word_embeddings) == (256, 1.0, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'.*known: gelu_pytorch_tanh"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, must be null"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, must be null"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_type of sliding_attention is 'linear'",
        ),
    ],
)
def test_what_would_change_the_numbers_of_gemma3_is_refused(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        config_from_hf(GEMMA | change)


def test_experts_are_read() -> None:
    mixtral = LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    assert config_from_hf(mixtral).experts == ExpertsConfig(4, 2, 128, sums_to_one=True)
    moe = LLAMA | {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 4}
    moe |= {"num_experts": 16, "moe_intermediate_size": 32, "decoder_sparse_step": 2}
    dense = frozenset({0, 1, 2})
    expected = ExpertsConfig(16, 8, 32, sums_to_one=False, dense_layers=dense)
    assert config_from_hf(moe | {"mlp_only_layers": [1]}).experts == expected
    with pytest.raises(ModelError, match="num_experts_per_tok is 8, must be at most 4"):
        config_from_hf(moe | {"num_experts": 4})
    with pytest.raises(ModelError, match=r"mlp_only_layers is .* must be a list of integers"):
        config_from_hf(moe | {"mlp_only_layers": [-1]})


def test_a_mistral_has_the_window_it_gives() -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"]}
    assert config_from_hf(mistral | {"sliding_window": 4096}).sliding_window == 4096
    assert config_from_hf(mistral | {"sliding_window": None}).sliding_window is None


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config.json cannot be read"):
        read_model_config(tmp_path)
    for text in ("{", "[]", json.dumps("x"), "\xff"):
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(ModelError, match=r"config.json is not"):
            read_model_config(tmp_path)
    with pytest.raises(ModelError, match=r"gone.gguf cannot be read"):
        read_gguf(tmp_path / "gone.gguf")
