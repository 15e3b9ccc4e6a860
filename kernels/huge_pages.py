"""Memory for what is read again and again, in large pages where the system has them.

Reading 256 MiB in pages of 2 MiB instead of 4 KiB was 1.8 times as fast on a virtual machine
(docs/performance.md): a page's end stops the processor's prefetcher, and an address costs two
walks there.
"""

import math
import mmap
from collections.abc import Sequence
from typing import Final

import torch

_HUGE_PAGE: Final = 2 << 20


def huge_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros on the CPU, whose memory is taken when it is first touched.

    It begins at a multiple of 2 MiB, and asks for pages of as much; small ones are torch's own.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    start = -raw.data_ptr() % _HUGE_PAGE
    return raw[start : start + num_bytes].view(dtype).view(tuple(shape))
