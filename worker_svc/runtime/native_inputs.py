"""Step inputs by native code, for what most steps are."""

from collections.abc import Callable
from functools import partial

import torch

from kernels.cpu_build import native_code
from kernels.cpu_inputs import CpuInputs, InputTensors, RowColumns
from worker_svc.runtime.rows import Rows
from worker_svc.runtime.step_inputs import StepInputs, build_step_inputs
from worker_svc.runtime.step_plan import Int64Array


def input_builder(rows: Rows, device: torch.device) -> Callable[[Int64Array], StepInputs]:
    """Return what builds the inputs for running some of these rows, as `build_step_inputs`.

    On a CPU what it returns holds until it is called again.
    """
    code = native_code() if device.type == "cpu" else None
    if code is None:
        return partial(build_step_inputs, rows, device=device)
    columns = RowColumns(
        rows.tokens,
        rows.num_tokens,
        rows.num_computed_tokens,
        rows.num_new_tokens,
        rows.sampling.pooling,
        tuple(tables.ids for tables in rows.block_tables),
    )
    return _NativeInputs(rows, CpuInputs(columns, rows.block_tables[0].block_size, code)).build


class _NativeInputs:
    """Leaves steps with drafts or embeddings to numpy."""

    __slots__ = ("_inputs", "_latest", "_rows", "_tensors")

    def __init__(self, rows: Rows, inputs: CpuInputs) -> None:
        self._rows = rows
        self._inputs = inputs
        self._tensors: InputTensors | None = None
        self._latest: StepInputs | None = None

    def build(self, running: Int64Array) -> StepInputs:
        rows = self._rows
        if rows.has_drafts or rows.embedded.are_any:
            return build_step_inputs(rows, running, torch.device("cpu"))
        tensors = self._inputs.write(running)
        read = None if rows.read_all_tokens(running) else tensors.last_tokens
        latest = self._latest
        if latest is None or tensors is not self._tensors or latest.read_tokens is not read:
            self._tensors = tensors
            self._latest = latest = StepInputs(**tensors._asdict(), read_tokens=read)
        return latest
