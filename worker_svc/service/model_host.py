"""What the shell needs of a model: its facts before it is loaded, and something to run steps on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from pagemill.v1 import worker_pb2
from worker_svc.model.other_ranks import OtherRanks
from worker_svc.runtime.memory_budget import MemoryReport
from worker_svc.runtime.step_plan import StepPlan, StepResult
from worker_svc.service.adapter_loading import AdapterHost


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """What the scheduler asks of a worker's rows and KV cache."""

    block_size: int
    """Tokens in a block."""

    max_num_seqs: int
    """Rows."""

    max_num_batched_tokens: int
    """Most tokens in a step."""

    max_model_len: int
    """Most tokens of a row."""

    num_blocks_override: int
    """Usable blocks to hold. 0: as the worker's own settings say, or memory allows."""

    max_adapters: int = 0
    """Adapters at once, for which memory is kept where they are loaded at all."""


class StepRunner(Protocol):
    """A loaded model with rows and a KV cache, in one thread with its processor."""

    def run(self, plan: StepPlan) -> StepResult:
        """Apply the plan to the rows, and run them."""
        ...


@runtime_checkable
class LaunchRunner(StepRunner, Protocol):
    """A loaded model with rows and a KV cache, on a device that computes beside this thread.

    One thread launches. Another may collect, each step once, oldest first.
    """

    def launch(self, plan: StepPlan) -> Any:
        """Apply the plan to the rows, and have the device run them behind what it runs."""
        ...

    def collect(self, launched: Any) -> StepResult:
        """Wait for a launched step."""
        ...


class ModelHost(Protocol):
    """A model on a device."""

    @property
    def model(self) -> worker_pb2.ModelFacts:
        """What will be loaded."""
        ...

    @property
    def device(self) -> worker_pb2.Device:
        """Where it will run. A CPU's uuid is empty."""
        ...

    @property
    def adapters(self) -> AdapterHost:
        """What changes its layers for some rows."""
        ...

    @property
    def devices(self) -> Sequence[worker_pb2.Device]:
        """Where it can run; once it is loaded, where it is."""
        ...

    def use(self, uuid: str) -> None:
        """Run on this one of `devices`. One that is not among them, as a CPU's, changes nothing."""
        ...

    def load(self, ranks: OtherRanks | None = None) -> None:
        """Read the weights, unless they are in memory: a part, if others have the rest.

        Raises: ConfigError if the model cannot be loaded.
        """
        ...

    def agree(self) -> None:
        """Settle what takes all ranks of a group, each time they have met.

        Raises: ConfigError if it cannot be settled; RanksLostError.
        """
        ...

    def make_runner(self, limits: CacheLimits) -> tuple[StepRunner, MemoryReport]:
        """Measure memory and make an empty cache. The caller has dropped an earlier runner.

        Raises: ConfigError if the device has no room for one row of the greatest length.
        """
        ...
