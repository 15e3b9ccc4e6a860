"""Runners that launch steps, on a CPU: what a GPU runs, but for graphs and the compiled sampler."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kernels.reference_sample import noisy_scores
from kernels.sample import PenaltyColumns, SamplingColumns
from worker_svc.model.weights import LoadedModel
from worker_svc.runtime import device_sampling
from worker_svc.runtime.device_runner import DeviceRunner
from worker_svc.runtime.model_runner import ModelRunner


def launching(loaded: LoadedModel, runner: ModelRunner) -> DeviceRunner:
    """Return a runner with the rows and the cache of one that has not run yet."""
    return DeviceRunner(loaded.model, runner)


@contextmanager
def reference_sampler() -> Iterator[None]:
    """Draw with the kernel's reference: interpreted, the kernel takes a second for a few rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_sampling, "sample", _sample)
        yield


def _sample(
    logits: torch.Tensor, params: SamplingColumns, penalties: PenaltyColumns | None = None
) -> torch.Tensor:
    failed = ~logits.amax(dim=-1).isfinite()
    scores = noisy_scores(torch.where(failed[:, None], 0.0, logits), params, penalties)
    return torch.where(failed, -1, scores.argmax(dim=-1)).int()
