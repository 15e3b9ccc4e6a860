"""A worker process ends as it was asked to, with the status that says so, and idles for nothing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

from pagemill.v1 import worker_pb2
from scripted_scheduler import DEADLINE_S, Connection, ScriptedScheduler
from source_tree import ROOT
from tiny_llama import write_tiny_llama
from worker_svc.service import wire
from worker_svc.service.exit_status import ExitStatus
from worker_svc.service.local_model import LocalModel, LocalSettings
from worker_svc.service.logs import make_logger
from worker_svc.service.model_host import CacheLimits

LIMITS = CacheLimits(
    block_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=64,
    num_blocks_override=24,
)
ON_A_CPU = ("--device", "cpu", "--dtype", "float32", "--threads", "1")

Release = Callable[[], object]


@contextmanager
def process(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """Run a Python program of this repository; it is gone when the block is left."""
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "proto", "tests"))
    started = subprocess.Popen(
        [sys.executable, *argv],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with started:
        try:
            yield started
        finally:
            started.kill()


@contextmanager
def blocking_worker(
    scheduler: ScriptedScheduler, folder: Path
) -> Iterator[tuple[subprocess.Popen[str], Release]]:
    """Run a worker that blocks while it loads and in each step, until it is released."""
    os.mkfifo(folder / "pipe")
    pipe = os.open(folder / "pipe", os.O_RDWR)
    script = str(ROOT / "tests" / "blocking_worker.py")
    try:
        with process(script, scheduler.address, str(folder / "pipe")) as worker:
            yield worker, lambda: os.write(pipe, b".")
    finally:
        os.close(pipe)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def test_sigterm_in_a_step_lets_it_finish_and_ends_with_status_0(tmp_path: Path) -> None:
    with ScriptedScheduler() as scheduler, blocking_worker(scheduler, tmp_path) as started:
        worker, release = started
        connection = scheduler.accept()
        release()
        connection.take()
        connection.plan(0)
        connection.hear_heartbeat(worker_pb2.WORKER_PHASE_RUNNING)
        worker.send_signal(signal.SIGTERM)
        connection.hear_heartbeat(worker_pb2.WORKER_PHASE_RUNNING)
        release()
        assert connection.hear("result").step_id == 0
        connection.hear_end()
        assert worker.wait(DEADLINE_S) == ExitStatus.STOPPED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_step_that_does_not(number: signal.Signals, tmp_path: Path) -> None:
    with ScriptedScheduler() as scheduler, blocking_worker(scheduler, tmp_path) as started:
        worker, release = started
        connection = scheduler.accept()
        release()
        connection.take()
        connection.plan(0)
        connection.hear_heartbeat(worker_pb2.WORKER_PHASE_RUNNING)
        worker.send_signal(number)
        connection.hear_heartbeat(worker_pb2.WORKER_PHASE_RUNNING)
        worker.send_signal(number)
        assert worker.wait(DEADLINE_S) == 128 + number
        connection.hear_end()


def test_sigterm_while_the_model_loads_ends_at_once_with_status_0(tmp_path: Path) -> None:
    with ScriptedScheduler() as scheduler, blocking_worker(scheduler, tmp_path) as started:
        worker, _ = started
        connection = scheduler.accept()
        connection.acknowledge()
        connection.hear_heartbeat(worker_pb2.WORKER_PHASE_LOADING)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(DEADLINE_S) == ExitStatus.STOPPED
        connection.hear_end()


def test_a_killed_worker_is_an_ended_stream(tmp_path: Path) -> None:
    with ScriptedScheduler() as scheduler, blocking_worker(scheduler, tmp_path) as started:
        worker, release = started
        connection = scheduler.accept()
        release()
        connection.take()
        connection.plan(0)
        worker.kill()
        connection.hear_end()


def admit_two_rows(connection: Connection) -> None:
    """Plan a prompt of three tokens in one step, and one of six in two."""
    rows = [
        worker_pb2.AdmittedRow(
            row=row,
            request_id=f"r{row}",
            tokens=wire.pack(np.array(tokens, dtype=np.int32)),
            num_prompt_tokens=len(tokens),
            num_new_tokens=min(len(tokens), 4),
            block_tables=[wire.pack(np.array(blocks, dtype=np.int32))],
            sampling=worker_pb2.RowSampling(top_p=1.0),
        )
        for row, tokens, blocks in ((2, [3, 1, 4], [5, 6]), (6, [1, 5, 9, 2, 6, 5], [9, 7, 8]))
    ]
    connection.plan(0, admitted=rows)
    connection.plan(
        1,
        exception_rows=wire.pack(np.array([6], dtype=np.int32)),
        exception_num_computed_tokens=wire.pack(np.array([4], dtype=np.int32)),
        exception_num_new_tokens=wire.pack(np.array([2], dtype=np.int32)),
    )


def greedy_alone(path: Path, tokens: list[int], count: int) -> list[int]:
    """Return what the model says to a prompt, each token from a cold start."""
    settings = LocalSettings(
        model_path=str(path),
        device="cpu",
        dtype="float32",
        kv_cache_dtype="auto",
        attention_backend="auto",
        kv_cache_memory_bytes=None,
        gpu_memory_utilization=0.92,
        num_gpu_blocks_override=None,
    )
    host = LocalModel(settings, make_logger(sys.stderr, "text", "info"))
    host.load()
    runner, _ = host.make_runner(LIMITS)
    known = list(tokens)
    for _ in range(count):
        row = worker_pb2.AdmittedRow(
            tokens=wire.pack(np.array(known, dtype=np.int32)),
            num_prompt_tokens=len(tokens),
            num_new_tokens=len(known),
            block_tables=[wire.pack(np.arange(1, 8, dtype=np.int32))],
            sampling=worker_pb2.RowSampling(top_p=1.0),
        )
        plan = worker_pb2.StepPlan(reset=True, admitted=[row])
        known += runner.run(wire.read_plan(plan)).tokens.tolist()
    return known[len(tokens) :]


def test_a_real_model_answers_plans_says_what_it_holds_and_idles_for_nothing(tiny: Path) -> None:
    with (
        ScriptedScheduler() as scheduler,
        process(
            *("-m", "worker_svc", str(tiny), "--join", scheduler.address),
            *("--num-gpu-blocks-override", "24", *ON_A_CPU),
        ) as worker,
    ):
        connection = scheduler.accept()
        hello = connection.acknowledge(heartbeat_s=0.25)
        assert hello.model.architecture == "LlamaForCausalLM"
        assert (hello.model.dtype, hello.model.kv_dtype) == ("float32", "float32")
        assert hello.model.kv_groups == [
            worker_pb2.KvGroup(num_layers=2, num_kv_heads=2, head_dim=16)
        ]
        assert hello.devices[0].kind == "cpu"
        assert connection.hear("ready").num_blocks == 24
        admit_two_rows(connection)
        results = [np.frombuffer(connection.hear("result").tokens, wire.INT32) for _ in range(2)]
        first, second = greedy_alone(tiny, [3, 1, 4], 2), greedy_alone(tiny, [1, 5, 9, 2, 6, 5], 1)
        assert [result.tolist() for result in results] == [first[:1], [first[1], *second]]

        idle = psutil.Process(worker.pid)
        busy_before, started = sum(idle.cpu_times()[:2]), time.monotonic()
        time.sleep(3.0)  # not to wait for something, but to measure it
        share = (sum(idle.cpu_times()[:2]) - busy_before) / (time.monotonic() - started)
        assert share < 0.01

        worker.send_signal(signal.SIGINT)
        _, log = worker.communicate(timeout=DEADLINE_S)
        assert worker.returncode == ExitStatus.STOPPED
    assert "Model weights: 0.00 GiB" in log
    assert "KV cache size: 96 tokens" in log
    assert "Maximum concurrency for 64 tokens per request: 1.50x" in log


def test_a_refused_process_ends_with_status_3(tiny: Path) -> None:
    with (
        ScriptedScheduler() as scheduler,
        process("-m", "worker_svc", str(tiny), "--join", scheduler.address, *ON_A_CPU) as worker,
    ):
        connection = scheduler.accept()
        connection.hear("hello")
        connection.end(grpc.StatusCode.FAILED_PRECONDITION)
        _, log = worker.communicate(timeout=DEADLINE_S)
        assert worker.returncode == ExitStatus.REFUSED
    assert "FAILED_PRECONDITION: as the test says" in log


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("nowhere",), "error: model_path is 'nowhere', where nothing is\n"),
        (
            ("nowhere", "--threads", "0"),
            "error: threads is '0', must be greater than or equal to 1\n",
        ),
    ],
)
def test_an_impossible_setting_is_one_line_and_status_2(argv: tuple[str, ...], line: str) -> None:
    with process("-m", "worker_svc", *argv) as worker:
        out, log = worker.communicate(timeout=DEADLINE_S)
        assert worker.returncode == ExitStatus.IMPOSSIBLE
    assert (out, log) == ("", line)
