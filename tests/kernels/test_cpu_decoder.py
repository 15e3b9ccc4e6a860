"""All layers in one native call give, bit for bit, what the same kernels give one by one."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from kernels import cpu_layers
from kernels.activation import Activation
from kernels.cache_layout import layout
from kernels.checks import Scales, Store
from kernels.cpu_attention import attend
from kernels.cpu_build import native_code
from kernels.cpu_decoder import Decoder, DecoderGroup, DecoderLayer, DecoderStep, KVCaches
from kernels.native_linear import NativeLinear
from kernels.packed_linear import PackedLinear

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, BLOCK = 6, 2, 16, 48, 80, 4
EPS = 1e-5
POSITIONS = torch.tensor([0, 1, 2, 3, 4, 7, 2, 3])

pytestmark = pytest.mark.skipif(native_code() is None, reason="this machine compiles no C++")


class Layer:
    """One layer's random parameters; with those that only some families have."""

    def __init__(
        self, dtype: torch.dtype, draw: torch.Generator, parts: str = "", group: int = 0
    ) -> None:
        def weight(rows: int, columns: int) -> torch.Tensor:
            drawn = torch.randn(rows, columns, generator=draw)
            return drawn.div(columns**0.5).to(dtype)

        def norm(*shape: int) -> torch.Tensor:
            return torch.rand(shape, generator=draw).to(dtype) + 0.5

        self.attention_norm, self.mlp_norm = norm(HIDDEN), norm(HIDDEN)
        has_head_norms, has_norms_behind = parts in {"qwen3", "gemma3"}, parts == "gemma3"
        self.head_norms = norm(HEADS + KV_HEADS, HEAD_DIM) if has_head_norms else None
        self.after_attention_norm = norm(HIDDEN) if has_norms_behind else None
        self.after_mlp_norm = norm(HIDDEN) if has_norms_behind else None
        self.group = group
        gate = Activation.GELU if parts == "gemma3" else Activation.SILU
        self.qkv = PackedLinear(weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN))
        self.output = PackedLinear(weight(HIDDEN, HEADS * HEAD_DIM))
        self.gate_up = PackedLinear(weight(2 * INNER, HIDDEN), gate=gate)
        self.down = PackedLinear(weight(HIDDEN, INNER))

    def native(self) -> DecoderLayer:
        qkv, output, gate_up, down = map(native, (self.qkv, self.output, self.gate_up, self.down))
        return DecoderLayer(
            self.attention_norm, qkv, output, self.mlp_norm, gate_up, down,
            self.head_norms, self.after_attention_norm, self.after_mlp_norm, self.group,
        )  # fmt: skip


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
        group = step.groups[layer.group]
        qkv = layer.qkv(normed).view(len(hidden), -1, HEAD_DIM)
        if layer.head_norms is not None:
            cpu_layers.norm_heads(qkv[:, : HEADS + KV_HEADS], layer.head_norms, EPS)
        q, k, v = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
        store = Store(v, k_cache, v_cache, group.slot_mapping, scales)
        cpu_layers.rotary(q, k, *cpu_layers.turns(step.positions, group.frequencies), store)
        mixed = attend(
            q, k_cache, v_cache, group.block_tables, step.seq_lens, step.query_start_loc,
            step.scale or HEAD_DIM**-0.5, window=group.window, scales=scales,
        )  # fmt: skip
        added = layer.output(mixed.view(len(hidden), -1))
        if layer.after_attention_norm is not None:
            added = cpu_layers.rms_norm(added, layer.after_attention_norm, EPS)
        normed = cpu_layers.rms_norm(added, layer.mlp_norm, EPS, hidden)
        added = layer.down(layer.gate_up(normed))
        if layer.after_mlp_norm is not None:
            added = cpu_layers.rms_norm(added, layer.after_mlp_norm, EPS)
    assert added is not None
    return cpu_layers.rms_norm(added, norm, EPS, hidden)


def a_step(window: int | None, scale: float | None, block_size: int = BLOCK) -> DecoderStep:
    """Five new tokens, one behind seven, and two behind two; one token is not kept."""
    seq_lens = torch.tensor([5, 8, 4], dtype=torch.int32)
    starts = torch.tensor([0, 5, 6, 8], dtype=torch.int32)
    group = a_group(window, [[1, 2], [3, 4], [5, 0]], block_size)
    return DecoderStep([group], POSITIONS, seq_lens, starts, scale)


def a_group(
    window: int | None, blocks: list[list[int]], block_size: int, slowest: float = 0.01
) -> DecoderGroup:
    tables = torch.tensor(blocks, dtype=torch.int32)
    row = torch.tensor([0, 0, 0, 0, 0, 1, 2, 2])
    slots = tables[row, POSITIONS // block_size].long() * block_size + POSITIONS % block_size
    slots[4] = -1
    return DecoderGroup(torch.linspace(1, slowest, HEAD_DIM // 2), slots, tables, window)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", ["qwen3", "gemma3"])
@pytest.mark.parametrize("block_size", [BLOCK, 16])
def test_layers_differ_in_what_they_see_and_have_the_norms_of_their_family(
    parts: str, dtype: torch.dtype, block_size: int
) -> None:
    draw = torch.Generator().manual_seed(3)
    layers = [Layer(dtype, draw, parts, group) for group in (1, 0, 1)]
    norm = torch.rand(HIDDEN, generator=draw).to(dtype)
    step = a_step(None, 0.3, block_size)
    windowed = a_group(3, [[6, 7], [8, 2], [4, 0]], block_size, slowest=0.5)
    step = dataclasses.replace(step, groups=[*step.groups, windowed])
    kv, expected_kv = (caches(3, dtype, block_size=block_size) for _ in range(2))
    hidden = torch.randn(8, HIDDEN, generator=draw).to(dtype)
    expected = one_by_one(layers, norm, hidden.clone(), step, expected_kv)
    assert torch.equal(make_decoder(layers, norm).run(hidden, step, kv), expected)
    assert same(kv, expected_kv)


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


@pytest.mark.parametrize("read", [[], [0], [1, 2, 5], [4, 5, 7], list(range(8))])
@pytest.mark.parametrize("parts", ["", "gemma3"])
def test_tokens_that_are_read_are_as_if_all_were(parts: str, read: list[int]) -> None:
    draw = torch.Generator().manual_seed(6)
    layers = [Layer(torch.bfloat16, draw, parts) for _ in range(2)]
    norm = torch.rand(HIDDEN, generator=draw).to(torch.bfloat16)
    kv, expected_kv = caches(2, torch.bfloat16), caches(2, torch.bfloat16)
    hidden = torch.randn(8, HIDDEN, generator=draw).to(torch.bfloat16)
    step = a_step(3, None)
    expected = make_decoder(layers, norm).run(hidden.clone(), step, expected_kv)
    some = dataclasses.replace(step, read=torch.tensor(read, dtype=torch.int64))
    found = make_decoder(layers, norm).run(hidden, some, kv)
    assert torch.equal(found[read], expected[read])
    assert same(kv, expected_kv)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("read", [[], [0], [1, 2, 5], [4, 5, 7], list(range(8))])
def test_logits_of_tokens_that_are_read_are_those_of_a_head_by_itself(
    dtype: torch.dtype, read: list[int]
) -> None:
    draw = torch.Generator().manual_seed(7)
    layers = [Layer(dtype, draw) for _ in range(2)]
    norm = torch.rand(HIDDEN, generator=draw).to(dtype)
    head = PackedLinear(torch.randn(75, HIDDEN, generator=draw).to(dtype))
    decoder = make_decoder(layers, norm, head)
    step = dataclasses.replace(a_step(3, None), read=torch.tensor(read, dtype=torch.int64))
    # Twice, and once without logits between, which leaves nothing behind.
    for _ in range(2):
        hidden = torch.randn(8, HIDDEN, generator=draw).to(dtype)
        expected = decoder.run(hidden.clone(), step, caches(2, dtype))
        states, logits = decoder.run_to_logits(hidden, step, caches(2, dtype))
        assert torch.equal(states[read], expected[read])
        assert logits.dtype == torch.float32
        assert torch.equal(logits, cpu_layers.widen(head(expected[read])))


def same(first: KVCaches, second: KVCaches) -> bool:
    """Return whether caches hold the same bits."""
    return all(
        torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        for one, other in zip(first, second, strict=True)
        for ours, theirs in zip(one[:2], other[:2], strict=True)
    )


def make_decoder(
    layers: Sequence[Layer], norm: torch.Tensor, head: PackedLinear | None = None
) -> Decoder:
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
        head=None if head is None else native(head),
    )


def test_what_does_not_fit_is_refused_by_name() -> None:
    draw = torch.Generator().manual_seed(1)
    dtype = torch.float32
    layers, step, kv = [Layer(dtype, draw)], a_step(None, None), caches(1, dtype)
    decoder = make_decoder(layers, torch.ones(HIDDEN))
    with pytest.raises(ValueError, match="hidden is"):
        decoder.run(torch.zeros(8, HIDDEN + 1), step, kv)
    with pytest.raises(ValueError, match="positions is"):
        decoder.run(torch.zeros(7, HIDDEN), step, kv)
    with pytest.raises(ValueError, match="logits are of a head and of tokens that are read"):
        decoder.run_to_logits(torch.zeros(8, HIDDEN), step, kv)
    with pytest.raises(ValueError, match="the cache is"):
        decoder.run(torch.zeros(8, HIDDEN), step, caches(1, torch.bfloat16))
    with pytest.raises(ValueError, match="caches of 2 layers"):
        decoder.run(torch.zeros(8, HIDDEN), step, [*kv, *kv])
    with pytest.raises(ValueError, match="a norm is"):
        make_decoder(layers, torch.ones(HIDDEN + 8))
    twice = dataclasses.replace(step, groups=[*step.groups, *step.groups])
    with pytest.raises(ValueError, match="2 KV groups, must be 1"):
        decoder.run(torch.zeros(8, HIDDEN), twice, kv)
