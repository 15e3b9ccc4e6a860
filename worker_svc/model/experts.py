"""A mixture of experts: each token goes through the few MLPs that a router chooses for it.

K is the number of experts a token goes to, X of those there are.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from worker_svc.model.model_config import ExpertsConfig
from worker_svc.model.operations import Linear
from worker_svc.model.other_ranks import OtherRanks


class Expert(NamedTuple):
    """One MLP."""

    gate_up: Linear
    """[E] to [intermediate]: silu(gate) * up."""

    down: Linear


class Experts:
    """A router and its experts, of which each rank has some columns."""

    __slots__ = ("_config", "_experts", "_ranks", "_router")

    def __init__(
        self,
        router: Linear,
        experts: Sequence[Expert],
        config: ExpertsConfig,
        ranks: OtherRanks,
    ) -> None:
        self._router = router
        self._experts = experts
        self._config = config
        self._ranks = ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts. Shapes: x, returns [T, E].

        Tokens are sorted by expert, so that each expert that is chosen at all multiplies once,
        and reads its weights once.

        Numerics: probabilities, and the sum over experts, in fp32.
        """
        num_chosen = self._config.num_chosen
        probabilities = self._router(x).float().softmax(dim=-1)  # [T, X]
        weights, chosen = probabilities.topk(num_chosen, dim=-1)  # [T, K]
        if self._config.sums_to_one:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        by_expert = chosen.flatten().argsort(stable=True)  # [T * K]
        tokens = by_expert // num_chosen
        counts = chosen.flatten().bincount(minlength=len(self._experts)).tolist()
        mixed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        start = 0
        for expert, count in zip(self._experts, counts, strict=True):
            if not count:
                continue
            theirs = tokens[start : start + count]
            out = expert.down(expert.gate_up(x[theirs]))  # [count, E]
            share = weights.flatten()[by_expert[start : start + count], None]
            mixed.index_add_(0, theirs, out * share)
            start += count
        out = mixed.to(x.dtype)
        self._ranks.all_reduce(out)
        return out
