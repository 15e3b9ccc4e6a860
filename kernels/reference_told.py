"""What is told of logits, in plain torch: on any device, and what `cpu_told` must compute."""

import numpy as np
import torch


def tell_tokens(
    logits: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `cpu_told.tell_tokens`, with the log-softmax in fp32."""
    logits = logits[places].float()
    chosen = tokens.to(torch.int64)[:, None]
    drawn = logits.gather(1, chosen)
    ids = torch.arange(logits.shape[1], device=logits.device)
    before = (logits > drawn) | ((logits == drawn) & (ids < chosen))
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, chosen)[:, 0]
    return logprobs.clamp(max=0.0), (before.sum(dim=-1) + 1).to(torch.int32)


def tell_likeliest(
    logits: torch.Tensor, places: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `cpu_told.tell_likeliest`, with the log-softmax in fp32; finite logits, or -inf.

    Cost: one pass over the logits, and a top-k.
    """
    wanted = counts.cpu().numpy()
    scores = logits[places].float()
    deepest_place = max(int(wanted.max(initial=0)), 1)
    # top-k breaks ties as it likes: it says how deep to look, not which tokens to take.
    best = scores.topk(deepest_place).values
    deepest = best.gather(1, (counts - 1).clamp(min=0).to(logits.device)[:, None])
    found_places = (scores >= deepest).nonzero(as_tuple=True)
    told = (*found_places, scores[found_places], torch.log_softmax(scores, dim=-1)[found_places])
    rows, ids, values, logprobs = (column.cpu().numpy() for column in told)

    order = np.lexsort((ids, -values, rows))
    found = np.bincount(rows, minlength=len(wanted))
    nth = np.arange(len(order)) - np.repeat(np.cumsum(found) - found, found)
    kept = order[nth < np.repeat(wanted, found)]
    return torch.from_numpy(ids[kept].astype(np.int32)), torch.from_numpy(logprobs[kept])
