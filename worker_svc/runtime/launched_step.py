"""A step that the device has been handed, and may still be running."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from worker_svc.runtime.step_plan import Int32Array, Int64Array, StepResult


class Sampled(NamedTuple):
    """What a step samples. S rows, T tokens."""

    rows: Int64Array
    """[S] ascending."""

    counts: Int64Array
    """[S] Tokens of each row."""

    num_candidates: Int64Array
    """[S] Candidates that each row reports."""

    tokens: torch.Tensor
    """[T] int32, on the device, row after row. Below 0 where logits are no numbers."""

    logits: torch.Tensor | None = None
    """[S, V], if a row reports candidates."""


class TokensUnderWay:
    """Tokens on their way from the device to the host."""

    __slots__ = ("_event", "_tokens")

    def __init__(self, tokens: torch.Tensor) -> None:
        """Send them off behind everything that the device has been handed. Shape: [T] int32."""
        self._event: torch.cuda.Event | None = None
        self._tokens = tokens
        if tokens.device.type == "cuda":
            self._tokens = torch.empty(len(tokens), dtype=tokens.dtype, pin_memory=True)
            self._tokens.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> Int32Array:
        """Return them when they are there, which is when the step has ended."""
        if self._event is not None:
            self._event.synchronize()
        tokens: Int32Array = self._tokens.numpy().astype(np.int32)
        return tokens


class UnderWay(NamedTuple):
    """What the device was handed."""

    sampled: Sampled
    tokens: TokensUnderWay
    generations: Int64Array
    """[S] Which of the requests that a row has had in its time it was when the step began."""


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """A step under way."""

    step_id: int
    under_way: UnderWay | None
    """None: no row ran, or `result` is there."""

    row_errors: tuple[tuple[int, str], ...]
    """Rows that were to run and had failed before."""

    started_ns: int
    prepared_ns: int
    """When its changes were on their way to the device."""

    result: StepResult | None = None
    """What a step brought that could not be launched without waiting for it."""
