"""Quantised checkpoints, each written beside a plain one that holds what its values stand for.

The packers here are a second opinion: loops over single values, from the formats' descriptions.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
GROUP = 16
BLOCK = (24, 40)


class Format(NamedTuple):
    """A way to quantise."""

    config: dict[str, Any]
    """What config.json says of it."""

    quantise: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
    """A weight [O, I] to its tensors by their suffixes, and what these stand for [O, I]."""


def write_quantised(
    plain: Path, directory: Path, form: Format, change: Callable[[Tensors], None] | None = None
) -> Path:
    """Write a quantised copy of a checkpoint into `directory`, and make the plain one its equal.

    Embedding and head stay as they are. `change` may damage the tensors.
    """
    directory.mkdir(exist_ok=True)
    for file in plain.glob("*.json"):
        shutil.copy(file, directory)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = form.config
    (directory / "config.json").write_text(json.dumps(config))
    weights = load_file(plain / "model.safetensors")
    quantised: Tensors = {}
    for name, tensor in weights.items():
        if name.endswith("_proj.weight") or ".experts." in name:
            tensors, stands_for = form.quantise(tensor)
            base = name.removesuffix("weight")
            quantised |= {base + suffix: part.contiguous() for suffix, part in tensors.items()}
            weights[name] = stands_for.contiguous()
        else:
            quantised[name] = tensor
    if change is not None:
        change(quantised)
    save_file(weights, plain / "model.safetensors")
    save_file(quantised, directory / "model.safetensors")
    return directory


def pack(values: np.ndarray[Any, Any], bits: int, order: list[int] | None = None) -> torch.Tensor:
    """Pack the last dimension into int32: the n-th bits from the right hold value order[n]."""
    per_word = 32 // bits
    order = order or list(range(per_word))
    *outer, count = values.shape
    padded = np.zeros((*outer, -(-count // per_word) * per_word), np.uint64)
    padded[..., :count] = values
    words = padded.reshape(*outer, -1, per_word)
    packed = np.zeros(words.shape[:-1], np.uint64)
    for place, value in enumerate(order):
        packed |= words[..., value] << np.uint64(place * bits)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32))


def to_grid(
    weight: torch.Tensor, bits: int, group_of: np.ndarray[Any, Any], *, symmetric: bool = False
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any], torch.Tensor]:
    """Round to values [O, I] from 0 on; scales and zeros [O, G]; and what these stand for."""
    dense, most = weight.float().numpy(), (1 << bits) - 1
    num_groups = int(group_of.max()) + 1
    scales = np.zeros((len(dense), num_groups), np.float32)
    zeros = np.zeros_like(scales)
    for group in range(num_groups):
        part = dense[:, group_of == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        span = 2 * np.maximum(-low, high) if symmetric else high - low
        scales[:, group] = (span / most + 1e-6).astype(np.float16)
        zeros[:, group] = (most + 1) // 2 if symmetric else np.round(-low / scales[:, group])
    scale, zero = scales[:, group_of], zeros[:, group_of]
    values = np.clip(np.round(dense / scale) + zero, 0, most)
    stands_for = torch.from_numpy(((values - zero) * scale).astype(np.float32))
    return values.astype(np.uint64), scales, zeros.astype(np.uint64), stands_for


def groups_of(columns: int, size: int) -> np.ndarray[Any, Any]:
    """Return the group of each column; all are one if size is -1."""
    return np.arange(columns) // (columns if size == -1 else size)


def awq(group_size: int = GROUP) -> Format:
    """Return what AutoAWQ writes."""

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        group_of = groups_of(weight.shape[1], group_size)
        values, scales, zeros, stands_for = to_grid(weight, 4, group_of)
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        tensors = {
            "qweight": pack(values.T, 4, order),
            "qzeros": pack(zeros.T, 4, order),
            "scales": torch.from_numpy(scales.T.copy()).half(),
        }
        return tensors, stands_for

    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm"}
    return Format(config | {"zero_point": True, "modules_to_not_convert": None}, quantise)


def gptq(
    bits: int = 4, group_size: int = GROUP, *, desc_act: bool = False, sym: bool = True,
    version: str = "gptq", has_g_idx: bool = True,
) -> Format:  # fmt: skip
    """Return what AutoGPTQ and GPTQModel write."""

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        columns = weight.shape[1]
        group_of = groups_of(columns, group_size)
        if desc_act:
            group_of = np.random.default_rng(columns).permutation(group_of)
        values, scales, zeros, stands_for = to_grid(weight, bits, group_of, symmetric=sym)
        # What was stored wraps in a group whose zero point is 0.
        stored = (zeros - np.uint64(version == "gptq")) & np.uint64((1 << bits) - 1)
        tensors = {
            "qweight": pack(values, bits).T,
            "qzeros": pack(stored.T, bits),
            "scales": torch.from_numpy(scales.T.copy()).half(),
        }
        if has_g_idx:
            tensors["g_idx"] = torch.from_numpy(group_of.astype(np.int32))
        return tensors, stands_for

    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": sym}
    return Format(
        config | {"desc_act": desc_act, "checkpoint_format": version, "lm_head": False}, quantise
    )


def compressed(form: str, **weights: object) -> dict[str, Any]:
    """Return the config of compressed-tensors."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def packed_rows(
    bits: int = 4, group_size: int = GROUP, *, symmetric: bool = True, act_order: bool = False
) -> Format:
    """Return compressed-tensors' W4A16 or W8A16."""

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        group_of = groups_of(columns, group_size)
        if act_order:
            group_of = np.random.default_rng(columns).permutation(group_of)
        values, scales, zeros, stands_for = to_grid(weight, bits, group_of, symmetric=symmetric)
        tensors = {
            "weight_packed": pack(values, bits),
            "weight_scale": torch.from_numpy(scales).bfloat16(),
            "weight_shape": torch.tensor([rows, columns]),
        }
        # The scales lose bits to bfloat16, which what they stand for must show.
        offset = values.astype(np.float32) - zeros[:, group_of].astype(np.float32)
        stands_for = torch.from_numpy(offset) * tensors["weight_scale"].float()[:, group_of]
        if not symmetric:
            tensors["weight_zero_point"] = pack(zeros.T, bits).T
        if act_order:
            tensors["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
        return tensors, stands_for

    strategy: dict[str, object] = {"strategy": "channel"}
    if group_size != -1:
        strategy = {"strategy": "group", "group_size": group_size}
    config = compressed(
        "pack-quantized", num_bits=bits, type="int", symmetric=symmetric, **strategy
    )
    return Format(config, quantise)


def int8(*, symmetric: bool = True) -> Format:
    """Return compressed-tensors' int8 with a scale for each output."""

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        group_of = groups_of(weight.shape[1], -1)
        values, scales, zeros, stands_for = to_grid(weight, 8, group_of, symmetric=symmetric)
        signed = (values.astype(np.int64) - 128).astype(np.int8)
        tensors = {"weight": torch.from_numpy(signed), "weight_scale": torch.from_numpy(scales)}
        if not symmetric:
            shifted = (zeros.astype(np.int64) - 128).astype(np.int8)
            tensors["weight_zero_point"] = torch.from_numpy(shifted)
        return tensors, stands_for

    config = compressed(
        "int-quantized", num_bits=8, type="int", symmetric=symmetric, strategy="channel"
    )
    return Format(config, quantise)


def fp8(kind: str, config: dict[str, Any], scale_shape: str = "") -> Format:
    """Return fp8 with scales for a tensor, each channel or each block."""

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        height, width = {"tensor": (rows, columns), "channel": (1, columns), "block": BLOCK}[kind]
        grid = (-(-rows // height), -(-columns // width))
        scales, each = torch.zeros(grid), torch.zeros(rows, columns)
        for row in range(grid[0]):
            for column in range(grid[1]):
                place = (
                    slice(row * height, (row + 1) * height),
                    slice(column * width, (column + 1) * width),
                )
                scales[row, column] = weight[place].abs().max() / 448
                each[place] = scales[row, column]
        values = (weight / each).to(torch.float8_e4m3fn)
        shape = {"scalar": [], "flat": [-1]}.get(scale_shape, list(grid))
        name = "weight_scale_inv" if scale_shape == "inverse" else "weight_scale"
        tensors = {"weight": values, name: scales.reshape(shape)}
        if kind == "tensor":
            tensors["input_scale"] = torch.tensor(0.5)
        return tensors, values.float() * each

    return Format(config, quantise)


PLAIN_FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}

FORMATS: dict[str, Format] = {
    "awq": awq(),
    "awq with one group": awq(-1),
    "gptq": gptq(),
    "gptq without g_idx": gptq(has_g_idx=False),
    "gptq with one group": gptq(group_size=-1),
    "gptq asymmetric": gptq(sym=False),
    "gptq in order of activations": gptq(desc_act=True, sym=False),
    "gptq of 8 bits": gptq(8, desc_act=True),
    "gptq_v2": gptq(sym=False, version="gptq_v2"),
    "W4A16": packed_rows(),
    "W4A16 asymmetric": packed_rows(symmetric=False),
    "W4A16 in order of activations": packed_rows(symmetric=False, act_order=True),
    "W8A16": packed_rows(8, -1),
    "int8": int8(),
    "int8 asymmetric": int8(symmetric=False),
    "fp8": fp8("tensor", PLAIN_FP8, "scalar"),
    "fp8 per channel": fp8("channel", PLAIN_FP8 | {"quant_method": "fbgemm_fp8"}),
    "fp8 in blocks": fp8("block", PLAIN_FP8 | {"weight_block_size": [*BLOCK]}, "inverse"),
    "compressed fp8": fp8(
        "tensor", compressed("float-quantized", num_bits=8, type="float", strategy="tensor"), "flat"
    ),
    "compressed fp8 per channel": fp8(
        "channel", compressed("naive-quantized", num_bits=8, type="float", strategy="channel")
    ),
    "compressed fp8 in blocks": fp8(
        "block",
        compressed(
            "float-quantized",
            num_bits=8,
            type="float",
            strategy="block",
            block_structure=[*BLOCK],
        ),
    ),
}
"""By a name for tests. Widths here are no multiples of the groups and blocks of real files."""
