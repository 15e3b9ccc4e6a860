"""Drawing tokens on the device from the packed sampling columns of rows."""

import torch

from kernels.sample import SamplingColumns, sample


def draw(
    logits: torch.Tensor,
    sampling: torch.Tensor,
    places: torch.Tensor,
    nth: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return one token per row, below 0 where the logits are no numbers.

    Shapes: logits [S, V]; sampling [S, 7] as in `DeviceRows`; places [S], where in its sequence
        the token will stand; nth [S], which of a row's samples it is; returns [S] int32.

    Numerics: a token's noise depends on seed, sequence index, place and token alone, and is
        another than the CPU's for the same seed.
    """
    columns = sampling.t().contiguous()  # [7, S]
    temperature, top_p, min_p = columns[:3].view(torch.float32)
    lower, upper = columns[4].long(), columns[5].long()
    index = columns[6]
    return sample(
        logits,
        SamplingColumns(
            temperature=temperature,
            top_k=columns[3],
            top_p=top_p,
            min_p=min_p,
            seed=(upper << 32) | (lower & 0xFFFFFFFF),
            sequence_index=index if nth is None else index + nth.int(),
            position=places.int(),
        ),
    )
