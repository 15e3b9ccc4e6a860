"""All layers of a decoder in one native call, on a CPU (kernels/cpu/decoder.h)."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kernels import cache_layout, cpu_threads
from kernels.adapted_linear import AdaptedTokens, check_status
from kernels.checks import ACTIVATIONS, Scales, check_cache, check_contiguous
from kernels.cpu_attention import AttentionArguments
from kernels.cpu_build import TYPES
from kernels.cpu_layers import RotaryArguments
from kernels.huge_pages import huge_tensor
from kernels.native_linear import AnyLinear, NativeLinear

KVCaches = Sequence[tuple[torch.Tensor, torch.Tensor, Scales | None]]
"""Per layer, keys and values in rows or in lanes, and the scales of an fp8 cache."""


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """What one layer is made of; None: its family has no such part. Shapes: the norms [E]."""

    attention_norm: torch.Tensor
    qkv: NativeLinear
    """[E] to [(H + 2 * G) * D]: queries, keys, values."""

    output: NativeLinear
    mlp_norm: torch.Tensor
    gate_up: NativeLinear | None
    """[E] to [I], gated. None: `down` is all of the MLP, [E] to [E]."""

    down: NativeLinear
    head_norms: torch.Tensor | None = None
    """[H + G, D]: what queries and keys are normalised by, head by head, before they turn."""

    after_attention_norm: torch.Tensor | None = None
    """Of what attention gave, before it is added."""

    after_mlp_norm: torch.Tensor | None = None
    group: int = 0
    """Number of the KV group."""


@dataclass(frozen=True, slots=True, eq=False)
class DecoderGroup:
    """How a step's tokens turn in the layers of a KV group, and what they read there."""

    frequencies: torch.Tensor
    """[D / 2] fp32: what positions are multiplied by. Groups that turn alike share one."""

    slot_mapping: torch.Tensor
    """[T] int64; -1 writes nothing."""

    block_tables: torch.Tensor
    """[R, B] int32"""

    window: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DecoderStep:
    """A step's rows; as `kernels.cpu_attention.attend` has them."""

    groups: Sequence[DecoderGroup]
    """As many as layers have numbers of."""

    positions: torch.Tensor
    """[T] int64"""

    seq_lens: torch.Tensor
    """[R] int32"""

    query_start_loc: torch.Tensor
    """[R + 1] int32"""

    scale: float | None = None
    """None: D ** -0.5."""

    read: torch.Tensor | None = None
    """[P] int64, ascending: the tokens whose hidden states are read. None: all are."""


class _Layer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        *((name, AnyLinear) for name in ("qkv", "output", "gate_up", "down")),
        ("head_norms", ctypes.c_void_p),
        ("after_attention_norm", ctypes.c_void_p),
        ("after_mlp_norm", ctypes.c_void_p),
        ("group", ctypes.c_int64),
    )


class _Group(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "frequencies", "cos", "sin", "slot_mapping", "block_tables",
        )),
        ("table_stride", ctypes.c_int64),
        ("window", ctypes.c_int64),
    )  # fmt: skip


class _Decoder(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "layers", "groups", "positions", "caches", "scales", "last_norm", "hidden", "out",
            "read", "normed", "added", "qkv", "mixed", "inner", "scores", "logits",
        )),
        *((name, ctypes.c_int64) for name in (
            "num_read", "num_layers", "num_groups", "E", "inner_stride", "itemsize",
        )),
        ("eps", ctypes.c_double),
        ("rotary", RotaryArguments),
        ("attention", AttentionArguments),
        ("adapted", ctypes.c_void_p),
        ("head", AnyLinear),
    )  # fmt: skip


_LINE_BYTES: Final = 64


class Decoder:
    """Runs tokens through layers of one shape: norms, attention, gated MLPs, residual sums.

    With a head, it finds logits, too.

    Results have the memory of those before where these were alike: a tensor that torch makes lets
    go of the interpreter's lock, and a thread that has the next plan to decode, or a result to
    send, then has it for 0.3 ms in front of a step, instead of beside it (Zen 4, 1 row).
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        last_norm: torch.Tensor,
        *,
        eps: float,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        code: ctypes.CDLL,
        adapted: AdaptedTokens | None = None,
        head: NativeLinear | None = None,
    ) -> None:
        """Take `adapted` if there are layers that adapters change: those of its tokens.

        Shapes: last_norm [E]; head [E] to [V].

        Raises: ValueError if a norm or a linear layer is not as native code wants it.
        """
        self._head_norms_shape = (num_heads + num_kv_heads, head_dim)
        # Whose memory the structures point to.
        self._parts = (tuple(layers), last_norm, adapted, head)
        self._code = code
        self._dtype = last_norm.dtype
        self._hidden_size = len(last_norm)
        if self._dtype not in ACTIVATIONS or head_dim % 8:
            raise ValueError(f"{self._dtype}, heads of {head_dim}; must be {ACTIVATIONS}, 8 * n")
        self._layers = (_Layer * len(layers))(*map(self._layer, layers))
        self._groups = (_Group * (1 + max(layer.group for layer in layers)))()
        self._widths = (
            self._hidden_size,
            self._hidden_size,
            (num_heads + 2 * num_kv_heads) * head_dim,
            num_heads * head_dim,
            _apart(max(layer.gate_up.O for layer in self._layers), self._dtype),
        )
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._out = self._logits = torch.empty(0)
        self._caches: KVCaches = ()
        self._cache_pointers = (ctypes.c_void_p * 0)()
        self._scale_pointers = (ctypes.c_void_p * 0)()
        self._arguments = _Decoder(
            layers=ctypes.addressof(self._layers),
            groups=ctypes.addressof(self._groups),
            last_norm=self._norm(last_norm),
            num_layers=len(layers),
            num_groups=len(self._groups),
            E=self._hidden_size,
            inner_stride=self._widths[-1],
            itemsize=self._dtype.itemsize,
            eps=eps,
            adapted=None if adapted is None else adapted.address,
            head=AnyLinear.of(head),
        )
        rotary, attention = self._arguments.rotary, self._arguments.attention
        for shape in (rotary, attention):
            shape.H, shape.G, shape.D = num_heads, num_kv_heads, head_dim
            shape.dtype = TYPES[self._dtype]
        self._head_dim = head_dim

    def run(self, hidden: torch.Tensor, step: DecoderStep, caches: KVCaches) -> torch.Tensor:
        """Return the normalised hidden state of each token, and write its keys and values.

        What is returned holds until the next call, which may overwrite it. Of tokens that are not
        read the hidden state is undefined. In each layer all tokens store before any attends.
        Values of columns are not read.

        Shapes: hidden [T, E], overwritten; caches: per layer, in rows or in lanes
            (`cache_layout`), of its dtype or fp8, all alike; returns [T, E].

        Raises: ValueError if a shape or dtype is not so, or adapters were told of another number
            of tokens; MemoryError.
        """
        return self._run(hidden, step, caches, 0)[0]

    def run_to_logits(
        self, hidden: torch.Tensor, step: DecoderStep, caches: KVCaches
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `run` does, and the logits of the tokens read, in fp32: [P, V].

        Raises: ValueError as `run`, or if it has no head, or the step names no tokens.
        """
        if not self._arguments.head.O or step.read is None:
            raise ValueError("logits are of a head and of tokens that are read, some is missing")
        return self._run(hidden, step, caches, len(step.read))

    def _run(
        self, hidden: torch.Tensor, step: DecoderStep, caches: KVCaches, num_logits: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        T = len(hidden)
        self._check(hidden, step)
        if (T, num_logits) != (len(self._out), len(self._logits)):
            self._take_results(T, num_logits)
        if T == 0:
            return self._out, self._logits
        self._arguments.hidden = hidden.data_ptr()
        if caches is not self._caches:
            self._take_caches(caches)
        self._place(step, T)
        self._lay_out_scratch(T, num_logits)
        check_status(self._code.pagemill_decoder(ctypes.byref(self._arguments)), T)
        return self._out, self._logits

    def _take_results(self, T: int, num_logits: int) -> None:
        """Make new tensors for what is returned: those before may be somebody's still."""
        arguments = self._arguments
        self._out = torch.empty((T, self._hidden_size), dtype=self._dtype)
        self._logits = torch.empty((num_logits, arguments.head.O), dtype=torch.float32)
        arguments.out = self._out.data_ptr()
        arguments.logits = self._logits.data_ptr() if num_logits else None

    def _place(self, step: DecoderStep, T: int) -> None:
        self._arguments.positions = step.positions.data_ptr()
        rotary, attention = self._arguments.rotary, self._arguments.attention
        rotary.T, rotary.num_threads = T, cpu_threads.num_threads()
        attention.num_threads = rotary.num_threads
        attention.R = len(step.seq_lens)
        attention.seq_lens = step.seq_lens.data_ptr()
        attention.query_start_loc = step.query_start_loc.data_ptr()
        attention.scale = step.scale or self._head_dim**-0.5
        read, arguments = step.read, self._arguments
        arguments.read = None if read is None else read.data_ptr()
        arguments.num_read = 0 if read is None else len(read)
        for place, group in zip(self._groups, step.groups, strict=True):
            place.frequencies = group.frequencies.data_ptr()
            place.slot_mapping = group.slot_mapping.data_ptr()
            place.block_tables = group.block_tables.data_ptr()
            place.table_stride = group.block_tables.stride(0)
            place.window = group.window or 0

    def _layer(self, layer: DecoderLayer) -> _Layer:
        linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
        return _Layer(
            self._norm(layer.attention_norm),
            self._norm(layer.mlp_norm),
            *(AnyLinear.of(one) for one in linears),
            self._norm(layer.head_norms, self._head_norms_shape),
            self._norm(layer.after_attention_norm),
            self._norm(layer.after_mlp_norm),
            layer.group,
        )

    def _norm(
        self, weight: torch.Tensor | None, shape: tuple[int, ...] | None = None
    ) -> int | None:
        """Return where a norm is, if there is one. Shape: [E], if none is given."""
        if weight is None:
            return None
        shape = shape or (self._hidden_size,)
        if weight.shape != shape or weight.dtype != self._dtype:
            raise ValueError(
                f"a norm is {list(weight.shape)} {weight.dtype}, must be {list(shape)} "
                f"{self._dtype}"
            )
        check_contiguous(norm=weight)
        return weight.data_ptr()

    def _lay_out_scratch(self, T: int, num_logits: int) -> None:
        """Give each tensor between operations its place, in memory that is kept for the next."""
        itemsize, turns = self._dtype.itemsize, T * self._head_dim // 2 * 4
        arguments, groups = self._arguments, self._groups
        sizes = [T * width * itemsize for width in self._widths]
        widened = self._dtype != torch.float32
        sizes.append(num_logits * arguments.head.O * itemsize if widened else 0)
        sizes.extend([turns] * (2 * len(groups)))
        sizes = [-(-size // _LINE_BYTES) * _LINE_BYTES for size in sizes]
        if sum(sizes) > self._scratch.nbytes:
            self._scratch = huge_tensor((2 * sum(sizes),), torch.uint8)
        at = self._scratch.data_ptr()
        places = []
        for size in sizes:
            places.append(at)
            at += size
        (
            arguments.normed, arguments.added, arguments.qkv, arguments.mixed, arguments.inner,
            arguments.scores, *angles,
        ) = places  # fmt: skip
        if not widened:
            arguments.scores = arguments.logits
        first_of: dict[int, int] = {}
        for number, group in enumerate(groups):
            alike = first_of.setdefault(group.frequencies, number)
            group.cos, group.sin = angles[2 * alike], angles[2 * alike + 1]

    def _take_caches(self, caches: KVCaches) -> None:
        rotary, attention = self._arguments.rotary, self._arguments.attention
        if len(caches) != len(self._layers):
            raise ValueError(f"caches of {len(caches)} layers, must be {len(self._layers)}")
        first, _, first_scales = caches[0]
        N, S, _, _ = cache_layout.sizes(first)
        shape = (N, S, attention.G, attention.D)
        for k_cache, v_cache, scales in caches:
            check_cache(k_cache, v_cache, self._dtype, scales, tiled=False)
            unlike = k_cache.shape != first.shape or k_cache.dtype != first.dtype
            if unlike or cache_layout.sizes(k_cache) != shape:
                raise ValueError(
                    f"a cache is {list(k_cache.shape)} {k_cache.dtype}, must be {list(shape)} "
                    f"{first.dtype} in all layers"
                )
            if _num_scales(scales) != _num_scales(first_scales):
                raise ValueError("scales are of one number in all layers, or there are none")
        self._caches = caches
        self._cache_pointers = _addresses([t for k, v, _ in caches for t in (k, v)])
        of_layers = [scales for _, _, scales in caches if scales is not None]
        self._scale_pointers = _addresses([t for scales in of_layers for t in (scales.k, scales.v)])
        self._arguments.caches = ctypes.addressof(self._cache_pointers)
        self._arguments.scales = ctypes.addressof(self._scale_pointers) if of_layers else None
        for part in (rotary, attention):
            part.S = S
            part.in_lanes = cache_layout.is_in_lanes(first)
            part.kv_dtype = TYPES[first.dtype]
            part.scale_stride = 0 if _num_scales(first_scales) == 1 else 1
            part.k_scale = part.v_scale = None

    def _check(self, hidden: torch.Tensor, step: DecoderStep) -> None:
        T, R = len(hidden), len(step.seq_lens)
        if hidden.shape != (T, self._hidden_size) or hidden.dtype != self._dtype:
            raise ValueError(
                f"hidden is {list(hidden.shape)} {hidden.dtype}, must be [T, {self._hidden_size}] "
                f"{self._dtype}"
            )
        if len(step.groups) != len(self._groups):
            raise ValueError(f"{len(step.groups)} KV groups, must be {len(self._groups)}")
        check_contiguous(hidden=hidden)
        _check_column("seq_lens", step.seq_lens, (R,), torch.int32)
        _check_column("query_start_loc", step.query_start_loc, (R + 1,), torch.int32)
        if step.read is not None:
            _check_column("read", step.read, (len(step.read),), torch.int64)
        _check_column("positions", step.positions, (T,), torch.int64)
        for group in step.groups:
            tables, half = group.block_tables, self._head_dim // 2
            _check_column("frequencies", group.frequencies, (half,), torch.float32)
            _check_column("slot_mapping", group.slot_mapping, (T,), torch.int64)
            _check_column("block_tables", tables, (R, tables.shape[-1]), torch.int32)


def _check_column(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {list(tensor.shape)} {tensor.dtype}, must be {list(shape)} {dtype}, "
            f"contiguous"
        )


def _apart(width: int, dtype: torch.dtype) -> int:
    """Return how far rows of so many elements stand apart.

    A multiple of 1 KiB would crowd them into a few lines of the first cache; rows a multiple of 2
    KiB apart, a linear layer would copy (linear.h).
    """
    return width if width * dtype.itemsize % 1024 else width + _LINE_BYTES // dtype.itemsize


def _num_scales(scales: Scales | None) -> int:
    return 0 if scales is None else len(scales.k)


def _addresses(tensors: Sequence[torch.Tensor]) -> "ctypes.Array[ctypes.c_void_p]":
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
