"""The table serves what it says, refuses the rest by name, and tells why."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import cost
from kernels.dispatch import Case, WeightCase, cascade_pays, choose, why_not_kept

H200 = Case("cuda", "sm_90", torch.bfloat16, torch.bfloat16, 128, 16)
CPU = dataclasses.replace(H200, device="cpu", target="")


def test_a_gpu_is_served_by_triton_and_a_cpu_by_native_code_with_the_reason() -> None:
    assert str(choose(H200)) == "attention backend triton"
    assert str(choose(CPU)) == (
        "attention backend native (not triton: the device is cpu, Triton needs a GPU)"
    )


def test_without_a_compiler_torch_serves_a_cpu_and_the_price_is_named() -> None:
    choice = choose(dataclasses.replace(CPU, no_native_code="there is no C++ compiler (g++)"))
    assert choice.name == "torch"
    assert str(choice).endswith(
        "not native: there is no C++ compiler (g++); decoding takes some ten times as long)"
    )


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("head_dim", [8, 24, 72, 128])
def test_native_code_serves_any_block_size_and_any_multiple_of_eight(
    head_dim: int, block_size: int
) -> None:
    case = dataclasses.replace(CPU, head_dim=head_dim, block_size=block_size)
    assert choose(case, "native").name == "native"
    with pytest.raises(ValueError, match="native cannot serve: head_dim is 20, must be a multiple"):
        choose(dataclasses.replace(case, head_dim=20), "native")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"head_dim": 72}, "head_dim is 72"),
        ({"block_size": 12}, "block_size is 12"),
        ({"target": "sm_75"}, "the GPU is sm_75"),
        ({"kv_dtype": torch.float16}, "the cache is torch.float16"),
        ({"dtype": torch.float64, "kv_dtype": torch.float64}, "activations are torch.float64"),
    ],
)
def test_an_unsupported_value_is_named(change: dict[str, object], named: str) -> None:
    case = dataclasses.replace(H200, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=named):
        choose(case, "triton")
    if case.dtype == case.kv_dtype:
        assert named in str(choose(case))


def test_an_override_is_obeyed_or_refused() -> None:
    assert choose(H200, "triton-classic").name == "triton-classic"
    assert choose(H200, "torch").name == "torch"
    with pytest.raises(ValueError, match="must be one of triton, triton-classic, native, torch"):
        choose(H200, "flash")
    with pytest.raises(ValueError, match="triton-classic cannot serve: the cache is"):
        choose(dataclasses.replace(H200, kv_dtype=torch.float8_e4m3fn), "triton-classic")


def test_what_nothing_serves_is_refused_with_every_reason() -> None:
    case = dataclasses.replace(CPU, kv_dtype=torch.float64, no_native_code="no g++")
    with pytest.raises(ValueError, match=r"triton: the device is cpu.*no g.*torch: the cache is"):
        choose(case)


@given(
    requests=st.integers(1, 512),
    prefix=st.integers(16, 65536),
    own=st.integers(0, 1 << 20),
    group=st.sampled_from([1, 4, 8]),
)
def test_a_cascade_is_never_chosen_when_it_moves_more(
    requests: int, prefix: int, own: int, group: int
) -> None:
    heads = cost.Heads(8 * group, 8, 128, 2, 2)
    if cascade_pays(requests, prefix, own, heads):
        together = cost.cascade_kv_bytes(requests, prefix, own, heads, 128)
        assert together < (requests * prefix + own) * heads.kv_bytes


def test_the_goal_of_a_cascade_is_within_its_bytes() -> None:
    # 64 requests, 8k shared and 256 own tokens: at least four times fewer bytes. The prefix is
    # read by two tiles, so 1.34 times the least; the second tile finds it in the L2.
    heads = cost.Heads(32, 8, 128, 2, 2)
    own = 64 * 256
    together = cost.cascade_kv_bytes(64, 8192, own, heads, 128)
    assert (64 * 8192 + own) * heads.kv_bytes >= 4 * together
    assert together <= 1.34 * (8192 + own) * heads.kv_bytes
    assert cascade_pays(64, 8192, own, heads)
    assert not cascade_pays(1, 8192, 256, heads)


def test_weights_of_few_bits_are_kept_or_the_reason_is_told() -> None:
    served = WeightCase("sm_90", 128)
    for case in (served, WeightCase("gfx942", 0), WeightCase("sm_80", 16)):
        assert why_not_kept(case) is None
    for change, named in (
        ({"target": "sm_75"}, "the GPU is sm_75, quantised_matmul needs sm_80"),
        ({"group": None}, "not in whole groups of 16 or more"),
        ({"same_order": False}, "inputs in different orders"),
    ):
        reason = why_not_kept(dataclasses.replace(served, **change))
        assert named in str(reason)
