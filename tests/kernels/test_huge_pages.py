"""A tensor in large pages is zeros like any other, aligned where it is large."""

import pytest
import torch

from kernels.huge_pages import huge_tensor


@pytest.mark.parametrize("num_rows", [1, 1000, 9000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_large_tensor_begins_with_a_page_and_holds_zeros(
    num_rows: int, dtype: torch.dtype
) -> None:
    tensor = huge_tensor((num_rows, 256), dtype)
    assert (tensor.shape, tensor.dtype) == ((num_rows, 256), dtype)
    assert not tensor.any()
    tensor.fill_(1)
    assert tensor.sum(dtype=torch.float64) == num_rows * 256
    if tensor.nbytes >= 2 << 20:
        assert tensor.data_ptr() % (2 << 20) == 0
