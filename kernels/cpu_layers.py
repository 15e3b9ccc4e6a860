"""What stands around attention on a CPU, in native code: rotary and store, norm, activation."""

import ctypes

import torch

from kernels import cache_layout, cpu_threads, reference_layers
from kernels.checks import (
    ACTIVATIONS,
    Store,
    check_contiguous,
    check_device,
    check_rows,
    check_store,
)
from kernels.cpu_build import TYPES, native_code
from kernels.reference_attention import quantise


def _structure(name: str, pointers: str, numbers: str, reals: str = "") -> type[ctypes.Structure]:
    """Return the twin of a structure of kernels/cpu/layers.h."""
    fields = [
        *((field, ctypes.c_void_p) for field in pointers.split()),
        *((field, ctypes.c_int64) for field in numbers.split()),
        *((field, ctypes.c_double) for field in reals.split()),
    ]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


RotaryArguments = _structure(
    "Rotary",
    "q k v cos sin k_cache v_cache slot_mapping k_scale v_scale",
    "q_stride k_stride v_stride scale_stride T H G D S in_lanes dtype kv_dtype num_threads",
)
_Turns = _structure("Turns", "positions frequencies cos sin", "T half num_threads")
_RmsNorm = _structure("RmsNorm", "x weight residual out", "x_stride T E dtype num_threads", "eps")
_NormHeads = _structure("NormHeads", "x weight", "x_stride T H D dtype num_threads", "eps")
_SiluAndMul = _structure("SiluAndMul", "gate_up out", "stride T I dtype num_threads")
_Widen = _structure("Widen", "x out", "count dtype num_threads")


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    store: Store | None = None,
    *,
    code: ctypes.CDLL | None = None,
) -> None:
    """Do what `kernels.rotary.rotary` does, for head dimensions of any multiple of 8.

    A cache may be in lanes, where a key is written 32 bits in each 64 bytes.

    Raises: ValueError if a shape, layout or dtype is not as there. Slots are not read.
    """
    T, H, D = q.shape
    G = k.shape[1]
    if D % 8 or q.dtype not in ACTIVATIONS:
        raise ValueError(f"q is {list(q.shape)} {q.dtype}; D must be a multiple of 8")
    if k.shape != (T, G, D) or k.dtype != q.dtype:
        raise ValueError(f"q {list(q.shape)} {q.dtype} and k {list(k.shape)} {k.dtype} disagree")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape != (T, D // 2) or table.dtype != torch.float32:
            raise ValueError(
                f"{name} is {list(table.shape)} {table.dtype}, must be [{T}, {D // 2}] float32"
            )
    check_rows("q", q)
    check_rows("k", k)
    check_contiguous(cos=cos, sin=sin)
    check_device(q, k=k, cos=cos, sin=sin)
    if store is not None:
        check_store(store, k, tiled=False)
        check_contiguous(slot_mapping=store.slot_mapping)
    code = code or native_code()
    if code is None:
        return _rotary_in_torch(q, k, cos, sin, store)
    if T == 0:
        return None
    arguments = RotaryArguments(
        q=q.data_ptr(), k=k.data_ptr(), cos=cos.data_ptr(), sin=sin.data_ptr(),
        q_stride=q.stride(0), k_stride=k.stride(0), T=T, H=H, G=G, D=D,
        dtype=TYPES[q.dtype], kv_dtype=TYPES[q.dtype], num_threads=cpu_threads.num_threads(),
    )  # fmt: skip
    if store is not None:
        arguments.v = store.v.data_ptr()
        arguments.v_stride = store.v.stride(0)
        arguments.k_cache = store.k_cache.data_ptr()
        arguments.v_cache = store.v_cache.data_ptr()
        arguments.slot_mapping = store.slot_mapping.data_ptr()
        arguments.kv_dtype = TYPES[store.k_cache.dtype]
        arguments.S = cache_layout.sizes(store.k_cache)[1]
        arguments.in_lanes = cache_layout.is_in_lanes(store.k_cache)
        if store.scales is not None:
            arguments.k_scale = store.scales.k.data_ptr()
            arguments.v_scale = store.scales.v.data_ptr()
            arguments.scale_stride = 0 if store.scales.k.shape[0] == 1 else 1
    code.pagemill_rotary(ctypes.byref(arguments))
    return None


def _rotary_in_torch(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, store: Store | None
) -> None:
    q.copy_(reference_layers.rotary(q, cos, sin))
    rotated = reference_layers.rotary(k, cos, sin)
    if store is None:
        k.copy_(rotated)
        return
    written = store.slot_mapping >= 0
    scales = store.scales
    k_cache, v_cache = cache_layout.to_rows(store.k_cache, store.v_cache)
    for cache, values, scale in (
        (k_cache, rotated, None if scales is None else scales.k),
        (v_cache, store.v, None if scales is None else scales.v),
    ):
        stored = quantise(values[written], scale, cache.dtype)
        cache.view(-1, *cache.shape[2:])[store.slot_mapping[written]] = stored
    if cache_layout.is_in_lanes(store.k_cache):
        for cache, whole in zip(
            (store.k_cache, store.v_cache), cache_layout.to_lanes(k_cache, v_cache), strict=True
        ):
            cache.copy_(whole)


def turns(
    positions: torch.Tensor, frequencies: torch.Tensor, *, code: ctypes.CDLL | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of positions times frequencies, for `rotary`.

    Shapes: positions [T] int64; frequencies [D / 2] fp32; returns [T, D / 2] fp32 each.

    Raises: ValueError if a shape, layout or dtype is not as above.
    """
    if positions.dim() != 1 or positions.dtype != torch.int64:
        raise ValueError(f"positions is {list(positions.shape)} {positions.dtype}, must be [T]")
    if frequencies.dim() != 1 or frequencies.dtype != torch.float32:
        raise ValueError(
            f"frequencies is {list(frequencies.shape)} {frequencies.dtype}, must be [D / 2] float32"
        )
    check_contiguous(positions=positions, frequencies=frequencies)
    check_device(positions, frequencies=frequencies)
    code = code or native_code()
    if code is None:
        angles = positions[:, None].float() * frequencies
        return angles.cos(), angles.sin()
    T, half = len(positions), len(frequencies)
    cos, sin = torch.empty((2, T, half))
    arguments = _Turns(
        positions=positions.data_ptr(), frequencies=frequencies.data_ptr(), cos=cos.data_ptr(),
        sin=sin.data_ptr(), T=T, half=half, num_threads=cpu_threads.num_threads(),
    )  # fmt: skip
    code.pagemill_turns(ctypes.byref(arguments))
    return cos, sin


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    code: ctypes.CDLL | None = None,
) -> torch.Tensor:
    """Do what `kernels.rms_norm.rms_norm` does, for tokens of any size.

    Raises: ValueError if a shape, layout or dtype is not as there.
    """
    if x.dim() != 2 or x.dtype not in ACTIVATIONS or x.shape[1] == 0:
        raise ValueError(f"x is {list(x.shape)} {x.dtype}, must be [T, E] of {ACTIVATIONS}")
    T, E = x.shape
    if weight.shape != (E,) or weight.dtype != x.dtype:
        raise ValueError(f"weight is {list(weight.shape)} {weight.dtype}, must be [{E}] {x.dtype}")
    if out is None:
        out = torch.empty((T, E), dtype=x.dtype)
    for name, tensor in (("residual", residual), ("out", out)):
        if tensor is None:
            continue
        if tensor.shape != x.shape or tensor.dtype != x.dtype:
            raise ValueError(f"{name} is {list(tensor.shape)} {tensor.dtype}, must be as x")
        check_contiguous(**{name: tensor})
        check_device(x, **{name: tensor})
    check_rows("x", x)
    check_contiguous(weight=weight)
    check_device(x, weight=weight)
    code = code or native_code()
    if code is None:
        if residual is not None:
            x = residual.add_(x)
        return out.copy_(reference_layers.rms_norm(x, weight, eps))
    arguments = _RmsNorm(
        x=x.data_ptr(), weight=weight.data_ptr(), out=out.data_ptr(), x_stride=x.stride(0),
        residual=None if residual is None else residual.data_ptr(),
        T=T, E=E, dtype=TYPES[x.dtype], num_threads=cpu_threads.num_threads(), eps=eps,
    )  # fmt: skip
    code.pagemill_rms_norm(ctypes.byref(arguments))
    return out


def norm_heads(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, code: ctypes.CDLL | None = None
) -> None:
    """Divide each head by its root mean square, and multiply by its weight, in place.

    Shapes: x [T, H, D], each token contiguous; weight [H, D], contiguous.

    Raises: ValueError if a shape, layout or dtype is not as above.
    Numerics: in fp32, rounded once.
    """
    if x.dim() != 3 or x.dtype not in ACTIVATIONS or 0 in x.shape[1:]:
        raise ValueError(f"x is {list(x.shape)} {x.dtype}, must be [T, H, D] of {ACTIVATIONS}")
    T, H, D = x.shape
    if weight.shape != (H, D) or weight.dtype != x.dtype:
        raise ValueError(
            f"weight is {list(weight.shape)} {weight.dtype}, must be [{H}, {D}] {x.dtype}"
        )
    check_rows("x", x)
    check_contiguous(weight=weight)
    check_device(x, weight=weight)
    code = code or native_code()
    if code is None:
        x.copy_(reference_layers.norm_heads(x, weight, eps))
        return
    arguments = _NormHeads(
        x=x.data_ptr(), weight=weight.data_ptr(), x_stride=x.stride(0), T=T, H=H, D=D,
        dtype=TYPES[x.dtype], num_threads=cpu_threads.num_threads(), eps=eps,
    )  # fmt: skip
    code.pagemill_norm_heads(ctypes.byref(arguments))


def silu_and_mul(
    gate_up: torch.Tensor, out: torch.Tensor | None = None, *, code: ctypes.CDLL | None = None
) -> torch.Tensor:
    """Do what `kernels.silu_and_mul.silu_and_mul` does.

    Raises: ValueError if a shape, layout or dtype is not as there.
    """
    arguments, out = _activation(gate_up, out)
    code = code or native_code()
    if code is None:
        return out.copy_(reference_layers.silu_and_mul(gate_up))
    code.pagemill_silu_and_mul(ctypes.byref(arguments))
    return out


def gelu_and_mul(
    gate_up: torch.Tensor, out: torch.Tensor | None = None, *, code: ctypes.CDLL | None = None
) -> torch.Tensor:
    """Return gelu(gate) * up, gelu by its approximation with tanh. Otherwise as `silu_and_mul`."""
    arguments, out = _activation(gate_up, out)
    code = code or native_code()
    if code is None:
        return out.copy_(reference_layers.gelu_and_mul(gate_up))
    code.pagemill_gelu_and_mul(ctypes.byref(arguments))
    return out


def widen(x: torch.Tensor, *, code: ctypes.CDLL | None = None) -> torch.Tensor:
    """Return x in fp32, exactly. Shape: any; what is fp32 already is returned as it is.

    Not torch's conversion: its OpenMP threads wake for it, and spin on behind it on cores that the
    threads of native code need.

    Raises: ValueError if `x` is not fp32, bf16 or fp16, contiguous, on a CPU.
    """
    if x.dtype not in ACTIVATIONS:
        raise ValueError(f"x is {x.dtype}, must be float32, bfloat16 or float16")
    check_contiguous(x=x)
    if x.device.type != "cpu":
        raise ValueError(f"x is on {x.device}, must be on a CPU")
    code = code or native_code()
    if x.dtype == torch.float32 or code is None:
        return x.float()
    out = torch.empty_like(x, dtype=torch.float32)
    arguments = _Widen(
        x=x.data_ptr(), out=out.data_ptr(), count=x.numel(), dtype=TYPES[x.dtype],
        num_threads=cpu_threads.num_threads(),
    )  # fmt: skip
    code.pagemill_widen(ctypes.byref(arguments))
    return out


def _activation(
    gate_up: torch.Tensor, out: torch.Tensor | None
) -> tuple[ctypes.Structure, torch.Tensor]:
    """Check what an activation is given; return it for native code, and where the result goes."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.dtype not in ACTIVATIONS:
        raise ValueError(f"gate_up is {list(gate_up.shape)} {gate_up.dtype}, must be [T, 2 * I]")
    T, I = gate_up.shape[0], gate_up.shape[1] // 2  # noqa: E741
    if out is None:
        out = torch.empty((T, I), dtype=gate_up.dtype)
    if out.shape != (T, I) or out.dtype != gate_up.dtype:
        raise ValueError(f"out is {list(out.shape)} {out.dtype}, must be [{T}, {I}]")
    check_rows("gate_up", gate_up)
    check_contiguous(out=out)
    check_device(gate_up, out=out)
    arguments = _SiluAndMul(
        gate_up=gate_up.data_ptr(), out=out.data_ptr(), stride=gate_up.stride(0), T=T, I=I,
        dtype=TYPES[gate_up.dtype], num_threads=cpu_threads.num_threads(),
    )  # fmt: skip
    return arguments, out
