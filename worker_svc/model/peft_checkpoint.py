"""PEFT LoRA checkpoints: a config and low-rank matrices, read whole and checked."""

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError

from worker_svc.errors import AdapterError, ModelError
from worker_svc.model.adapters import AdapterTarget, LowRankMatrix
from worker_svc.model.fields import Fields

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_MAX_CONFIG_BYTES = 1 << 20
_MAX_HEAD_BYTES = 1 << 22
"""For the names and places of the matrices, in front of them."""

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<which>[AB])\.weight")

# Fields that make another kind of adapter of it, where they are neither absent, false nor empty.
_OTHER_KINDS = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "trainable_token_indices",
    "layer_replication",
    "target_parameters",
    "rank_pattern",
    "alpha_pattern",
    "alora_invocation_tokens",
    "arrow_config",
    "megatron_config",
)
# Initialisations that leave another base model behind than the one that is served.
_OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")


class Checkpoint(NamedTuple):
    """An adapter as its files hold it."""

    generation: int
    """64 bits of a hash of both files. Not 0."""

    matrices: Mapping[str, LowRankMatrix]
    """By the module they change, this rank's parts. fp32."""


def find_directory(root: str, path: str) -> Path:
    """Return the directory of an adapter, below the root, links followed.

    Raises: AdapterError if there is no root, or nothing below it under this path.
    """
    if not root:
        raise AdapterError("adapter_dir of the worker is not set: it loads no adapters")
    try:
        home = Path(root).resolve(strict=True)
        directory = (home / path).resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise AdapterError(f"path is {path!r}, where nothing is below adapter_dir") from error
    if directory == home or not directory.is_relative_to(home) or not directory.is_dir():
        raise AdapterError(f"path is {path!r}, must be a directory below adapter_dir")
    return directory


def read_checkpoint(
    directory: Path, targets: Mapping[str, AdapterTarget], max_rank: int
) -> Checkpoint:
    """Read an adapter for a model whose matrices are `targets`.

    What it adds to a matrix is b @ a * lora_alpha / r, or / sqrt(r) with `use_rslora`.
    Source: Hu et al. 2021 (arXiv:2106.09685), Kalajdzievski 2023 (arXiv:2312.03732); names as
    in the `peft` package, `tuners/lora`.

    Raises: AdapterError if a file is missing, damaged or too large, the adapter is of another
        kind than LoRA, or a matrix does not fit the model.
    """
    config_bytes = _read(directory, CONFIG_FILE, _MAX_CONFIG_BYTES)
    rank, scale = _read_config(config_bytes, max_rank)
    bound = _MAX_HEAD_BYTES + 4 * sum(
        rank * (target.rows.whole + target.columns.whole) for target in targets.values()
    )
    weight_bytes = _read(directory, WEIGHTS_FILE, bound)
    try:
        tensors = safetensors.torch.load(weight_bytes)
    except (SafetensorError, ValueError, KeyError) as error:
        raise AdapterError(f"{WEIGHTS_FILE} is damaged or cut short: {error}") from error
    digest = hashlib.sha256(len(config_bytes).to_bytes(8, "little") + config_bytes)
    digest.update(weight_bytes)
    generation = int.from_bytes(digest.digest()[:8], "little") or 1
    return Checkpoint(generation, _pair(tensors, targets, rank, scale))


def _read(directory: Path, name: str, most_bytes: int) -> bytes:
    """Read a file of the directory itself: a link may lead anywhere below it, but not out."""
    path = directory / name
    try:
        if not path.resolve(strict=True).is_relative_to(directory):
            raise AdapterError(f"{name} is a link that leads out of the adapter's directory")
        # What is no file could make the loading thread wait for ever, even to open it.
        with open(path, "rb", opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise AdapterError(f"{name} is no file")
            if status.st_size > most_bytes:
                raise AdapterError(
                    f"{name} has {status.st_size} bytes, must have at most {most_bytes}"
                )
            return file.read(most_bytes)
    except OSError as error:
        raise AdapterError(f"{name} cannot be read: {error.strerror}") from error


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _read_config(raw: bytes, max_rank: int) -> tuple[int, float]:
    """Return the rank and the scale.

    Raises: AdapterError for what is impossible, or not served, by its name.
    """
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG_FILE} is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise AdapterError(f"{CONFIG_FILE} must hold an object")
    for name in _OTHER_KINDS:
        if values.get(name):
            raise AdapterError(f"{CONFIG_FILE}: {name} is set, which is not served")
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_OTHER_BASES):
        raise AdapterError(
            f"{CONFIG_FILE}: init_lora_weights is {start!r}, which changes the base model: "
            "convert the adapter to plain LoRA"
        )
    try:
        fields = Fields(values, CONFIG_FILE)
        kind, bias = fields.text("peft_type"), fields.text("bias", "none")
        rank, alpha = fields.count("r"), fields.number("lora_alpha")
        is_rank_stabilised = fields.flag("use_rslora", default=False)
    except ModelError as error:
        raise AdapterError(str(error)) from error
    for name, value, wanted in (("peft_type", kind, "LORA"), ("bias", bias, "none")):
        if value != wanted:
            raise AdapterError(f"{CONFIG_FILE}: {name} is {value!r}, must be {wanted!r}")
    if rank > max_rank:
        raise AdapterError(
            f"{CONFIG_FILE}: r is {rank}, must be at most {max_rank}: see max_lora_rank"
        )
    return rank, alpha / math.sqrt(rank) if is_rank_stabilised else alpha / rank


def _pair(
    tensors: Mapping[str, torch.Tensor],
    targets: Mapping[str, AdapterTarget],
    rank: int,
    scale: float,
) -> dict[str, LowRankMatrix]:
    """Return the matrices by module; each must have both halves, and fit."""
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = _TENSOR.fullmatch(name)
        module = found["module"] if found else None
        if found is None or module is None:
            raise AdapterError(f"{WEIGHTS_FILE}: tensor {name[:200]} is not served")
        target = targets.get(module)
        if target is None:
            known = sorted({each.rpartition(".")[2] for each in targets})
            raise AdapterError(
                f"{WEIGHTS_FILE}: no module {module[:200]} of the model can be changed; known "
                f"are {', '.join(known)} of its layers"
            )
        columns, rows = target.columns.whole, target.rows.whole
        wanted = (rank, columns) if found["which"] == "A" else (rows, rank)
        if tuple(tensor.shape) != wanted or tensor.dtype not in _FLOATS:
            raise AdapterError(
                f"{WEIGHTS_FILE}: tensor {name} is {list(tensor.shape)} {tensor.dtype}, must be "
                f"{list(wanted)} of floats of 16 bits or more"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise AdapterError(f"{WEIGHTS_FILE}: tensor {name} holds values that are not finite")
        halves.setdefault(module, {})[found["which"]] = tensor.float()
    if not halves:
        raise AdapterError(f"{WEIGHTS_FILE} holds no matrices")
    for module, pair in halves.items():
        if len(pair) < 2:
            raise AdapterError(f"{WEIGHTS_FILE}: {module} has only lora_{next(iter(pair))}")
    matrices = {}
    for module, pair in halves.items():
        a, b = pair["A"], pair["B"] * scale
        # Of the whole, on each rank: all of them refuse it, or none.
        if not all(bool(torch.isfinite(half).all()) for half in (a, b)):
            raise AdapterError(f"{module} is not finite in float32, scaled by {scale:g}")
        matrices[module] = LowRankMatrix(a, b).part_for(targets[module])
    return matrices
