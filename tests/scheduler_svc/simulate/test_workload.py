"""A load is what a trace or a distribution says, and the same for the same seed."""

import json
from pathlib import Path

import pytest

from scheduler_svc.simulate.workload import (
    LENGTHS,
    Arrival,
    TraceError,
    poisson,
    prompt_ids,
    read_trace,
)

CHUNK = 4


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "inputs", "outputs"), [("sharegpt", 161.31, 337.99), ("alpaca", 19.31, 58.45)]
)
def test_lengths_have_the_published_means(name: str, inputs: float, outputs: float) -> None:
    load = LENGTHS[name].draw(40_000, seed=0)
    assert sum(a.input_length for a in load) / len(load) == pytest.approx(inputs, rel=0.03)
    assert sum(a.output_length for a in load) / len(load) == pytest.approx(outputs, rel=0.03)


def test_a_rate_spreads_arrivals_and_leaves_lengths() -> None:
    load = LENGTHS["alpaca"].draw(5000, seed=3)
    spread = poisson(load, rate=8.0, seed=3)
    assert spread == poisson(load, rate=8.0, seed=3) != poisson(load, rate=8.0, seed=4)
    assert [a.input_length for a in spread] == [a.input_length for a in load]
    assert spread[-1].arrival_s == pytest.approx(5000 / 8, rel=0.05)


def test_a_trace_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        {"arrival_s": 2.0, "input_length": 5, "output_length": 1, "hash_ids": [7, 8]},
        {"arrival_s": 0.5, "input_length": 3, "output_length": 2},
    )
    assert read_trace(path, CHUNK) == [Arrival(0.5, 3, 2), Arrival(2.0, 5, 1, (7, 8))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_length": 0}, "input_length is 0, must be an integer from 1"),
        ({"output_length": "4"}, "output_length is '4'"),
        ({"arrival_s": -1}, "arrival_s is -1.0, must be finite and at least 0"),
        ({"hash_ids": [1]}, "1 chunks of 4 tokens, fewer than input_length, 5"),
        ({"hash_ids": [1, 2**30]}, "hash_ids is 1073741824"),
    ],
)
def test_an_impossible_line_is_named(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    good: dict[str, object] = {"arrival_s": 0.0, "input_length": 5, "output_length": 1}
    path = write(tmp_path / "trace.jsonl", good, good | change)
    with pytest.raises(TraceError, match="line 2: ") as raised:
        read_trace(path, CHUNK)
    assert message in str(raised.value)


@pytest.mark.parametrize("content", ["", "no json\n", "[1]\n", '{"arrival_s": 0}\n', "\xff"])
def test_what_is_no_trace_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(TraceError, match=r"trace\.jsonl"):
        read_trace(path, CHUNK)


def test_prompts_are_equal_as_far_as_their_chunks_are() -> None:
    first = prompt_ids(Arrival(0.0, 10, 1, (1, 2, 3)), 0, CHUNK)
    second = prompt_ids(Arrival(0.0, 12, 1, (1, 2, 4)), 1, CHUNK)
    assert len(first) == 10
    assert first[:8] == second[:8]
    assert not set(first[8:]) & set(second[8:])
    own = [prompt_ids(Arrival(0.0, 6, 1), number, CHUNK) for number in (0, 1)]
    assert not set(own[0]) & (set(own[1]) | set(first) | set(second))
