"""Scales that each rank has measured of its own heads, made one set for the group."""

from collections.abc import Sequence

import torch

from kernels.checks import Scales
from worker_svc.model.other_ranks import OtherRanks
from worker_svc.model.shard import Extent


def share_scales(
    measured: Sequence[Scales], kept: Sequence[Scales] | None, heads: Extent, ranks: OtherRanks
) -> tuple[Scales, ...]:
    """Return the scales of all heads of the whole model, the same on every rank. Shapes: [G] each.

    A head that several ranks hold gets the scale by which one of them stores it already (`kept`),
    else the largest that was measured. Shapes of what is given: [this rank's heads].

    Raises: RanksLostError.
    """
    device = measured[0].k.device
    mine = slice(heads.mine.start, heads.mine.stop)
    table = torch.zeros(2, len(measured), 2, heads.whole)  # kept and measured; layers; k and v
    for of_kind, scales in zip(table, (kept or (), measured), strict=True):
        for row, one in zip(of_kind, scales, strict=False):  # those that are kept, or none
            row[:, mine] = torch.stack((one.k, one.v)).cpu()
    # Of NaN nobody knows which is larger; infinity says as well that a head cannot be stored.
    table = torch.where(table.isfinite(), table, torch.inf)
    of_kept, of_measured = ranks.largest(table)
    shared = torch.where(of_kept > 0, of_kept, of_measured).to(device)
    return tuple(Scales(k.contiguous(), v.contiguous()) for k, v in shared)
