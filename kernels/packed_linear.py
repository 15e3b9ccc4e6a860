"""A linear layer whose matrix is laid out once, for the processor's products."""

import ctypes

import torch
from torch.nn import functional

from kernels import cpu_threads, reference_layers
from kernels.activation import Activation
from kernels.checks import ACTIVATIONS
from kernels.cpu_build import TYPES, native_code
from kernels.native_linear import NativeLinear, native_linear
from kernels.weight_memory import WeightMemory


class LinearStructure(ctypes.Structure):
    """The twin of `Linear` in kernels/cpu/linear.h."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("O", ctypes.c_int64),
        ("I", ctypes.c_int64),
        ("gate", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    ]


# Layer, x, its stride, T, out, its stride, threads: prepared, since converting them takes time.
PROTOTYPE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64,
    ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64,
)  # fmt: skip


class PackedLinear:
    """x @ weight.T + bias on a CPU; or, gated, activation(gate) * up of such a product [gate, up].

    Shapes: weight [O, I], bias [O], both fp32, bf16 or fp16; gated: [2 * O, I] and [2 * O]. The
        weight is copied: the caller may drop it.
    Numerics: sums in fp32, rounded once; bf16 numbers below 2 ** -126 count as zeros where the
        processor multiplies bf16 itself.
    Invariant: a row's result is bitwise the same whatever rows stand beside it, however many, and
        whatever the number of threads. Without native code torch makes no such promise.
    """

    __slots__ = ("_arguments", "_bias", "_call", "_dtype", "_packed", "_pointer", "_weight",
                 "num_inputs", "num_outputs")  # fmt: skip

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        gate: Activation | None = None,
        memory: WeightMemory | None = None,
        code: ctypes.CDLL | None = None,
    ) -> None:
        """Lay `weight` out in `memory`, or in memory of its own.

        Raises: ValueError if shapes or dtypes do not fit, or the weight is not on a CPU.
        """
        _check(weight, bias, is_gated=gate is not None)
        self._dtype = weight.dtype
        self._bias = None if bias is None else bias.contiguous()
        self.num_outputs = weight.shape[0] // (2 if gate else 1)
        self.num_inputs = weight.shape[1]
        self._weight: torch.Tensor | None = None
        code = code or native_code()
        self._call = None if code is None else PROTOTYPE(("pagemill_linear", code))
        self._arguments = LinearStructure(
            bias=None if self._bias is None else self._bias.data_ptr(),
            O=self.num_outputs, I=self.num_inputs, gate=gate or 0, dtype=TYPES[weight.dtype],
        )  # fmt: skip
        if code is None:
            self._weight = weight.clone()
            return
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        code.pagemill_linear_bytes.restype = ctypes.c_int64
        num_bytes = code.pagemill_linear_bytes(ctypes.byref(self._arguments))
        self._packed = (memory or WeightMemory(0)).allocate(num_bytes)
        self._arguments.weight = self._packed.data_ptr()
        self._pointer = ctypes.addressof(self._arguments)
        code.pagemill_linear_pack(
            ctypes.byref(self._arguments),
            ctypes.c_void_p(weight.data_ptr()),
            ctypes.c_int64(weight.stride(0)),
            ctypes.c_void_p(self._packed.data_ptr()),
            ctypes.c_int64(cpu_threads.num_threads()),
        )

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
        """Return the product. Shapes: x [T, I], out and returned [T, O], of the weight's dtype.

        Raises: ValueError if `x` or `out` is not so, or its rows are not contiguous.
        """
        check_rows_of("x", x, self.num_inputs, self._dtype)
        out = empty_or(out, x, self.num_outputs)
        if self._call is None:
            return self._in_torch(x, out)
        T = len(x)
        status = self._call(
            self._pointer, x.data_ptr(), x.stride(0), T, out.data_ptr(), out.stride(0),
            cpu_threads.num_threads(),
        )  # fmt: skip
        if status:
            raise MemoryError(f"no memory for {T} rows of {self.num_inputs}")
        return out

    def _in_torch(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        product = functional.linear(x, self._weight, self._bias)  # type: ignore[arg-type] # is there without code
        if self._arguments.gate:
            activation = Activation(self._arguments.gate)
            product = reference_layers.activate_and_mul(product, activation)
        return out.copy_(product)


def check_rows_of(name: str, x: torch.Tensor, width: int, dtype: torch.dtype) -> None:
    """Raises: ValueError unless `x` is [T, width] of `dtype`, each row contiguous."""
    if x.dim() != 2 or x.shape[1] != width or x.dtype != dtype or (len(x) and x.stride(1) != 1):
        raise ValueError(
            f"{name} is {list(x.shape)} {x.dtype} with strides {x.stride()}, "
            f"must be [T, {width}] {dtype}, each row contiguous"
        )


def empty_or(out: torch.Tensor | None, x: torch.Tensor, width: int) -> torch.Tensor:
    """Return `out`, or a new [T, width] if there is none.

    Raises: ValueError if `out` is not [T, width] of the dtype of `x`, each row contiguous.
    """
    if out is None:
        return x.new_empty((len(x), width))
    check_rows_of("out", out, width, x.dtype)
    if len(out) != len(x):
        raise ValueError(f"out has {len(out)} rows, x {len(x)}")
    return out


def _check(weight: torch.Tensor, bias: torch.Tensor | None, *, is_gated: bool) -> None:
    if weight.dim() != 2 or weight.device.type != "cpu" or 0 in weight.shape:
        raise ValueError(f"weight is {list(weight.shape)} on {weight.device}, must be [O, I]")
    if weight.dtype not in ACTIVATIONS:
        raise ValueError(f"weight is {weight.dtype}, must be one of {ACTIVATIONS}")
    if is_gated and weight.shape[0] % 2:
        raise ValueError(f"a gated weight is {list(weight.shape)}, must be [2 * O, I]")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
        raise ValueError(
            f"bias is {list(bias.shape)} {bias.dtype}, weight {list(weight.shape)} {weight.dtype}"
        )
