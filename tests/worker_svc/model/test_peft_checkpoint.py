"""A PEFT checkpoint is read whole, or refused by the name of what is wrong."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny_adapter import write_adapter
from tiny_llama import write_tiny_llama
from worker_svc.errors import AdapterError
from worker_svc.model.adapters import AdapterBank, AdapterTarget
from worker_svc.model.peft_checkpoint import find_directory, read_checkpoint
from worker_svc.model.weights import load_model

CPU = torch.device("cpu")
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, AdapterTarget]:
    bank = AdapterBank(torch.float32, CPU)
    model = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    load_model(model, torch.float32, CPU, adapters=bank)
    return bank.targets


def test_every_linear_layer_of_the_body_can_be_changed(targets: dict[str, AdapterTarget]) -> None:
    assert len(targets) == 2 * 7
    queries, keys, values = (
        targets[f"model.layers.1.self_attn.{name}_proj"] for name in ("q", "k", "v")
    )
    assert queries.layer == keys.layer == values.layer
    assert [each.first_row for each in (queries, keys, values)] == [0, 64, 96]


def test_the_scale_is_alpha_over_r(tmp_path: Path, targets: dict[str, AdapterTarget]) -> None:
    directory = write_adapter(tmp_path, rank=4, alpha=2.0)
    given = load_file(directory / "adapter_model.safetensors")
    read = read_checkpoint(directory, targets, 64).matrices[Q.removeprefix("base_model.model.")]
    assert torch.equal(read.a, given[f"{Q}.lora_A.weight"])
    assert torch.equal(read.b, given[f"{Q}.lora_B.weight"] * 0.5)


def test_with_rslora_it_is_alpha_over_the_root(
    tmp_path: Path, targets: dict[str, AdapterTarget]
) -> None:
    directory = write_adapter(tmp_path, rank=4, alpha=2.0, use_rslora=True)
    given = load_file(directory / "adapter_model.safetensors")
    read = read_checkpoint(directory, targets, 64).matrices[Q.removeprefix("base_model.model.")]
    assert torch.equal(read.b, given[f"{Q}.lora_B.weight"])


def test_the_generation_is_the_contents(tmp_path: Path, targets: dict[str, AdapterTarget]) -> None:
    def generation(name: str, **changes: Any) -> int:
        return read_checkpoint(write_adapter(tmp_path / name, **changes), targets, 64).generation

    first = generation("a")
    assert first == generation("b")
    others = {generation("c", seed=2), generation("d", alpha=9.0)}
    assert len({first, 0, *others}) == 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_dora": True}, "use_dora is set, which is not served"),
        ({"bias": "all"}, "bias is 'all', must be 'none'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is set"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern is set"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is set"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', must be 'LORA'"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16'"),
        ({"r": 65}, "r is 65, must be at most 64: see max_lora_rank"),
        ({"r": 0}, "r is 0, must be a positive integer"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan, must be a positive number"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes', must be true or false"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, targets: dict[str, AdapterTarget], changes: dict[str, Any], reason: str
) -> None:
    directory = write_adapter(tmp_path)
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(config | changes))
    with pytest.raises(AdapterError, match=reason):
        read_checkpoint(directory, targets, 64)


def _change(directory: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(directory / "adapter_model.safetensors")
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, directory / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        (f"{Q}.lora_A.weight", None, "q_proj has only lora_B"),
        (f"{Q}.lora_A.weight", torch.ones(4, 63), r"is \[4, 63\].* must be \[4, 64\]"),
        (f"{Q}.lora_A.weight", torch.ones(4, 64, dtype=torch.int8), "of floats"),
        (f"{Q}.lora_A.weight", torch.ones(4, 64).to(torch.float8_e4m3fn), "of floats of 16 bits"),
        (f"{Q}.lora_A.weight", torch.full((4, 64), 1e39, dtype=torch.float64), "not finite in fl"),
        (f"{Q}.lora_A.weight", torch.full((4, 64), torch.inf), "not finite"),
        (f"{Q}.lora_magnitude_vector", torch.ones(64), "lora_magnitude_vector is not served"),
        (
            "base_model.model.lm_head.lora_A.weight",
            torch.ones(4, 64),
            "no module lm_head of the model can be changed; known are down_proj, gate_proj",
        ),
        (
            "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight",
            torch.ones(4, 64),
            "no module model.layers.9.self_attn.q_proj",
        ),
    ],
)
def test_a_matrix_that_does_not_fit_is_refused_by_name(
    tmp_path: Path,
    targets: dict[str, AdapterTarget],
    name: str,
    tensor: torch.Tensor | None,
    reason: str,
) -> None:
    directory = write_adapter(tmp_path)
    _change(directory, name, tensor)
    with pytest.raises(AdapterError, match=reason):
        read_checkpoint(directory, targets, 64)


def test_damaged_and_missing_files_are_named(
    tmp_path: Path, targets: dict[str, AdapterTarget]
) -> None:
    directory = write_adapter(tmp_path)
    weights = directory / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for content, reason in (
        (whole[:100], "damaged or cut short"),
        (b"\x80\x04pickle", "damaged or cut short"),
        (bytes(10_000_000), "has 10000000 bytes, must have at most"),
    ):
        weights.write_bytes(content)
        with pytest.raises(AdapterError, match=reason):
            read_checkpoint(directory, targets, 64)
    weights.unlink()
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors cannot be read: No such"):
        read_checkpoint(directory, targets, 64)
    (directory / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterError, match=r"adapter_config\.json is no JSON"):
        read_checkpoint(directory, targets, 64)


@pytest.mark.parametrize("path", ["../evil", "a/../../evil", "/etc", "..", ".", "", "out", "a\0b"])
def test_case_j05_nothing_outside_the_directory_of_adapters_is_read(
    tmp_path: Path, path: str
) -> None:
    root = tmp_path / "adapters"
    (root / "a").mkdir(parents=True)
    (tmp_path / "evil").mkdir()
    (root / "out").symlink_to("/etc")
    assert find_directory(str(root), "a") == (root / "a").resolve()
    assert find_directory(str(root), str(root / "a")) == (root / "a").resolve()
    with pytest.raises(AdapterError, match=r"path is .* below adapter_dir"):
        find_directory(str(root), path)


def test_case_j05_a_file_that_is_a_link_out_is_not_read(
    tmp_path: Path, targets: dict[str, AdapterTarget]
) -> None:
    directory = write_adapter(tmp_path / "a")
    elsewhere = write_adapter(tmp_path / "b") / "adapter_model.safetensors"
    (directory / "adapter_model.safetensors").unlink()
    os.symlink(elsewhere, directory / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match="leads out of the adapter's directory"):
        read_checkpoint(directory, targets, 64)


def test_without_a_directory_of_adapters_nothing_is_loaded() -> None:
    with pytest.raises(AdapterError, match="adapter_dir of the worker is not set"):
        find_directory("", "a")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_what_is_no_file_is_not_waited_for(
    tmp_path: Path, targets: dict[str, AdapterTarget], name: str
) -> None:
    directory = write_adapter(tmp_path / "a")
    (directory / name).unlink()
    os.mkfifo(directory / name)
    with pytest.raises(AdapterError, match=f"{name} is no file"):
        read_checkpoint(directory, targets, 64)


def test_brackets_without_end_are_no_json(
    tmp_path: Path, targets: dict[str, AdapterTarget]
) -> None:
    directory = write_adapter(tmp_path)
    (directory / "adapter_config.json").write_text("[" * 200_000)
    with pytest.raises(AdapterError, match=r"adapter_config\.json is no JSON"):
        read_checkpoint(directory, targets, 64)


def test_a_scale_beyond_floats_is_refused(
    tmp_path: Path, targets: dict[str, AdapterTarget]
) -> None:
    directory = write_adapter(tmp_path, alpha=1e300)
    with pytest.raises(AdapterError, match=r"not finite in float32, scaled by 2.5e\+299"):
        read_checkpoint(directory, targets, 64)
