"""The bench's numbers are medians of pairs, and its other side is a program that answers lines."""

import sys

import pytest

from pagemill.cli.bare_loop import bare_loop
from pagemill.cli.bench import Pair, Workload, summarize
from pagemill.cli.exit_status import CliError
from pagemill.client import StepTimes

WORKLOAD = Workload(num_seqs=4, input_len=3, output_len=5, num_pairs=3)
STEPS = StepTimes(
    steps=3,
    schedule_s=0.0,
    encode_s=0.0,
    wire_s=0.0,
    worker_wait_s=0.0,
    model_s=0.098,
    emit_s=0.0,
    step_s=0.1,
)
ECHO = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    print(json.dumps({"wall_s": json.loads(line)["num_seqs"]}), flush=True)
"""


def test_a_drifting_machine_does_not_move_the_ratio() -> None:
    pairs = [Pair(engine_s=1.0 * k, bare_s=0.9 * k, steps=10) for k in (1, 2, 4)]
    result = summarize(pairs, STEPS, WORKLOAD)
    assert result.ratio == pytest.approx(0.9)
    assert result.engine_tok_s == pytest.approx(10)
    assert result.bare_tok_s == pytest.approx(20 / 1.8)
    assert result.wall_ms_per_step == pytest.approx(20)
    assert result.overhead_ms_per_step == pytest.approx(2)
    assert [pair["engine_s"] for pair in result.rounds] == [1, 2, 4]


def test_prompts_are_equal_within_a_pair_and_new_to_the_next() -> None:
    first = WORKLOAD.prompts(0, 1000)
    assert first == WORKLOAD.prompts(0, 1000)
    assert [len(prompt) for prompt in first] == [3, 3, 3, 3]
    assert not {tuple(prompt) for prompt in first} & {
        tuple(prompt) for prompt in WORKLOAD.prompts(1, 1000)
    }


async def test_the_bare_loop_answers_runs() -> None:
    async with bare_loop([sys.executable, "-c", ECHO]) as bare:
        assert (await bare.run({"num_seqs": 7}))["wall_s"] == 7
        assert (await bare.run({"num_seqs": 8}))["wall_s"] == 8


async def test_a_bare_loop_that_ends_is_told() -> None:
    program = ECHO.replace("for line in sys.stdin", "for line in ()")
    async with bare_loop([sys.executable, "-c", program]) as bare:
        with pytest.raises(CliError, match="ended before it answered"):
            await bare.run({"num_seqs": 7})
