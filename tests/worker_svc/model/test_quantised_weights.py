"""Checkpoints with quantised weights are the models that their values stand for, or are refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paged_logits import CPU, all_logits
from quantised_checkpoints import FORMATS, Format, Tensors, awq, gptq, write_quantised
from thread_ranks import on_all_ranks
from tiny_families import VOCAB, write_family
from worker_svc.errors import ModelError
from worker_svc.model.fingerprint import model_fingerprint
from worker_svc.model.quantised_config import quantisation_from_hf
from worker_svc.model.quantised_weights import QuantisedWeights
from worker_svc.model.safetensors_weights import SafetensorsWeights
from worker_svc.model.weights import load_model

PROMPT = [(7 * i * i + 3) % VOCAB for i in range(24)]
LAYER = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what gives a copy of a family's plain checkpoint, which is made once."""
    made: dict[str, Path] = {}

    def give(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("family")
            write_family(name, made[name])
        copy = tmp_path_factory.mktemp("plain")
        for file in made[name].iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        return copy

    return give


def logits(path: Path) -> torch.Tensor:
    return all_logits(load_model(path, torch.float32, CPU).model, PROMPT)


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_llama_is_the_one_its_values_stand_for(
    name: str, families: Callable[[str], Path], tmp_path: Path
) -> None:
    plain = families("llama")
    before = logits(plain)
    path = write_quantised(plain, tmp_path, FORMATS[name])
    assert torch.equal(logits(path), logits(plain))
    # And it is another than the one that was quantised.
    assert not torch.equal(logits(plain), before)


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "mixtral"])
@pytest.mark.parametrize("name", ["awq", "gptq in order of activations", "int8", "fp8 in blocks"])
def test_so_are_other_families(
    name: str, family: str, families: Callable[[str], Path], tmp_path: Path
) -> None:
    plain = families(family)
    path = write_quantised(plain, tmp_path, FORMATS[name])
    assert torch.equal(logits(path), logits(plain))


@pytest.mark.parametrize("name", FORMATS)
def test_a_part_of_a_matrix_is_that_part_of_the_whole(
    name: str, families: Callable[[str], Path], tmp_path: Path
) -> None:
    plain = families("llama")
    path = write_quantised(plain, tmp_path, FORMATS[name])
    expected = load_file(plain / "model.safetensors")
    quantisation = quantisation_from_hf({"quantization_config": FORMATS[name].config})
    assert quantisation is not None
    with SafetensorsWeights(path) as tensors:
        weights = QuantisedWeights(tensors, quantisation)
        assert weights.names == expected.keys()
        for base in (LAYER, "model.layers.0.self_attn.k_proj"):
            whole = expected[f"{base}.weight"]
            assert weights.shape(f"{base}.weight") == list(whole.shape)
            for rows, columns in [((0, 16), (16, 48)), ((5, 27), (3, 41)), ((7, 8), (47, 48))]:
                part = weights.read(f"{base}.weight", torch.float32, range(*rows), range(*columns))
                assert torch.equal(part, whole[slice(*rows), slice(*columns)])
            part = weights.read(f"{base}.weight", torch.float16, range(9, 30))
            assert torch.equal(part, whole[9:30].half())


@pytest.mark.parametrize("name", ["awq", "gptq in order of activations", "fp8 in blocks"])
def test_ranks_with_parts_of_it_are_the_whole(
    name: str, families: Callable[[str], Path], tmp_path: Path
) -> None:
    path = write_quantised(families("llama"), tmp_path, FORMATS[name])
    found = on_all_ranks(
        2,
        lambda group: all_logits(load_model(path, torch.float32, CPU, ranks=group).model, PROMPT),
    )[0]
    torch.testing.assert_close(found, logits(path), atol=1e-4, rtol=1e-3)


def test_scales_of_fp8_keys_and_values_stay_where_they_are(
    families: Callable[[str], Path], tmp_path: Path
) -> None:
    def add(tensors: Tensors) -> None:
        for layer in range(3):
            tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(0.5)
            tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor(0.25)

    path = write_quantised(families("llama"), tmp_path, FORMATS["compressed fp8"], add)
    scales = load_model(path, torch.float32, CPU).kv_scales
    assert scales is not None
    assert [(one.k.tolist(), one.v.tolist()) for one in scales] == [([0.5] * 2, [0.25] * 2)] * 3


def test_biases_of_old_gptq_files_are_passed_over_if_they_are_0(
    families: Callable[[str], Path], tmp_path: Path
) -> None:
    plain = families("llama")

    def add(value: float) -> Callable[[Tensors], None]:
        return lambda tensors: tensors.update({f"{LAYER}.bias": torch.full((48,), value)})

    path = write_quantised(plain, tmp_path, gptq(), add(0.0))
    assert torch.equal(logits(path), logits(plain))
    write_quantised(plain, tmp_path, gptq(), add(0.5))
    with pytest.raises(ModelError, match=rf"the first is {LAYER}\.bias"):
        load_model(path, torch.float32, CPU)


def test_what_was_dequantised_is_told(families: Callable[[str], Path], tmp_path: Path) -> None:
    plain = families("llama")
    path = write_quantised(plain, tmp_path, awq())
    found = load_model(path, torch.float32, CPU).dequantised
    assert found is not None
    num_weights = 3 * (48 * 128 + 64 * 48 + 3 * 48 * 64)
    assert (found.method, found.num_matrices, found.num_weights) == ("awq", 3 * 7, num_weights)
    assert found.file_bytes == num_weights // 2
    assert load_model(plain, torch.float32, CPU).dequantised is None


def test_its_name_is_that_of_its_values(families: Callable[[str], Path], tmp_path: Path) -> None:
    plain = families("llama")
    path = write_quantised(plain, tmp_path, awq())
    first = model_fingerprint(path)
    assert first != model_fingerprint(plain)

    def change(tensors: Tensors) -> None:
        tensors[f"{LAYER}.scales"] *= 2

    write_quantised(plain, tmp_path, awq(), change)
    assert model_fingerprint(path) != first


def drop(suffix: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(f"{LAYER}.{suffix}")


def put(suffix: str, tensor: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({f"{LAYER}.{suffix}": tensor})


def fill(suffix: str, value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[f"{LAYER}.{suffix}"].fill_(value)

    return change


NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("awq", drop("qzeros"), r"down_proj\.qzeros is missing"),
        ("awq", drop("qweight"), r"down_proj\.qweight is missing"),
        ("awq", put("scales", torch.ones(3, 48)), r"scales is \[3, 48\], must be \[4, 48\]"),
        ("awq", put("qzeros", torch.ones(4, 7)), r"qzeros is \[4, 7\], must be \[4, 6\]"),
        ("awq", put("qweight", torch.ones(64)), r"qweight is \[64\], must have two dimensions"),
        ("awq", put("qweight", torch.ones(64, 6)), r"qweight is torch.float32, must be .*int32"),
        ("awq", put("qweight", torch.ones(64, 5)), r"down_proj.weight is \[40, 64\], must be \[48"),
        ("awq", fill("scales", NAN), r"down_proj\.scales has a value that is not finite"),
        ("gptq", put("g_idx", torch.ones(63)), r"g_idx is \[63\], must be \[64\]"),
        ("gptq", fill("g_idx", 4), r"g_idx has a group outside of 0 to 3"),
        ("gptq", fill("g_idx", -1), r"g_idx has a group outside of 0 to 3"),
        ("W4A16", drop("weight_shape"), r"down_proj\.weight_shape is missing"),
        ("W4A16", fill("weight_shape", 7), r"weight_packed is \[48, 8\], must be \[7, 1\]"),
        ("W4A16", put("weight_scale", torch.ones(48, 3)), r"weight_scale is .*must be \[48, 4\]"),
        ("int8", drop("weight"), r"down_proj\.weight is missing"),
        ("int8", put("weight", torch.ones(48, 64)), r"weight is torch.float32, must be torch.int8"),
        ("int8 asymmetric", put("weight_zero_point", torch.ones(47, 1)), r"must be \[48, 1\]"),
        ("fp8", drop("weight_scale"), r"down_proj\.weight is torch.float8_e4m3fn and has no scale"),
        ("fp8", put("weight_scale", torch.ones(2)), r"weight_scale is \[2\], must be \[48, 1\] or"),
        ("fp8", fill("weight_scale", NAN), r"weight_scale has a value that is not finite"),
        ("fp8 in blocks", put("weight_scale_inv", torch.ones(2, 3)), r"_inv is .*must be \[2, 2\]"),
    ],
)  # fmt: skip
def test_a_damaged_tensor_is_named(
    name: str,
    change: Callable[[Tensors], None],
    message: str,
    families: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    path = write_quantised(families("llama"), tmp_path, FORMATS[name], change)
    with pytest.raises(ModelError, match=message):
        load_model(path, torch.float32, CPU)


def test_a_config_that_promises_what_the_tensors_are_not_is_refused(
    families: Callable[[str], Path], tmp_path: Path
) -> None:
    form = Format(awq().config, gptq().quantise)
    path = write_quantised(families("llama"), tmp_path, form)
    with pytest.raises(ModelError, match=r"q_proj.weight is \[512, 6\], must be"):
        load_model(path, torch.float32, CPU)
    form = Format(FORMATS["fp8"].config, gptq().quantise)
    write_quantised(families("llama"), tmp_path, form)
    with pytest.raises(ModelError, match=r"no tensor is named .*'fp8'.*weight_scale"):
        load_model(path, torch.float32, CPU)
