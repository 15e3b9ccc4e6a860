"""The other ranks: what the model and the runtime ask of them, over sockets, and NCCL on a GPU."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed
from torch._C._distributed_c10d import GatherOptions, PrefixStore, Store, Work

from worker_svc.errors import InvariantError, RanksLostError
from worker_svc.model.shard import Shard
from worker_svc.service.rank_sockets import EXCHANGE_LIMIT_S, RankSockets

_SLICED_BYTES: Final = 128 << 10
"""Sums of as many bytes and more are made in slices. Below, a second round costs more."""

_ALIGNMENT: Final = 64
"""Bytes, for tensors of any type."""


class _Nccl(Protocol):
    """What is used here of torch's group; its own stubs lack it."""

    def allreduce(self, tensors: list[torch.Tensor]) -> Work: ...

    def gather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        options: GatherOptions,
    ) -> Work: ...

    def abort(self) -> None: ...


class ProcessGroup:
    """See `OtherRanks`. Lives as long as the model that calls it; meets anew for every stream.

    Sums are made by every rank, of all parts in the order of ranks, so they are equal in all bits.
    """

    def __init__(self, shard: Shard, device_kind: str) -> None:
        """Exchange tensors of a device of this kind, cpu or cuda."""
        self.shard = shard
        self._device_kind = device_kind
        self._sockets: RankSockets | None = None
        self._nccl: _Nccl | None = None
        """For the model's tensors, on a GPU."""
        self._is_apart = False
        self._swapped = torch.empty(shard.world_size, 0, dtype=torch.uint8)
        """What came of each rank: made anew for every sum, its pages would be, too."""
        self._others = tuple(rank for rank in range(shard.world_size) if rank != shard.rank)

    def connect(self, store: Store, host: str, given_up: threading.Event) -> None:
        """Meet the others, who give the same store, each with the address they reach it at.

        Once `given_up` is set, whoever waits for another rank ends within a second.

        Raises: RanksLostError if they do not come.
        """
        shard = self.shard
        self._sockets = RankSockets(shard.rank, store, shard.world_size, host, given_up)
        if self._device_kind == "cuda":
            try:
                self._nccl = _make_nccl(shard, store)
            except RuntimeError as error:
                self.disconnect()
                raise RanksLostError(f"the ranks could not meet: {_reason(error)}") from error

    def disconnect(self) -> None:
        """Leave the others, who notice."""
        if self._nccl is not None:
            self._nccl.abort()
        if self._sockets is not None:
            self._sockets.close()
        self._nccl = self._sockets = None

    def all_reduce(self, part: torch.Tensor) -> None:
        """As `OtherRanks.all_reduce`."""
        if self._is_apart:
            return
        if self._nccl is not None:
            _wait(self._nccl.allreduce([part]))
            return
        if part.nbytes < _SLICED_BYTES:
            _add_up(self._swap_same(part), part)
            return
        # Each rank sums a slice and sends that to the others: a part twice over the wire, and not
        # once for every other rank.
        slices = part.view(-1).tensor_split(self.shard.world_size)
        own = slices[self.shard.rank]
        _add_up(self._swap(slices), own)
        self._exchange([own] * self.shard.world_size, slices)

    def gather(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        """As `OtherRanks.gather`."""
        leads = self.shard.leads
        if self._is_apart:
            return [part] * (self.shard.world_size if leads else 1)
        if self._nccl is not None:
            return self._gather_on_gpu(self._nccl, part)
        if not leads:
            self._met().exchange({0: _bytes(part)}, {})
            return (part,)
        parts = [part, *(torch.empty_like(part) for _ in self._others)]
        self._met().exchange({}, {rank: _bytes(parts[rank]) for rank in self._others})
        return parts

    def _gather_on_gpu(self, nccl: _Nccl, part: torch.Tensor) -> Sequence[torch.Tensor]:
        options = GatherOptions()
        options.rootRank = 0
        if not self.shard.leads:
            _wait(nccl.gather([], [part], options))
            return (part,)
        parts = [torch.empty_like(part) for _ in range(self.shard.world_size)]
        _wait(nccl.gather([parts], [part], options))
        return parts

    def share_tokens(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """As `OtherRanks.share_tokens`."""
        shared = tokens.copy()
        view = shared.view(np.uint8).data
        if self.shard.leads:
            self._met().exchange(dict.fromkeys(self._others, view), {})
        else:
            self._met().exchange({}, {0: view})
        return shared

    def least(self, count: int) -> int:
        """As `OtherRanks.least`."""
        return min(int(each.item()) for each in self._swap_same(torch.tensor(count)))

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """As `OtherRanks.largest`."""
        return torch.stack(self._swap_same(values)).amax(dim=0)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """As `OtherRanks.apart`."""
        self._is_apart = True
        try:
            yield
        finally:
            self._is_apart = False

    def _swap_same(self, part: torch.Tensor) -> list[torch.Tensor]:
        return self._swap([part] * self.shard.world_size)

    def _swap(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send each rank its part, and return what all sent this one, by rank, its own among it.

        All have the shape of this one's. The others' hold until the next swap.
        """
        own = parts[self.shard.rank]
        size = own.nbytes
        if self._swapped.shape[1] < size:
            stride = -(-size // _ALIGNMENT) * _ALIGNMENT
            self._swapped = torch.empty(self.shard.world_size, stride, dtype=torch.uint8)
        came = [each[:size].view(own.dtype).view(own.shape) for each in self._swapped]
        came[self.shard.rank] = own
        self._exchange(parts, came)
        return came

    def _exchange(self, out: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        """Send each other rank its tensor while filling another from it. Both by rank."""
        self._met().exchange(
            {rank: _bytes(out[rank]) for rank in self._others},
            {rank: _bytes(into[rank]) for rank in self._others},
        )

    def _met(self) -> RankSockets:
        if self._sockets is None:
            raise InvariantError("ranks exchange something before they have met")
        return self._sockets


def _add_up(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Sum in the order of ranks, so that each rank that does gets the same bits."""
    first, *others = parts
    total = first.float()  # 16 bits are rounded once, at the end
    for other in others[:-1]:
        total = total + other
    torch.add(total, others[-1], out=out)


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on a CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _make_nccl(shard: Shard, store: Store) -> _Nccl:
    nccl: Any = distributed.ProcessGroupNCCL
    limit = timedelta(seconds=EXCHANGE_LIMIT_S)
    group: _Nccl = nccl(PrefixStore("nccl", store), shard.rank, shard.world_size, limit)
    return group


def _wait(work: Work) -> None:
    """Put an exchange in front of what follows on the GPU: nobody waits here.

    Raises: RanksLostError if another rank is gone.
    """
    try:
        work.wait()
    except RuntimeError as error:
        raise RanksLostError(_reason(error)) from error


def _reason(error: Exception) -> str:
    """Return torch's own words, without its advice."""
    return str(error).split("\n", maxsplit=1)[0]
