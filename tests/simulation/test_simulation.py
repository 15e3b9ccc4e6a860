"""Whatever happens, in whatever order: every sequence gets the tokens it gets alone."""

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from commands import run
from simulation import __main__ as command
from simulation.driver import RATES, simulate
from simulation.world import World
from source_tree import ROOT

ON_THE_PATH = {"PYTHONPATH": ".:proto:clients:tests"}


@pytest.mark.parametrize("first_seed", range(0, 100, 10))
def test_a_hundred_worlds_keep_every_promise(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 10):
        outcome = command.run_seed(seed, 120, 1)
        if isinstance(outcome, command.Failure):
            pytest.fail(f"{outcome.report}\nAgain: {outcome.command}")


def test_what_can_happen_does_happen() -> None:
    """Worlds too tame to fail would prove nothing."""
    runs = [simulate(seed, 150, 16) for seed in range(1000, 1012)]
    assert sum(each.num_preemptions for each in runs) > 50
    assert sum(each.num_copies for each in runs) > 20
    assert sum(each.num_tokens for each in runs) > 1000
    assert all(max(rates) > 0 for rates in RATES.values())


def test_a_seed_repeats_itself_exactly_in_another_process_too() -> None:
    first = simulate(42, 150, 16)
    assert simulate(42, 150, 16) == first
    # What is checked, and how often, changes nothing.
    assert simulate(42, 150, 1) == first
    printed = run(
        sys.executable, "-m", "simulation", "--seed", 42, "--steps", 150, environment=ON_THE_PATH
    )
    assert f"digest={first.digest}" in printed
    assert simulate(43, 150, 16).digest != first.digest


def test_a_failure_is_told_with_the_line_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = World.execute

    def execute(world: World, failing: frozenset[int] = frozenset()) -> bool:
        """Sample a wrong token in step 60, once."""
        done = honest(world, failing)
        flight = next((each for each in world.wire if each.result is not None), None)
        if flight and flight.result and world.num_steps > 60 and len(flight.result.tokens):
            flight.result = replace(flight.result, tokens=(flight.result.tokens + 1) % 3)
        return done

    monkeypatch.setattr(World, "execute", execute)
    assert command.main(["--total-steps", "400", "--steps", "100", "--processes", "1"]) == 1
    printed = capsys.readouterr().out
    (line,) = re.findall(r"^Again: (.*)$", printed, re.MULTILINE)
    assert "not the token it gets alone" in printed
    # In the same broken world the line fails again; in a sound one it does not.
    words = shlex.split(line)
    arguments = words[words.index("simulation") + 1 :]
    assert command.main(arguments) == 1
    monkeypatch.undo()
    assert command.main(arguments) == 0
    assert (ROOT / words[1]).exists()
    assert Path(words[1]).name.startswith("python")


@pytest.mark.slow
def test_a_million_steps(capfd: pytest.CaptureFixture[str]) -> None:
    with capfd.disabled():
        assert command.main([]) == 0
