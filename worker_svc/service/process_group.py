"""The other ranks, through `torch.distributed`: gloo on a CPU, NCCL beside it on a GPU."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    GatherOptions,
    PrefixStore,
    ReduceOp,
    Store,
    Work,
)

from worker_svc.errors import InvariantError, RanksLostError
from worker_svc.model.shard import Shard

COLLECTIVE_LIMIT: Final = timedelta(seconds=30)
"""For one exchange: far more than ranks of one step are apart. Only a rank that hangs, or a broken
network, takes so long; one that dies closes its connections."""

GIVE_UP_CHECK: Final = timedelta(seconds=1)
"""How often one who waits looks whether the group has been given up."""


class _Exchange(Protocol):
    """What is used here of torch's groups; its own stubs lack it."""

    def allreduce(self, tensors: list[torch.Tensor], options: AllreduceOptions = ...) -> Work: ...

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> Work: ...

    def gather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        options: GatherOptions,
    ) -> Work: ...

    def abort(self) -> None: ...


class ProcessGroup:
    """See `OtherRanks`. Lives as long as the model that calls it; meets anew for every stream.

    The groups of torch are made as objects, not as its one default group: they come and go with
    the streams, and the ranks of a test are threads.
    """

    def __init__(self, shard: Shard, device_kind: str) -> None:
        """Exchange tensors of a device of this kind, cpu or cuda."""
        self.shard = shard
        self._device_kind = device_kind
        self._gloo: _Exchange | None = None
        self._tensors: _Exchange | None = None
        """What exchanges the model's tensors: gloo, or NCCL on a GPU."""
        self._given_up = threading.Event()
        self._is_apart = False

    def connect(self, store: Store, host: str, given_up: threading.Event) -> None:
        """Meet the others, who give the same store, each with the address they reach it at.

        Once `given_up` is set, whoever waits for another rank ends within a second.

        Raises: RanksLostError if they do not come.
        """
        self._given_up = given_up
        try:
            self._gloo = self._tensors = _make_gloo(self.shard, store, host)
            if self._device_kind == "cuda":
                self._tensors = _make_nccl(self.shard, store)
        except RuntimeError as error:
            self.disconnect()
            raise RanksLostError(f"the ranks could not meet: {_reason(error)}") from error

    def disconnect(self) -> None:
        """Leave the others, who notice."""
        if self._tensors is not None and self._tensors is not self._gloo:
            self._tensors.abort()
        self._gloo = self._tensors = None

    def all_reduce(self, part: torch.Tensor) -> None:
        """As `OtherRanks.all_reduce`."""
        if not self._is_apart:
            self._wait(self._of_tensors().allreduce([part]))

    def gather(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        """As `OtherRanks.gather`."""
        if self._is_apart:
            return [part] * (self.shard.world_size if self.shard.leads else 1)
        group, options = self._of_tensors(), GatherOptions()
        options.rootRank = 0
        if not self.shard.leads:
            self._wait(group.gather([], [part], options))
            return (part,)
        parts = [torch.empty_like(part) for _ in range(self.shard.world_size)]
        self._wait(group.gather([parts], [part], options))
        return parts

    def share_tokens(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """As `OtherRanks.share_tokens`."""
        options = BroadcastOptions()
        options.rootRank = 0
        shared = torch.from_numpy(tokens.copy())
        self._wait(self._of_cpu().broadcast([shared], options))
        values: npt.NDArray[np.int32] = shared.numpy()
        return values

    def least(self, count: int) -> int:
        """As `OtherRanks.least`."""
        shared = torch.tensor([count])
        self._reduce_on_cpu(shared, ReduceOp(ReduceOp.MIN))
        return int(shared.item())

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """As `OtherRanks.largest`."""
        shared = values.clone()
        self._reduce_on_cpu(shared, ReduceOp(ReduceOp.MAX))
        return shared

    def _reduce_on_cpu(self, shared: torch.Tensor, operation: ReduceOp) -> None:
        options = AllreduceOptions()
        options.reduceOp = operation
        self._wait(self._of_cpu().allreduce([shared], options))

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """As `OtherRanks.apart`."""
        self._is_apart = True
        try:
            yield
        finally:
            self._is_apart = False

    def _of_cpu(self) -> _Exchange:
        if self._gloo is None:
            raise InvariantError("ranks exchange something before they have met")
        return self._gloo

    def _of_tensors(self) -> _Exchange:
        if self._tensors is None:
            raise InvariantError("ranks exchange something before they have met")
        return self._tensors

    def _wait(self, work: Work) -> None:
        """Wait for an exchange. On a GPU that only puts it in front of what follows."""
        while True:
            try:
                if self._tensors is self._gloo:
                    work.wait(GIVE_UP_CHECK)
                else:
                    work.wait()
            except RuntimeError as error:
                if work.is_completed():
                    raise RanksLostError(_reason(error)) from error
                if self._given_up.is_set():
                    _outlive(self._gloo, work)
                    raise RanksLostError("the group was given up") from None
            else:
                return


def _make_gloo(shard: Shard, store: Store, host: str) -> _Exchange:
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = COLLECTIVE_LIMIT
    options._threads = 1
    options._devices = [gloo.create_device(hostname=host)]
    group: _Exchange = gloo(PrefixStore("gloo", store), shard.rank, shard.world_size, options)
    return group


def _make_nccl(shard: Shard, store: Store) -> _Exchange:
    nccl: Any = distributed.ProcessGroupNCCL
    stored = PrefixStore("nccl", store)
    group: _Exchange = nccl(stored, shard.rank, shard.world_size, COLLECTIVE_LIMIT)
    return group


def _outlive(group: _Exchange | None, work: Work) -> None:
    """Keep a group until the exchange in it has ended: gloo can not cut it short."""

    def wait(_group: object) -> None:
        with contextlib.suppress(RuntimeError):
            work.wait()

    threading.Thread(target=wait, args=(group,), name="given up ranks", daemon=True).start()


def _reason(error: Exception) -> str:
    """Return gloo's own words, without the place in its source and its advice."""
    first = str(error).split("\n", maxsplit=1)[0].split(". ", maxsplit=1)[0]
    return first.rpartition(".cc:")[2].partition("] ")[2] or first
