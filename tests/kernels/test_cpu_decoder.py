"""All layers in one native call give, bit for bit, what the same kernels give one by one."""

from collections.abc import Sequence

import pytest
import torch

from kernels import cpu_layers
from kernels.checks import Scales, Store
from kernels.cache_layout import layout
from kernels.cpu_attention import attend
from kernels.cpu_build import native_code
from kernels.cpu_decoder import Decoder, DecoderLayer, DecoderStep, KVCaches
from kernels.native_linear import NativeLinear
from kernels.packed_linear import PackedLinear

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, BLOCK = 6, 2, 16, 48, 80, 4
EPS = 1e-5

pytestmark = pytest.mark.skipif(native_code() is None, reason="this machine compiles no C++")


class Layer:
    """One layer's random parameters."""

    def __init__(self, dtype: torch.dtype, draw: torch.Generator) -> None:
        def weight(rows: int, columns: int) -> torch.Tensor:
            drawn = torch.randn(rows, columns, generator=draw)
            return drawn.div(columns**0.5).to(dtype)

        self.attention_norm = torch.rand(HIDDEN, generator=draw).to(dtype) + 0.5
        self.mlp_norm = torch.rand(HIDDEN, generator=draw).to(dtype) + 0.5
        self.qkv = PackedLinear(weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN))
        self.output = PackedLinear(weight(HIDDEN, HEADS * HEAD_DIM))
        self.gate_up = PackedLinear(weight(2 * INNER, HIDDEN), is_gated=True)
        self.down = PackedLinear(weight(HIDDEN, INNER))

    def native(self) -> DecoderLayer:
        qkv, output, gate_up, down = map(native, (self.qkv, self.output, self.gate_up, self.down))
        return DecoderLayer(self.attention_norm, qkv, output, self.mlp_norm, gate_up, down)


def native(linear: PackedLinear) -> NativeLinear:
    assert linear.native is not None
    return linear.native


def caches(
    num_layers: int, dtype: torch.dtype, num_scales: int = 0, block_size: int = BLOCK
) -> KVCaches:
    """Return random caches; with scales of their own in each layer, if any."""
    shape = layout(9, block_size, KV_HEADS, HEAD_DIM, dtype, in_lanes=True)
    draw = torch.Generator().manual_seed(5)

    def one() -> tuple[torch.Tensor, torch.Tensor]:
        k_cache, v_cache = (torch.randn(of, generator=draw).to(dtype) for of in shape)
        return k_cache, v_cache

    def scales() -> Scales | None:
        if not num_scales:
            return None
        return Scales(*(torch.rand(num_scales, generator=draw) + 0.5 for _ in range(2)))

    return [(*one(), scales()) for _ in range(num_layers)]


def one_by_one(
    layers: Sequence[Layer],
    norm: torch.Tensor,
    hidden: torch.Tensor,
    step: DecoderStep,
    kv: KVCaches,
) -> torch.Tensor:
    added: torch.Tensor | None = None
    for layer, (k_cache, v_cache, scales) in zip(layers, kv, strict=True):
        residual = None if added is None else hidden
        x = hidden if added is None else added
        normed = cpu_layers.rms_norm(x, layer.attention_norm, EPS, residual)
        qkv = layer.qkv(normed).view(len(hidden), -1, HEAD_DIM)
        q, k, v = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
        store = Store(v, k_cache, v_cache, step.slot_mapping, scales)
        cpu_layers.rotary(q, k, step.cos, step.sin, store)
        mixed = attend(
            q, k_cache, v_cache, step.block_tables, step.seq_lens, step.query_start_loc,
            step.scale or HEAD_DIM**-0.5, window=step.window, scales=scales,
        )  # fmt: skip
        added = layer.output(mixed.view(len(hidden), -1))
        normed = cpu_layers.rms_norm(added, layer.mlp_norm, EPS, hidden)
        added = layer.down(layer.gate_up(normed))
    assert added is not None
    return cpu_layers.rms_norm(added, norm, EPS, hidden)


def a_step(window: int | None, scale: float | None, block_size: int = BLOCK) -> DecoderStep:
    """Five new tokens, one behind seven, and two behind two; one token is not kept."""
    positions = torch.tensor([0, 1, 2, 3, 4, 7, 2, 3])
    angles = positions[:, None].float() * torch.linspace(1, 0.01, HEAD_DIM // 2)
    tables = torch.tensor([[1, 2], [3, 4], [5, 0]], dtype=torch.int32)
    row = torch.tensor([0, 0, 0, 0, 0, 1, 2, 2])
    slots = tables[row, positions // block_size].long() * block_size + positions % block_size
    slots[4] = -1
    return DecoderStep(
        angles.cos(),
        angles.sin(),
        slots,
        tables,
        torch.tensor([5, 8, 4], dtype=torch.int32),
        torch.tensor([0, 5, 6, 8], dtype=torch.int32),
        window,
        scale,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("window", "scale"), [(None, None), (3, 0.4)])
@pytest.mark.parametrize("block_size", [BLOCK, 16])  # in rows, and in lanes
def test_layers_in_one_call_equal_layers_one_by_one(
    dtype: torch.dtype, window: int | None, scale: float | None, block_size: int
) -> None:
    draw = torch.Generator().manual_seed(1)
    layers = [Layer(dtype, draw) for _ in range(3)]
    norm = torch.rand(HIDDEN, generator=draw).to(dtype)
    decoder = make_decoder(layers, norm)
    step = a_step(window, scale, block_size)
    kv, expected_kv = (caches(3, dtype, block_size=block_size) for _ in range(2))
    # Twice, so that memory between operations is used again, and with other caches.
    for _ in range(2):
        hidden = torch.randn(8, HIDDEN, generator=draw).to(dtype)
        expected = one_by_one(layers, norm, hidden.clone(), step, expected_kv)
        assert torch.equal(decoder.run(hidden, step, kv), expected)
        assert same(kv, expected_kv)
        kv, expected_kv = (caches(3, dtype, block_size=block_size) for _ in range(2))


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("num_scales", [0, 1, KV_HEADS])
def test_fp8_caches_have_scales_of_their_own_in_each_layer(
    kv_dtype: torch.dtype, num_scales: int
) -> None:
    draw = torch.Generator().manual_seed(2)
    layers = [Layer(torch.bfloat16, draw) for _ in range(3)]
    norm = torch.rand(HIDDEN, generator=draw).to(torch.bfloat16)
    kv, expected_kv = (caches(3, kv_dtype, num_scales) for _ in range(2))
    step = a_step(None, None)
    hidden = torch.randn(8, HIDDEN, generator=draw).to(torch.bfloat16)
    expected = one_by_one(layers, norm, hidden.clone(), step, expected_kv)
    assert torch.equal(make_decoder(layers, norm).run(hidden, step, kv), expected)
    assert same(kv, expected_kv)


def same(first: KVCaches, second: KVCaches) -> bool:
    """Return whether caches hold the same bits."""
    return all(
        torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        for one, other in zip(first, second, strict=True)
        for ours, theirs in zip(one[:2], other[:2], strict=True)
    )


def make_decoder(layers: Sequence[Layer], norm: torch.Tensor) -> Decoder:
    code = native_code()
    assert code is not None
    return Decoder(
        [layer.native() for layer in layers],
        norm,
        eps=EPS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        code=code,
    )


def test_what_does_not_fit_is_refused_by_name() -> None:
    draw = torch.Generator().manual_seed(1)
    dtype = torch.float32
    layers, step, kv = [Layer(dtype, draw)], a_step(None, None), caches(1, dtype)
    decoder = make_decoder(layers, torch.ones(HIDDEN))
    with pytest.raises(ValueError, match="hidden is"):
        decoder.run(torch.zeros(8, HIDDEN + 1), step, kv)
    with pytest.raises(ValueError, match="cos is"):
        decoder.run(torch.zeros(7, HIDDEN), step, kv)
    with pytest.raises(ValueError, match="the cache is"):
        decoder.run(torch.zeros(8, HIDDEN), step, caches(1, torch.bfloat16))
    with pytest.raises(ValueError, match="caches of 2 layers"):
        decoder.run(torch.zeros(8, HIDDEN), step, [*kv, *kv])
    with pytest.raises(ValueError, match="a norm is"):
        make_decoder(layers, torch.ones(HIDDEN + 8))
