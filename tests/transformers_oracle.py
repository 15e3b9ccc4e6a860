"""What `transformers` computes: the oracle of everything a model of ours says, in float32."""

# mypy: allow-untyped-calls

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import logging

logging.disable_progress_bar()

# SmolLM2-135M; `rms_norm_eps` as float32 rounds it.
DEMO_NUMBERS: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 9.999999747378752e-06,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
DEMO = LlamaConfig(**DEMO_NUMBERS)

# Gemma 3 270M; the file does not tell query_pre_attn_scalar.
GEMMA_NUMBERS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 9.999999974752427e-07,
    "sliding_window": 512,
    "query_pre_attn_scalar": 256,
}
GEMMA = Gemma3TextConfig(**GEMMA_NUMBERS)

ModelT = TypeVar("ModelT", bound=PreTrainedModel)


def load_directory(directory: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Load a Hugging Face directory."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(directory, dtype=dtype)
    return model


def load_demo(path: Path) -> LlamaForCausalLM:
    """Load the demo model's GGUF file by transformers' own reader, which takes 10 seconds.

    Not by `from_pretrained`, which wants the accelerate package for it.
    """
    model = _load_gguf(path, LlamaForCausalLM, DEMO, DEMO_NUMBERS)
    # The rotary frequencies are in no file, and on the meta device they have no values.
    model.model.rotary_emb = LlamaRotaryEmbedding(DEMO)
    return model


def load_gemma(path: Path) -> Gemma3ForCausalLM:
    """Load Gemma 3 270M's GGUF file likewise, which takes a minute: the vocabulary is large."""
    model = _load_gguf(path, Gemma3ForCausalLM, GEMMA, GEMMA_NUMBERS)
    model.model.rotary_emb = Gemma3RotaryEmbedding(GEMMA)
    model.model.embed_tokens.embed_scale = torch.tensor(GEMMA.hidden_size**0.5)
    return model


def _load_gguf(
    path: Path, kind: type[ModelT], config: PreTrainedConfig, numbers: dict[str, Any]
) -> ModelT:
    with torch.device("meta"):
        model = kind(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the arrays it makes tensors of are read-only
        loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    for name, value in loaded["config"].items():
        assert name not in numbers or numbers[name] == value
    missing = model.load_state_dict(loaded["tensors"], strict=False, assign=True)
    assert missing.unexpected_keys == []
    assert missing.missing_keys == ["lm_head.weight"]
    model.tie_weights()
    model.eval()
    return model


@torch.inference_mode()
def logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits behind every token of a sequence. Shape: [T, V]."""
    result: torch.Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return result


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """Return the `count` most likely tokens behind a prompt, whatever ends a text."""
    prompts = torch.tensor([list(prompt)])
    settings = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0)
    assert isinstance(model, GenerationMixin)
    model.generation_config.eos_token_id = None
    output = model.generate(prompts, settings, attention_mask=torch.ones_like(prompts))
    assert isinstance(output, torch.Tensor)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


@dataclass(frozen=True, slots=True)
class BeamOracle:
    """What `transformers` returns for one hypothesis."""

    tokens: list[int]
    """Generated, with the end-of-sequence id if there is one."""

    score: float


@torch.inference_mode()
def beam_search(
    model: LlamaForCausalLM,
    prompt: Sequence[int],
    count: int,
    *,
    width: int,
    eos_token_ids: Sequence[int],
    num_returned: int,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> list[BeamOracle]:
    """Return the best hypotheses behind a prompt, of at most `count` tokens, the best first."""
    prompts = torch.tensor([list(prompt)])
    settings = GenerationConfig(
        max_new_tokens=count,
        do_sample=False,
        num_beams=width,
        num_return_sequences=num_returned,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        eos_token_id=list(eos_token_ids),
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    output: Any = model.generate(prompts, settings, attention_mask=torch.ones_like(prompts))
    found = []
    for tokens, score in zip(
        output.sequences.tolist(), output.sequences_scores.tolist(), strict=True
    ):
        generated = tokens[len(prompt) :]
        ends = [place for place, token in enumerate(generated) if token in eos_token_ids]
        found.append(BeamOracle(generated[: ends[0] + 1] if ends else generated, score))
    return found
