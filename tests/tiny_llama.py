"""A tiny random Llama as a Hugging Face directory, with a tokenizer of bytes.

Ids 0 to 255 are the bytes, then come <bos>, <eos>, <eot> and <img>; the rest of the 272 are spare.
Two layers with four query heads on two key/value heads, so that a mistake in either shows.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 2, 4, 2, 16
VOCAB = 272
BOS, EOS, EOT, IMG = 256, 257, 258, 259
SPECIAL_TOKENS = ("<bos>", "<eos>", "<eot>", "<img>")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: "
    "{{ message['content'] }}<eot>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tiny_llama(directory: Path, *, seed: int = 0, max_position_embeddings: int = 512) -> Path:
    """Write the model and its tokenizer into `directory`, which is made, and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": [EOS, EOT]}
    )
    save_file(tiny_weights(seed), directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory)
    return directory


def tiny_weights(seed: int) -> dict[str, torch.Tensor]:
    """Return the weights by their Hugging Face names: normal(0, 0.15), the head normal(0, 0.5)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, std: float = 0.15) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * std

    weights = {"model.embed_tokens.weight": normal(VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.o_proj.weight": normal(HIDDEN, HEADS * HEAD_DIM),
            f"{name}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.mlp.gate_proj.weight": normal(INTERMEDIATE, HIDDEN),
            f"{name}.mlp.up_proj.weight": normal(INTERMEDIATE, HIDDEN),
            f"{name}.mlp.down_proj.weight": normal(HIDDEN, INTERMEDIATE),
        }
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    weights["lm_head.weight"] = normal(VOCAB, HIDDEN, std=0.5)
    return weights


def write_tokenizer(
    directory: Path, *, spare: Mapping[int, bytes] | None = None, add_bos: bool = False
) -> None:
    """Write the tokenizer. `spare` binds ids behind the special ones to bytes of an output.

    Nothing merges into these: they appear in outputs only.
    """
    characters = _byte_characters()
    vocab = {character: byte for byte, character in enumerate(characters)}
    vocab |= {text: BOS + place for place, text in enumerate(SPECIAL_TOKENS)}
    for token, text in (spare or {}).items():
        vocab["".join(characters[byte] for byte in text)] = token
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{SPECIAL_TOKENS[0]} $A", special_tokens=[(SPECIAL_TOKENS[0], BOS)]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[0],
            "eos_token": SPECIAL_TOKENS[1],
            "add_bos_token": add_bos,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _byte_characters() -> list[str]:
    """Return the printable character that byte-level tokenizers write for each byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
