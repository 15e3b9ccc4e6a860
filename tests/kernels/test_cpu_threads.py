"""Native code takes over torch's threads, and torch keeps one."""

import sys

from commands import run as run_program
from source_tree import ROOT

# In a process of its own, since the number holds for all of it.
PROGRAM = """
import os
import torch
from kernels import cpu_layers
from kernels.cpu_threads import num_threads, take_threads_from_torch

torch.set_num_threads(3)
assert num_threads() == 3
take_threads_from_torch()
assert (torch.get_num_threads(), num_threads()) == (1, 3)
take_threads_from_torch()
assert (torch.get_num_threads(), num_threads()) == (1, 3)

x = torch.randn(64, 32768).to(torch.bfloat16)
before = len(os.listdir("/proc/self/task"))
assert torch.equal(x.float().to(torch.bfloat16), x)
assert len(os.listdir("/proc/self/task")) == before, "torch has started threads"
cpu_layers.widen(x)
assert len(os.listdir("/proc/self/task")) == before + 2, "native code has started none"
"""


def test_native_code_computes_on_the_threads_that_torch_gave_up() -> None:
    environment = {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    run_program(sys.executable, "-c", PROGRAM, environment=environment)
