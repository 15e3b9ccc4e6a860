"""Layers are grouped so that one pool of blocks serves all of them, and wastes little."""

from hypothesis import given
from hypothesis import strategies as st

from worker_svc.model.layer_groups import LayerGroup, group_layers


def test_layers_without_windows_are_one_group() -> None:
    assert group_layers(3, None) == (LayerGroup((0, 1, 2), None),)


def test_layers_that_all_have_a_window_are_one_group() -> None:
    assert group_layers(3, 7) == (LayerGroup((0, 1, 2), 7),)


def test_five_layers_with_a_window_to_each_without_are_six_equal_groups() -> None:
    full = frozenset({5, 11, 17})
    groups = group_layers(18, 512, full)
    assert groups[0] == LayerGroup((5, 11, 17), None)
    assert [len(group.layers) for group in groups] == [3] * 6
    assert groups[1] == LayerGroup((0, 1, 2), 512)


def test_one_layer_among_many_does_not_make_a_group_of_each() -> None:
    assert len(group_layers(64, 512, frozenset({63}))) == 9


@given(num_layers=st.integers(1, 100), window=st.none() | st.integers(1, 9), data=st.data())
def test_every_layer_is_in_one_group_of_its_kind(
    num_layers: int, window: int | None, data: st.DataObject
) -> None:
    full = data.draw(st.frozensets(st.integers(0, num_layers - 1)))
    groups = group_layers(num_layers, window, full)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(num_layers))
    assert len(groups) <= 9
    for group in groups:
        assert list(group.layers) == sorted(group.layers)
        for layer in group.layers:
            assert group.window == (None if window is None or layer in full else window)


@given(
    length=st.integers(1, 200),
    window=st.integers(1, 50),
    step=st.integers(1, 50),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_no_more_blocks_are_held_than_said(
    length: int, window: int, step: int, block_size: int
) -> None:
    most = LayerGroup((0,), window).most_blocks(length, step, block_size)
    for start in range(0, length, step):
        end = min(start + step, length)
        first_seen = max(0, start - window + 1)
        assert (end - 1) // block_size - first_seen // block_size + 1 <= most
    assert LayerGroup((0,), None).most_blocks(length, step, block_size) == -(-length // block_size)
