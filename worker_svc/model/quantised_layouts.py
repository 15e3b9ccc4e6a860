"""Quantised matrices as files hold them: what tensors one is, its shape, and how parts are read.

O and I are a matrix's outputs and inputs, P the values in one int32, G the groups of its inputs.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import torch

from worker_svc.errors import ModelError
from worker_svc.model.loader import TensorSource
from worker_svc.model.quantised_config import Layout, Quantisation
from worker_svc.model.quantised_matrix import QuantisedMatrix

_WORD: Final = 32
"""Bits of what values are packed into."""

_AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in an int32 AWQ puts the n-th of eight outputs, in units of 4 bits."""


class Suffixes(NamedTuple):
    """What the tensors of one matrix are called behind its name."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    """Scales and zero points that not all have, and what we make no use of."""


SUFFIXES: Final[Mapping[Layout, Suffixes]] = {
    # Scales of activations stay unused: ours are in the run dtype.
    Layout.PLAIN: Suffixes(
        ("weight", "weight_scale"),
        ("weight_zero_point", "input_scale", "input_zero_point", "activation_scale"),
    ),
    Layout.ROWS: Suffixes(
        ("weight_packed", "weight_scale", "weight_shape"),
        ("weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point"),
    ),
    Layout.AWQ: Suffixes(("qweight", "qzeros", "scales")),
    Layout.GPTQ: Suffixes(("qweight", "qzeros", "scales"), ("g_idx",)),
}


class Stored:
    """The tensors of one matrix in a source."""

    __slots__ = ("_base", "_names", "_source", "quantisation")

    def __init__(
        self, source: TensorSource, names: frozenset[str], base: str, quantisation: Quantisation
    ) -> None:
        """Take `source.names`, too: a source makes them anew each time it is asked."""
        self._source = source
        self._names = names
        self._base = base
        self.quantisation = quantisation

    def has(self, suffix: str) -> bool:
        """Return whether there is such a tensor, and something in it."""
        return self.name(suffix) in self._names and 0 not in self.shape(suffix)

    def shape(self, suffix: str) -> list[int]:
        """Return the shape of one tensor."""
        return self._source.shape(self.name(suffix))

    def matrix_of(self, suffix: str) -> list[int]:
        """Return the shape of one tensor. Raises: ModelError if it has not two dimensions."""
        shape = self.shape(suffix)
        if len(shape) != 2:
            raise ModelError(f"tensor {self.name(suffix)} is {shape}, must have two dimensions")
        return shape

    def check_shape(self, suffix: str, *known: Sequence[int]) -> None:
        """Raise ModelError if a tensor has none of these shapes."""
        if (found := self.shape(suffix)) not in [list(one) for one in known]:
            raise self.error(suffix, f"is {found}, must be {' or '.join(str(k) for k in known)}")

    def read(self, suffix: str, dtype: torch.dtype, *parts: range) -> torch.Tensor:
        """Return a tensor or a part. Raises: ModelError if its dtype is another."""
        tensor = self._source.read(self.name(suffix), dtype, *parts)
        if tensor.dtype != dtype:
            raise self.error(suffix, f"is {tensor.dtype}, must be {dtype}")
        return tensor

    def scales(self, suffix: str) -> torch.Tensor:
        """Return a tensor in fp32. Raises: ModelError if a value is not finite."""
        scales = self._source.read(self.name(suffix), torch.float32).float()
        if not scales.isfinite().all():
            raise self.error(suffix, "has a value that is not finite")
        return scales

    def groups(self, suffix: str, inputs: range, num_groups: int) -> torch.Tensor:
        """Return which group each input is in. Raises: ModelError if there is no such group."""
        groups = self._source.read(self.name(suffix), torch.int32, inputs).long()
        if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
            raise self.error(suffix, f"has a group outside of 0 to {num_groups - 1}")
        return groups

    def error(self, suffix: str, what: str) -> ModelError:
        """Return an error that names one of the tensors."""
        return ModelError(f"tensor {self.name(suffix)} {what}")

    def name(self, suffix: str) -> str:
        """Return what one of the tensors is called in full."""
        name = f"{self._base}.{suffix}"
        # DeepSeek's, which multiplies all the same.
        if suffix == "weight_scale" and name not in self._names:
            return f"{name}_inv"
        return name


def shape_of(stored: Stored) -> list[int]:
    """Return [O, I]. Raises: ModelError if a tensor's shape does not fit the others'."""
    per_word = _WORD // stored.quantisation.bits
    match stored.quantisation.layout:
        case Layout.PLAIN:
            return stored.matrix_of("weight")
        case Layout.ROWS:
            stored.check_shape("weight_shape", [2])
            rows, columns = stored.read("weight_shape", torch.int64).tolist()
            stored.check_shape("weight_packed", [rows, -(-columns // per_word)])
            return [rows, columns]
        case Layout.AWQ:
            columns, packed = stored.matrix_of("qweight")
            return [packed * per_word, columns]
        case Layout.GPTQ:
            packed, rows = stored.matrix_of("qweight")
            return [rows, packed * per_word]


def read_matrix(stored: Stored, rows: range, columns: range) -> QuantisedMatrix:
    """Return the part of a matrix that these rows and columns are.

    Of the values no more is read than that, up to whole int32; of the scales, all.

    Raises: ModelError if a tensor has another shape or dtype, or impossible values.
    """
    match stored.quantisation.layout:
        case Layout.PLAIN:
            return _read_plain(stored, rows, columns)
        case Layout.ROWS:
            return _read_rows(stored, rows, columns)
        case Layout.AWQ | Layout.GPTQ:
            return _read_inputs_first(stored, rows, columns)


def _read_plain(stored: Stored, rows: range, columns: range) -> QuantisedMatrix:
    whole = shape_of(stored)
    grid, steps = _grid_of_scales(stored, whole)
    scales = stored.scales("weight_scale").view(grid)
    row_of, column_of = _places(rows, steps[0]), _places(columns, steps[1])
    if stored.quantisation.is_float:
        values = stored.read("weight", torch.float8_e4m3fn, rows, columns)
        return QuantisedMatrix(values, scales, None, row_of, column_of)
    values = stored.read("weight", torch.int8, rows, columns)
    zeros = torch.full_like(scales, 128)
    if stored.has("weight_zero_point"):
        stored.check_shape("weight_zero_point", stored.shape("weight_scale"))
        zeros += stored.scales("weight_zero_point").view(grid)
    unsigned = values.view(torch.uint8) ^ 128
    return QuantisedMatrix(unsigned, scales, zeros, row_of, column_of)


def _read_rows(stored: Stored, rows: range, columns: range) -> QuantisedMatrix:
    bits = stored.quantisation.bits
    whole = shape_of(stored)
    grid, steps = _grid_of_scales(stored, whole)
    scales = stored.scales("weight_scale").view(grid)
    words = _words(columns, bits)
    packed = stored.read("weight_packed", torch.int32, rows, words)
    values = _unpack(packed, bits, _in_order(bits))[:, _inside(columns, words, bits)]
    zeros = torch.full_like(scales, 1 << (bits - 1))
    if stored.has("weight_zero_point"):
        num_words = -(-grid[0] * bits // _WORD)
        stored.check_shape("weight_zero_point", [num_words, grid[1]])
        packed = stored.read("weight_zero_point", torch.int32)
        zeros = _unpack(packed.T, bits, _in_order(bits))[:, : grid[0]].T.float()
    column_of = _places(columns, steps[1])
    if stored.has("weight_g_idx"):
        stored.check_shape("weight_g_idx", [whole[1]])
        column_of = stored.groups("weight_g_idx", columns, grid[1])
    return QuantisedMatrix(values.contiguous(), scales, zeros, _places(rows, steps[0]), column_of)


def _read_inputs_first(stored: Stored, rows: range, columns: range) -> QuantisedMatrix:
    """Read what AWQ and GPTQ write: [I, O], of which AWQ packs outputs and GPTQ inputs."""
    quantisation = stored.quantisation
    bits, is_awq = quantisation.bits, quantisation.layout is Layout.AWQ
    num_rows, num_columns = shape_of(stored)
    group = (quantisation.block or (1, None))[1] or num_columns
    num_groups = -(-num_columns // group)
    if num_rows * bits % _WORD:
        raise stored.error("qweight", f"has {num_rows} outputs, must be whole words of zero points")
    stored.check_shape("scales", [num_groups, num_rows])
    stored.check_shape("qzeros", [num_groups, num_rows * bits // _WORD])
    order = _AWQ_PLACES if is_awq else _in_order(bits)
    if is_awq:
        words = _words(rows, bits)
        packed = stored.read("qweight", torch.int32, columns, words)
        values = _unpack(packed, bits, order)[:, _inside(rows, words, bits)].T
    else:
        words = _words(columns, bits)
        packed = stored.read("qweight", torch.int32, words, rows)
        values = _unpack(packed.T, bits, order)[:, _inside(columns, words, bits)]
    zeros = _unpack(stored.read("qzeros", torch.int32), bits, order)
    # 0 is stored as the largest value, where 1 is stored as 0.
    zeros = (zeros + quantisation.zero_offset) & ((1 << bits) - 1)
    column_of = _places(columns, group)
    if not is_awq and stored.has("g_idx"):
        stored.check_shape("g_idx", [num_columns])
        column_of = stored.groups("g_idx", columns, num_groups)
    scales = stored.scales("scales").T
    return QuantisedMatrix(
        values.contiguous(), scales, zeros.T.float(), _places(rows, 1), column_of
    )


def _grid_of_scales(stored: Stored, whole: Sequence[int]) -> tuple[list[int], tuple[int, int]]:
    """Return the shape [R, C] of the scales, and how many outputs and inputs share one."""
    rows, columns = whole
    block = stored.quantisation.block
    if block is not None:
        steps = (block[0] or rows, block[1] or columns)
        grid = [-(-rows // steps[0]), -(-columns // steps[1])]
        stored.check_shape("weight_scale", grid)
        return grid, steps
    a_row = [rows, 1], [rows]
    stored.check_shape("weight_scale", *a_row, [], [1], [1, 1])
    if stored.shape("weight_scale") in a_row:
        return [rows, 1], (1, columns)
    return [1, 1], (rows, columns)


def _places(part: range, step: int) -> torch.Tensor:
    """Return in which step each index lies."""
    return torch.arange(part.start, part.stop) // step


def _in_order(bits: int) -> tuple[int, ...]:
    return tuple(range(_WORD // bits))


def _words(part: range, bits: int) -> range:
    """Return the int32 that hold some values."""
    per_word = _WORD // bits
    return range(part.start // per_word, -(-part.stop // per_word))


def _inside(part: range, words: range, bits: int) -> slice:
    """Return where some values are among those of their words."""
    start = part.start - words.start * (_WORD // bits)
    return slice(start, start + len(part))


def _unpack(packed: torch.Tensor, bits: int, places: Sequence[int]) -> torch.Tensor:
    """Return unsigned values. Shapes: packed [..., n] int32, returns [..., n * P] uint8."""
    out = torch.empty((*packed.shape, len(places)), dtype=torch.uint8)
    for number, place in enumerate(places):
        out[..., number] = (packed >> (place * bits)) & ((1 << bits) - 1)
    return out.flatten(-2)
