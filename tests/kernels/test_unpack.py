"""Native code unpacks blocks to the very weights that the `gguf` package gives."""

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import unpack
from kernels.unpack import BLOCK, BLOCK_BYTES
from native_variants import variant, variants

Kind = gguf.GGMLQuantizationType
KINDS = [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0]


def drawn_blocks(kind: int, num_blocks: int, seed: int) -> npt.NDArray[np.uint8]:
    """Any bytes are blocks: scales may be infinite, NaN or too small to be normal."""
    return np.random.default_rng(seed).integers(
        0, 256, (num_blocks, BLOCK_BYTES[kind]), dtype=np.uint8
    )


def test_the_kinds_are_those_of_the_package() -> None:
    assert sorted(BLOCK_BYTES) == sorted(KINDS)
    for kind, num_bytes in BLOCK_BYTES.items():
        assert gguf.GGML_QUANT_SIZES[Kind(kind)] == (BLOCK, num_bytes)


@variants
@settings(max_examples=30)
@given(
    kind=st.sampled_from(KINDS),
    num_blocks=st.integers(1, 40) | st.sampled_from([511, 1025]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
def test_unpacked_weights_are_those_of_the_package(
    name: str, kind: Kind, num_blocks: int, dtype: torch.dtype, seed: int
) -> None:
    blocks = drawn_blocks(kind, num_blocks, seed)
    with np.errstate(all="ignore"):
        values = gguf.dequantize(blocks.reshape(1, -1), kind).reshape(-1)
    expected = torch.from_numpy(values).to(dtype)
    found = torch.empty(num_blocks * BLOCK, dtype=dtype)
    assert unpack.unpack(kind, blocks, found, variant(name))
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(9.0), expected.nan_to_num(9.0))


def test_other_kinds_are_left_alone() -> None:
    out = torch.full((256,), 7.0)
    assert not unpack.unpack(Kind.Q6_K, np.zeros(210, np.uint8), out)
    assert out.eq(7).all()


@pytest.mark.parametrize(
    ("blocks", "out", "message"),
    [
        (np.zeros(19, np.uint8), torch.empty(32), "whole and contiguous"),
        (np.zeros(36, np.uint8)[::2], torch.empty(32), "whole and contiguous"),
        (np.zeros(18, np.uint8), torch.empty(31), "must hold 1 blocks of 32"),
        (np.zeros(18, np.uint8), torch.empty(64)[::2], "must be contiguous"),
        (np.zeros(18, np.uint8), torch.empty(32, dtype=torch.int8), "torch.int8"),
    ],
)
def test_what_does_not_fit_is_refused(
    blocks: npt.NDArray[np.uint8], out: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        unpack.unpack(Kind.Q4_0, blocks, out)
