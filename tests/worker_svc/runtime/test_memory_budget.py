"""Memory is divided as the reference engine divides it, and what cannot fit is said in numbers."""

from collections.abc import Callable

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker_svc.errors import ConfigError
from worker_svc.model.model_config import ModelConfig
from worker_svc.runtime.kv_cache import block_bytes
from worker_svc.runtime.memory_budget import (
    GIB,
    MAX_CPU_BYTES,
    MemoryReport,
    blocks_for,
    cpu_cache_bytes,
    cuda_cache_bytes,
    num_blocks_that_fit,
    startup_lines,
)

SEVEN_BILLION = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    max_position_embeddings=32768,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    tie_word_embeddings=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
)
BLOCK_BYTES = block_bytes(SEVEN_BILLION, 16, torch.float16)


def report(num_blocks: int, max_model_len: int, block_size: int = 16) -> MemoryReport:
    return MemoryReport(
        weight_bytes=3 * GIB // 2,
        load_seconds=2.345,
        num_blocks=num_blocks,
        block_size=block_size,
        block_bytes=BLOCK_BYTES,
        max_model_len=max_model_len,
        blocks_per_request=blocks_for(max_model_len, block_size),
    )


def in_blocks_of(block_size: int) -> Callable[[int], int]:
    return lambda num_tokens: blocks_for(num_tokens, block_size)


def test_1536_blocks_hold_one_and_a_half_requests_of_1024() -> None:
    assert report(1536, 16384).max_concurrency == 1.5
    assert report(1536, 16384).num_kv_tokens == 1536 * 16


def test_8_gib_hold_16384_tokens_of_a_model_of_7_billion() -> None:
    assert BLOCK_BYTES == 8 << 20
    for length in (16383, 16384):
        assert num_blocks_that_fit(8 * GIB, BLOCK_BYTES, length, in_blocks_of(16)) == 1024
    with pytest.raises(ConfigError) as refusal:
        num_blocks_that_fit(8 * GIB, BLOCK_BYTES, 16385, in_blocks_of(16))
    message = str(refusal.value)
    assert message.startswith("max_model_len is 16385: one request needs 8.01 GiB")
    assert "8.00 GiB is available" in message
    assert "must be at most 16384" in message
    assert "\n" not in message


@given(
    cache_bytes=st.integers(0, 1 << 36),
    bytes_of_block=st.integers(1, 1 << 26),
    block_size=st.sampled_from([1, 8, 16, 64]),
    length=st.integers(1, 1 << 17),
)
def test_the_length_named_is_the_greatest_that_fits(
    cache_bytes: int, bytes_of_block: int, block_size: int, length: int
) -> None:
    try:
        num_blocks = num_blocks_that_fit(
            cache_bytes, bytes_of_block, length, in_blocks_of(block_size)
        )
    except ConfigError as refusal:
        nothing = "not one block fits" in str(refusal)
        feasible = 0 if nothing else int(str(refusal).split("must be at most ")[1].split()[0])
        assert (feasible == 0) == nothing
        assert feasible < length
        assert feasible // block_size * bytes_of_block <= cache_bytes
        assert (feasible // block_size + 1) * bytes_of_block > cache_bytes
    else:
        assert num_blocks * bytes_of_block <= cache_bytes
        assert num_blocks * block_size >= length


def test_three_lines_tell_what_memory_holds() -> None:
    assert startup_lines(report(100, 64)) == (
        "Model weights: 1.50 GiB, loaded in 2.35 seconds",
        "KV cache size: 1600 tokens",
        "Maximum concurrency for 64 tokens per request: 25.00x",
    )
    # 7 blocks a request: 100 / 7 = 14.29 of them, of 100 tokens each.
    assert startup_lines(report(100, 100))[1:] == (
        "KV cache size: 1428 tokens",
        "Maximum concurrency for 100 tokens per request: 14.29x",
    )


def test_a_cpu_cache_takes_part_of_what_is_free() -> None:
    free = psutil.virtual_memory().available
    assert cpu_cache_bytes(1e-4) <= free * 1e-3
    assert 0 < cpu_cache_bytes(1.0) <= MAX_CPU_BYTES


class Gpu:
    """A GPU of 100 bytes: torch holds `reserved`, others `others`; a step peaks at `peak`."""

    def __init__(self, *, reserved: int, others: int, peak: int) -> None:
        self.reserved, self.others, self.peak = reserved, others, peak
        self.calls: list[str] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = torch.cuda
        monkeypatch.setattr(
            cuda, "mem_get_info", lambda _: (100 - self.reserved - self.others, 100)
        )
        monkeypatch.setattr(cuda, "memory_reserved", lambda _: self.reserved)
        monkeypatch.setattr(cuda, "max_memory_allocated", lambda _: self.peak)
        for name in ("reset_peak_memory_stats", "synchronize"):
            monkeypatch.setattr(cuda, name, lambda _, name=name: self.calls.append(name))
        monkeypatch.setattr(cuda, "empty_cache", lambda: self.calls.append("empty_cache"))

    def step(self) -> None:
        """The largest step: what it freed stays reserved until the allocator gives it back."""
        self.calls.append("step")
        self.reserved = max(self.reserved, self.peak)


def test_a_gpu_cache_gets_the_share_less_the_peak_and_what_others_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(reserved=30, others=5, peak=42)
    gpu.install(monkeypatch)
    assert cuda_cache_bytes(torch.device("cuda"), 0.92, gpu.step) == 92 - 42 - 5
    assert gpu.calls == ["reset_peak_memory_stats", "step", "synchronize", "empty_cache"]


def test_a_gpu_without_its_share_free_is_refused_before_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(reserved=30, others=9, peak=42)
    gpu.install(monkeypatch)
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization is 0.92: asks for .* is free"):
        cuda_cache_bytes(torch.device("cuda"), 0.92, gpu.step)
    assert gpu.calls == []


def test_a_gpu_filled_by_the_peak_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(reserved=30, others=0, peak=95)
    gpu.install(monkeypatch)
    assert cuda_cache_bytes(torch.device("cuda"), 0.92, gpu.step) == 0
