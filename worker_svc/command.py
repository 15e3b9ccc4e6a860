"""The worker's command line: a worker that joins, or the bare loop."""

import os
import sys
from collections.abc import Sequence

from worker_svc.config import JOIN_AS_TOLD, WorkerSettings, read_settings
from worker_svc.errors import ConfigError
from worker_svc.service.bench_forward import bench_forward
from worker_svc.service.exit_status import ExitStatus
from worker_svc.service.grpc_waits import sleep_until_woken
from worker_svc.service.local_adapters import AdapterSettings
from worker_svc.service.local_model import LocalModel, LocalSettings, set_threads
from worker_svc.service.logs import Logger, make_logger
from worker_svc.service.shutdown import Shutdown, stopped_by_signals
from worker_svc.service.start_clock import StartClock
from worker_svc.service.told_address import NobodyToldError, told_address
from worker_svc.service.worker import JoinSettings, Worker


def run(argv: Sequence[str], clock: StartClock) -> ExitStatus:
    """Run a worker, or the bare loop that its speed is compared with.

    The clock knows of all that comes before.
    """
    try:
        settings = read_settings(argv)
        set_threads(settings.threads, leave_one=settings.attention_backend == "torch")
        if settings.bench_forward:
            host = LocalModel(_local_settings(settings), _logger(settings))
            bench_forward(host, sys.stdin, sys.stdout)
            return ExitStatus.STOPPED
        return _work(settings, clock)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return ExitStatus.IMPOSSIBLE
    except NobodyToldError as error:
        sys.stderr.write(f"error: {error}\n")
        return ExitStatus.NO_SCHEDULER


def _work(settings: WorkerSettings, clock: StartClock) -> ExitStatus:
    # Nothing is said of the model before: a scheduler that starts beside us may find the same
    # fault in it, and then goes first.
    address = settings.join
    if address == JOIN_AS_TOLD:
        address = told_address(sys.stdin.fileno() if sys.stdin else None)
    clock.ended("address")
    sleep_until_woken()
    shutdown = Shutdown()
    log = _logger(settings)
    with stopped_by_signals(shutdown):
        worker = Worker(
            LocalModel(_local_settings(settings), log),
            JoinSettings(
                address=address,
                secret=settings.join_secret.get_secret_value(),
                timeout_s=settings.join_timeout,
                rank_host=settings.rank_host,
            ),
            shutdown,
            log,
            exit_now=lambda: os._exit(ExitStatus.STOPPED),
            clock=clock,
        )
        return worker.run()


def _logger(settings: WorkerSettings) -> Logger:
    return make_logger(sys.stderr, settings.log_format, settings.log_level)


def _local_settings(settings: WorkerSettings) -> LocalSettings:
    return LocalSettings(
        model_path=settings.model_path,
        device=settings.device,
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        calculate_kv_scales=settings.calculate_kv_scales,
        attention_backend=settings.attention_backend,
        quantization=settings.quantization,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        num_gpu_blocks_override=settings.num_gpu_blocks_override,
        adapters=AdapterSettings(settings.adapter_dir, settings.max_lora_rank),
    )
