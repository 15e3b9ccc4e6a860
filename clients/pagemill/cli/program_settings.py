"""Which setting belongs to which program, and how a program is told."""

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from pagemill.cli.exit_status import CliError, ExitStatus
from pagemill.cli.extras import check_installed
from pagemill.cli.model_source import Model
from pagemill.cli.processes import Programs
from pagemill.cli.run_folder import SOCKET

MAX_RANKS = 1024
"""The scheduler's own bound."""

# Settings by their names in the programs' own configurations.
SCHEDULER_SETTINGS = frozenset(
    {
        "block_size",
        "drain_timeout",
        "enable_kv_cache_events",
        "enable_prefix_caching",
        "eviction_policy",
        "hash_seed",
        "join_secret",
        "kv_cache_metrics",
        "kv_cache_metrics_sample",
        "kv_events_buffer",
        "listen",
        "log_format",
        "log_level",
        "long_prefill_token_threshold",
        "max_embedding_bytes",
        "max_logprobs",
        "max_long_prefills",
        "max_loras",
        "max_model_len",
        "max_num_batched_tokens",
        "max_pinned_share",
        "max_num_seqs",
        "max_waiting_requests",
        "max_waiting_tokens",
        "metrics_listen",
        "num_gpu_blocks_override",
        "num_speculative_tokens",
        "pipeline_depth",
        "preemption_victim",
        "prefix_caching_hash_algo",
        "priority_ageing",
        "scheduling_policy",
        "served_model_name",
        "speculation",
        "step_timeout",
        "tensor_parallel_size",
        "tenant_weights",
        "trace_steps_every",
        "worker_listen",
        "worker_wait",
    }
)
WORKER_SETTINGS = frozenset(
    {
        "adapter_dir",
        "attention_backend",
        "calculate_kv_scales",
        "device",
        "dtype",
        "gpu_memory_utilization",
        "join_secret",
        "kv_cache_dtype",
        "kv_cache_memory_bytes",
        "log_format",
        "log_level",
        "max_lora_rank",
        "quantization",
        "threads",
    }
)


def server_programs(
    model: Model,
    flags: Mapping[str, object],
    file: Mapping[str, object],
    folder: Path,
    *,
    ready_timeout_s: float = 600.0,
) -> Programs:
    """Return the command lines of a scheduler and its workers on this machine.

    Flags stay flags. What the file says, and what is only usual here (a private socket
    between the two), goes into a file for each program in `folder`, so that the environment
    keeps its place between file and flags.

    Raises: CliError if the file names a setting of neither program, or the timeout is none.
    """
    if not 0 < ready_timeout_s < math.inf:
        raise CliError(
            f"ready_timeout is {ready_timeout_s:g}, must be a finite number greater than 0",
            ExitStatus.USAGE,
        )
    if unknown := file.keys() - SCHEDULER_SETTINGS - WORKER_SETTINGS:
        raise CliError(
            f"config names {', '.join(sorted(unknown))}, no setting of scheduler or worker",
            ExitStatus.USAGE,
        )
    usual = {"served_model_name": [model.name], "worker_listen": f"unix:{folder / SOCKET}"}
    scheduler_file = _write(folder / "scheduler.json", _only(SCHEDULER_SETTINGS, {**usual, **file}))
    ranks = num_ranks(flags, file)
    threads = {"threads": threads_of_a_rank(ranks, os.cpu_count() or 1)} if ranks > 1 else {}
    worker_file = _write(folder / "worker.json", _only(WORKER_SETTINGS, {**threads, **file}))
    return Programs(
        scheduler=(
            *program("scheduler_svc", str(model.path), "--config", scheduler_file),
            *arguments(_only(SCHEDULER_SETTINGS, flags)),
        ),
        worker=(
            *program("worker_svc", str(model.path), "--config", worker_file),
            *arguments(_only(WORKER_SETTINGS, flags)),
        ),
        num_workers=ranks,
        ready_timeout_s=ready_timeout_s,
    )


def num_ranks(flags: Mapping[str, object], file: Mapping[str, object]) -> int:
    """Return how many workers to start. One, where the scheduler will refuse the number."""
    given = flags.get("tensor_parallel_size")
    text = str(file.get("tensor_parallel_size", 1) if given is None else given)
    return max(1, min(int(text), MAX_RANKS)) if text.isdecimal() else 1


def threads_of_a_rank(ranks: int, cores: int) -> int:
    """Return threads for each of several workers of this machine, which leave a core to others."""
    return max(1, (cores - 1) // ranks)


def program(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command line of one of our programs, under this interpreter.

    Raises: CliError if what it needs is not installed.
    """
    check_installed(module)
    return (sys.executable, "-m", module, *arguments)


def read_config(path: Path) -> dict[str, object]:
    """Return the settings of a YAML file, by their names with underscores.

    Raises: CliError if it cannot be read, or holds no mapping.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise CliError(
            f"config is {path}, which cannot be read: {reason}", ExitStatus.USAGE
        ) from error
    if not isinstance(content, dict):
        raise CliError(f"config is {path}, which must hold a mapping", ExitStatus.USAGE)
    return {str(name).replace("-", "_"): value for name, value in content.items()}


def arguments(flags: Mapping[str, object]) -> list[str]:
    """Return the flags that were given, as our programs read them."""
    given = []
    for name, value in flags.items():
        if value is None:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            given.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            given.append(f"--{flag}={value}")
    return given


def _only(known: frozenset[str], settings: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in settings.items() if name in known}


def _write(path: Path, settings: Mapping[str, object]) -> str:
    """Write settings for a program, for which JSON is YAML; return the path."""
    path.write_text(json.dumps(settings, default=str), encoding="utf-8")
    return str(path)
