"""How each row's tokens are chosen: SamplingParams, turned by 90 degrees."""

import numpy as np

from worker_svc.runtime.step_plan import AdmittedRow, Int64Array


class SamplingColumns:
    """One entry per row in every column."""

    __slots__ = (
        "min_p",
        "num_candidates",
        "num_samples",
        "seed",
        "sequence_index",
        "temperature",
        "top_k",
        "top_p",
    )

    def __init__(self, max_rows: int) -> None:
        self.temperature = np.zeros(max_rows, dtype=np.float64)
        self.top_k = np.zeros(max_rows, dtype=np.int64)
        self.top_p = np.ones(max_rows, dtype=np.float64)
        self.min_p = np.zeros(max_rows, dtype=np.float64)
        self.seed = np.zeros(max_rows, dtype=np.uint64)
        self.sequence_index = np.zeros(max_rows, dtype=np.int64)
        # Tokens to draw when the row next samples: 1 once it has.
        self.num_samples = np.ones(max_rows, dtype=np.int64)
        self.num_candidates = np.zeros(max_rows, dtype=np.int64)

    def write(self, row: int, entry: AdmittedRow) -> None:
        """Replace what is known of one row."""
        params = entry.sampling
        # A row that reports candidates takes the first of them.
        self.temperature[row] = 0.0 if entry.num_candidates else params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = params.seed
        self.sequence_index[row] = entry.sequence_index
        self.num_samples[row] = entry.num_samples
        self.num_candidates[row] = entry.num_candidates

    def fork(self, rows: Int64Array, parents: Int64Array, sequence_indices: Int64Array) -> None:
        """Let rows sample as their parents did before the call, with indices of their own."""
        for name in self.__slots__:
            column = getattr(self, name)
            column[rows] = column[parents]
        self.sequence_index[rows] = sequence_indices
