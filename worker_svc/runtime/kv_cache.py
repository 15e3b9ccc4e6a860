"""The cache tensors, and the bytes of a block."""

from collections.abc import Sequence

import numpy as np
import torch

from kernels import cache_layout
from kernels.checks import Scales
from kernels.huge_pages import huge_tensor
from worker_svc.errors import InvariantError
from worker_svc.model.model_config import ModelConfig
from worker_svc.model.operations import LayerCache
from worker_svc.runtime.step_plan import BlockCopies


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block's keys and values, over the layers of a KV group.

    A block may serve any group, so it has room for the largest. Static scales take nothing.
    """
    per_layer = 2 * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize
    return per_layer * max(len(group.layers) for group in config.kv_groups)


class KVCache:
    """Keys and values of all blocks.

    The first layers of all KV groups share one tensor, and so on: a block belongs to one group at
    a time, so what lies under its number is that group's, in every tensor.

    Shapes: layers: per layer, keys and values of num_blocks + 1 blocks, in rows or in lanes
        (`kernels.cache_layout`). Block 0 is the null block: never written, never read.
    """

    __slots__ = ("_tensors", "block_size", "layers", "num_blocks")

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[Scales] | None = None,
        *,
        in_lanes: bool = False,
    ) -> None:
        """Make an empty cache; `scales` are those of an fp8 one, layer by layer. None: 1.

        It is in lanes if that is asked for and the block size allows it.
        """
        form = cache_layout.layout(
            num_blocks + 1, block_size, config.num_kv_heads, config.head_dim, dtype,
            in_lanes=in_lanes,
        )  # fmt: skip
        self.num_blocks = num_blocks
        self.block_size = block_size
        groups = config.kv_groups
        self._tensors = tuple(
            (_zeros(form.k_shape, dtype, device), _zeros(form.v_shape, dtype, device))
            for _ in range(max(len(group.layers) for group in groups))
        )
        places = {layer: place for group in groups for place, layer in enumerate(group.layers)}
        self.layers = tuple(
            LayerCache(*self._tensors[places[layer]], None if scales is None else scales[layer])
            for layer in range(config.num_layers)
        )

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Copy whole blocks.

        Raises: InvariantError if a block is dst twice, both src and dst, or not in the cache.
        """
        if not len(copies.src):
            return
        src, dst = copies.src.astype(np.int64), copies.dst.astype(np.int64)
        both = np.concatenate((src, dst))
        if len(src) != len(dst) or both.min() < 1 or both.max() > self.num_blocks:
            raise InvariantError(f"blocks {src} are copied to {dst} of 1 to {self.num_blocks}")
        if len(np.unique(dst)) < len(dst) or np.isin(src, dst).any():
            raise InvariantError(f"blocks {src} are copied to {dst}, in an order that matters")
        for layer in self._tensors:
            for tensor in layer:
                # As bytes: copies of fp8 are not known everywhere.
                cache = tensor.view(torch.uint8)
                copied = cache.index_select(0, torch.from_numpy(src).to(cache.device))
                cache.index_copy_(0, torch.from_numpy(dst).to(cache.device), copied)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU in memory that is only taken when it is touched.

    torch.zeros would touch gigabytes at start, which large pages leave to the operating system.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return huge_tensor(shape, dtype)
