"""Counts the bytes that a kernel reads from and writes to each tensor, in Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder


class Touched:
    """Bytes read and written, by the name of the tensor; `?` is memory of no known tensor."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.read: dict[str, int] = dict.fromkeys((*tensors, "?"), 0)
        self.written: dict[str, int] = dict.fromkeys((*tensors, "?"), 0)
        self._ranges = {
            name: (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())
            for name, tensor in tensors.items()
        }

    def count(self, to: dict[str, int], pointers: Any, mask: Any) -> None:
        """Add an access of all `pointers` where `mask` is set."""
        itemsize = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses = np.broadcast_to(pointers.data, mask.data.shape)[mask.data.astype(bool)]
        rest = addresses.size
        for name, (start, end) in self._ranges.items():
            hits = int(((addresses >= start) & (addresses < end)).sum())
            to[name] += hits * itemsize
            rest -= hits
        to["?"] += rest * itemsize


@contextmanager
def count_bytes(**tensors: torch.Tensor) -> Iterator[Touched]:
    """Count what kernels launched inside touch of each of the tensors."""
    touched = Touched(tensors)
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        touched.count(touched.read, pointers, mask)
        return load(self, pointers, mask, *rest)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        touched.count(touched.written, pointers, mask)
        return store(self, pointers, value, mask, *rest)

    with (
        mock.patch.object(InterpreterBuilder, "create_masked_load", counted_load),
        mock.patch.object(InterpreterBuilder, "create_masked_store", counted_store),
    ):
        yield touched
