"""Whatever happens to a request, it learns of each token once, and what it would learn alone."""

from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_told import pooled, prompt_part, token_told
from fake_worker import ROOT, extend, generate_alone
from scheduler_bench import Bench, bench, limits, request
from scheduler_svc.core.departure import preempt
from scheduler_svc.core.reports import Pooling, Reports
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step_plan import StepResult
from scheduler_svc.core.told import TokenTold
from scheduler_svc.core.victims import VICTIM_POLICIES

NO_STOP: frozenset[int] = frozenset()


def history_behind(tokens: list[int]) -> int:
    return reduce(extend, tokens, ROOT)


@dataclass
class Job:
    prompt: list[int]
    n: int
    max_output: int
    arrives: int
    aborted: int | None
    reports: Reports

    def request(self, name: str) -> Request:
        return request(
            name,
            self.prompt,
            1 if self.reports.pooling else self.max_output,
            n=1 if self.reports.pooling else self.n,
            read_cache=self.reports.prompt_logprobs is None
            and self.reports.pooling is not Pooling.MEAN,
            reports=self.reports,
        )

    def token_told(self, output: list[int], place: int) -> TokenTold:
        history = history_behind([*self.prompt, *output[:place]])
        return token_told(history, output[place], self.reports.logprobs or 0)


reports = st.builds(
    Reports,
    logprobs=st.none() | st.integers(0, 2),
    prompt_logprobs=st.none() | st.integers(0, 2),
) | st.builds(Reports, pooling=st.sampled_from(Pooling))
jobs = st.builds(
    Job,
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
    n=st.integers(1, 3),
    max_output=st.integers(1, 6),
    arrives=st.integers(0, 6),
    aborted=st.none() | st.integers(0, 12),
    reports=reports,
)


@settings(deadline=None, max_examples=200)
@given(
    load=st.lists(jobs, min_size=1, max_size=5),
    budget=st.integers(1, 16),
    depth=st.integers(1, 2),
    num_blocks=st.integers(14, 24),
    losses=st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=2),
    failing=st.sets(st.tuples(st.integers(0, 20), st.integers(0, 4)), max_size=1),
    caching=st.booleans(),
    victim=st.sampled_from(["cheapest", "newest"]),
)
def test_each_request_learns_what_it_asked_for_and_each_thing_once(
    load: list[Job],
    budget: int,
    depth: int,
    num_blocks: int,
    losses: list[tuple[int, bool]],
    failing: set[tuple[int, int]],
    caching: bool,
    victim: str,
) -> None:
    scheduler = Scheduler(
        limits(budget, rows=4, depth=depth),
        enable_prefix_caching=caching,
        choose_victim=VICTIM_POLICIES[victim],
    )
    table = Bench(scheduler, num_blocks)
    requests = [job.request(str(number)) for number, job in enumerate(load)]
    told: dict[Request, list[TokenTold]] = {m: [] for each in requests for m in each.members}
    turns = 0
    while scheduler.has_work or table.wire or turns <= 6:
        for job, each in zip(load, requests, strict=True):
            if job.arrives == turns:
                table.send(each)
            if job.aborted == turns and each.sequence >= 0:
                scheduler.abort_family(each, table.now_ns)
        for turn, same_process in losses:
            if turn == turns:
                table.lose_worker(same_process=same_process)
        outcome = table.turn(frozenset(row for turn, row in failing if turn == turns))
        if outcome is not None:
            for member in outcome.requests:
                if member in outcome.told:
                    told[member].append(outcome.told[member])
        turns += 1
        assert turns < 1000
    assert scheduler.pool is not None
    assert scheduler.pool.num_free == num_blocks
    for job, each in zip(load, requests, strict=True):
        for member in each.members:
            check_tokens(job, member, told[member])
        check_prompt(job, each)
        check_vector(job, each)


def check_tokens(job: Job, member: Request, told: list[TokenTold]) -> None:
    output = member.output_token_ids().tolist()
    if job.reports.pooling is not None or job.reports.logprobs is None:
        assert not told
    else:
        assert told == [job.token_told(output, place) for place in range(len(output))]
    if job.reports.pooling is None and member.finish_reason is FinishReason.LENGTH:
        assert output == generate_alone(job.prompt, job.max_output, NO_STOP, member.index)


def check_prompt(job: Job, each: Request) -> None:
    count, table = job.reports.prompt_logprobs, each.prompt_table
    if count is None or table is None:
        assert table is None
        assert count is None or not each.num_output_tokens or len(job.prompt) == 1
        return
    assert table.is_complete or not each.num_output_tokens
    histories = [history_behind(job.prompt[:end]) for end in range(1, len(job.prompt))]
    alone = prompt_part(0, 1, histories, job.prompt[1:], count)
    known = table.num_told
    for name in ("logprobs", "ranks", "candidate_ids", "candidate_logprobs"):
        assert np.array_equal(getattr(table, name)[:known], getattr(alone, name)[:known])


def check_vector(job: Job, each: Request) -> None:
    if job.reports.pooling is None or each.finish_reason is not FinishReason.STOP:
        assert each.vector is None
        return
    histories = [history_behind(job.prompt[:end]) for end in range(1, len(job.prompt) + 1)]
    assert each.vector is not None
    assert each.vector.tolist() == pooled(histories, job.reports.pooling)
    assert each.num_output_tokens == 0


def test_a_prompt_that_is_known_is_not_told_of_again() -> None:
    """A request that lost its blocks behind its prompt computes it again, without the LM head."""
    table = bench(24, rows=4)
    each = request("x", [0, 1] * 4, 6, read_cache=False, reports=Reports(prompt_logprobs=1))
    table.send(each)
    table.turn()
    table.turn()
    assert each.prompt_table is not None
    assert each.prompt_table.is_complete
    table.lose_worker(same_process=True)
    plan = table.plan()
    assert plan is not None
    [row] = plan.admitted
    assert (row.num_computed_tokens, row.prompt_logprobs) == (0, None)
    table.run()
    assert each.output_token_ids().tolist() == generate_alone([0, 1] * 4, 6, NO_STOP)


@pytest.mark.parametrize("pooling", [None, Pooling.LAST])
def test_what_a_row_is_told_reaches_a_request_that_has_lost_it(pooling: Pooling | None) -> None:
    """Its step was in flight, and its answer is all that there is of the token and the prompt."""
    told = Reports(logprobs=2, prompt_logprobs=1) if pooling is None else Reports(pooling=pooling)
    job = Job([0, 1, 1, 0, 1], 1, 3, 0, None, told)
    table, each = bench(24, depth=2), job.request("x")
    table.send(each)
    table.plan()
    preempt(table.scheduler._state, each, table.now_ns)
    outcome = table.answer()
    if pooling is None:
        assert outcome.told == {each: job.token_told(each.output_token_ids().tolist(), 0)}
        assert each.prompt_table is not None
        assert each.prompt_table.is_complete
    check_prompt(job, each)
    check_vector(job, each)
    assert (each.vector is not None) == (pooling is not None)


def test_a_vector_takes_one_step_and_no_token() -> None:
    table = bench(24)
    each = request("x", [0, 1, 1], 1, reports=Reports(pooling=Pooling.LAST))
    table.send(each)
    outcome = table.turn()
    assert outcome is not None
    assert (outcome.finished, outcome.tokens) == ([each], [])
    assert each.finish_reason is FinishReason.STOP
    assert table.plan() is None


def answer_of(reports: Reports) -> tuple[Bench, StepResult]:
    """Return a bench with one step in flight, and the right answer to it."""
    table = bench(24)
    table.send(request("x", [0, 1, 1, 0], 3, read_cache=False, reports=reports))
    table.plan()
    return table, table.wire[0][1]


WRONG = [
    (Reports(logprobs=0), {"ranks": None, "logprobs": None}, "gave no log-probabilities"),
    (Reports(logprobs=0), {"ranks": np.zeros(1, dtype=np.int32)}, "no rank of a token"),
    (Reports(logprobs=0), {"ranks": np.ones(2, dtype=np.int32)}, "gave 2 ranks, expected 1"),
    (Reports(prompt_logprobs=0), {"prompt_parts": ()}, r"expected \{0: range\(1, 4\)\}"),
    (Reports(), {"prompt_parts": (prompt_part(0, 1, [1], [1], 0),)}, r"expected \{\}"),
    (Reports(pooling=Pooling.LAST), {"vectors": ()}, r"rows \[\], expected \[0\]"),
    (
        Reports(),
        {"vectors": ((0, np.zeros(3, dtype=np.float32)),)},
        r"rows \[0\], expected \[\]",
    ),
]


@pytest.mark.parametrize(("asked", "changes", "complaint"), WRONG)
def test_an_answer_that_lacks_what_was_asked_for_is_the_workers_fault(
    asked: Reports, changes: dict[str, object], complaint: str
) -> None:
    table, answer = answer_of(asked)
    with pytest.raises(ValueError, match=complaint):
        table.scheduler.apply(replace(answer, **changes), 9)  # type: ignore[arg-type]
    # Nothing is changed: the right answer still fits.
    table.run()
