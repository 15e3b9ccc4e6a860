"""How many threads native code shares its work among: as many as torch, or torch's in its place."""

import torch

from kernels.cpu_build import native_code


def num_threads() -> int:
    """Return how many threads a native operation uses."""
    code = native_code()
    return max(0 if code is None else code.pagemill_threads(), torch.get_num_threads())


def take_threads_from_torch() -> None:
    """Leave torch one thread, and native code as many as torch had. Nothing without native code.

    An idle thread of torch's OpenMP spins for some milliseconds behind each operation, however
    small, that torch shares out: on a core that native code's threads then lack.
    """
    code = native_code()
    if code is not None:
        code.pagemill_use_threads(num_threads())
        torch.set_num_threads(1)
