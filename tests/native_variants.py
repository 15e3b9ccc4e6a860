"""The native code as other machines would have it, and tensors to try it with."""

import ctypes
import functools
import os

import pytest
import torch

from kernels.cpu_build import FLAGS, build_and_load, cache_folder

# Flags behind -march=native: what the machine lacks, on smaller machines.
VARIANTS = {
    "native": (),
    "no bf16 products": ("-mno-avx512bf16",),
    "AVX2": ("-mno-avx512f",),
    "no vectors of its own": ("-mno-avx512f", "-mno-avx2", "-mno-f16c", "-mno-fma"),
}
variants = pytest.mark.parametrize("name", VARIANTS)
# Lookups of bytes have a path of their own.
BYTE_VARIANTS = {**VARIANTS, "no lookups of bytes": ("-mno-avx512vbmi",)}
byte_variants = pytest.mark.parametrize("name", BYTE_VARIANTS)


@functools.cache
def variant(name: str) -> ctypes.CDLL:
    """Return the code for one kind of machine."""
    return build_and_load(cache_folder(os.environ), (*FLAGS, *BYTE_VARIANTS[name]))


def drawn(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers around 0, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
