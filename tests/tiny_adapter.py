"""PEFT LoRA checkpoints for `tiny_llama`, and the weights that they make of it."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tiny_llama import LAYERS, tiny_weights, write_tiny_llama

ALL_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def module_path(module: str) -> str:
    return f"mlp.{module}" if module[:2] in ("ga", "up", "do") else f"self_attn.{module}"


def write_adapter(
    directory: Path,
    *,
    seed: int = 1,
    rank: int = 4,
    alpha: float = 8.0,
    modules: Sequence[str] = ALL_MODULES,
    std: float = 0.2,
    weights: Mapping[str, torch.Tensor] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter with the names and shapes that `peft` writes; return its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    given: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "target_modules": list(modules),
        **config,
    }
    (directory / "adapter_config.json").write_text(json.dumps(given), encoding="utf-8")
    shapes = weights if weights is not None else tiny_weights(0)
    num_layers = (
        LAYERS
        if weights is None
        else 1 + max(int(name.split(".")[2]) for name in shapes if name.startswith("model.layers."))
    )
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(num_layers):
        for module in modules:
            name = f"model.layers.{layer}.{module_path(module)}"
            outputs, inputs = shapes[f"{name}.weight"].shape
            for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                tensors[f"base_model.model.{name}.lora_{half}.weight"] = (
                    torch.randn(shape, generator=generator) * std
                )
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    return directory


def write_merged(directory: Path, adapter: Path, *, seed: int = 0) -> Path:
    """Write tiny Llama's weights with an adapter merged in, as `peft` merges: W + B @ A * scale.

    Source: `peft`, `tuners/lora/layer.py`, Linear.get_delta_weight; scale as in LoraLayer:
    lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora.
    """
    write_tiny_llama(directory, seed=seed)
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    divisor = math.sqrt(config["r"]) if config["use_rslora"] else config["r"]
    tensors = load_file(adapter / "adapter_model.safetensors")
    merged = tiny_weights(seed)
    for name in merged:
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in tensors:
            delta = tensors[f"{key}.lora_B.weight"] @ tensors[f"{key}.lora_A.weight"]
            merged[name] = merged[name] + delta * (config["lora_alpha"] / divisor)
    save_file(merged, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
