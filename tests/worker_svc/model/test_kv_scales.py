"""Scales of a checkpoint are found under all their names, or the layer that lacks them is named."""

import pytest
import torch

from worker_svc.errors import ModelError
from worker_svc.model.kv_scales import read_kv_scales

CPU = torch.device("cpu")
PREFIX = "model.layers.{}.self_attn."


def checkpoint(k: str, v: str, num_layers: int = 2, size: int = 0) -> dict[str, torch.Tensor]:
    """Return tensors k = 0.5 and v = 0.25 of each layer; of no dimension if `size` is 0."""
    shape = (size,) if size else ()
    tensors = {}
    for layer in range(num_layers):
        tensors[PREFIX.format(layer) + k] = torch.full(shape, 0.5)
        tensors[PREFIX.format(layer) + v] = torch.full(shape, 0.25 if v != k else 0.5)
    return tensors


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
@pytest.mark.parametrize("size", [0, 1, 3])
def test_scales_have_several_names_and_become_one_per_head(k: str, v: str, size: int) -> None:
    tensors = checkpoint(k, v, size=size)
    tensors[PREFIX.format(0) + "q_scale"] = torch.tensor(1.0)
    scales, known = read_kv_scales(tensors, tensors.__getitem__, 2, 3, CPU)
    assert known == set(tensors)
    assert scales is not None
    assert [one.k.tolist() for one in scales] == [[0.5] * 3] * 2
    assert [one.v.tolist() for one in scales] == [[0.25] * 3] * 2


def test_an_old_checkpoint_has_one_scale_for_both() -> None:
    tensors = checkpoint("kv_scale", "kv_scale")
    scales, _ = read_kv_scales(tensors, tensors.__getitem__, 2, 2, CPU)
    assert scales is not None
    assert scales[1].k.tolist() == scales[1].v.tolist() == [0.5, 0.5]


def test_most_checkpoints_have_none() -> None:
    others = {"model.norm.weight": torch.ones(4)}
    assert read_kv_scales(others, others.__getitem__, 2, 2, CPU) == (None, frozenset())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"1.self_attn.k_scale": None, "1.self_attn.v_scale": None}, "layer 1 has no scales"),
        ({"1.self_attn.v_scale": None}, "a scale of k only"),
        ({"0.self_attn.k_scale": torch.ones(3)}, "has 3 elements, must have 1 or 2"),
        ({"0.self_attn.k_scale": torch.tensor(0.0)}, "k scale is 0.0, must be positive"),
        ({"0.self_attn.v_scale": torch.tensor(float("nan"))}, "v scale is nan"),
    ],
)
def test_a_scale_that_is_missing_or_impossible_is_named(
    change: dict[str, torch.Tensor | None], message: str
) -> None:
    tensors = checkpoint("k_scale", "v_scale")
    for name, value in change.items():
        if value is None:
            del tensors[f"model.layers.{name}"]
        else:
            tensors[f"model.layers.{name}"] = value
    with pytest.raises(ModelError, match=message):
        read_kv_scales(tensors, tensors.__getitem__, 2, 2, CPU)
