"""A mixture of experts on a CPU, in native code (kernels/cpu/experts.h)."""

import ctypes
from collections.abc import Sequence

import torch

from kernels import cpu_threads
from kernels.cpu_build import TYPES
from kernels.native_linear import AnyLinear, NativeLinear, native_linear
from kernels.packed_linear import PROTOTYPE, check_rows_of


class _Experts(ctypes.Structure):
    _fields_ = (
        ("router", AnyLinear),
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("E", "X", "K", "sums_to_one", "dtype")),
    )


class CpuExperts:
    """Each token's weighted sum of the K gated MLPs that a router finds likeliest.

    Shapes: [T, E] to [T, E]; of X experts, the router is [E] to [X].
    Numerics: probabilities, and the sum over experts, in fp32; that is rounded once. Of equal
        logits the lower expert's counts as larger.
    Cost: each expert that is chosen at all is read once.
    """

    __slots__ = ("_arguments", "_call", "_dtype", "_hidden_size", "_owners", "_pointers")

    def __init__(
        self,
        router: NativeLinear,
        experts: Sequence[tuple[NativeLinear, NativeLinear]],
        *,
        num_chosen: int,
        sums_to_one: bool,
        owners: object,
        code: ctypes.CDLL,
    ) -> None:
        """Take the router, and each expert's MLP: gate and up, and what brings them back.

        `owners` are kept: they hold the layers.

        Raises: ValueError if sizes or dtypes do not fit one another.
        """
        self._owners = owners
        self._hidden_size, self._dtype = router.num_inputs, router.dtype
        _check(router, experts, num_chosen)
        self._pointers = tuple(
            (AnyLinear * len(experts))(*(AnyLinear.of(expert[part]) for expert in experts))
            for part in (0, 1)
        )
        gate_up, down = map(ctypes.addressof, self._pointers)
        self._arguments = _Experts(
            AnyLinear.of(router), gate_up, down, self._hidden_size, len(experts), num_chosen,
            sums_to_one, TYPES[self._dtype],
        )  # fmt: skip
        self._call = PROTOTYPE(("pagemill_experts", code))

    @property
    def native(self) -> NativeLinear | None:
        """How native code calls it."""
        return native_linear(
            self._call, self._arguments, self._hidden_size, self._hidden_size, self._dtype
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sums. Shapes: x, returns [T, E].

        Raises: ValueError if `x` is not so, or its rows are not contiguous; MemoryError.
        """
        check_rows_of("x", x, self._hidden_size, self._dtype)
        out = torch.empty((len(x), self._hidden_size), dtype=self._dtype)
        status = self._call(
            ctypes.addressof(self._arguments), x.data_ptr(), x.stride(0), len(x), out.data_ptr(),
            out.stride(0), cpu_threads.num_threads(),
        )  # fmt: skip
        if status:
            raise MemoryError(f"no memory for {len(x)} tokens")
        return out


def _check(
    router: NativeLinear, experts: Sequence[tuple[NativeLinear, NativeLinear]], num_chosen: int
) -> None:
    size, dtype = router.num_inputs, router.dtype
    if router.num_outputs != len(experts):
        raise ValueError(f"the router has {router.num_outputs} outputs for {len(experts)} experts")
    if not 1 <= num_chosen <= len(experts):
        raise ValueError(f"num_chosen is {num_chosen}, must be 1 to {len(experts)}")
    for number, (gate_up, down) in enumerate(experts):
        sizes = (gate_up.num_inputs, gate_up.num_outputs, down.num_inputs, down.num_outputs)
        inner = gate_up.num_outputs
        if sizes != (size, inner, inner, size) or {gate_up.dtype, down.dtype} != {dtype}:
            raise ValueError(
                f"expert {number} is {sizes[:2]} {gate_up.dtype}, {sizes[2:]} {down.dtype}, "
                f"must be {(size, inner)}, {(inner, size)} {dtype}"
            )
