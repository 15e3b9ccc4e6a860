"""The program prints a table or one JSON object, and its status says what went wrong."""

import json
from pathlib import Path

import pytest

from scheduler_svc.simulate.__main__ import main

ALPACA = ["--lengths", "alpaca", "--requests", "20"]


@pytest.mark.parametrize("allocator", ["paged", "max", "pow2", "oracle"])
def test_json_is_one_object_with_the_named_fields(
    allocator: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ALPACA, "--allocator", allocator, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["allocator"] == allocator
    assert answer["requests"] == 20
    assert answer["step_cost"]["weights_ns"] > 0
    assert answer["ttft_s"].keys() == answer["itl_s"].keys() == {"p50", "p90", "p99"}
    assert 0 < answer["utilisation_of_pool"] <= answer["utilisation_of_allocated"] <= 1
    for name in ("mean_batch", "blocks_saved_share", "hit_rate", "steps", "virtual_s"):
        assert answer[name] >= 0
    assert answer["preemptions"] == answer["recomputed_tokens"] == 0


def test_a_table_shows_the_published_share_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--lengths", "sharegpt", "--requests", "20"]
    assert main([*flags, "--allocator", "max"]) == 0
    assert "(published: 20.4%)" in capsys.readouterr().out
    assert main(ALPACA) == 0
    table = capsys.readouterr().out
    assert "published" not in table
    assert "blocks of 16" in table


def test_a_trace_that_cannot_be_read_is_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--trace", str(tmp_path / "none")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "which cannot be read" in printed.err
