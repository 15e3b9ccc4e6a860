"""A linear layer over weights of 4 or 8 bits, in groups of 32 inputs."""

import ctypes
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from kernels import cpu_threads, reference_layers
from kernels.activation import Activation
from kernels.checks import ACTIVATIONS
from kernels.cpu_build import TYPES, native_code
from kernels.native_linear import NativeLinear, native_linear
from kernels.packed_linear import PROTOTYPE, LinearStructure, check_rows_of, empty_or
from kernels.reference_quantised import GROUP, dequantise
from kernels.weight_memory import WeightMemory

_HALF_MAX: Final = float(torch.finfo(torch.float16).max)


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedWeight:
    """Weights scale * value + minimum; with no minimums scale * (value - zero_point)."""

    bits: int
    """4 or 8"""

    values: torch.Tensor
    """[O, I] uint8, below 2 ** bits"""

    scales: torch.Tensor
    """[O, ceil(I / 32)] fp32, or anything that converts to it"""

    minimums: torch.Tensor | None = None
    """As scales."""

    zero_point: int = 0
    """From 0 to 2 ** bits - 1"""

    def check(self) -> None:
        """Raises: ValueError if shapes, types or bounds are not as told above."""
        if self.bits not in {4, 8}:
            raise ValueError(f"bits is {self.bits}, must be 4 or 8")
        values = self.values
        if values.dim() != 2 or 0 in values.shape or values.dtype != torch.uint8:
            raise ValueError(f"values is {list(values.shape)} {values.dtype}, must be [O, I] uint8")
        if int(values.max()) >= 1 << self.bits:
            raise ValueError(f"values go up to {int(values.max())}, must be below {1 << self.bits}")
        shape = (values.shape[0], -(-values.shape[1] // GROUP))
        for name, tensor in (("scales", self.scales), ("minimums", self.minimums)):
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} is {list(tensor.shape)}, must be {list(shape)}")
        if not 0 <= self.zero_point < 1 << self.bits:
            raise ValueError(f"zero_point is {self.zero_point}, must be below {1 << self.bits}")

    def dequantise(self) -> torch.Tensor:
        """Return what the values stand for. Shape: [O, I] fp32."""
        return dequantise(self.values, self.scales, self.minimums, self.zero_point)


def quantise(weight: torch.Tensor, bits: int, code: ctypes.CDLL | None = None) -> QuantisedWeight:
    """Round weights: to 8 bits around 0, as GGUF's Q8_0; or to 4 from a group's least, as Q4_1.

    Shapes: weight [O, I], of any float type.
    Numerics: off by at most half a scale, which is a group's largest size / 127 (8 bits), or its
        range / 15 (4 bits); scales and minimums are rounded to fp16, which adds 2 ** -11 of them.
    Raises: ValueError if `bits` is neither 4 nor 8.
    """
    if bits not in {4, 8}:
        raise ValueError(f"bits is {bits}, must be 4 or 8")
    code = code or native_code()
    if code is None or weight.device.type != "cpu":
        return quantise_in_torch(weight, bits)
    weight = weight.float().contiguous()
    rows, columns = weight.shape
    values = torch.empty((rows, columns), dtype=torch.uint8)
    scales = torch.empty((rows, -(-columns // GROUP)))
    minimums = torch.empty_like(scales) if bits == 4 else None
    code.pagemill_quantise(
        ctypes.c_void_p(weight.data_ptr()),
        *(ctypes.c_int64(number) for number in (rows, columns, bits)),
        ctypes.c_void_p(values.data_ptr()),
        ctypes.c_void_p(scales.data_ptr()),
        ctypes.c_void_p(None if minimums is None else minimums.data_ptr()),
        ctypes.c_int64(cpu_threads.num_threads()),
    )
    return QuantisedWeight(bits, values, scales, minimums, 128 if minimums is None else 0)


def quantise_in_torch(weight: torch.Tensor, bits: int) -> QuantisedWeight:
    """Do the same without native code, value for value."""
    rows, columns = weight.shape
    # What fills the last group up must not widen its range: the last weight does not.
    padded = functional.pad(weight.float()[None], (0, -columns % GROUP), mode="replicate")[0]
    groups = padded.view(rows, -1, GROUP)
    if bits == 8:
        scales = _to_half(groups.abs().amax(-1) / 127)
        values = (groups / _not_zero(scales)).round() + 128
        values = values.clamp(1, 255).to(torch.uint8).view(rows, -1)[:, :columns].contiguous()
        return QuantisedWeight(8, values, scales, zero_point=128)
    least, most = groups.aminmax(dim=-1)
    minimums = _to_half(least)
    scales = _to_half((most - minimums).clamp(min=0) / 15)
    values = ((groups - minimums[..., None]) / _not_zero(scales)).round()
    values = values.clamp(0, 15).to(torch.uint8).view(rows, -1)[:, :columns].contiguous()
    return QuantisedWeight(4, values, scales, minimums)


def _to_half(x: torch.Tensor) -> torch.Tensor:
    """Round to fp16, as packed scales are."""
    return x.clamp(-_HALF_MAX, _HALF_MAX).half().float()


def _not_zero(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales == 0, 1.0, scales)[..., None]


class _Structure(ctypes.Structure):
    """The twin of `QuantisedLinear` in kernels/cpu/quantised.h."""

    _fields_ = [
        ("plain", LinearStructure),
        ("bits", ctypes.c_int64),
        ("zero_point", ctypes.c_int64),
        ("has_minimums", ctypes.c_int64),
        ("has_fp32_scales", ctypes.c_int64),
    ]


class QuantisedLinear:
    """x @ weight.T + bias on a CPU; or, gated, activation(gate) * up of such a product [gate, up].

    Shapes: weight [O, I], bias [O] of `dtype`; gated: [2 * O, I] and [2 * O]. The weight is copied.
    Numerics: each row of x is rounded to 8 bits in groups of 32, by at most 1 / 254 of the group's
        largest; the rest is exact, but for sums of groups in fp32 and one rounding of the result.
        Infinity and NaN make NaN of their row's results. Scales are kept in fp16 if that is exact
        for all of them, else in fp32. Without native code x is not rounded.
    Invariant: a row's result is bitwise the same whatever rows stand beside it, however many, and
        whatever the number of threads. Without native code torch makes no such promise.
    Cost: 0.625 bytes a weight of 4 bits with minimums in fp16, 1.0625 of 8 bits without.
    """

    __slots__ = ("_arguments", "_bias", "_call", "_dtype", "_packed", "_pointer", "_weight",
                 "num_inputs", "num_outputs")  # fmt: skip

    def __init__(
        self,
        weight: QuantisedWeight,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype,
        gate: Activation | None = None,
        memory: WeightMemory | None = None,
        code: ctypes.CDLL | None = None,
    ) -> None:
        """Lay `weight` out in `memory`, or in memory of its own; x and results are of `dtype`.

        Raises: ValueError if a shape, dtype or value does not fit.
        """
        weight.check()
        rows, self.num_inputs = weight.values.shape
        if dtype not in ACTIVATIONS:
            raise ValueError(f"dtype is {dtype}, must be one of {ACTIVATIONS}")
        if gate and rows % 2:
            raise ValueError(f"a gated weight is {list(weight.values.shape)}, must be [2 * O, I]")
        if bias is not None and (bias.shape != (rows,) or bias.dtype != dtype):
            raise ValueError(f"bias is {list(bias.shape)} {bias.dtype}, must be [{rows}] {dtype}")
        self._dtype = dtype
        self._bias = None if bias is None else bias.contiguous()
        self.num_outputs = rows // (2 if gate else 1)
        code = code or native_code()
        self._call = None if code is None else PROTOTYPE(("pagemill_quantised", code))
        self._arguments = _Structure(
            plain=LinearStructure(
                bias=None if self._bias is None else self._bias.data_ptr(),
                O=self.num_outputs, I=self.num_inputs, gate=gate or 0, dtype=TYPES[dtype],
            ),
            bits=weight.bits, zero_point=weight.zero_point,
            has_minimums=weight.minimums is not None, has_fp32_scales=not _fit_fp16(weight),
        )  # fmt: skip
        self._weight: torch.Tensor | None = None
        if code is None:
            self._weight = weight.dequantise().to(dtype)
            return
        self._pointer = ctypes.addressof(self._arguments)
        self._packed = self._pack(weight, memory or WeightMemory(0), code)
        self._arguments.plain.weight = self._packed.data_ptr()

    def _pack(
        self, weight: QuantisedWeight, memory: WeightMemory, code: ctypes.CDLL
    ) -> torch.Tensor:
        code.pagemill_quantised_bytes.restype = ctypes.c_int64
        packed = memory.allocate(code.pagemill_quantised_bytes(ctypes.byref(self._arguments)))
        values, scales = weight.values.contiguous(), weight.scales.float().contiguous()
        minimums = scales if weight.minimums is None else weight.minimums.float().contiguous()
        code.pagemill_quantised_pack(
            ctypes.byref(self._arguments),
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (values, scales, minimums, packed)),
            ctypes.c_int64(cpu_threads.num_threads()),
        )
        return packed

    @property
    def num_bytes(self) -> int:
        """What the packed weight takes."""
        return (self._packed if self._weight is None else self._weight).nbytes

    @property
    def native(self) -> NativeLinear | None:
        """How native code calls the layer. None: there is no native code."""
        return native_linear(
            self._call, self._arguments, self.num_inputs, self.num_outputs, self._dtype
        )

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product. Shapes: x [T, I], out and returned [T, O], of `dtype`.

        Raises: ValueError if `x` or `out` is not so, or its rows are not contiguous.
        """
        check_rows_of("x", x, self.num_inputs, self._dtype)
        out = empty_or(out, x, self.num_outputs)
        if self._call is None:
            product = functional.linear(x, self._weight, self._bias)  # type: ignore[arg-type] # is there without code
            if self._arguments.plain.gate:
                activation = Activation(self._arguments.plain.gate)
                product = reference_layers.activate_and_mul(product, activation)
            return out.copy_(product)
        T = len(x)
        status = self._call(
            self._pointer, x.data_ptr(), x.stride(0), T, out.data_ptr(), out.stride(0),
            cpu_threads.num_threads(),
        )  # fmt: skip
        if status:
            raise MemoryError(f"no memory for {T} rows of {self.num_inputs}")
        return out


def _fit_fp16(weight: QuantisedWeight) -> bool:
    """Return whether scales and minimums are the same in fp16."""
    tensors = [weight.scales, *([] if weight.minimums is None else [weight.minimums])]
    return all(torch.equal(tensor.half().float(), tensor.float()) for tensor in tensors)
