"""A linear layer that multiplies a checkpoint's values of few bits on a GPU, as they are."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.activation import Activation
from kernels.dispatch import WeightCase, why_not_kept
from kernels.kept_weight import Form, KeptWeight, group_of, lay_out
from kernels.quantised_matmul import quantised_matmul
from kernels.silu_and_mul import silu_and_mul
from kernels.tuned import target_of
from worker_svc.model.kept_values import NotKept
from worker_svc.model.quantised_config import Quantisation
from worker_svc.model.quantised_matrix import QuantisedMatrix
from worker_svc.model.torch_operations import gelu_and_mul


@dataclass(frozen=True, slots=True, eq=False)
class KeptLinear:
    """x @ weight.T + bias; or, gated, act(gate) * up of such a product [gate, up]."""

    weight: KeptWeight
    bias: torch.Tensor | None
    order: torch.Tensor | None
    """[in] int64. The inputs by the groups they are in; None: they lie so."""

    gate: Activation | None
    """None: the product as it is."""

    @property
    def num_bytes(self) -> int:
        """As `SizedLinear.num_bytes`."""
        return self.weight.num_bytes + (0 if self.order is None else self.order.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product. Shapes: x [T, in], returns [T, out]."""
        if self.order is not None:
            x = x.index_select(1, self.order)
        product = quantised_matmul(x, self.weight, self.bias)
        if self.gate is None:
            return product
        return gelu_and_mul(product) if self.gate is Activation.GELU else silu_and_mul(product)


def kept_linear(
    matrices: Sequence[QuantisedMatrix],
    known: Quantisation,
    bias: torch.Tensor | None,
    device: torch.device,
    gate: Activation | None = None,
) -> KeptLinear | NotKept:
    """Lay matrices out above one another, or say why not.

    Inputs are sorted by the group they are in, if need be: hidden states are then, too.
    """
    orders = [matrix.column_of.argsort(stable=True) for matrix in matrices]
    order = orders[0]
    groups = [group_of(matrix.column_of[order]) for matrix in matrices]
    group = None if None in groups else min((one for one in groups if one), default=0)
    same_order = all(torch.equal(order, other) for other in orders)
    reason = why_not_kept(WeightCase(target_of(device).name, group, same_order=same_order))
    if reason is not None or group is None:
        return NotKept(reason or "")
    is_sorted = bool((order.diff() == 1).all())
    values = torch.cat([matrix.values.view(torch.uint8) for matrix in matrices])
    firsts = order[:: group or len(order)]
    scales = torch.cat([_spread(matrix, matrix.scales, firsts) for matrix in matrices])
    zeros = [
        _spread(matrix, matrix.zeros, firsts) for matrix in matrices if matrix.zeros is not None
    ]
    weight = lay_out(
        _form(known),
        values if is_sorted else values.index_select(1, order),
        scales,
        torch.cat(zeros) if zeros else None,
        group=group,
    )
    return KeptLinear(weight.to(device), bias, None if is_sorted else order.to(device), gate)


def _form(known: Quantisation) -> Form:
    if known.is_float:
        return "e4m3"
    return "int4" if known.bits == 4 else "int8"


def _spread(matrix: QuantisedMatrix, grid: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return the scales or zero points [R, C] of all outputs and some inputs."""
    places = matrix.column_of.index_select(0, columns)
    return grid.index_select(0, matrix.row_of).index_select(1, places)
