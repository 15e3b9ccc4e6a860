"""Kernel tests run in Triton's interpreter where there is no GPU."""

import os

import torch

# Read when a kernel's module is imported, so before any test imports one.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
