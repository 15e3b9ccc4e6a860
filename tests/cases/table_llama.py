"""Llamas whose next token is a table of the last one: benches T, M and U of the public cases.

The embedding of token i is 100 times the unit vector i, and neither attention nor MLP adds to it.
So the normalised state is sqrt(512) at place i, and column i of the head decides what follows i.
Attention is computed and ignored: such a model proves scheduling and text, not keys and values.
"""

import json
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file

from tiny_llama import VOCAB, write_tiny_llama, write_tokenizer

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 512, 8, 2, 64, 16
STATE = math.sqrt(HIDDEN)
"""The normalised state at the place of the last token; 0 elsewhere."""

BOS, EOS, EOT = 256, 257, 258

SUCCESSORS = {i: (i + 1) % 256 for i in range(256)}
"""The table of bench T, if a case has no script of its own."""


def chain(*tokens: int) -> dict[int, int]:
    """Return the table in which each token is followed by the next."""
    return dict(pairwise(tokens))


def successors_of(token: int, count: int) -> list[int]:
    """Return what the default table says behind a token."""
    return [(token + 1 + i) % 256 for i in range(count)]


def table_head(table: Mapping[int, int]) -> torch.Tensor:
    """Return the head of bench T: f(i) has probability 0.99999996 behind i."""
    head = torch.zeros(VOCAB, HIDDEN)
    for last, following in table.items():
        head[following, last] = 1.0
    return head


def markov_head(probabilities: Mapping[int, Mapping[int, float]]) -> torch.Tensor:
    """Return the head of bench M: `probabilities[i][j]` is that of j behind i."""
    head = torch.full((VOCAB, HIDDEN), -40 / STATE)
    for last, row in probabilities.items():
        for following, probability in row.items():
            head[following, last] = math.log(probability) / STATE
    return head


def uniform_head() -> torch.Tensor:
    """Return the head of bench U: every token is as likely as any other."""
    return torch.zeros(VOCAB, HIDDEN)


def write_table_llama(
    directory: Path,
    head: torch.Tensor | None = None,
    *,
    spare: Mapping[int, bytes] | None = None,
    add_bos: bool = False,
    max_position_embeddings: int = 131_072,
) -> Path:
    """Write a model with this head, bench T's by default, into `directory`, and return it."""
    write_tiny_llama(directory, max_position_embeddings=max_position_embeddings)
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
    }
    (directory / "config.json").write_text(json.dumps(config))
    weights = _weights(table_head(SUCCESSORS) if head is None else head)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory, spare=spare, add_bos=add_bos)
    return directory


def _weights(head: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def noise(rows: int) -> torch.Tensor:
        return torch.randn(rows, HIDDEN, generator=generator) * 0.05

    layer = "model.layers.0"
    return {
        "model.embed_tokens.weight": 100 * torch.eye(VOCAB, HIDDEN),
        f"{layer}.input_layernorm.weight": torch.ones(HIDDEN),
        f"{layer}.self_attn.q_proj.weight": noise(HEADS * HEAD_DIM),
        f"{layer}.self_attn.k_proj.weight": noise(KV_HEADS * HEAD_DIM),
        f"{layer}.self_attn.v_proj.weight": noise(KV_HEADS * HEAD_DIM),
        f"{layer}.self_attn.o_proj.weight": torch.zeros(HIDDEN, HEADS * HEAD_DIM),
        f"{layer}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        f"{layer}.mlp.gate_proj.weight": noise(INTERMEDIATE),
        f"{layer}.mlp.up_proj.weight": noise(INTERMEDIATE),
        f"{layer}.mlp.down_proj.weight": torch.zeros(HIDDEN, INTERMEDIATE),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": head,
    }
