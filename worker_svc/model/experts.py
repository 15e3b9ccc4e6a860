"""A mixture of experts in torch: each token goes through the few MLPs a router chooses for it.

K is the number of experts a token goes to, X of those there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker_svc.model.model_config import ExpertsConfig
from worker_svc.model.operations import Linear, Mlp


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """See `Operations.experts`."""

    router: Linear
    """[E] to [X]."""

    experts: Sequence[Mlp]
    config: ExpertsConfig

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts. Shapes: x, returns [T, E].

        Tokens are sorted by expert, so that each expert that is chosen at all multiplies once,
        and reads its weights once.
        """
        num_chosen = self.config.num_chosen
        probabilities = self.router(x).float().softmax(dim=-1)  # [T, X]
        weights, chosen = probabilities.topk(num_chosen, dim=-1)  # [T, K]
        if self.config.sums_to_one:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        by_expert = chosen.flatten().argsort(stable=True)  # [T * K]
        tokens = by_expert // num_chosen
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        mixed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        start = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if not count:
                continue
            theirs = tokens[start : start + count]
            out = expert(x[theirs])  # [count, E]
            share = weights.flatten()[by_expert[start : start + count], None]
            mixed.index_add_(0, theirs, out * share)
            start += count
        return mixed.to(x.dtype)
