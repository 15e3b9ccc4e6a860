"""One launch of each kernel at the shapes of a real model, and which of them are built where."""

from collections.abc import Sequence

import torch

from compile_kernels import Build
from kernels.adapter_runs import adapter_runs
from kernels.cache_addresses import CacheAddresses
from kernels.checks import FP8, Scales
from kernels.copy_blocks import copy_blocks
from kernels.gather_blocks import gather_blocks
from kernels.kept_weight import BITS, lay_out
from kernels.merge_splits import merge_splits
from kernels.multi_lora import multi_lora
from kernels.paged_attention_classic import paged_attention_classic
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill
from kernels.quantised_matmul import quantised_matmul
from kernels.reference_layers import to_classic
from kernels.rms_norm import rms_norm
from kernels.rotary import Store, rotary
from kernels.sample import SamplingColumns, sample
from kernels.scatter_blocks import scatter_blocks
from kernels.shared_prefix import shared_prefix
from kernels.silu_and_mul import silu_and_mul
from kernels.store_kv import store_kv

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
# Llama 3 8B: 32 query heads over 8 key/value heads.
H, G, R = 32, 8, 64
ATTENTION = ("paged_decode", "paged_prefill", "shared_prefix")


def launch(build: Build) -> None:
    """Call the wrapper of the build's kernel."""
    if build.kernel == "quantised_matmul":
        _launch_matmul(build)
        return
    dtype, kv_dtype = DTYPES[build.dtype], DTYPES[build.kv_dtype]
    D, S = build.head_dim, build.block_size
    q, kv = torch.zeros(R, H, D, dtype=dtype), torch.zeros(R, G, D, dtype=dtype)
    k_cache, v_cache = (torch.zeros(4, S, G, D, dtype=kv_dtype) for _ in "kv")
    scales = Scales(torch.ones(1), torch.ones(1)) if kv_dtype in FP8 else None
    tables = torch.zeros(R, 64, dtype=torch.int32)
    lengths, slots = torch.ones(R, dtype=torch.int32), torch.zeros(R, dtype=torch.int64)
    wide = torch.zeros(R, 8192, dtype=dtype)
    if build.kernel == "store_kv":
        store_kv(kv, kv, k_cache, v_cache, slots, scales)
    elif build.kernel == "paged_decode":
        paged_decode(q, k_cache, v_cache, tables, lengths, 0.1, 1 << 15, scales=scales)
    elif build.kernel == "paged_prefill":
        starts = torch.arange(R + 1, dtype=torch.int32)
        paged_prefill(q, k_cache, v_cache, tables, lengths, starts, 0.1, 1 << 13, scales=scales)
    elif build.kernel == "shared_prefix":
        shared_prefix(q, k_cache, v_cache, tables[0], tables, lengths, 0.1, 1 << 13, scales=scales)
    elif build.kernel == "paged_attention_classic":
        paged_attention_classic(q, *to_classic(k_cache, v_cache), tables, lengths, 0.1)
    elif build.kernel == "rotary":
        angles = torch.zeros(R, D // 2)
        rotary(q, kv, angles, angles, Store(kv, k_cache, v_cache, slots, scales))
    elif build.kernel == "rms_norm":
        rms_norm(wide[:, :4096], wide[0, :4096], 1e-5, torch.zeros(R, 4096, dtype=dtype))
    elif build.kernel == "silu_and_mul":
        silu_and_mul(wide)
    elif build.kernel == "multi_lora":
        a, b = torch.zeros(4, 16, 8192, dtype=dtype), torch.zeros(4, 4096, 16, dtype=dtype)
        runs = adapter_runs(lengths, 4)
        multi_lora(wide, a, b, torch.ones(4), runs, torch.zeros(R, 4096, dtype=dtype))
    elif build.kernel == "sample":
        column, count = torch.ones(R), torch.ones(R, dtype=torch.int32)
        params = SamplingColumns(column, count, column, column, slots, count, count)
        sample(torch.zeros(R, 128256, dtype=dtype), params)
    elif build.kernel == "merge_splits":
        sums = torch.zeros(R, H, 32)
        merge_splits(torch.zeros(R, H, 32, D), sums, q)
    else:
        _launch_block_move(build.kernel, [k_cache, v_cache])


def _launch_matmul(build: Build) -> None:
    """Of `head_dim` tokens; `kv_dtype` is the weight's form, `block_size` its groups."""
    form = next(form for form in BITS if form == build.kv_dtype)
    values = torch.zeros(4096, 4096, dtype=torch.uint8)
    scales = torch.ones(4096, 4096 // build.block_size if build.block_size else 1)
    zeros = None
    if form != "e4m3":
        zeros = torch.zeros_like(scales)
        # AWQ's differ.
        zeros[0, 0] = 1
    x = torch.zeros(build.head_dim, 4096, dtype=DTYPES[build.dtype])
    quantised_matmul(x, lay_out(form, values, scales, zeros, group=build.block_size))


def _launch_block_move(kernel: str, caches: list[torch.Tensor]) -> None:
    addresses = CacheAddresses.of(caches)
    blocks = torch.zeros(2, dtype=torch.int64)
    staging = torch.zeros(2, len(caches), addresses.block_bytes, dtype=torch.uint8)
    if kernel == "copy_blocks":
        copy_blocks(addresses, blocks, blocks)
    elif kernel == "gather_blocks":
        gather_blocks(addresses, blocks, staging)
    elif kernel == "scatter_blocks":
        scatter_blocks(addresses, blocks, staging)
    else:
        raise ValueError(f"no kernel is called {kernel!r}")


def _matmul_builds(target: str, dtype: str, tokens: Sequence[int]) -> list[Build]:
    forms = (("int4", 128), ("int4", 32), ("int8", 0), ("e4m3", 0))
    return [
        Build("quantised_matmul", target, dtype, form, count, group)
        for form, group in forms
        for count in tokens
    ]


def table_builds() -> list[Build]:
    """Return the builds of docs/kernels_compiled.md: what a server is likely to run."""
    plain = ("merge_splits", "rms_norm", "silu_and_mul", "sample", "copy_blocks", "gather_blocks",
             "scatter_blocks", "multi_lora", "paged_attention_classic")  # fmt: skip
    builds = [
        *(Build("paged_decode", "sm_90", "bf16", "bf16", dim) for dim in (64, 80, 128, 256)),
        Build("paged_decode", "sm_90", "bf16", "bf16", 128, 128),
        *(Build("paged_prefill", "sm_90", "bf16", "bf16", dim) for dim in (64, 128)),
        Build("shared_prefix", "sm_90", "bf16", "bf16", 128),
        *(Build(name, "sm_90", "bf16", "bf16", 128) for name in plain),
        *(Build(name, "sm_90", "fp32", "fp32", 128) for name in ATTENTION[:2]),
    ]
    fp8 = ("paged_decode", "paged_prefill", "store_kv", "rotary")
    builds += [Build(name, "sm_90", "bf16", "e4m3", 128) for name in fp8]
    builds += [Build(name, "sm_90", "bf16", "bf16", 128) for name in ("store_kv", "rotary")]
    builds += _matmul_builds("sm_90", "bf16", (1, 4096))
    for target in ("sm_80", "sm_100", "gfx942"):
        builds += [Build(name, target, "bf16", "bf16", 128) for name in ATTENTION[:2]]
        builds.append(Build("quantised_matmul", target, "bf16", "int4", 1, 128))
        builds += [
            Build(name, target, "bf16", "e4m3", 128) for name in ("paged_decode", "store_kv")
        ]
        builds.append(Build("copy_blocks", target, "bf16", "bf16", 128))
    return builds


def all_builds() -> list[Build]:
    """Return every kernel, dtype, head dimension and target that the dispatch table can choose."""
    layers = ("merge_splits", "rms_norm", "silu_and_mul", "sample", "multi_lora",
              "paged_attention_classic")  # fmt: skip
    builds = []
    for target in ("sm_80", "sm_90", "sm_100", "gfx942"):
        for dtype in ("bf16", "fp16", "fp32"):
            builds += [
                Build(name, target, dtype, kv_dtype, head_dim)
                for kv_dtype in (dtype, "e4m3", "e5m2")
                for head_dim in (64, 80, 96, 112, 128, 256)
                for name in (*ATTENTION, "store_kv", "rotary")
            ]
            builds += [Build(name, target, dtype, dtype, 128) for name in layers]
            builds += _matmul_builds(target, dtype, (1, 32, 64, 4096))
            builds += [
                Build("quantised_matmul", target, dtype, form, count, group)
                for form, group in (("int4", 0), ("int4", 16), ("int8", 128), ("e4m3", 128))
                for count in (1, 4096)
            ]
        builds += [
            Build(name, target, "bf16", "bf16", 128, block_size)
            for block_size in (8, 64, 128)
            for name in (*ATTENTION, "copy_blocks", "gather_blocks", "scatter_blocks")
        ]
    return builds
