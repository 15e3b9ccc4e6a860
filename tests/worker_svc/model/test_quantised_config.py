"""What a config.json says of quantised weights is understood, or refused with what is supported."""

import json
from pathlib import Path
from typing import Any

import pytest

from quantised_checkpoints import compressed
from tiny_llama import write_tiny_llama
from worker_svc.errors import ModelError
from worker_svc.model.checkpoint import read_model_config
from worker_svc.model.quantised_config import SUPPORTED, Layout, Quantisation, quantisation_from_hf

AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel"}


def read(config: dict[str, Any]) -> Quantisation | None:
    return quantisation_from_hf({"quantization_config": config})


def test_most_checkpoints_are_not_quantised() -> None:
    assert quantisation_from_hf({}) is None
    assert quantisation_from_hf({"quantization_config": None}) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AWQ | {"version": "GEMM"}, Quantisation(Layout.AWQ, "awq", 4, block=(1, 128))),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": -1},
            Quantisation(Layout.AWQ, "awq", 4, block=(1, None)),
        ),
        (GPTQ, Quantisation(Layout.GPTQ, "gptq", 4, block=(1, 128), zero_offset=1)),
        (
            GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2", "dynamic": {"-:.*lm_head": {}}},
            Quantisation(Layout.GPTQ, "gptq", 8, block=(1, 128)),
        ),
        ({"quant_method": "fp8"}, Quantisation(Layout.PLAIN, "fp8", 8, is_float=True)),
        (
            {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 64]},
            Quantisation(Layout.PLAIN, "fp8", 8, is_float=True, block=(128, 64)),
        ),
        (
            compressed("pack-quantized", **INT4),
            Quantisation(Layout.ROWS, "compressed-tensors", 4, block=(1, 128)),
        ),
        (
            compressed("float-quantized", **FP8),
            Quantisation(Layout.PLAIN, "compressed-tensors", 8, is_float=True),
        ),
    ],
)
def test_what_is_supported_is_understood(config: dict[str, Any], expected: Quantisation) -> None:
    assert read(config) == expected
    assert quantisation_from_hf({"compression_config": config}) == expected


METHODS = ("bitsandbytes", "hqq", "quanto", "aqlm", "mxfp4", "modelopt", "torchao", "eetq", "exl2")


@pytest.mark.parametrize("method", METHODS)
def test_other_methods_are_refused_with_the_known_ones(method: str) -> None:
    with pytest.raises(ModelError, match=f"quant_method is '{method}'") as refusal:
        read({"quant_method": method, "bits": 4})
    assert all(known in str(refusal.value) for known in SUPPORTED)


def groups(**schemes: dict[str, Any]) -> dict[str, Any]:
    config = compressed("float-quantized", **FP8)
    return config | {"config_groups": {name: {"weights": one} for name, one in schemes.items()}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bits": 4}, "quant_method is missing"),
        (AWQ | {"version": "gemv"}, "version of awq is 'gemv'.*known: gemm"),
        (AWQ | {"version": "marlin"}, "version of awq is 'marlin'.*known: gemm"),
        (AWQ | {"bits": 3}, "bits of awq is '3'.*known: 4"),
        (AWQ | {"zero_point": False}, "zero_point of awq is false, must be true"),
        (AWQ | {"group_size": 0}, "group_size is 0, must be a positive integer"),
        (AWQ | {"group_size": None}, "group_size is missing"),
        (GPTQ | {"bits": 3}, "bits of gptq is '3'.*known: 4, 8"),
        (GPTQ | {"bits": 2}, "bits of gptq is '2'.*known: 4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format of gptq is 'marlin'.*gptq_v2"),
        (GPTQ | {"is_marlin_format": True}, "checkpoint_format of gptq is 'marlin'"),
        (GPTQ | {"dynamic": {"+:.*mlp.*": {"bits": 8}}}, "dynamic of gptq has '.:..mlp"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt of fp8 is 'e5m2'.*known: e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"is \[128\], must be two positive"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "must be two positive integers"),
        (compressed("marlin-24", **INT4), "format of compressed-tensors is 'marlin-24'.*pack-quan"),
        (compressed("nvfp4-pack-quantized", **FP8), "is 'nvfp4-pack-quantized'"),
        (compressed("pack-quantized", **INT4 | {"num_bits": 3}), "is 'int3'.*known: int4, int8"),
        (compressed("float-quantized", **FP8 | {"num_bits": 4}), "is 'float4'.*int8, float8"),
        (compressed("int-quantized", **FP8 | {"strategy": "token"}), "strategy .* is 'token'"),
        (
            compressed("float-quantized", **FP8) | {"sparsity_config": {"format": "sparse-24"}},
            "sparsity_config of compressed-tensors is 'sparse-24'.*known: dense",
        ),
        (
            compressed("float-quantized", **FP8)
            | {"transform_config": {"config_groups": {"R3": {}}}},
            "transform_config of compressed-tensors is set",
        ),
        (groups(), "config_groups of compressed-tensors is empty"),
        (groups(a=FP8, b=FP8 | {"strategy": "block", "block_structure": [4, 4]}), r"differ \(a, b"),
    ],
)
def test_variants_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(config)


def test_it_is_refused_before_a_tensor_is_read(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(ModelError, match="quant_method is 'hqq'"):
        read_model_config(tmp_path)
