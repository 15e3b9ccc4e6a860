"""A step bench decodes steadily, and a steady plan is small."""

import json

import pytest

from scheduler_svc.bench_step import main, measure


def test_a_steady_plan_holds_only_new_blocks() -> None:
    costs = measure(64)
    assert costs.requests == 64
    assert costs.us_per_request == costs.us_per_step / 64
    # Four rows a step gain a block of 4 bytes, and say which they are in 4 more.
    assert 4 * 8 <= costs.plan_bytes <= 4 * 8 + 64
    assert costs.plan_bytes_max == costs.plan_bytes


def test_a_plan_of_1024_rows_is_at_most_a_kibibyte() -> None:
    assert measure(1024).plan_bytes <= 1024


@pytest.mark.slow
def test_a_steady_step_costs_half_a_microsecond_a_request_at_most() -> None:
    # And four times the requests cost four times as much at most. The best of five runs counts,
    # since a shared machine slows single ones down.
    costs = {size: min(measure(size).us_per_step for _ in range(5)) / size for size in (256, 1024)}
    assert max(costs.values()) <= 0.5
    assert costs[1024] <= costs[256]


def test_each_size_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--requests", "1", "--requests", "17", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["requests"] for line in lines] == [1, 17]
    assert lines[0].keys() == {
        "requests",
        "us_per_step",
        "us_per_request",
        "plan_bytes",
        "plan_bytes_max",
    }
    assert main(["--requests", "3"]) == 0
    assert capsys.readouterr().out.startswith("3 requests: ")


def test_no_requests_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--requests", "0"])
    assert ended.value.code == 2
    assert "--requests is 0, must be at least 1" in capsys.readouterr().err
