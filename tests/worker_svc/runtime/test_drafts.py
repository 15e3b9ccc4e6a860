"""A row with a draft keeps exactly what it would have sampled, one step after the other."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

from plan_driver import AnyRunner, PlanDriver, Sequence, int32, make_plan
from tiny_llama import VOCAB, write_tiny_llama
from worker_svc.errors import InvariantError
from worker_svc.model.weights import LoadedModel, load_model
from worker_svc.runtime.drafts import Verified, with_verified
from worker_svc.runtime.model_runner import ModelRunner
from worker_svc.runtime.start_up import RunnerLimits, make_runner
from worker_svc.runtime.step_plan import (
    AdmittedRow,
    Candidates,
    Draft,
    SamplingParams,
    StepPlan,
    StepResult,
    StepTiming,
)

Kind: TypeAlias = Callable[[LoadedModel, ModelRunner], AnyRunner]

PROMPT = [5, 6, 7, 8, 9, 5, 6]
COUNT = 12
GREEDY = SamplingParams()
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=11)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return load_model(path, torch.float32, torch.device("cpu"))


def new_runner(loaded: LoadedModel, kind: Kind) -> AnyRunner:
    limits = RunnerLimits(
        block_size=4, max_num_seqs=4, max_model_len=40, num_gpu_blocks_override=40
    )
    return kind(loaded, make_runner(loaded, limits)[0])


def alone(loaded: LoadedModel, kind: Kind, sampling: SamplingParams) -> list[int]:
    return PlanDriver(new_runner(loaded, kind)).generate(Sequence(PROMPT, sampling), COUNT)


def admit(row: int, sampling: SamplingParams) -> AdmittedRow:
    return AdmittedRow(
        row=row,
        request_id=str(row),
        tokens=int32(*PROMPT),
        num_prompt_tokens=len(PROMPT),
        num_computed_tokens=0,
        num_new_tokens=len(PROMPT),
        block_tables=(np.arange(1 + 8 * row, 9 + 8 * row, dtype=np.int32),),
        sampling=sampling,
    )


def with_drafts(plan: StepPlan, drafts: dict[int, list[int]]) -> StepPlan:
    return replace(plan, drafts=tuple(Draft(row, int32(*ids)) for row, ids in drafts.items()))


def outputs(result: StepResult) -> dict[int, list[int]]:
    parts = np.split(result.tokens, np.cumsum(result.num_tokens)[:-1])
    return {row: part.tolist() for row, part in zip(result.rows.tolist(), parts, strict=True)}


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_what_is_kept_is_what_would_have_been_sampled(
    loaded: LoadedModel, kind: Kind, sampling: SamplingParams, num_right: int
) -> None:
    expected = alone(loaded, kind, sampling)
    runner = new_runner(loaded, kind)
    output = runner.run(make_plan(0, reset=True, admitted=[admit(1, sampling)])).tokens.tolist()
    assert output == expected[:1]
    step_id, computed = 1, len(PROMPT)
    while len(output) + 4 <= COUNT:
        ahead = expected[len(output) : len(output) + 3]
        wrong = [(token + 1) % VOCAB for token in ahead]
        draft = ahead[:num_right] + wrong[num_right:]
        plan = make_plan(step_id, exceptions=[(1, computed, 4)])
        got = outputs(runner.run(with_drafts(plan, {1: draft})))[1]
        assert got == expected[len(output) : len(output) + num_right + 1]
        output += got
        computed += len(got)
        step_id += 1
    # Without a word of the plan, the row goes on behind what it kept.
    assert runner.run(make_plan(step_id)).tokens.tolist() == [expected[len(output)]]


def test_rows_with_and_without_drafts_share_a_step(loaded: LoadedModel, kind: Kind) -> None:
    greedy, drawn = alone(loaded, kind, GREEDY), alone(loaded, kind, DRAWN)
    runner = new_runner(loaded, kind)
    admitted = [admit(0, GREEDY), admit(1, DRAWN), admit(2, GREEDY), admit(3, DRAWN)]
    runner.run(make_plan(0, reset=True, admitted=admitted))
    computed = len(PROMPT)
    plan = make_plan(1, exceptions=[(1, computed, 3), (2, computed, 2)])
    result = runner.run(with_drafts(plan, {2: [greedy[1]], 1: [drawn[1], 0]}))
    assert outputs(result) == {
        0: greedy[1:2],
        1: drawn[1:3],
        2: greedy[1:3],
        3: drawn[1:2],
    }
    after = runner.run(make_plan(2))
    assert after.tokens.tolist() == [greedy[2], drawn[3], greedy[3], drawn[2]]


@pytest.mark.parametrize(
    ("new", "draft", "message"),
    [
        (2, [1, 2], "to verify 2 tokens behind its 8, and runs up to 9"),
        (2, [VOCAB], "drafts a token that is not in the vocabulary"),
        (2, [-1], "drafts a token that is not in the vocabulary"),
        (33, [1] * 32, "runs up to 40 of 40"),
        (1, [], "to verify 0 tokens"),
    ],
)
def test_a_draft_that_does_not_fit_its_row_stops_the_worker(
    loaded: LoadedModel, kind: Kind, new: int, draft: list[int], message: str
) -> None:
    runner = new_runner(loaded, kind)
    runner.run(make_plan(0, reset=True, admitted=[admit(1, GREEDY)]))
    plan = make_plan(1, exceptions=[(1, len(PROMPT), new)])
    with pytest.raises(InvariantError, match=message):
        runner.run(with_drafts(plan, {1: draft}))


def test_logits_that_are_no_numbers_fail_the_row_with_a_draft(
    loaded: LoadedModel, kind: Kind
) -> None:
    runner = new_runner(loaded, kind)
    runner.run(make_plan(0, reset=True, admitted=[admit(1, GREEDY), admit(2, GREEDY)]))
    for layer in runner.kv_cache.layers:
        layer.v[1 + 8] = float("nan")
    plan = make_plan(1, exceptions=[(1, len(PROMPT), 2)])
    result = runner.run(with_drafts(plan, {1: [3]}))
    assert [row for row, _ in result.row_errors] == [1]
    assert result.rows.tolist() == [2]


def test_a_step_of_which_every_row_fails_is_answered(loaded: LoadedModel, kind: Kind) -> None:
    """It once stopped the worker, with all that others had in its cache."""
    runner = new_runner(loaded, kind)
    runner.run(make_plan(0, reset=True, admitted=[admit(1, GREEDY)]))
    for layer in runner.kv_cache.layers:
        layer.v[1 + 8] = float("nan")
    plan = make_plan(1, exceptions=[(1, len(PROMPT), 2)])
    result = runner.run(with_drafts(plan, {1: [3]}))
    assert [row for row, _ in result.row_errors] == [1]
    assert (len(result.rows), len(result.tokens)) == (0, 0)


@pytest.mark.parametrize(("failing", "ends"), [(0, True), (1, True), (2, False)])
def test_only_positions_that_are_kept_can_fail_a_row(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, failing: int, ends: bool
) -> None:
    """Of three, the first drafted token is right and the second is not."""
    expected = alone(loaded, lambda _, runner: runner, GREEDY)
    runner = make_runner(loaded, RunnerLimits(num_gpu_blocks_override=40, block_size=4))[0]
    runner.run(make_plan(0, reset=True, admitted=[admit(1, GREEDY)]))
    draw = ModelRunner._draw

    def draw_and_fail(*arguments: Any) -> tuple[Any, Any]:
        tokens, failed = draw(*arguments)
        failed[failing] = True
        return tokens, failed

    monkeypatch.setattr(ModelRunner, "_draw", draw_and_fail)
    plan = make_plan(1, exceptions=[(1, len(PROMPT), 3)])
    draft = [expected[1], (expected[2] + 1) % VOCAB]
    result = runner.run(with_drafts(plan, {1: draft}))
    assert bool(result.row_errors) == ends
    assert result.tokens.tolist() == ([] if ends else expected[1:3])


def test_results_are_put_in_order_of_rows() -> None:
    plain = StepResult(
        step_id=3,
        rows=int32(0, 4),
        tokens=int32(10, 11, 40),
        timing=StepTiming(1, 1, 1, 4),
        row_errors=(),
        num_tokens=int32(2, 1),
        candidates=Candidates(int32(7), np.zeros(1, np.float32), int32(0, 1)),
    )
    both = with_verified(plain, Verified(int32(2, 5), int32(20, 21, 50), int32(2, 1)))
    assert both.rows.tolist() == [0, 2, 4, 5]
    assert both.tokens.tolist() == [10, 11, 20, 21, 40, 50]
    assert both.num_tokens.tolist() == [2, 2, 1, 1]
    assert both.candidates is not None
    assert both.candidates.counts.tolist() == [0, 0, 1, 0]
