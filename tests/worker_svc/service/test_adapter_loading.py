"""Adapters come and go beside the steps, each load answered once, whatever overtakes it."""

import sys
from pathlib import Path

import pytest
import torch

from fake_model_host import FakeHost, running_worker
from pagemill.v1 import worker_pb2
from scripted_scheduler import Connection, ScriptedScheduler
from tiny_adapter import write_adapter
from tiny_llama import write_tiny_llama
from worker_svc.errors import ConfigError
from worker_svc.model.other_ranks import NoOtherRanks
from worker_svc.model.shard import Shard
from worker_svc.service.local_adapters import AdapterSettings, LocalAdapters
from worker_svc.service.local_model import LocalModel, LocalSettings
from worker_svc.service.logs import make_logger

ONE = (1).to_bytes(4, "little")
ROW = worker_pb2.AdmittedRow(
    row=3, tokens=ONE, num_prompt_tokens=1, num_new_tokens=1, block_tables=[ONE]
)


def answer_of(connection: Connection) -> tuple[int, int, str]:
    answer: worker_pb2.AdapterAnswer = connection.hear("adapter")
    return answer.number, answer.generation, answer.error


def test_a_load_is_answered_with_the_generation_and_a_failure_with_one_line() -> None:
    host = FakeHost()
    host.adapters.generations = {"poet": 77}
    with ScriptedScheduler() as scheduler, running_worker(host, scheduler.address):
        connection = scheduler.accept()
        connection.take()
        connection.adapter(adapter=2, path="poet", number=1)
        assert answer_of(connection) == (1, 77, "")
        connection.adapter(adapter=3, path="cook", number=2)
        assert answer_of(connection) == (2, 0, "nothing is at cook")
        assert host.adapters.generation(2) == 77
        assert set(host.adapters.loaded) == {2}


def test_steps_go_on_while_an_adapter_is_read() -> None:
    host = FakeHost()
    host.adapters.generations = {"poet": 77}
    host.adapters.may_read.clear()
    with ScriptedScheduler() as scheduler, running_worker(host, scheduler.address):
        connection = scheduler.accept()
        connection.take()
        connection.adapter(adapter=1, path="poet", number=1)
        for step_id in range(3):
            connection.plan(step_id, admitted=[ROW])
            assert connection.hear("result").step_id == step_id
        host.adapters.may_read.set()
        assert answer_of(connection) == (1, 77, "")


def test_a_drop_behind_a_plan_is_done_behind_it_and_not_answered() -> None:
    host = FakeHost()
    host.adapters.generations = {"poet": 77}
    with ScriptedScheduler() as scheduler, running_worker(host, scheduler.address):
        connection = scheduler.accept()
        connection.take()
        connection.adapter(adapter=1, path="poet", number=1)
        assert answer_of(connection) == (1, 77, "")
        connection.plan(0, admitted=[ROW])
        connection.adapter(adapter=1, number=2)
        connection.plan(1, admitted=[ROW])
        assert connection.hear("result").step_id == 0
        assert connection.hear("result").step_id == 1
        assert host.adapters.loaded == {}


def test_a_load_that_a_drop_overtook_leaves_nothing() -> None:
    host = FakeHost()
    host.adapters.generations = {"poet": 77, "cook": 78}
    host.adapters.may_read.clear()
    with ScriptedScheduler() as scheduler, running_worker(host, scheduler.address):
        connection = scheduler.accept()
        connection.take()
        connection.adapter(adapter=1, path="poet", number=1)
        connection.adapter(adapter=1, number=2)
        connection.adapter(adapter=2, path="cook", number=3)
        host.adapters.may_read.set()
        assert [answer_of(connection)[0] for _ in range(2)] == [1, 3]
        assert set(host.adapters.loaded) == {2}


def test_what_a_worker_has_already_is_not_read_again() -> None:
    host = FakeHost()
    host.adapters.generations = {"poet": 77}
    with ScriptedScheduler() as scheduler, running_worker(host, scheduler.address):
        connection = scheduler.accept()
        connection.take()
        connection.adapter(adapter=1, path="poet", number=1)
        assert answer_of(connection) == (1, 77, "")
        connection.adapter(adapter=1, path="poet", generation=77, number=2)
        assert answer_of(connection) == (2, 77, "")
        assert host.adapters.num_reads == 1
        connection.adapter(adapter=1, path="poet", generation=78, number=3)
        assert answer_of(connection) == (3, 77, "")
        assert host.adapters.num_reads == 2


def test_a_bug_of_ours_is_answered_as_well() -> None:
    host = FakeHost()
    with ScriptedScheduler() as scheduler, running_worker(host, scheduler.address):
        connection = scheduler.accept()
        connection.take()
        connection.adapter(adapter=2, path="bug", number=1)
        number, generation, error = answer_of(connection)
        assert (number, generation) == (1, 0)
        assert error == "ZeroDivisionError: division by zero"


class OneOfTwo(NoOtherRanks):
    """A rank that is loaded, and never runs."""

    def __init__(self, rank: int) -> None:
        self.shard = Shard(rank, 2)


def test_another_part_of_the_model_forgets_the_adapters_of_the_one_before(tmp_path: Path) -> None:
    """What is read for the old part when the new one has come is not taken either."""
    write_adapter(tmp_path / "adapters" / "poet")
    settings = LocalSettings(
        model_path=str(write_tiny_llama(tmp_path)),
        device="cpu",
        dtype="float32",
        kv_cache_dtype="auto",
        attention_backend="auto",
        kv_cache_memory_bytes=None,
        gpu_memory_utilization=0.92,
        num_gpu_blocks_override=None,
        adapters=AdapterSettings(str(tmp_path / "adapters")),
    )
    model = LocalModel(settings, make_logger(sys.stderr, "text", "info"))
    model.load(OneOfTwo(0))
    old = model.adapters.read("poet")
    model.adapters.publish(1, old)
    assert model.adapters.generation(1) == old.generation
    model.load(OneOfTwo(1))
    assert model.adapters.generation(1) == 0
    model.adapters.publish(1, old)
    assert model.adapters.generation(1) == 0
    new = model.adapters.read("poet")
    model.adapters.publish(1, new)
    assert model.adapters.generation(1) == old.generation == new.generation


def test_a_directory_of_adapters_that_is_not_there_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "gone", tmp_path / "file"):
        wanted = AdapterSettings(str(directory))
        with pytest.raises(ConfigError, match=r"^adapter_dir is .*, must be a directory$"):
            LocalAdapters(wanted, torch.float32, torch.device("cpu"))
    LocalAdapters(AdapterSettings(str(tmp_path)), torch.float32, torch.device("cpu"))
    LocalAdapters(AdapterSettings(""), torch.float32, torch.device("cpu"))
