"""Low-rank adapters over a model's linear layers, each for the tokens of its own rows."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.errors import AdapterError, InvariantError
from worker_svc.model.operations import Linear
from worker_svc.model.shard import Extent


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """A matrix of the model that adapters may change."""

    layer: int
    """Number of the linear layer that holds it, by the order in which they were made."""

    first_row: int
    """Its first row there: a layer may hold several, above one another."""

    rows: Extent
    """Outputs, and those of this rank."""

    columns: Extent
    """Inputs, and those of this rank."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRankMatrix:
    """What an adapter adds to one matrix, or to a rank's part of it: b @ a. The scale is in b."""

    a: torch.Tensor
    """[r, in]"""

    b: torch.Tensor
    """[out, r]"""

    def part_for(self, target: AdapterTarget) -> "LowRankMatrix":
        """Return what a rank needs of the whole matrix: its inputs of a, its outputs of b.

        Where ranks have inputs each, the layer's sum over them is that of b @ a as well.
        """
        rows, columns = target.rows.mine, target.columns.mine
        a = self.a[:, columns.start : columns.stop]
        return LowRankMatrix(a, self.b[rows.start : rows.stop])


_FEW_TOKENS = 64
"""Up to so many, one product with zeros in it costs less than one for each matrix of a layer."""


@dataclass(frozen=True, slots=True, eq=False)
class _LayerChange:
    """What an adapter adds to one layer: all its matrices there, in one pair."""

    a: torch.Tensor
    """[in, sum of ranks]"""

    b: torch.Tensor
    """[sum of ranks, out], 0 where a matrix does not reach."""

    parts: tuple[tuple[slice, slice], ...]
    """Ranks and outputs of each matrix."""

    def add(self, x: torch.Tensor, places: torch.Tensor | None, y: torch.Tensor) -> None:
        """Add to the outputs of some tokens. Shapes: x [T, in], places [P], y [T, out].

        Numerics: both products in the type of `a`, rounded once to y's.
        """
        inner = (x if places is None else x[places]).to(self.a.dtype) @ self.a
        if len(inner) <= _FEW_TOKENS:
            _add_rows(y, places, inner @ self.b)
            return
        for ranks, rows in self.parts:
            _add_rows(y[:, rows], places, inner[:, ranks] @ self.b[ranks, rows])


def _add_rows(y: torch.Tensor, places: torch.Tensor | None, added: torch.Tensor) -> None:
    added = added.to(y.dtype)
    if places is None:
        y += added
    else:
        y.index_add_(0, places, added)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter that is ready to run."""

    generation: int
    """Of its content. Not 0."""

    layers: Mapping[int, _LayerChange]
    num_bytes: int
    bank: "AdapterBank | None" = None
    """For whose layers it is."""


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """The tokens of the step in hand that one adapter changes."""

    layers: Mapping[int, _LayerChange]

    places: torch.Tensor | None
    """[P] int64. None: all tokens."""


class AdapterBank:
    """The adapters of one model, by slot, and those of the step in hand.

    `wrap` makes layers that ask it; `publish` may come from another thread than steps do, for a
    slot that no row has. A step without adapters costs each layer a look at an empty list.
    """

    __slots__ = ("_device", "_dtype", "_loaded", "_lock", "_num_rows", "_runs", "targets")

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.targets: dict[str, AdapterTarget] = {}
        """By the names of their modules, as Hugging Face has them."""
        self._dtype = dtype
        self._device = device
        self._num_rows: list[int] = []
        """Of each layer."""
        self._loaded: dict[int, LoadedAdapter] = {}
        self._runs: list[_Run] = []
        self._lock = threading.Lock()

    # Making the model.

    def wrap(self, linear: Linear, parts: Sequence[tuple[str, Extent]], columns: Extent) -> Linear:
        """Return a layer that adds adapters to this one.

        `parts` names the matrices it holds, from the top, each with its rows.
        """
        layer, first_row = len(self._num_rows), 0
        for name, rows in parts:
            self.targets[name] = AdapterTarget(layer, first_row, rows, columns)
            first_row += len(rows.mine)
        self._num_rows.append(first_row)

        def adapted(x: torch.Tensor) -> torch.Tensor:
            y = linear(x)
            for run in self._runs:
                change = run.layers.get(layer)
                if change is not None:
                    change.add(x, run.places, y)
            return y

        return adapted

    def largest_bytes(self, rank: int) -> int:
        """Return what an adapter takes that changes all there is, this rank's parts, by `rank`."""
        matrices, columns = [0] * len(self._num_rows), [0] * len(self._num_rows)
        for target in self.targets.values():
            matrices[target.layer] += 1
            columns[target.layer] = len(target.columns.mine)
        sizes = zip(matrices, columns, self._num_rows, strict=True)
        # As `_fuse` lays them out: each matrix's b is as wide as the layer.
        return self._run_dtype.itemsize * sum(
            count * rank * (inputs + outputs) for count, inputs, outputs in sizes
        )

    @property
    def num_bytes(self) -> int:
        """What is loaded takes."""
        with self._lock:
            return sum(adapter.num_bytes for adapter in self._loaded.values())

    # Coming and going.

    def prepare(self, generation: int, matrices: Mapping[str, LowRankMatrix]) -> LoadedAdapter:
        """Bring an adapter's matrices, this rank's parts, into the model's layers.

        Raises: AdapterError if the device has no memory for them.
        """
        by_layer: dict[int, list[tuple[AdapterTarget, LowRankMatrix]]] = {}
        for name, matrix in matrices.items():
            target = self.targets[name]
            by_layer.setdefault(target.layer, []).append((target, matrix))
        try:
            layers = {layer: self._fuse(layer, each) for layer, each in by_layer.items()}
        except torch.OutOfMemoryError as error:
            raise AdapterError(f"{self._device} has no memory for it: {error}") from error
        tensors = [tensor for each in layers.values() for tensor in (each.a, each.b)]
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return LoadedAdapter(generation, layers, num_bytes, self)

    def _fuse(
        self, layer: int, changes: Sequence[tuple[AdapterTarget, LowRankMatrix]]
    ) -> _LayerChange:
        a = torch.cat([matrix.a for _, matrix in changes]).T.contiguous()
        b = torch.zeros(a.shape[1], self._num_rows[layer])
        parts, first = [], 0
        for target, matrix in changes:
            last = first + len(matrix.a)
            part = slice(first, last), slice(target.first_row, target.first_row + len(matrix.b))
            b[part] = matrix.b.T
            parts.append(part)
            first = last
        dtype = self._run_dtype
        return _LayerChange(a.to(self._device, dtype), b.to(self._device, dtype), tuple(parts))

    @property
    def _run_dtype(self) -> torch.dtype:
        """Of an adapter's matrices."""
        # A CPU's products of few rows are several times faster in fp32 than in narrower types.
        return torch.float32 if self._device.type == "cpu" else self._dtype

    def publish(self, slot: int, adapter: LoadedAdapter) -> None:
        """Put an adapter into a slot, unless it was read for another part of the model."""
        if adapter.bank is not self:
            return
        with self._lock:
            self._loaded[slot] = adapter

    def drop(self, slot: int) -> None:
        """Empty a slot. Rows that still have it fail."""
        with self._lock:
            self._loaded.pop(slot, None)

    def generation(self, slot: int) -> int:
        """Return the generation of what is in a slot. 0: nothing is."""
        loaded = self._loaded.get(slot)
        return loaded.generation if loaded else 0

    # The step in hand.

    def begin(self, slots: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]) -> None:
        """Let each row's tokens have its adapter, until the next call.

        Shapes: slots, counts [R]: adapters, 0 for none, and tokens of the rows of a step, in
            order.

        Raises: InvariantError if there is no such adapter.
        """
        self._runs = []
        if not slots.any():
            return
        slot_of_token = np.repeat(slots, counts)
        for slot in np.unique(slots[slots != 0]).tolist():
            if slot not in self._loaded:
                raise InvariantError(f"rows use adapter {slot}, which was dropped")
            places = None
            if not (slots == slot).all():
                found = np.flatnonzero(slot_of_token == slot)
                places = torch.from_numpy(found).to(self._device)
            self._runs.append(_Run(self._loaded[slot].layers, places))

    def has(self, slot: int) -> bool:
        """Whether an adapter is in a slot."""
        return slot in self._loaded
