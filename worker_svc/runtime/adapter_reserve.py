"""Memory that is kept free for adapters that come after the KV cache was sized."""

from dataclasses import dataclass
from typing import Final

from worker_svc.model.adapters import AdapterBank

_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class AdapterReserve:
    """Room for so many adapters of the largest rank: as many and as large as are ever loaded."""

    max_adapters: int
    """The scheduler's max_loras. 0: none are loaded."""

    max_rank: int
    """The worker's max_lora_rank."""

    num_bytes: int = 0
    """For all of them, on this rank."""

    num_bytes_taken: int = 0
    """Of these, by adapters that are there already."""

    @property
    def num_bytes_left(self) -> int:
        """What has to stay free."""
        return max(0, self.num_bytes - self.num_bytes_taken)

    @property
    def words(self) -> str:
        """How much for what, by the settings' names; empty if there is nothing."""
        if not self.num_bytes:
            return ""
        each = self.num_bytes / self.max_adapters / _GIB
        return (
            f"{self.num_bytes / _GIB:.2f} GiB kept for adapters, {each:.2f} for each: max_loras is "
            f"{self.max_adapters}, max_lora_rank is {self.max_rank}"
        )


NO_ADAPTERS: Final = AdapterReserve(0, 0)


def reserve_for(bank: AdapterBank | None, max_adapters: int, max_rank: int) -> AdapterReserve:
    """Return what the layers' adapters may take, the model being loaded."""
    if bank is None:
        return NO_ADAPTERS
    num_bytes = max_adapters * bank.largest_bytes(max_rank)
    return AdapterReserve(max_adapters, max_rank, num_bytes, bank.num_bytes)
