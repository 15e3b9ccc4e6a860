"""How many blocks fit: memory measured, then divided."""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker_svc.errors import ConfigError
from worker_svc.runtime.free_memory import available_memory_bytes

GIB = 1 << 30

# Of the memory that is free on a CPU machine; the rest is for everything else that runs there.
CPU_MEMORY_FRACTION = 0.4
MAX_CPU_BYTES = 4 * GIB


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What a worker's memory holds."""

    weight_bytes: int
    load_seconds: float
    """Time it took to load the weights."""

    num_blocks: int
    """Usable blocks; the null block is one more."""

    block_size: int
    """Tokens per block."""

    block_bytes: int
    """Of one block, over the layers of a KV group."""

    max_model_len: int
    """Most tokens of one request."""

    blocks_per_request: int
    """Blocks that such a request holds at a time, over all KV groups."""

    longest_that_fits: int | None = None
    """Most tokens of one request that the blocks hold, where that is less than max_model_len."""

    kv_form: str = ""
    """How keys and values are stored, in words. Empty: in the run dtype."""

    plain_block_bytes: int = 0
    """Of one block, were it stored in the run dtype."""

    dtype: str = ""
    """The run dtype's name."""

    adapters: str = ""
    """What is kept for adapters, in words. Empty: nothing."""

    @property
    def max_concurrency(self) -> float:
        """How many requests of the greatest length fit at once."""
        return self.num_blocks / self.blocks_per_request

    @property
    def num_kv_tokens(self) -> int:
        """How many tokens the cache holds, counted in requests of the greatest length."""
        return int(self.max_concurrency * self.max_model_len)


def startup_lines(report: MemoryReport) -> tuple[str, ...]:
    """Return what a worker says of its memory when it starts."""
    lines: tuple[str, ...] = (
        f"Model weights: {report.weight_bytes / GIB:.2f} GiB, "
        f"loaded in {report.load_seconds:.2f} seconds",
        f"KV cache size: {report.num_kv_tokens} tokens",
        f"Maximum concurrency for {report.max_model_len} tokens per request: "
        f"{report.max_concurrency:.2f}x",
    )
    if report.kv_form:
        gain = report.plain_block_bytes / report.block_bytes
        lines += (
            f"KV cache in {report.kv_form}: {gain:.2f}x the blocks of {report.dtype} in the same "
            f"memory ({report.num_blocks} instead of {int(report.num_blocks / gain)})",
        )
    if report.adapters:
        lines += (report.adapters,)
    if report.longest_that_fits is not None:
        lines += (
            f"max_model_len is {report.max_model_len}, and the KV cache holds less: "
            f"the longest request that fits has {report.longest_that_fits} tokens",
        )
    return lines


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold this many tokens."""
    return -(-num_tokens // block_size)


def num_blocks_that_fit(
    cache_bytes: int,
    block_bytes: int,
    max_model_len: int,
    needs: Callable[[int], int],
    kept: str = "",
    *,
    given: str = "",
) -> int:
    """Return how many usable blocks `cache_bytes` hold, beside the null block.

    `needs` says how many blocks a request of so many tokens holds at a time; `kept`, in words, for
    what else memory was kept; `given`, which setting gave so many bytes, if one did.

    Raises: ConfigError if one request of `max_model_len` does not fit. It names the GiB needed
        and available and the greatest length that does.
    """
    # The null block is small change, and left out: a cache of 1,024 blocks' bytes has 1,024.
    num_blocks = cache_bytes // block_bytes
    needed = needs(max_model_len)
    if needed > num_blocks:
        longest = longest_that_fits(num_blocks, max_model_len, needs)
        bound = f"must be at most {longest}" if longest else "not one block fits"
        source = f"{given}, give more" if given else "or give kv_cache_memory_bytes"
        raise ConfigError(
            f"max_model_len is {max_model_len}: one request needs "
            f"{needed * block_bytes / GIB:.2f} GiB of KV cache, "
            f"{cache_bytes / GIB:.2f} GiB is available; {bound} ({source})"
            + (f"; {kept}" if kept else "")
        )
    return num_blocks


def longest_that_fits(
    num_blocks: int, max_model_len: int, needs: Callable[[int], int]
) -> int | None:
    """Return the most tokens of a request that the blocks hold; None if `max_model_len` fits."""
    if needs(max_model_len) <= num_blocks:
        return None
    return bisect_right(range(1, max_model_len + 1), num_blocks, key=needs)


def cpu_cache_bytes(fraction: float = CPU_MEMORY_FRACTION, kept_bytes: int = 0) -> int:
    """Return how many bytes a CPU worker gives its cache: part of what is free, up to 4 GiB.

    What is kept for something else does not count as free.
    """
    return min(int(max(0, available_memory_bytes() - kept_bytes) * fraction), MAX_CPU_BYTES)


def cuda_cache_bytes(device: torch.device, utilization: float, profile: Callable[[], None]) -> int:
    """Return how many bytes a CUDA worker gives its cache; call it after loading the weights.

    `profile` runs the largest step there can be. What it and the weights take at their peak,
    and what others hold on the device, is taken from `utilization` of the total.

    Raises: ConfigError if the device has less free memory than `utilization` asks for.
    """
    free, total = torch.cuda.mem_get_info(device)
    budget = math.ceil(total * utilization)
    ours = torch.cuda.memory_reserved(device)
    if free + ours < budget:
        raise ConfigError(
            f"gpu_memory_utilization is {utilization}: asks for {budget / GIB:.2f} GiB, "
            f"{(free + ours) / GIB:.2f} of {total / GIB:.2f} GiB is free"
        )
    torch.cuda.reset_peak_memory_stats(device)
    profile()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return max(0, budget - peak - others)
