"""What a rank needs of the other ranks of its group, and the layers that are made of it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.model.operations import Linear
from worker_svc.model.shard import WHOLE, Shard


class OtherRanks(Protocol):
    """The group, seen from one rank. All ranks make the same calls, in the same order.

    Raises: RanksLostError, all of them, once another rank is gone.
    """

    @property
    def shard(self) -> Shard:
        """This rank's part."""
        ...

    def all_reduce(self, part: torch.Tensor) -> None:
        """Replace the tensor by the sum of all ranks' tensors of this shape."""
        ...

    def gather(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return all ranks' tensors of this shape on rank 0, and this one's elsewhere."""
        ...

    def share_tokens(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return rank 0's tokens; those of others matter by their number only. Shape: [S]."""
        ...

    def least(self, count: int) -> int:
        """Return the smallest of all ranks' numbers."""
        ...

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest of all ranks' values, place by place. Shape: any; fp32 on a CPU."""
        ...

    def apart(self) -> AbstractContextManager[None]:
        """Let this rank run a model alone in the block, where only time and memory matter."""
        ...


class NoOtherRanks:
    """See `OtherRanks`: a rank that has the whole model."""

    shard = WHOLE

    def all_reduce(self, part: torch.Tensor) -> None:
        """Leave it: it is the sum."""

    def gather(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return it alone."""
        return (part,)

    def share_tokens(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return them."""
        return tokens

    def least(self, count: int) -> int:
        """Return it."""
        return count

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Return them."""
        return values

    def apart(self) -> AbstractContextManager[None]:
        """Change nothing."""
        return nullcontext()


class SummedLinear:
    """A layer each rank has some input columns of: the whole product is the sum over ranks."""

    __slots__ = ("_part", "_ranks")

    def __init__(self, part: Linear, ranks: OtherRanks) -> None:
        """Take this rank's part. Of all, one may add a bias."""
        self._part = part
        self._ranks = ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product. Shapes: x [T, this rank's inputs], returns [T, out]."""
        out = self._part(x)
        self._ranks.all_reduce(out)
        return out


class GatheredHead:
    """A head each rank has some tokens of. Rank 0 gets the logits of all."""

    __slots__ = ("_part", "_ranks", "_vocab_size")

    def __init__(self, part: Linear, ranks: OtherRanks, vocab_size: int) -> None:
        """Take this rank's part, which has as many rows as any rank's."""
        self._part = part
        self._ranks = ranks
        self._vocab_size = vocab_size

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits. Shapes: hidden [S, E], returns [S, V]; elsewhere this rank's part."""
        if not len(hidden):
            return hidden.new_empty(0, self._vocab_size)
        parts = self._ranks.gather(self._part(hidden))
        if len(parts) == 1:
            return parts[0]
        return torch.cat(tuple(parts), dim=1)[:, : self._vocab_size]
