"""Tensors of a GGUF file, dequantised, under their Hugging Face names and in that layout."""

from math import prod
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from gguf import dequantize

from kernels.unpack import unpack
from worker_svc.errors import ModelError
from worker_svc.model.gguf_file import GgufFile, GgufTensor
from worker_svc.model.gguf_names import hf_tensors
from worker_svc.model.model_config import ModelConfig

_SLAB_ELEMENTS = 1 << 18


class GgufWeights:
    """Reads tensors from a file. A context manager; leaving it closes the file."""

    __slots__ = ("_config", "_opened", "_tensors")

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._config = config
        self._tensors = hf_tensors(file, config)
        self._opened = file.path.open("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._opened.close()

    @property
    def names(self) -> frozenset[str]:
        """The tensors there are, by their Hugging Face names."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> list[int]:
        """Return the shape of one tensor. It must be among `names`."""
        return list(self._tensors[name].shape)

    def read(self, name: str, dtype: torch.dtype, *parts: range) -> torch.Tensor:
        """Return one tensor, or a part of its first dimensions. It must be among `names`.

        It is unpacked a few rows at a time, so that an embedding need not fit into memory in
        fp32. Rows that are not asked for are not read; those of queries and keys must be whole
        heads.

        Raises: ModelError if it is packed in a way the `gguf` package cannot unpack.
        """
        tensor = self._tensors[name]
        weight = self._read_rows(tensor, parts[0] if parts else range(tensor.shape[0]), dtype)
        # Llama's GGUF files hold the rotary pairs of Q and K side by side, (2i, 2i + 1);
        # the model wants them half a head apart, (i, i + D / 2), as the files of others have them.
        if self._config.architecture == "llama":
            if ".attn_q." in tensor.name:
                weight = self._halves_apart(name, weight, self._config.num_heads)
            if ".attn_k." in tensor.name:
                weight = self._halves_apart(name, weight, self._config.num_kv_heads)
        if len(parts) > 1:
            weight = weight[(slice(None), *(slice(part.start, part.stop) for part in parts[1:]))]
        return weight

    def _read_rows(self, tensor: GgufTensor, wanted: range, dtype: torch.dtype) -> torch.Tensor:
        """Return some of a tensor's first dimension."""
        columns = tensor.shape[-1]
        if len(tensor.shape) == 1:
            whole = torch.empty((1, columns), dtype=dtype)
            self._unpack(tensor, 0, whole)
            return whole[0, wanted.start : wanted.stop]
        weight = torch.empty((len(wanted), *tensor.shape[1:]), dtype=dtype)
        rows = weight.view(-1, columns)
        start = wanted.start * prod(tensor.shape[1:-1])
        step = max(1, _SLAB_ELEMENTS // columns)
        for first in range(0, len(rows), step):
            self._unpack(tensor, start + first, rows[first : first + step])
        return weight

    def _halves_apart(self, name: str, weight: torch.Tensor, heads: int) -> torch.Tensor:
        head_dim, shape = self._config.head_dim, self.shape(name)
        if shape[0] != (rows := heads * head_dim):
            raise ModelError(f"tensor {name} is {shape}, must have {rows} rows")
        return halves_apart(weight, len(weight) // head_dim)

    def _unpack(self, tensor: GgufTensor, first: int, to: torch.Tensor) -> None:
        """Write rows from the `first` on. Shape: to [rows, columns], contiguous."""
        row_bytes = tensor.num_bytes // prod(tensor.shape[:-1])
        packed = np.empty((len(to), row_bytes), np.uint8)
        self._opened.seek(tensor.offset + first * row_bytes)
        if self._opened.readinto(packed.data) != packed.nbytes:
            raise ModelError(f"{tensor.name} is cut short")
        if unpack(tensor.kind, packed, to):
            return
        try:
            # As one row: the package loops over every 16 of them, which is slow for narrow ones.
            values: npt.NDArray[np.float32] = dequantize(packed.reshape(1, -1), tensor.kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{tensor.name} is packed as {tensor.kind.name}, which is not known"
            ) from error
        to.copy_(torch.from_numpy(values.reshape(to.shape)))


def halves_apart(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the order of rotary pairs in GGUF: row 2i + j of a head becomes row j * D / 2 + i.

    Shapes: weight [heads * D, ...], and the same returned.
    """
    pairs = weight.view(heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
