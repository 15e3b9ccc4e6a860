"""Both kinds of runner, for tests that hold of each."""

from collections.abc import Callable, Iterator

import pytest

from launching import launching, reference_sampler
from plan_driver import AnyRunner
from worker_svc.model.weights import LoadedModel
from worker_svc.runtime.model_runner import ModelRunner


@pytest.fixture(scope="module", params=["waiting", "launching"])
def kind(
    request: pytest.FixtureRequest,
) -> Iterator[Callable[[LoadedModel, ModelRunner], AnyRunner]]:
    """Turn a new runner into one of a kind."""
    if request.param == "waiting":
        yield lambda _loaded, runner: runner
        return
    with reference_sampler():
        yield launching
