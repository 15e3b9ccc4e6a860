"""From a loaded model and a worker's limits to a runner, and a report of its memory."""

from dataclasses import dataclass

import numpy as np
import torch

from worker_svc.errors import ConfigError
from worker_svc.model.adapters import AdapterBank
from worker_svc.model.causal_model import CausalModel
from worker_svc.model.weights import LoadedModel
from worker_svc.runtime.adapter_reserve import NO_ADAPTERS, AdapterReserve
from worker_svc.runtime.free_memory import total_memory_bytes
from worker_svc.runtime.kv_cache import KVCache, block_bytes
from worker_svc.runtime.kv_form import KvForm
from worker_svc.runtime.memory_budget import (
    GIB,
    MemoryReport,
    blocks_for,
    cpu_cache_bytes,
    cuda_cache_bytes,
    longest_that_fits,
    num_blocks_that_fit,
)
from worker_svc.runtime.model_runner import ModelRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """What a worker may use. Validated on construction."""

    block_size: int = 16
    """Tokens per block. A power of two."""

    max_num_seqs: int = 256
    """Most rows in one step."""

    max_num_batched_tokens: int = 2048
    """Most tokens in one step."""

    max_model_len: int | None = None
    """Most tokens of one request. None: as many as the model was made for."""

    kv_cache_memory_bytes: int | None = None
    """Bytes for the cache. None: measured."""

    num_gpu_blocks_override: int | None = None
    """Usable blocks, whatever was measured. None: as many as fit."""

    gpu_memory_utilization: float = 0.92
    """Part of a GPU's memory to use, in all. Means nothing on a CPU."""

    @property
    def size_given(self) -> str:
        """Which setting says how large the cache is, and its value. Empty: none, it is measured."""
        for name in ("num_gpu_blocks_override", "kv_cache_memory_bytes"):
            if (value := getattr(self, name)) is not None:
                return f"{name} is {value}"
        return ""

    def __post_init__(self) -> None:
        """Raise ConfigError, naming the field, its value and its bound."""
        if self.block_size.bit_count() != 1 or self.block_size < 1:
            raise ConfigError(f"block_size is {self.block_size}, must be a power of two")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}, must be above 0 "
                "and at most 1"
            )
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "kv_cache_memory_bytes",
            "num_gpu_blocks_override",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, must be at least 1")


def make_runner(
    loaded: LoadedModel,
    limits: RunnerLimits,
    form: KvForm | None = None,
    adapters: AdapterBank | None = None,
    reserve: AdapterReserve = NO_ADAPTERS,
) -> tuple[ModelRunner, MemoryReport]:
    """Give a loaded model an empty cache of some form (the run dtype's), and return what runs it.

    With the adapters that its layers were loaded with, rows can use them. Where memory is
    measured, that of the reserve is left free.

    The memory of an older runner counts as taken as long as there is a reference to it.

    Raises: ConfigError if a limit does not fit the model or the memory.
    """
    model, config = loaded.model, loaded.model.config
    max_model_len = _max_model_len(limits, config.max_position_embeddings)
    form = form or KvForm(model.dtype, None, "")
    bytes_of_block = block_bytes(config, limits.block_size, form.dtype)
    step_tokens, groups = limits.max_num_batched_tokens, config.kv_groups

    def needs(num_tokens: int) -> int:
        return sum(
            group.most_blocks(num_tokens, step_tokens, limits.block_size) for group in groups
        )

    num_blocks = limits.num_gpu_blocks_override
    if num_blocks is None:
        cache_bytes, kept = _cache_bytes(loaded, limits, form, reserve)
        num_blocks = num_blocks_that_fit(
            cache_bytes, bytes_of_block, max_model_len, needs, kept, given=limits.size_given
        )
    # Each rank has its part of every block, so all have as many as the one with the least room.
    num_blocks = loaded.ranks.least(num_blocks)
    cache = _allocate(loaded, limits, form, num_blocks)
    runner = ModelRunner(
        model,
        cache,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=max_model_len,
        ranks=loaded.ranks,
        adapters=adapters,
    )
    report = MemoryReport(
        weight_bytes=loaded.weight_bytes,
        load_seconds=loaded.load_seconds,
        num_blocks=num_blocks,
        block_size=limits.block_size,
        block_bytes=bytes_of_block,
        max_model_len=max_model_len,
        blocks_per_request=needs(max_model_len),
        longest_that_fits=longest_that_fits(num_blocks, max_model_len, needs),
        kv_form=_describe(form),
        plain_block_bytes=block_bytes(config, limits.block_size, model.dtype),
        dtype=_name(model.dtype),
        adapters=reserve.words,
    )
    return runner, report


def _allocate(loaded: LoadedModel, limits: RunnerLimits, form: KvForm, num_blocks: int) -> KVCache:
    """Return an empty cache.

    Raises: ConfigError if the size that a setting gives is more than the machine has. On a CPU
        that is no error of the system's: it gives memory when it is touched, and then kills.
    """
    model, shard = loaded.model, loaded.ranks.shard
    given = limits.size_given
    num_bytes = num_blocks * block_bytes(model.config, limits.block_size, form.dtype)
    words = f"{given}: a KV cache of {num_bytes / GIB:.2f} GiB"
    if given and model.device.type == "cpu":
        # As far as anybody knows, the ranks share one machine's memory.
        room = total_memory_bytes() // shard.world_size
        if num_bytes > room:
            raise ConfigError(f"{words}, must be at most {room / GIB:.2f}, the memory there is")
    try:
        return KVCache(
            model.config, num_blocks, limits.block_size, form.dtype, model.device, form.scales,
            in_lanes=model.keys_in_lanes,
        )  # fmt: skip
    except (OSError, torch.OutOfMemoryError) as error:
        if not given:
            raise
        raise ConfigError(f"{words} cannot be had: {error}") from error


def _max_model_len(limits: RunnerLimits, made_for: int) -> int:
    """Return the most tokens of a request, of a model made for so many. Raises: ConfigError."""
    max_model_len = limits.max_model_len or made_for
    if max_model_len > made_for:
        raise ConfigError(
            f"max_model_len is {max_model_len}, must be at most {made_for}, for which the model "
            "was made"
        )
    return max_model_len


def _describe(form: KvForm) -> str:
    """Return the form in words; empty if it is the run dtype's."""
    if not form.origin:
        return ""
    scales = f" {form.scales_name}" if form.scales_name else ""
    return f"{_name(form.dtype)}, {form.origin}{scales}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cache_bytes(
    loaded: LoadedModel, limits: RunnerLimits, form: KvForm, reserve: AdapterReserve
) -> tuple[int, str]:
    """Return what the cache may take, and in words what was kept out of it."""
    if limits.kv_cache_memory_bytes is not None:
        return limits.kv_cache_memory_bytes, ""
    return _measure_cache_bytes(loaded, limits, form, reserve), reserve.words


def _measure_cache_bytes(
    loaded: LoadedModel, limits: RunnerLimits, form: KvForm, reserve: AdapterReserve
) -> int:
    model = loaded.model
    if model.device.type == "cpu":
        # As far as anybody knows, the ranks share one machine's memory.
        num_ranks = loaded.ranks.shard.world_size
        return cpu_cache_bytes(kept_bytes=reserve.num_bytes_left * num_ranks) // num_ranks
    # Others may have their cache already, and do not run this step with us.
    with loaded.ranks.apart():
        num_bytes = cuda_cache_bytes(
            model.device,
            limits.gpu_memory_utilization,
            lambda: run_largest_step(model, limits, form),
        )
    return max(0, num_bytes - reserve.num_bytes_left)


def run_largest_step(model: CausalModel, limits: RunnerLimits, form: KvForm | None = None) -> None:
    """Run a step of as many rows and tokens as there may be, for its peak of memory.

    It writes nothing, and all rows read the same one block: the tokens' own memory is what
    counts.
    """
    num_rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    counts = np.ones(num_rows, dtype=np.int32)
    counts[0] = limits.max_num_batched_tokens - num_rows + 1
    width = blocks_for(int(counts[0]), limits.block_size)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    form = form or KvForm(model.dtype, None, "")
    cache = KVCache(
        model.config, 1, limits.block_size, form.dtype, model.device, form.scales,
        in_lanes=model.keys_in_lanes,
    )  # fmt: skip
    num_tokens, device, num_groups = int(starts[-1]), model.device, len(model.config.kv_groups)
    slot_mapping = torch.full((num_tokens,), -1, device=device)
    block_table = torch.ones((num_rows, width), dtype=torch.int32, device=device)
    hidden = model.forward(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        kv_caches=cache.layers,
        slot_mappings=[slot_mapping] * num_groups,
        block_tables=[block_table] * num_groups,
        seq_lens=torch.from_numpy(counts).to(device),
        query_start_loc=torch.from_numpy(starts).to(device),
    ).hidden
    model.logits(hidden[:num_rows])
