"""Which attention backend a worker runs on, and its line in the log."""

from collections.abc import Callable
from typing import Final

import torch

from kernels import checks, dispatch
from kernels.cpu_build import why_no_native_code
from kernels.tuned import target_of
from worker_svc.errors import ConfigError
from worker_svc.model.native_operations import NativeOperations
from worker_svc.model.operations import Operations
from worker_svc.model.torch_operations import TorchOperations
from worker_svc.service.logs import Logger


def _triton_operations() -> Operations:
    # Triton takes a second to import, and a worker on a CPU has no use for it.
    from worker_svc.model.triton_operations import TritonOperations  # noqa: PLC0415

    return TritonOperations()


OPERATIONS: Final[dict[str, Callable[[], Operations]]] = {
    "triton": _triton_operations,
    "native": NativeOperations,
    "torch": TorchOperations,
}
"""Backends of `kernels.dispatch` that a worker has the rest of a model for."""


def choose_operations(
    wanted: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    log: Logger,
    *,
    kv_dtype: torch.dtype | None = None,
) -> Operations:
    """Return the operations of the best backend, or of the one that is wanted; log which, once.

    `kv_dtype` is the cache's; None: `dtype`. A CPU that could run native code and cannot is worth
    a warning. Compiles it the first time.

    Raises: ConfigError if the one that is wanted does not serve.
    """
    case = dispatch.Case(
        device=device.type,
        target=target_of(device).name if device.type == "cuda" else "",
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        head_dim=head_dim,
        block_size=checks.BLOCK_SIZES[0],  # known only later: `check_block_size`
        no_native_code=why_no_native_code() if device.type == "cpu" else None,
    )
    # That a CPU has no use for Triton is no news to anybody who did not ask for it.
    off = {"triton"} if device.type == "cpu" and wanted != "triton" else set()
    backends = tuple(
        backend for backend in dispatch.BACKENDS if backend.name in OPERATIONS.keys() - off
    )
    try:
        choice = dispatch.choose(case, None if wanted == "auto" else wanted, backends)
    except ValueError as error:
        raise ConfigError(f"attention_backend: {error}") from error
    fell_back = device.type == "cpu" and bool(choice.rejected)
    (log.warning if fell_back else log.info)(str(choice))
    return OPERATIONS[choice.name]()


def check_block_size(block_size: int) -> None:
    """Raise ConfigError if a GPU's kernels do not serve blocks of so many tokens."""
    if block_size not in checks.BLOCK_SIZES:
        raise ConfigError(f"block_size is {block_size}, must be one of {checks.BLOCK_SIZES}")
