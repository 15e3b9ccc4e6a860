"""A cell is read in both forms, and gives the same prompts to every engine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.cli.bench_cell import Cell
from pagemill.cli.exit_status import CliError, ExitStatus

PEERS = [[5452, 9407, 2922], [6037, 22587, 2603]]

numbers = st.integers(1, 4096)


@given(requests=numbers, prompt=numbers, output=numbers)
def test_both_forms_of_a_cell_mean_the_same(requests: int, prompt: int, output: int) -> None:
    cell = Cell(requests, prompt, output)
    assert Cell.parse(str(cell)) == cell
    assert Cell.parse(f" {requests}x{prompt}/{output}\n") == cell


@pytest.mark.parametrize(
    "text", ["", "1x2", "0x1x1", "1x0x1", "1x1x0", "axbxc", "1x2x3x4", "-1x1x1"]
)
def test_what_is_no_cell_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(CliError, match="such as 32x128x64") as caught:
        Cell.parse(text)
    assert caught.value.status == ExitStatus.USAGE


@pytest.mark.parametrize("text", ["4097x1x1", "2x8388609x1", "999999x9999999x9999999"])
def test_a_cell_that_no_memory_holds_is_refused_before_its_prompts_are_made(text: str) -> None:
    with pytest.raises(CliError, match="at most 4096 requests and 16777216 prompt tokens") as caught:
        Cell.parse(text)
    assert caught.value.status == ExitStatus.USAGE
    assert Cell.parse("4096x4096x1").num_requests == 4096


def test_prompts_are_those_of_the_peers_scripts() -> None:
    # random.Random("2x3/4:7"), ids from 100 to 48,999: what other engines get for this cell.
    assert Cell(2, 3, 4).prompts(7, 49_152) == PEERS


def test_prompts_differ_between_runs_and_fit_the_vocabulary() -> None:
    cell = Cell(3, 16, 1)
    first, second = cell.prompts(0, 64), cell.prompts(1, 64)
    assert first == cell.prompts(0, 64)
    assert not {tuple(prompt) for prompt in first} & {tuple(prompt) for prompt in second}
    assert all(0 <= token < 64 for prompt in first for token in prompt)
