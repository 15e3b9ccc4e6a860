"""A path to a model that runs: its family is found by its architecture."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.checks import Scales
from worker_svc.model.adapters import AdapterBank
from worker_svc.model.causal_model import CausalModel
from worker_svc.model.checkpoint import open_checkpoint
from worker_svc.model.families import FAMILIES
from worker_svc.model.kept_values import Kept
from worker_svc.model.loader import Loader, Progress
from worker_svc.model.operations import Operations
from worker_svc.model.other_ranks import NoOtherRanks, OtherRanks
from worker_svc.model.quantised_weights import Dequantised, QuantisedWeights
from worker_svc.model.shard import Extent
from worker_svc.model.torch_operations import TorchOperations


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model ready to run, and what it took to load it."""

    model: CausalModel
    weight_bytes: int
    load_seconds: float
    ranks: OtherRanks
    """Who has the rest of it."""

    kv_heads: Extent
    """The key/value heads of the whole model, and those that are here."""

    kv_scales: tuple[Scales, ...] | None = None
    """Of fp8 keys and values, layer by layer, if the checkpoint has them."""

    dequantised: Dequantised | None = None
    """None: the checkpoint's weights are plain, or all of them run as they are stored."""

    kept: Kept | None = None
    """None: none of the weights run as they are stored, or could."""


def load_model(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    operations: Operations | None = None,
    ranks: OtherRanks | None = None,
    progress: Progress | None = None,
    adapters: AdapterBank | None = None,
) -> LoadedModel:
    """Load a Hugging Face directory or a GGUF file, to run by `operations` (torch's, if not given).

    With other ranks, load this rank's part; running it exchanges with them. With `adapters`, its
    layers take adapters of that bank, of which a rank holds what belongs to its part.

    Raises: ModelError if the files are damaged, hold a model of another shape, or lack a tensor;
        ConfigError if there are more ranks than can have a part.
    """
    started = time.perf_counter()
    operations, ranks = operations or TorchOperations(), ranks or NoOtherRanks()
    config, source = open_checkpoint(path)
    with source as tensors:
        loader = Loader(tensors, config, dtype, device, operations, ranks, progress, adapters)
        model = FAMILIES[config.family](loader)
        kv_scales = loader.kv_scales()
        loader.finish()
        dequantised = tensors.dequantised if isinstance(tensors, QuantisedWeights) else None
    return LoadedModel(
        model,
        loader.weight_bytes,
        time.perf_counter() - started,
        ranks,
        Extent(config.num_kv_heads, ranks.shard.heads(config).keys),
        kv_scales,
        dequantised if dequantised and dequantised.num_matrices else None,
        loader.kept if loader.kept.num_matrices or loader.kept.refused else None,
    )
