"""Which tile sizes a kernel uses on which GPU, and where each choice comes from.

Nothing is tuned at run time: a server that times kernels while it starts answers late, and
differently from its neighbour. A row is chosen by (kernel, target, padded head dimension, bytes of
a cached element); what has no row falls back to a row with room for more, then to `_FALLBACK`.
"""

from dataclasses import dataclass
from typing import Final

import torch

_HAS_E4M3: Final = ("sm_89", "sm_90", "sm_100", "sm_120")


@dataclass(frozen=True, slots=True)
class Target:
    """The machine a kernel is built for."""

    name: str
    """`sm_90`, `gfx942`, or `interpreter` on a CPU."""

    num_processors: int
    """Multiprocessors (NVIDIA) or compute units (AMD)."""

    @property
    def interpreted(self) -> bool:
        """Whether Triton's interpreter runs the kernels, not a GPU."""
        return self.name == "interpreter"

    @property
    def fp32_products(self) -> str:
        """How a product of fp32 tiles is made.

        NVIDIA's tensor cores take 19 bits of each number; three products of them make up for it.
        One-element products on ordinary units would be exact, slower, and spill registers.
        """
        return "tf32x3" if self.name.startswith("sm_") else "ieee"

    @property
    def warp_size(self) -> int:
        """Threads that run in step."""
        return 64 if self.name.startswith("gfx") else 32

    @property
    def converts_e4m3(self) -> bool:
        """Whether one instruction turns e4m3 into a wider type. If not, bytes are shifted."""
        return self.name in _HAS_E4M3


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of one program."""

    rows: int
    """Query rows (tokens times the heads that share a key/value head). A power of two."""

    tokens: int
    """Keys per iteration. A power of two."""

    num_warps: int
    num_stages: int
    """Depth of the software pipeline: tiles of keys and values in flight, plus one in use."""

    origin: str
    """How the numbers were found."""


_COMPILED: Final = "by the compiler's report (docs/kernels_compiled.md); never timed"
_INTERPRETED: Final = "small, so that the interpreter's tests see several tiles"

_FALLBACK: Final = Tile(32, 32, 4, 2, "safe anywhere: below 48 KiB of shared memory; never timed")

# (kernel, target, padded head dimension, bytes of a cached element)
_Key = tuple[str, str, int, int]

_TILES: Final[dict[_Key, Tile]] = {
    # Decode waits for memory. What counts is bytes in flight: on an H200 some 29 KiB per
    # multiprocessor hide 800 ns at 4.8 TB/s; two stages of 32 KiB (four of 16 KiB with fp8) in
    # each of two or three programs are well above.
    ("paged_decode", "sm_80", 64, 1): Tile(16, 64, 4, 5, _COMPILED),
    ("paged_decode", "sm_80", 128, 1): Tile(16, 64, 4, 5, _COMPILED),
    ("paged_decode", "sm_80", 256, 1): Tile(16, 32, 4, 5, _COMPILED),
    ("paged_decode", "sm_80", 64, 2): Tile(16, 64, 4, 3, _COMPILED),
    ("paged_decode", "sm_80", 128, 2): Tile(16, 64, 4, 3, _COMPILED),
    ("paged_decode", "sm_80", 256, 2): Tile(16, 32, 4, 3, _COMPILED),
    ("paged_decode", "sm_80", 128, 4): Tile(16, 16, 4, 2, _COMPILED),
    ("paged_decode", "sm_80", 256, 4): Tile(16, 16, 8, 2, _COMPILED),
    ("paged_decode", "sm_90", 64, 1): Tile(16, 64, 4, 5, _COMPILED),
    ("paged_decode", "sm_90", 128, 1): Tile(16, 64, 4, 5, _COMPILED),
    ("paged_decode", "sm_90", 256, 1): Tile(16, 32, 4, 5, _COMPILED),
    ("paged_decode", "sm_90", 64, 2): Tile(16, 128, 4, 3, _COMPILED),
    ("paged_decode", "sm_90", 128, 2): Tile(16, 64, 4, 3, _COMPILED),
    ("paged_decode", "sm_90", 256, 2): Tile(16, 32, 4, 3, _COMPILED),
    ("paged_decode", "sm_90", 128, 4): Tile(16, 16, 4, 2, _COMPILED),
    ("paged_decode", "sm_90", 256, 4): Tile(16, 16, 8, 2, _COMPILED),
    ("paged_decode", "sm_100", 64, 1): Tile(16, 64, 4, 5, _COMPILED),
    ("paged_decode", "sm_100", 128, 1): Tile(16, 64, 4, 5, _COMPILED),
    ("paged_decode", "sm_100", 256, 1): Tile(16, 32, 4, 5, _COMPILED),
    ("paged_decode", "sm_100", 64, 2): Tile(16, 128, 4, 3, _COMPILED),
    ("paged_decode", "sm_100", 128, 2): Tile(16, 64, 4, 3, _COMPILED),
    ("paged_decode", "sm_100", 256, 2): Tile(16, 32, 4, 3, _COMPILED),
    ("paged_decode", "sm_100", 128, 4): Tile(16, 16, 4, 2, _COMPILED),
    ("paged_decode", "sm_100", 256, 4): Tile(16, 16, 8, 2, _COMPILED),
    ("paged_decode", "gfx942", 64, 2): Tile(16, 64, 4, 2, _COMPILED),
    ("paged_decode", "gfx942", 128, 2): Tile(16, 32, 4, 2, _COMPILED),
    ("paged_decode", "gfx942", 256, 2): Tile(16, 32, 4, 2, _COMPILED),
    ("paged_decode", "gfx942", 256, 4): Tile(16, 16, 4, 1, _COMPILED),
    # Prefill waits for the tensor cores: a warpgroup of 4 warps owns 64 rows.
    ("paged_prefill", "sm_80", 64, 2): Tile(128, 64, 8, 3, _COMPILED),
    ("paged_prefill", "sm_80", 128, 2): Tile(128, 32, 8, 3, _COMPILED),
    ("paged_prefill", "sm_80", 256, 1): Tile(32, 32, 8, 2, _COMPILED),
    ("paged_prefill", "sm_80", 256, 2): Tile(64, 32, 8, 2, _COMPILED),
    ("paged_prefill", "sm_80", 128, 4): Tile(16, 32, 8, 2, _COMPILED),
    ("paged_prefill", "sm_80", 256, 4): Tile(16, 16, 8, 2, _COMPILED),
    ("paged_prefill", "sm_90", 64, 2): Tile(128, 128, 8, 3, _COMPILED),
    ("paged_prefill", "sm_90", 128, 2): Tile(128, 64, 8, 3, _COMPILED),
    ("paged_prefill", "sm_90", 256, 2): Tile(64, 64, 8, 2, _COMPILED),
    ("paged_prefill", "sm_90", 128, 4): Tile(16, 32, 8, 2, _COMPILED),
    ("paged_prefill", "sm_90", 256, 4): Tile(16, 16, 8, 2, _COMPILED),
    ("paged_prefill", "sm_100", 64, 2): Tile(128, 128, 8, 3, _COMPILED),
    ("paged_prefill", "sm_100", 128, 2): Tile(128, 64, 8, 3, _COMPILED),
    ("paged_prefill", "sm_100", 256, 2): Tile(64, 64, 8, 2, _COMPILED),
    ("paged_prefill", "sm_100", 128, 4): Tile(16, 32, 8, 2, _COMPILED),
    ("paged_prefill", "sm_100", 256, 4): Tile(16, 16, 8, 2, _COMPILED),
    ("paged_prefill", "gfx942", 64, 2): Tile(128, 32, 4, 2, _COMPILED),
    ("paged_prefill", "gfx942", 128, 2): Tile(128, 32, 4, 1, _COMPILED),
    ("paged_prefill", "gfx942", 256, 1): Tile(32, 32, 4, 1, _COMPILED),
    ("paged_prefill", "gfx942", 256, 2): Tile(64, 32, 4, 1, _COMPILED),
    ("paged_prefill", "gfx942", 256, 4): Tile(32, 16, 4, 1, _COMPILED),
    ("paged_decode", "interpreter", 256, 4): Tile(16, 32, 4, 1, _INTERPRETED),
    ("paged_prefill", "interpreter", 256, 4): Tile(32, 32, 4, 1, _INTERPRETED),
}

# A kernel without rows of its own walks over keys as this one does.
_LIKE: Final = {"shared_prefix": "paged_prefill"}


def target_of(device: torch.device) -> Target:
    """Return what kernels on `device` are built for."""
    if device.type != "cuda":
        # As many as make short test sequences split.
        return Target("interpreter", 4)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        name = properties.gcnArchName.split(":")[0]
    else:
        name = f"sm_{properties.major}{properties.minor}"
    return Target(name, properties.multi_processor_count)


def tile_of(
    kernel: str, target: Target, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> Tile:
    """Return the tile for a kernel, from the narrowest row with room for head_dim and dtypes."""
    kernel = _LIKE.get(kernel, kernel)
    # fp8 makes tiles in flight small, but not those that are worked on.
    wanted = kv_dtype.itemsize if dtype.itemsize == 2 else 4
    for dim in (64, 128, 256):
        for itemsize in (1, 2, 4):
            tile = _TILES.get((kernel, target.name, dim, itemsize))
            if tile is not None and dim >= head_dim and itemsize >= wanted:
                return tile
    return _FALLBACK


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """The shape of one program of `quantised_matmul`."""

    rows: int
    """Tokens. A power of two."""

    columns: int
    """Outputs. A power of two."""

    splits: int
    """Programs that share one long sum."""

    num_warps: int
    num_stages: int


_PROGRAMS_PER_PROCESSOR: Final = 2
_PANELS_PER_SPLIT: Final = 4
"""Fewer would end before the pipeline is full."""

_MOST_SPLITS: Final = 16


def matmul_tile(
    target: Target, num_tokens: int, num_outputs: int, num_panels: int, group: int, *,
    bits: int, dtype: torch.dtype,
) -> MatmulTile:  # fmt: skip
    """Return the tile of `quantised_matmul`, of a weight of `num_panels` panels of inputs.

    By the compiler's report and by arithmetic: never timed. Up to 16 tokens only bytes count: on
    an H200 two programs with two or three tiles of 8 or 16 KiB in flight are above the 29 KiB
    that a multiprocessor needs. Sums are split while there are fewer programs than that.
    """
    if target.interpreted:
        # Small, so that tests see several tiles and splits.
        return MatmulTile(16, 16, min(2, num_panels), 4, 1)
    is_wide = dtype == torch.float32
    # With small groups a second sum is alive beside the first. For sm_100, Triton 3.7.1 makes
    # an empty kernel of 128 tokens and 4 bits.
    is_narrow = 0 < group < 128 or (bits == 4 and target.name == "sm_100")
    most = 32 if is_wide else 64 if is_narrow else 128
    rows = min(most, max(16, 1 << (num_tokens - 1).bit_length()))
    columns = 64 if is_wide else 128
    tiles = -(-num_tokens // rows) * -(-num_outputs // columns)
    wanted = -(-_PROGRAMS_PER_PROCESSOR * target.num_processors // tiles)
    splits = max(1, min(wanted, num_panels // _PANELS_PER_SPLIT, _MOST_SPLITS))
    stages = 2 if target.name.startswith("gfx") else 3 if bits == 8 or rows > 64 else 4
    return MatmulTile(rows, columns, splits, 8 if rows > 32 else 4, stages)
