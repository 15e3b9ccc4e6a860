"""However rows fork, share and copy, each goes on as if it had been alone all along."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fork_script import Alone, ForkScript
from plan_driver import AnyRunner, PlanDriver, Sequence, int32, make_plan
from tiny_llama import VOCAB, write_tiny_llama
from worker_svc.errors import InvariantError
from worker_svc.model.weights import LoadedModel, load_model
from worker_svc.runtime.block_tables import BlockTables
from worker_svc.runtime.model_runner import ModelRunner
from worker_svc.runtime.rows import Rows
from worker_svc.runtime.start_up import RunnerLimits, make_runner
from worker_svc.runtime.step_plan import AdmittedRow, ForkedRow, SamplingParams

CPU = torch.device("cpu")

Kind: TypeAlias = Callable[[LoadedModel, ModelRunner], AnyRunner]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_tiny_llama(tmp_path_factory.mktemp("tiny")), torch.float32, CPU)


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel, kind: Kind) -> Alone:
    return Alone(new_runner(loaded, kind))


def new_runner(loaded: LoadedModel, kind: Kind, max_num_seqs: int = 6) -> AnyRunner:
    limits = RunnerLimits(
        block_size=4, max_num_seqs=max_num_seqs, max_model_len=32, num_gpu_blocks_override=120
    )
    runner, _ = make_runner(loaded, limits)
    # What was never written must never be read.
    for layer in runner.kv_cache.layers:
        for cache in layer[:2]:
            cache.fill_(float("nan"))
    return kind(loaded, runner)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_rows_that_fork_at_random_answer_as_each_would_alone(
    loaded: LoadedModel, kind: Kind, alone: Alone, seed: int
) -> None:
    script = ForkScript(new_runner(loaded, kind), alone, VOCAB, random.Random(seed))
    for _ in range(20):
        script.step()


def test_the_random_script_makes_every_kind_of_fork(
    loaded: LoadedModel, kind: Kind, alone: Alone
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(5):
        script = ForkScript(new_runner(loaded, kind), alone, VOCAB, random.Random(seed))
        for _ in range(20):
            script.step()
        seen += script.seen
    kinds = {"shortened", "taken", "in place", "shared", "copied", "chained"}
    assert kinds == {kind for kind in seen if seen[kind] >= 5}


def test_sequences_of_the_demo_model_share_a_prompt_and_copy_its_tail(demo_gguf: Path) -> None:
    """Several first tokens from one row; then forks whose last block is copied before they run."""
    loaded = load_model(demo_gguf, torch.float32, CPU)
    limits = RunnerLimits(block_size=16, max_num_seqs=4, num_gpu_blocks_override=32)
    runner, _ = make_runner(loaded, limits)
    prompt = [7 * i * i % 49152 for i in range(21)]
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=11)
    first = runner.run(make_plan(0, admitted=[admission(2, prompt, [4, 9], params, num_samples=3)]))
    assert (first.rows.tolist(), first.num_tokens.tolist()) == ([2], [3])
    outputs = {row: [token] for row, token in zip((2, 0, 3), first.tokens.tolist(), strict=True)}
    forks = [ForkedRow(0, 2, 1, outputs[0][0], 1), ForkedRow(3, 2, 2, outputs[3][0], 1)]
    appended, copies = [(0, 5), (3, 6)], [(9, 5), (9, 6)]
    plan = make_plan(1, forked=forks, appended=appended, copies=copies)
    for step_id in range(2, 9):
        result = runner.run(plan)
        assert result.rows.tolist() == [0, 2, 3]
        for row, token in zip((0, 2, 3), result.tokens.tolist(), strict=True):
            outputs[row].append(token)
        plan = make_plan(step_id)
    assert len({tuple(output) for output in outputs.values()}) == 3
    for index, row in enumerate((2, 0, 3)):
        runner, _ = make_runner(loaded, limits)
        expected = PlanDriver(runner).generate(Sequence(prompt, params, index), 8)
        assert outputs[row] == expected


def admission(
    row: int,
    tokens: list[int],
    blocks: list[int],
    sampling: SamplingParams | None = None,
    *,
    num_samples: int = 1,
    num_candidates: int = 0,
) -> AdmittedRow:
    return AdmittedRow(
        row=row,
        request_id="r",
        tokens=int32(*tokens),
        num_prompt_tokens=len(tokens),
        num_computed_tokens=0,
        num_new_tokens=len(tokens),
        block_tables=(int32(*blocks),),
        sampling=sampling or SamplingParams(),
        num_samples=num_samples,
        num_candidates=num_candidates,
    )


def new_rows() -> Rows:
    """Rows 0 and 1 have three tokens, ran them and sampled 50 and 51; rows 2 and 3 are free."""
    rows = Rows(max_rows=4, max_tokens=16, tables=(BlockTables(4, 4, 4, last_block=20),), vocab=100)
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=2**64 - 1)
    first, second = admission(0, [1, 2, 3], [5, 6], params), admission(1, [7, 8, 9], [7])
    rows.apply(make_plan(0, admitted=[first, second]))
    rows.append_tokens(rows.running(), int32(50, 51))
    return rows


def test_a_fork_takes_over_all_that_its_parent_knows() -> None:
    rows = new_rows()
    rows.sampling.num_candidates[0] = 6
    rows.apply(make_plan(1, forked=[ForkedRow(3, 0, 17, None, 2)]))
    assert rows.tokens[3, :4].tolist() == [1, 2, 3, 50]
    assert (rows.num_tokens[3], rows.num_computed_tokens[3], rows.num_new_tokens[3]) == (4, 3, 1)
    assert rows.block_tables[0].ids[3, :2].tolist() == [5, 6]
    assert rows.block_tables[0].num_blocks[3] == 2
    columns = rows.sampling
    assert columns.seed[3] == 2**64 - 1
    assert columns.temperature[3] == 0.5
    assert (columns.top_k[3], columns.top_p[3], columns.min_p[3]) == (3, 0.9, 0.1)
    assert (columns.num_candidates[3], columns.num_samples[3]) == (6, 1)
    assert columns.sequence_index[[0, 3]].tolist() == [0, 17]
    assert rows.running().tolist() == [0, 1, 3]


def test_rows_can_change_places() -> None:
    rows = new_rows()
    forks = [ForkedRow(0, 1, 1, None, 1), ForkedRow(1, 0, 0, 60, 2), ForkedRow(2, 0, 2, 61, 0)]
    rows.apply(make_plan(1, forked=forks))
    assert rows.tokens[:3, :4].tolist() == [[7, 8, 9, 51], [1, 2, 3, 60], [1, 2, 3, 61]]
    assert rows.block_tables[0].num_blocks.tolist()[:3] == [1, 2, 0]
    assert rows.block_tables[0].ids[0, 0] == 7
    assert rows.block_tables[0].ids[1, :2].tolist() == [5, 6]
    assert rows.sampling.top_k.tolist()[:3] == [0, 3, 3]


def test_a_row_forked_in_place_is_shortened_after_others_have_read_it() -> None:
    rows = new_rows()
    forks = [ForkedRow(0, 0, 9, 70, 1), ForkedRow(2, 0, 1, None, 2)]
    rows.apply(make_plan(1, forked=forks, appended=[(0, 8)]))
    assert rows.tokens[0, :4].tolist() == [1, 2, 3, 70]
    assert rows.tokens[2, :4].tolist() == [1, 2, 3, 50]
    assert rows.block_tables[0].ids[0, :2].tolist() == [5, 8]
    assert rows.block_tables[0].ids[2, :2].tolist() == [5, 6]
    assert rows.sampling.sequence_index[[0, 2]].tolist() == [9, 1]


def test_a_fork_of_a_row_in_its_prompt_goes_on_with_that_prompt() -> None:
    rows = new_rows()
    rows.apply(make_plan(1, exceptions=[(0, 0, 2), (1, 3, 0)]))
    forks = [ForkedRow(2, 0, 1, None, 1), ForkedRow(3, 1, 1, None, 1)]
    rows.apply(make_plan(2, forked=forks, exceptions=[(2, 2, 2)]))
    assert rows.num_computed_tokens[2:].tolist() == [2, 3]
    assert rows.num_new_tokens.tolist() == [1, 0, 2, 0]


def test_forks_fail_with_their_parent_and_a_healthy_parent_heals() -> None:
    rows = new_rows()
    rows.failures[0] = "bad"
    forks = [ForkedRow(0, 1, 1, None, 1), ForkedRow(2, 0, 2, None, 1), ForkedRow(3, 0, 3, None, 1)]
    rows.apply(make_plan(1, forked=forks))
    assert rows.failed() == ((2, "bad"), (3, "bad"))
    assert rows.running().tolist() == [0, 1]


@pytest.mark.parametrize("token", [-1, 100])
def test_a_fork_with_an_impossible_last_token_fails_alone(token: int) -> None:
    rows = new_rows()
    forks = [ForkedRow(2, 0, 1, token, 1), ForkedRow(3, 0, 2, 99, 1)]
    rows.apply(make_plan(1, forked=forks))
    assert rows.failed() == ((2, "a token id is not in 0 to 99"),)
    assert rows.running().tolist() == [0, 1, 3]


def test_a_released_row_can_be_forked_into_and_a_forked_one_released() -> None:
    rows = new_rows()
    rows.apply(make_plan(1, released=[1], forked=[ForkedRow(1, 0, 4, None, 1)]))
    assert rows.tokens[1, :4].tolist() == [1, 2, 3, 50]
    rows.apply(make_plan(2, released=[0, 1]))
    assert rows.running().tolist() == []


@pytest.mark.parametrize(
    ("forks", "message"),
    [
        ([ForkedRow(1, 2, 0, None, 0)], "row 1 continues row 2, which is not there"),
        # A fork of a fork of the same plan: row 2 comes to be only with it.
        (
            [ForkedRow(2, 0, 0, None, 0), ForkedRow(3, 2, 0, None, 0)],
            "row 3 continues row 2, which is not there",
        ),
        ([ForkedRow(2, 0, 0, None, 3)], "row 2 takes over 3 blocks of row 0, which has 2"),
        ([ForkedRow(0, 0, 0, None, 3)], "row 0 takes over 3 blocks of row 0, which has 2"),
        ([ForkedRow(2, 0, 0, None, -1)], "row 2 takes over -1 blocks of row 0"),
        ([ForkedRow(4, 0, 0, None, 0)], "row 4 continues row 0, there are 0 to 3"),
        ([ForkedRow(-1, 0, 0, None, 0)], "row -1 continues row 0, there are 0 to 3"),
        ([ForkedRow(2**32 - 1, 0, 0, None, 0)], "row 4294967295 continues row 0"),
        ([ForkedRow(2, 4, 0, None, 0)], "row 2 continues row 4, there are 0 to 3"),
        ([ForkedRow(2, -1, 0, None, 0)], "row 2 continues row -1, there are 0 to 3"),
        ([ForkedRow(2, 0, 0, None, 1), ForkedRow(2, 1, 0, None, 1)], "one of them twice"),
    ],
)
def test_a_fork_that_cannot_be_is_refused(forks: list[ForkedRow], message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        new_rows().apply(make_plan(1, forked=forks))


def test_a_released_parent_is_not_there_to_be_forked() -> None:
    fork = ForkedRow(2, 1, 0, None, 1)
    with pytest.raises(InvariantError, match="row 2 continues row 1, which is not there"):
        new_rows().apply(make_plan(1, released=[1], forked=[fork]))


@pytest.mark.parametrize("count", [0, 5])
def test_a_row_samples_no_more_tokens_than_there_are_rows(count: int) -> None:
    entry = admission(2, [1], [3], num_samples=count)
    with pytest.raises(InvariantError, match=f"row 2 is to sample {count} tokens, must be 1 to 4"):
        new_rows().apply(make_plan(1, admitted=[entry]))


def test_several_first_tokens_are_drawn_once_and_the_row_keeps_its_own(
    loaded: LoadedModel,
    kind: Kind,
) -> None:
    params = SamplingParams(temperature=1.5, seed=3)
    runner = new_runner(loaded, kind)
    several = admission(1, [5, 6, 7], [1], params, num_samples=4)
    chunk = make_plan(0, admitted=[several, admission(4, [8], [2])], exceptions=[(1, 0, 2)])
    assert runner.run(chunk).num_tokens.tolist() == []
    result = runner.run(make_plan(1))
    assert (result.rows.tolist(), result.num_tokens.tolist()) == ([1, 4], [4, 1])
    for index in range(4):
        single = PlanDriver(new_runner(loaded, kind))
        expected = single.generate(Sequence([5, 6, 7], params, index), 1)
        assert expected == [result.tokens[index]]
    # What the row itself has kept shows in what it samples next.
    later = runner.run(make_plan(2, appended=[(1, 3)]))
    single = PlanDriver(new_runner(loaded, kind))
    assert single.generate(Sequence([5, 6, 7], params), 2) == [result.tokens[0], later.tokens[0]]
    assert (later.rows.tolist(), later.num_tokens.tolist(), len(later.tokens)) == ([1, 4], [], 2)


def test_a_row_with_candidates_takes_the_first_whatever_its_temperature(
    loaded: LoadedModel,
    kind: Kind,
) -> None:
    params = SamplingParams(temperature=50.0, seed=3)
    rows = [
        admission(0, [5, 6, 7], [1], params, num_candidates=3, num_samples=2),
        admission(1, [5, 6, 7], [2], params),
        admission(2, [5, 6, 7], [3], params, num_candidates=VOCAB + 1),
    ]
    result = new_runner(loaded, kind).run(make_plan(0, admitted=rows))
    assert result.candidates is not None
    assert result.candidates.counts.tolist() == [3, 0, VOCAB]
    ids, logprobs = result.candidates.ids, result.candidates.logprobs
    assert result.tokens[[0, 1, 3]].tolist() == ids[[0, 0, 0]].tolist()
    assert result.tokens[2] != ids[0]
    assert ids[:3].tolist() == ids[3:6].tolist()
    assert sorted(ids[3:].tolist()) == list(range(VOCAB))
    assert (np.diff(logprobs[3:]) <= 0).all()
    assert float(np.exp(logprobs[3:]).sum()) == pytest.approx(1, abs=1e-5)


def test_a_row_that_fails_has_neither_tokens_nor_candidates(
    loaded: LoadedModel, kind: Kind
) -> None:
    runner = new_runner(loaded, kind)
    # Row 0 claims that a token is computed which is not, and so reads NaN.
    broken = admission(0, [5, 6], [1], num_candidates=4, num_samples=2)
    params = SamplingParams(temperature=1.5, seed=3)
    several = admission(1, [5, 6, 7], [2], params, num_samples=3)
    plan = make_plan(
        0,
        admitted=[broken, several, admission(2, [5, 6], [3], num_candidates=3)],
        exceptions=[(0, 1, 1)],
    )
    result = runner.run(plan)
    assert result.row_errors == ((0, "the model's logits are not finite"),)
    assert (result.rows.tolist(), result.num_tokens.tolist()) == ([1, 2], [3, 1])
    alone = new_runner(loaded, kind).run(make_plan(0, admitted=[several]))
    assert result.tokens[:3].tolist() == alone.tokens.tolist()
    assert result.candidates is not None
    assert (result.candidates.counts.tolist(), len(result.candidates.ids)) == ([0, 3], 3)
