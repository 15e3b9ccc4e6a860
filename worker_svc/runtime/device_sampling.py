"""Drawing tokens on the device from the packed sampling columns of rows."""

import numpy as np
import numpy.typing as npt
import torch

from kernels.sample import SamplingColumns, sample
from worker_svc.runtime.device_rows import DeviceRows, to_device
from worker_svc.runtime.sampler import number_samples
from worker_svc.runtime.sampling_columns import SamplingColumns as HostColumns
from worker_svc.runtime.step_plan import Int32Array, Int64Array


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


class DeviceSampler:
    """A `Sampler` that draws what a step which waits for nothing would draw, and waits for it."""

    def __init__(self, known: DeviceRows, device: torch.device) -> None:
        self._known = known
        self._device = device

    def sample(
        self,
        logits: torch.Tensor,
        rows: Int64Array,
        positions: Int32Array,
        _params: HostColumns,
    ) -> tuple[Int32Array, npt.NDArray[np.bool_]]:
        """As `sampler.sample`."""
        tokens = self._draw(logits, rows, positions, np.zeros_like(rows))
        return np.maximum(tokens, 0), tokens < 0

    def sample_several(
        self,
        logits: torch.Tensor,
        _tokens: Int32Array,
        rows: Int64Array,
        positions: Int32Array,
        params: HostColumns,
    ) -> tuple[Int32Array, Int32Array]:
        """As `sampler.sample_several`."""
        counts = params.num_samples[rows]
        source, nth = number_samples(counts)
        each = logits[to_device(source, self._device)]
        return self._draw(each, rows[source], positions[source], nth), counts.astype(np.int32)

    def _draw(
        self, logits: torch.Tensor, rows: Int64Array, positions: Int32Array, nth: Int64Array
    ) -> Int32Array:
        placed = to_device(np.stack((rows, positions.astype(np.int64), nth)), self._device)
        tokens = draw(logits, self._known.sampling[placed[0]], placed[1], placed[2])
        drawn: Int32Array = tokens.cpu().numpy().astype(np.int32)
        return drawn
