"""Every head, column and token has its rank, and ranks have as much as whole KV groups allow."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_svc.errors import ConfigError
from worker_svc.model.shard import Shard, split_columns, split_heads

KV_HEADS, IN_GROUP = st.integers(1, 16), st.integers(1, 8)


def test_the_demo_models_heads() -> None:
    assert [(len(r.queries), len(r.keys)) for r in split_heads(9, 3, 2)] == [(6, 2), (3, 1)]
    assert [(len(r.queries), len(r.keys)) for r in split_heads(9, 3, 3)] == [(3, 1)] * 3
    assert [len(r.queries) for r in split_heads(9, 3, 4)] == [2, 1, 3, 3]


@given(KV_HEADS, IN_GROUP, st.data())
def test_query_heads_are_parted_and_each_finds_its_own_key_head(
    num_kv_heads: int, in_group: int, data: st.DataObject
) -> None:
    num_heads = num_kv_heads * in_group
    num_ranks = data.draw(st.integers(1, num_heads))
    parts = split_heads(num_heads, num_kv_heads, num_ranks)
    assert [head for part in parts for head in part.queries] == list(range(num_heads))
    for part in parts:
        assert len(part.queries) % len(part.keys) == 0
        local_group = len(part.queries) // len(part.keys)
        for place, head in enumerate(part.queries):
            assert part.keys[place // local_group] == head // in_group


@given(KV_HEADS, IN_GROUP, st.data())
def test_ranks_have_whole_groups_and_differ_by_one_or_share_a_key_head(
    num_kv_heads: int, in_group: int, data: st.DataObject
) -> None:
    num_heads = num_kv_heads * in_group
    num_ranks = data.draw(st.integers(1, num_heads))
    parts = split_heads(num_heads, num_kv_heads, num_ranks)
    sizes = [len(part.keys) for part in parts]
    if num_ranks <= num_kv_heads:
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == num_kv_heads
        assert all(len(part.queries) == in_group * len(part.keys) for part in parts)
    else:
        assert sizes == [1] * num_ranks
        sharers = [sum(part.keys.start == head for part in parts) for head in range(num_kv_heads)]
        assert max(sharers) - min(sharers) <= 1


@given(st.integers(1, 20_000), st.integers(1, 16))
def test_columns_are_parted_as_evenly_as_their_units_allow(count: int, num_ranks: int) -> None:
    if num_ranks > count:
        with pytest.raises(ConfigError, match="tensor_parallel_size"):
            split_columns(count, num_ranks)
        return
    parts = split_columns(count, num_ranks)
    assert [place for part in parts for place in part] == list(range(count))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 64
    assert max(sizes) <= 1.125 * (count / num_ranks) + 1


@pytest.mark.parametrize(
    ("count", "num_ranks", "sizes"),
    [
        (1536, 2, [768, 768]),  # units of 256: three K-quants' blocks each
        (1536, 3, [512] * 3),
        (1536, 5, [320, 320, 320, 288, 288]),
        (192, 2, [96, 96]),
        (11008, 4, [2752] * 4),
    ],
)
def test_columns_of_some_models(count: int, num_ranks: int, sizes: list[int]) -> None:
    assert [len(part) for part in split_columns(count, num_ranks)] == sizes


@given(st.integers(1, 300_000), st.integers(1, 16))
def test_every_token_has_one_rank_and_no_rank_more_rows_than_any(vocab: int, ranks: int) -> None:
    shards = [Shard(rank, ranks) for rank in range(ranks)]
    parts = [shard.vocab(vocab).mine for shard in shards]
    assert sum(len(part) for part in parts) == vocab
    assert all(a.stop == b.start for a, b in pairwise(parts))
    assert parts[0].start == 0
    width = shards[0].vocab_width(vocab)
    assert all(len(part) == width or part.stop == vocab for part in parts)
    assert max(len(part) for part in parts) <= width <= -(-vocab // ranks) + 15


def test_more_ranks_than_query_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size is 10, must be at most 9"):
        split_heads(9, 3, 10)
