"""Blocks of a GGUF file to plain weights, in native code."""

import ctypes
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from kernels import cpu_threads
from kernels.checks import ACTIVATIONS
from kernels.cpu_build import TYPES, native_code

BLOCK: Final = 32
"""Weights of a block."""

BLOCK_BYTES: Final = {2: 18, 3: 20, 8: 34}
"""By a kind's number in GGUF: Q4_0, Q4_1, Q8_0."""


def unpack(
    kind: int,
    blocks: npt.NDArray[np.uint8],
    out: torch.Tensor,
    code: ctypes.CDLL | None = None,
) -> bool:
    """Unpack blocks of a kind into `out`; return False, and do nothing, if that takes other code.

    Shapes: blocks any, contiguous, of whole blocks; out any, contiguous, on a CPU, of fp32, bf16
        or fp16, with 32 numbers for each block.
    Numerics: bitwise those of the `gguf` package, rounded to nearest.
    Raises: ValueError if a shape or dtype is not as above.
    """
    code = code or native_code()
    if code is None or kind not in BLOCK_BYTES:
        return False
    num_blocks, rest = divmod(blocks.nbytes, BLOCK_BYTES[kind])
    if rest or not blocks.flags.c_contiguous:
        raise ValueError(f"blocks are {blocks.shape}, must be whole and contiguous")
    if out.device.type != "cpu" or out.dtype not in ACTIVATIONS or not out.is_contiguous():
        raise ValueError(f"out is {out.dtype} on {out.device}, must be contiguous on a CPU")
    if out.numel() != num_blocks * BLOCK:
        raise ValueError(f"out is {list(out.shape)}, must hold {num_blocks} blocks of {BLOCK}")
    code.pagemill_unpack(
        ctypes.c_int64(kind),
        ctypes.c_void_p(blocks.ctypes.data),
        ctypes.c_int64(num_blocks),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int64(TYPES[out.dtype]),
        ctypes.c_int64(cpu_threads.num_threads()),
    )
    return True
