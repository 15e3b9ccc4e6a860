"""Weights of 4 or 8 bits laid out for `quantised_matmul`: whole words, in the order it reads them.

    words [P, O, W] int32        a panel of inputs (128 of them) of one output: W words, 64 bytes
                                 of 4-bit values or 128 of 8-bit ones; panels of neighbouring
                                 outputs lie side by side
    word j, half h, place p      is input p * 2 * W + 2 * j + h of the panel, at bit
                                 16 * h + bits * p of the word

One shift and one mask then give two weights, neighbours in the sum, in the halves of a register.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

import torch

Form: TypeAlias = Literal["int4", "int8", "e4m3"]

BITS: Final[dict[Form, int]] = {"int4": 4, "int8": 8, "e4m3": 8}
PANEL: Final = 128
"""Inputs of a panel, but where small groups want smaller ones."""

GROUPS: Final = (128, 64, 32, 16)
"""How many inputs may share a scale. The last is what a tensor core takes at a time."""

ZEROS: Final = {"int4": 16, "int8": 256}
"""Zero points lie below."""

_E4M3_NAN: Final = 0x7F


@dataclass(frozen=True, slots=True, eq=False)
class KeptWeight:
    """A matrix [O, I] of scale * (value - zero point), or scale * value of e4m3."""

    form: Form
    num_inputs: int
    panel: int
    """Inputs of a panel."""

    group: int
    """Inputs that share a scale, of `GROUPS`; 0: all."""

    words: torch.Tensor
    """[P, O, panel * bits / 32] int32. Behind the last input there are zeros."""

    scales: torch.Tensor
    """[P * panel / group, O], or [1, O]; fp16, bf16 or fp32, whichever is exact."""

    zeros: torch.Tensor | None
    """As scales, uint8. None: all are `zero`."""

    zero: int
    """Of e4m3: 0."""

    @property
    def num_outputs(self) -> int:
        """O."""
        return self.words.shape[1]

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.words.nbytes + self.scales.nbytes + zeros

    def to(self, device: torch.device) -> "KeptWeight":
        """Return it on a device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return replace(
            self, words=self.words.to(device), scales=self.scales.to(device), zeros=zeros
        )


def group_of(places: torch.Tensor) -> int | None:
    """Return of how many inputs in a row one scale can be kept; 0: one for all; None: too few.

    Shapes: places [I], which scale each input has.
    """
    if bool((places == places[0]).all()):
        return 0
    for group in GROUPS:
        firsts = places[::group].repeat_interleave(group)[: len(places)]
        if torch.equal(firsts, places):
            return group
    return None


def lay_out(
    form: Form,
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    *,
    group: int = 0,
) -> KeptWeight:
    """Return values in words, in a copy.

    Shapes: values [O, I] uint8, below 2 ** bits, or the bytes of e4m3; scales, zeros [O, groups]
        fp32, zeros whole.
    Raises: ValueError if a shape, a dtype or a value is not so, or a weight is NaN.
    """
    _check(form, values, scales, zeros, group)
    bits, columns = BITS[form], values.shape[1]
    panel = min(PANEL, group * 16 // bits) if group else PANEL
    num_panels = -(-columns // panel)
    rows = 1 if not group else num_panels * panel // group
    zero = 0 if zeros is None else int(zeros.flatten()[0])
    if zeros is not None and bool((zeros == zero).all()):
        zeros = None
    return KeptWeight(
        form, columns, panel, group, _words(values, bits, panel), _narrow(_rows(scales, rows)),
        None if zeros is None else _rows(zeros, rows).to(torch.uint8), zero,
    )  # fmt: skip


def _words(values: torch.Tensor, bits: int, panel: int) -> torch.Tensor:
    """Shapes: values [O, I] uint8, returns [P, O, panel * bits / 32] int32."""
    rows, columns = values.shape
    num_panels, places = -(-columns // panel), 16 // bits
    padded = values.new_zeros((rows, num_panels * panel))
    padded[:, :columns] = values
    by_place = padded.view(rows, num_panels, places, panel // places // 2, 2)
    words = torch.zeros((rows, num_panels, panel // places // 2), dtype=torch.int32)
    for place in range(places):
        for half in range(2):
            words |= by_place[:, :, place, :, half].int() << (16 * half + bits * place)
    return words.transpose(0, 1).contiguous()


def _rows(grid: torch.Tensor, rows: int) -> torch.Tensor:
    """Return [O, groups] as [rows, O], zeros behind the last group."""
    out = grid.new_zeros((rows, len(grid)))
    out[: grid.shape[1]] = grid.T
    return out


def _narrow(scales: torch.Tensor) -> torch.Tensor:
    """Return scales in 16 bits if that loses nothing."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(scales.to(dtype).float(), scales):
            return scales.to(dtype)
    return scales


def _check(
    form: Form, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int
) -> None:
    if values.dim() != 2 or 0 in values.shape or values.dtype != torch.uint8:
        raise ValueError(f"values is {list(values.shape)} {values.dtype}, must be [O, I] uint8")
    if group not in {0, *GROUPS}:
        raise ValueError(f"group is {group}, must be 0 or one of {GROUPS}")
    shape = (len(values), -(-values.shape[1] // group) if group else 1)
    for name, tensor in (("scales", scales), ("zeros", zeros)):
        if tensor is not None and (tensor.shape != shape or tensor.dtype != torch.float32):
            raise ValueError(
                f"{name} is {list(tensor.shape)} {tensor.dtype}, must be {list(shape)} fp32"
            )
    if form == "e4m3":
        if zeros is not None:
            raise ValueError("zeros are given, must be none with e4m3")
        if bool(((values & 0x7F) == _E4M3_NAN).any()):
            raise ValueError("values has NaN among its e4m3")
        return
    if int(values.max()) >= 1 << BITS[form]:
        raise ValueError(f"values go up to {int(values.max())}, must be below {1 << BITS[form]}")
    if zeros is not None:
        bad = zeros[(zeros != zeros.round()) | (zeros < 0) | (zeros >= ZEROS[form])]
        if bad.numel():
            raise ValueError(f"zeros has {bad[0].item()}, must be whole, 0 to {ZEROS[form] - 1}")
