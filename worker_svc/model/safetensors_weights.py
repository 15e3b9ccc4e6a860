"""Tensors of a Hugging Face directory, by name."""

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch
from safetensors import SafetensorError, safe_open

from worker_svc.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...

    def __getitem__(self, places: tuple[slice, ...]) -> torch.Tensor: ...


class _OpenFile(Protocol):
    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...

    def get_slice(self, name: str) -> _Slice: ...


class SafetensorsWeights:
    """Reads tensors from memory-mapped files. A context manager; leaving it closes the files.

    Raises: ModelError if a file is missing, damaged, or lacks a tensor the index promises.
    """

    __slots__ = ("_files", "_stack")

    def __init__(self, directory: Path) -> None:
        self._stack = ExitStack()
        self._files: dict[str, _OpenFile] = {}
        try:
            for path in weight_files(directory):
                file: _OpenFile = self._stack.enter_context(safe_open(path, framework="pt"))
                self._files.update(dict.fromkeys(file.keys(), file))
        except (SafetensorError, OSError) as error:
            self._stack.close()
            raise ModelError(f"{directory.name}: weights cannot be read: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def names(self) -> frozenset[str]:
        """The tensors there are, by their Hugging Face names."""
        return frozenset(self._files)

    def shape(self, name: str) -> list[int]:
        """Return the shape of one tensor. It must be among `names`."""
        return self._files[name].get_slice(name).get_shape()

    def read(self, name: str, _dtype: torch.dtype, *parts: range) -> torch.Tensor:
        """Return one tensor, or a part of its first dimensions, in the dtype of the file.

        It must be among `names`. What is not asked for is not read.
        """
        if not parts:
            return self._files[name].get_tensor(name)
        return self._files[name].get_slice(name)[tuple(slice(p.start, p.stop) for p in parts)]


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model, in order of their names.

    Raises: ModelError if there are none, or the index names a file outside the directory.
    """
    index = directory / INDEX_FILE
    if not index.exists():
        single = directory / SINGLE_FILE
        if not single.exists():
            raise ModelError(f"{directory.name} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{INDEX_FILE} is damaged: {error}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{INDEX_FILE} names {name!r}, which is not a file beside it")
    return [directory / name for name in names]
