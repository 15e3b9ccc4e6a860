"""Tokens find their rows of a table, with native code and without."""

import pytest
import torch
from torch.nn import functional

from kernels.cpu_embedding import CpuEmbedding
from native_variants import variant, variants

TABLE = torch.randn(50, 24, generator=torch.Generator().manual_seed(1))


@variants
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_token_finds_its_row(name: str, dtype: torch.dtype) -> None:
    table = TABLE.to(dtype)
    embedding = CpuEmbedding(table, variant(name))
    for ids in ([0, 49, 7, 7], [3], [], [1, 2, 3, 4]):
        token_ids = torch.tensor(ids, dtype=torch.int64)
        assert torch.equal(embedding(token_ids), functional.embedding(token_ids, table))


@variants
@pytest.mark.parametrize("wrong", [-1, 50])
def test_a_token_without_a_row_is_refused(name: str, wrong: int) -> None:
    embedding = CpuEmbedding(TABLE, variant(name))
    with pytest.raises(IndexError):
        embedding(torch.tensor([3, wrong]))
    assert torch.equal(embedding(torch.tensor([4]))[0], TABLE[4])


def test_what_is_no_table_or_no_ids_is_refused() -> None:
    with pytest.raises(ValueError, match="table is"):
        CpuEmbedding(TABLE[0])
    with pytest.raises(ValueError, match="contiguous"):
        CpuEmbedding(TABLE.t())
    embedding = CpuEmbedding(TABLE)
    for ids in (torch.tensor([1], dtype=torch.int32), torch.tensor([[1]])):
        with pytest.raises(ValueError, match="token_ids is"):
            embedding(ids)
