"""Low-rank adapters over a model's linear layers, each for the tokens of its own rows."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.adapted_linear import AdaptedLinear, AdaptedTokens
from kernels.cpu_build import native_code
from kernels.low_rank import LowRankPart, PackedAdapter, packed_bytes
from kernels.packed_linear import PackedLinear
from kernels.quantised_linear import QuantisedLinear
from worker_svc.errors import AdapterError, InvariantError
from worker_svc.model.operations import Linear
from worker_svc.model.shard import Extent
from worker_svc.model.torch_adapted import LayerChange, Run, adapted, fuse


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


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter that is ready to run."""

    generation: int
    """Of its content. Not 0."""

    layers: Mapping[int, LayerChange]
    """What it adds to layers without native code, by number."""

    packed: PackedAdapter | None = None
    """What it adds to layers with native code. None: the model has none."""

    bank: "AdapterBank | None" = None
    """For whose layers it is."""

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        packed = 0 if self.packed is None else self.packed.num_bytes
        return packed + sum(change.num_bytes for change in self.layers.values())


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """A linear layer that adapters may change."""

    parts: tuple[tuple[int, int], ...]
    """The first row and the rows of each matrix it holds."""

    num_columns: int
    native: AdaptedLinear | None

    @property
    def num_rows(self) -> int:
        return sum(rows for _, rows in self.parts)


class AdapterBank:
    """The adapters of one model, by slot, and those of the step in hand.

    `wrap` makes layers that ask it; `publish` may come from another thread than steps do, for a
    slot that no row has. A step without adapters costs each layer a look at whether there are any.
    """

    __slots__ = ("_device", "_dtype", "_layers", "_loaded", "_lock", "_runs", "_tokens", "targets")

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.targets: dict[str, AdapterTarget] = {}
        """By the names of their modules, as Hugging Face has them."""
        self._dtype = dtype
        self._device = device
        self._layers: list[_Layer] = []
        self._loaded: dict[int, LoadedAdapter] = {}
        self._runs: list[Run] = []
        self._tokens = AdaptedTokens()
        self._lock = threading.Lock()

    # Making the model.

    def wrap(self, linear: Linear, parts: Sequence[tuple[str, Extent]], columns: Extent) -> Linear:
        """Return a layer that adds adapters to this one; native code calls it, if it calls this.

        `parts` names the matrices it holds, from the top, each with its rows. A gated layer must
        have native code.
        """
        number, first_row = len(self._layers), 0
        rows_of_parts = []
        for name, rows in parts:
            self.targets[name] = AdapterTarget(number, first_row, rows, columns)
            rows_of_parts.append((first_row, len(rows.mine)))
            first_row += len(rows.mine)
        native = None
        if isinstance(linear, PackedLinear | QuantisedLinear) and linear.native is not None:
            native = AdaptedLinear(linear, self._tokens, number)
        self._layers.append(_Layer(tuple(rows_of_parts), len(columns.mine), native))
        return native or adapted(linear, number, lambda: self._runs)

    def largest_bytes(self, rank: int) -> int:
        """Return what an adapter takes that changes all there is, this rank's parts, by `rank`."""
        return sum(self._largest_of(layer, rank) for layer in self._layers)

    def _largest_of(self, layer: _Layer, rank: int) -> int:
        code = native_code()
        if layer.native is not None and code is not None:
            return packed_bytes(layer.native.shape, layer.parts, rank, code)
        # As `fuse` lays them out: each matrix's b is as wide as the layer.
        width = layer.num_columns + layer.num_rows
        return self._run_dtype.itemsize * len(layer.parts) * rank * width

    @property
    def num_bytes(self) -> int:
        """What is loaded takes."""
        with self._lock:
            return sum(adapter.num_bytes for adapter in self._loaded.values())

    # Coming and going.

    def prepare(self, generation: int, matrices: Mapping[str, LowRankMatrix]) -> LoadedAdapter:
        """Bring an adapter's matrices, this rank's parts, into the model's layers.

        Raises: AdapterError if the device has no memory for them, or they leave their dtype.
        """
        by_layer: dict[int, list[LowRankPart]] = {}
        for name, matrix in matrices.items():
            target = self.targets[name]
            part = LowRankPart(target.first_row, matrix.a, matrix.b)
            by_layer.setdefault(target.layer, []).append(part)
        try:
            layers = {
                number: fuse(each, self._layers[number].num_rows, self._run_dtype, self._device)
                for number, each in by_layer.items()
                if self._layers[number].native is None
            }
            packed = self._pack({n: each for n, each in by_layer.items() if n not in layers})
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise AdapterError(f"{self._device} has no memory for it: {error}") from error
        except ValueError as error:
            raise AdapterError(f"it does not fit the model: {error}") from error
        return LoadedAdapter(generation, layers, packed, self)

    def _pack(self, parts: Mapping[int, Sequence[LowRankPart]]) -> PackedAdapter | None:
        """Return what is added to layers with native code. None: nothing."""
        code = native_code()
        if code is None or not parts:
            return None
        shapes = {
            number: layer.native.shape
            for number, layer in enumerate(self._layers)
            if layer.native is not None
        }
        return PackedAdapter(shapes, parts, code)

    @property
    def _run_dtype(self) -> torch.dtype:
        """Of an adapter's matrices in layers without native code."""
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
            self._tokens.begin((), np.empty(0, np.int32))
            return
        slot_of_token = np.repeat(slots, counts)
        packed: list[PackedAdapter] = []
        adapter_of = np.full(len(slot_of_token), -1, np.int32)
        for slot in np.unique(slots[slots != 0]).tolist():
            loaded = self._loaded.get(slot)
            if loaded is None:
                raise InvariantError(f"rows use adapter {slot}, which was dropped")
            found = slot_of_token == slot
            if loaded.packed is not None:
                adapter_of[found] = len(packed)
                packed.append(loaded.packed)
            if loaded.layers:
                places = torch.from_numpy(np.flatnonzero(found)).to(self._device)
                self._runs.append(Run(loaded.layers, None if found.all() else places))
        self._tokens.begin(packed, adapter_of)

    def has(self, slot: int) -> bool:
        """Whether an adapter is in a slot."""
        return slot in self._loaded
