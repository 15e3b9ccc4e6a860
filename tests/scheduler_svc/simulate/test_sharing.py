"""Sequences of one prompt share its blocks, as many as the paper says, and as the core counts them.

All sequences of a prompt have one length, as in the paper's data, and the pool is not full, so that
preemption does not part them.
"""

from functools import cache

import pytest

from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.simulate.beam_forks import read_parents
from scheduler_svc.simulate.options import read_options
from scheduler_svc.simulate.paged import PagedReplay
from scheduler_svc.simulate.replay import make_load, make_paged, replay
from scheduler_svc.simulate.report import Report
from scheduler_svc.simulate.simulated_worker import SimulatedStep
from scheduler_svc.simulate.step_cost import StepCost
from scheduler_svc.simulate.workload import Arrival, searched

RATES = {"sharegpt": 2.4, "alpaca": 30.0}
"""Sequences a second: some six tenths of what the simulated server manages."""

REQUESTS = {"sharegpt": 120, "alpaca": 300}


@cache
def report(lengths: str, *flags: str, seed: int = 0, requests: int = 0) -> Report:
    count = str(requests or REQUESTS[lengths])
    options = read_options(["--lengths", lengths, "--requests", count, "--seed", str(seed), *flags])
    return replay(options, make_load(options), StepCost())


def sampled(lengths: str, n: int, *flags: str, seed: int = 0, requests: int = 0) -> Report:
    rate = str(RATES[lengths] / n)
    return report(lengths, "--n", str(n), "--rate", rate, *flags, seed=seed, requests=requests)


SAVED = [
    ("sharegpt", 2, 0.16),
    ("sharegpt", 4, 0.24),
    ("sharegpt", 6, 0.27),
    ("alpaca", 2, 0.06),
    ("alpaca", 4, 0.09),
    ("alpaca", 6, 0.10),
]


@pytest.mark.parametrize(("lengths", "n", "least"), SAVED)
def test_sequences_of_one_prompt_save_blocks(lengths: str, n: int, least: float) -> None:
    found = sampled(lengths, n)
    assert least <= found.blocks_saved_share <= 1 - 1 / n
    assert found.requests == REQUESTS[lengths]


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "n", "least"), SAVED)
def test_they_save_as_much_in_longer_loads(lengths: str, n: int, least: float) -> None:
    saved = [sampled(lengths, n, seed=seed, requests=600).blocks_saved_share for seed in (7, 8)]
    print(lengths, n, saved)
    assert min(saved) >= least


def test_sequences_that_end_apart_share_for_a_shorter_time() -> None:
    apart = sampled("alpaca", 2, "--own-lengths").blocks_saved_share
    assert 0.01 < apart < sampled("alpaca", 2).blocks_saved_share


def searched_for(lengths: str, width: int, requests: int, seed: int = 0) -> float:
    rate = str(RATES[lengths] / width)
    flags = ("--beam-width", str(width), "--rate", rate)
    return report(lengths, *flags, seed=seed, requests=requests).blocks_saved_share


# The paper saved 37.6 to 66.3 %. With ShareGPT lengths and 4 or 6 beams more is saved here: the
# demo model's beams have a common past some 30 tokens back.
BEAMS = [
    ("sharegpt", 2, 0.46),
    ("sharegpt", 4, 0.70),
    ("sharegpt", 6, 0.78),
    ("alpaca", 2, 0.37),
    ("alpaca", 4, 0.55),
    ("alpaca", 6, 0.61),
]


@pytest.mark.parametrize(("lengths", "width", "share"), BEAMS[:4])
def test_beams_of_one_prompt_save_blocks(lengths: str, width: int, share: float) -> None:
    requests = 15 if lengths == "sharegpt" else 200
    assert searched_for(lengths, width, requests) == pytest.approx(share, abs=0.015)


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "width", "share"), BEAMS)
def test_beams_save_as_much_in_longer_loads(lengths: str, width: int, share: float) -> None:
    requests = REQUESTS[lengths]
    saved = [searched_for(lengths, width, requests, seed) for seed in range(1, 4)]
    print(lengths, width, saved)
    assert sum(saved) / 3 == pytest.approx(share, abs=0.02)
    assert sum(saved) / 3 >= 0.36


@pytest.mark.parametrize("depth", [1, 2])
def test_every_sequence_ends_at_its_own_length_whatever_is_preempted(depth: int) -> None:
    load = [
        Arrival(0.0, 20 + i, 1 + i % 40, sibling_lengths=(1 + i * 7 % 50, 1, 1 + i % 3))
        for i in range(40)
    ]
    flags = ["--lengths=alpaca", "--slots=640", f"--pipeline-depth={depth}"]
    result = replay(read_options(flags), load, StepCost())
    outputs = [sum((each.output_length, *each.sibling_lengths)) for each in load]
    assert result.generation_tokens == sum(outputs)
    assert result.prompt_tokens == sum(arrival.input_length for arrival in load)
    assert result.requests == 40
    assert result.preemptions > 0
    assert result.blocks_saved_share > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_every_beam_search_ends_at_its_length_whatever_is_preempted(depth: int) -> None:
    load = searched([Arrival(0.0, 20 + i, 1 + i % 40) for i in range(30)], read_parents(4), seed=0)
    flags = ["--lengths=alpaca", "--slots=640", f"--pipeline-depth={depth}"]
    result = replay(read_options(flags), load, StepCost())
    assert result.generation_tokens == sum(arrival.output_length for arrival in load)
    assert result.requests == 30
    assert result.preemptions > 0
    assert result.blocks_saved_share > 0


def tables_follow_the_core(paged: PagedReplay) -> list[int]:
    """Compare, plan by plan, the blocks that the worker counts with the core's tables.

    Returns a list that the replay fills: blocks that are held by more than one row, per plan.
    """
    run, state = paged._worker.run, paged._scheduler._state
    shared: list[int] = []

    def checked(plan: StepPlan) -> SimulatedStep:
        step = run(plan)
        size, running = state.limits.block_size, list(state.rows.running)
        tables = [request.blocks for request in running]
        held = {block for table in tables for block in table}
        computed = [int(state.rows.num_computed[state.rows.row_of(each)]) for each in running]
        filled = {
            (table[place // size], place % size)
            for table, count in zip(tables, computed, strict=True)
            for place in range(count)
        }
        assert step.num_table_blocks == sum(map(len, tables))
        assert step.num_slots_unfilled == len(held) * size - len(filled)
        shared.append(step.num_table_blocks - len(held))
        return step

    paged._worker.run = checked  # type: ignore[method-assign]  # seen from outside
    return shared


@pytest.mark.parametrize(
    "several", [["--n=2"], ["--n=5", "--own-lengths"], ["--beam-width=2"], ["--beam-width=4"]]
)
@pytest.mark.parametrize("slots", [800, 3000])
def test_the_simulated_worker_holds_the_blocks_that_the_core_gave(
    several: list[str], slots: int
) -> None:
    flags = ["--lengths=alpaca", "--requests=25", f"--slots={slots}", *several]
    options = read_options([*flags, "--block-size=8"])
    paged = make_paged(options, make_load(options), StepCost())
    shared = tables_follow_the_core(paged)
    paged.run(lambda _: None)
    assert max(shared) > 0
