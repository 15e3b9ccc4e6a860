"""Logits of one sequence by a model of ours, over blocks that lie in order."""

from collections.abc import Sequence

import torch

from worker_svc.model.causal_model import CausalModel
from worker_svc.runtime.kv_cache import KVCache

BLOCK_SIZE = 16
CPU = torch.device("cpu")


def all_logits(model: CausalModel, tokens: Sequence[int], chunk: int | None = None) -> torch.Tensor:
    """Return the logits behind each token of one sequence, run in chunks of so many tokens."""
    count = len(tokens)
    chunk = chunk or count
    num_blocks = -(-count // BLOCK_SIZE)
    num_groups = len(model.config.kv_groups)
    cache = KVCache(
        model.config, num_groups * num_blocks, BLOCK_SIZE, model.dtype, CPU,
        in_lanes=model.keys_in_lanes,
    )  # fmt: skip
    blocks = torch.arange(1, num_groups * num_blocks + 1, dtype=torch.int32)
    tables = [group[None] for group in blocks.view(num_groups, num_blocks)]
    group_slots = [
        (table[0, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten() for table in tables
    ]
    out = []
    for start in range(0, count, chunk):
        end = min(start + chunk, count)
        hidden = model.forward(
            token_ids=torch.tensor(tokens[start:end]),
            positions=torch.arange(start, end),
            kv_caches=cache.layers,
            slot_mappings=[slots[start:end] for slots in group_slots],
            block_tables=tables,
            seq_lens=torch.tensor([end], dtype=torch.int32),
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
        ).hidden
        out.append(model.logits(hidden))
    return torch.cat(out)
