"""Which layers share block tables: KV groups, of so many layers each that any block serves any."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

_FEW_GROUPS: Final = 8
"""Groups beyond these cost a step more than the memory they save."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that see the same tokens, and keep what they know of them in the same blocks."""

    layers: tuple[int, ...]
    """Ascending."""

    window: int | None
    """Tokens a token sees, itself included. None: all before it."""

    def most_blocks(self, num_tokens: int, step_tokens: int, block_size: int) -> int:
        """Return the most blocks that a request of so many tokens holds at a time.

        Behind a window: what the first of a step's tokens sees, up to the last of them, and a
        block more where that begins inside one.
        """
        whole = -(-num_tokens // block_size)
        if self.window is None:
            return whole
        return min(whole, -(-(self.window - 1 + step_tokens) // block_size) + 1)


def group_layers(
    num_layers: int, window: int | None, full_layers: Collection[int] = ()
) -> tuple[LayerGroup, ...]:
    """Return the groups of a model whose layers have a window, but for `full_layers`.

    All groups share one pool, so a block has room for the layers of the largest. Layers of a
    kind are therefore cut into groups as large as the smaller kind: five layers with a window to
    each without are six equal groups, and a block wastes nothing. Layers that see all come first.

    Source: the hybrid memory layout of vLLM, `kv_cache_utils.py`.
    """
    full: list[int] = []
    windowed: list[int] = []
    for layer in range(num_layers):
        (full if window is None or layer in full_layers else windowed).append(layer)
    kinds = [(None, full), (window, windowed)]
    smallest = min(len(layers) for _, layers in kinds if layers)
    size = max(smallest, -(-num_layers // _FEW_GROUPS))
    return tuple(
        LayerGroup(tuple(layers[first : first + size]), seen)
        for seen, layers in kinds
        for first in range(0, len(layers), size)
    )
