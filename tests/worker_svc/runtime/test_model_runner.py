"""However steps are cut, batched and laid out, a sequence has the tokens it has alone."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

import transformers_oracle as oracle
from plan_driver import AnyRunner, PlanDriver, Sequence, int32, make_plan
from tiny_llama import VOCAB, write_tiny_llama
from worker_svc.errors import InvariantError
from worker_svc.model.native_operations import NativeOperations
from worker_svc.model.operations import Operations
from worker_svc.model.torch_operations import TorchOperations
from worker_svc.model.weights import LoadedModel, load_model
from worker_svc.runtime.model_runner import ModelRunner
from worker_svc.runtime.start_up import RunnerLimits, make_runner
from worker_svc.runtime.step_plan import AdmittedRow, SamplingParams

CPU = torch.device("cpu")
NUM_BLOCKS = 60


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=[TorchOperations, NativeOperations])
def operations(request: pytest.FixtureRequest) -> Operations:
    made: Operations = request.param()
    return made


@pytest.fixture(scope="module")
def loaded(directory: Path, operations: Operations) -> LoadedModel:
    return load_model(directory, torch.float32, CPU, operations)


@pytest.fixture(scope="module")
def theirs(directory: Path) -> LlamaForCausalLM:
    return oracle.load_directory(directory)


@pytest.fixture(scope="module")
def new_runner(
    loaded: LoadedModel, kind: Callable[[LoadedModel, ModelRunner], AnyRunner]
) -> Callable[[], AnyRunner]:
    def make() -> AnyRunner:
        limits = RunnerLimits(
            block_size=4, max_num_seqs=8, max_model_len=64, num_gpu_blocks_override=NUM_BLOCKS
        )
        runner, _ = make_runner(loaded, limits)
        # What was never written must never be read.
        for layer in runner.kv_cache.layers:
            for cache in layer[:2]:
                cache.fill_(float("nan"))
        return kind(loaded, runner)

    return make


def run_all(
    driver: PlanDriver, sequences: list[Sequence], count: int, rng: random.Random, budget: int
) -> None:
    """Run random chunks of random sequences until each has `count` tokens."""
    unfinished = list(sequences)
    while unfinished:
        work: dict[Sequence, int] = {}
        left = budget
        for sequence in rng.sample(unfinished, rng.randint(1, len(unfinished))):
            new = min(left, sequence.num_tokens - sequence.num_computed_tokens)
            if new:
                work[sequence] = new = rng.randint(1, new)
                left -= new
        driver.step(work)
        for sequence in list(unfinished):
            if len(sequence.output) == count:
                driver.release(sequence)
                unfinished.remove(sequence)
            elif sequence.row is not None and rng.random() < 0.05:
                driver.release(sequence)


prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)


@settings(max_examples=30)
@given(
    load=st.lists(prompts, min_size=1, max_size=6),
    budget=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_any_schedule_gives_the_tokens_of_transformers(
    new_runner: Callable[[], AnyRunner],
    theirs: LlamaForCausalLM,
    load: list[list[int]],
    budget: int,
    seed: int,
) -> None:
    driver = PlanDriver(new_runner(), seed)
    sequences = [Sequence(prompt) for prompt in load]
    run_all(driver, sequences, 6, random.Random(seed), budget)
    for sequence in sequences:
        assert sequence.output == oracle.greedy(theirs, sequence.prompt, 6)


def test_the_demo_model_gives_the_tokens_of_transformers(
    demo_gguf: Path, operations: Operations
) -> None:
    model = load_model(demo_gguf, torch.float32, CPU, operations)
    runner, _ = make_runner(
        model, RunnerLimits(block_size=16, max_num_seqs=4, num_gpu_blocks_override=64)
    )
    # "Hello, my name is", " the the the", and a jumble.
    load = [[19556, 28, 957, 1462, 314], [260, 260, 260], [7 * i * i % 49152 for i in range(40)]]
    sequences = [Sequence(prompt) for prompt in load]
    run_all(PlanDriver(runner), sequences, 10, random.Random(0), budget=30)
    theirs = oracle.load_demo(demo_gguf)
    for sequence in sequences:
        assert sequence.output == oracle.greedy(theirs, sequence.prompt, 10)


@pytest.mark.parametrize("seed", range(4))
def test_a_seeded_sequence_is_the_same_alone_and_in_company(
    new_runner: Callable[[], AnyRunner], seed: int
) -> None:
    rng = random.Random(seed)
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=42)
    prompt = [rng.randrange(VOCAB) for _ in range(13)]
    alone = PlanDriver(new_runner()).generate(Sequence(prompt, params), 16)
    assert PlanDriver(new_runner(), 1).generate(Sequence(prompt, params), 16, chunk=3) == alone
    company = [
        Sequence([rng.randrange(VOCAB)], SamplingParams(temperature=1.5, top_k=40, seed=i))
        for i in range(3)
    ]
    company.insert(seed % 4, Sequence(prompt, params))
    company.append(Sequence(prompt, params, sequence_index=1))
    run_all(PlanDriver(new_runner(), seed), company, 16, rng, budget=20)
    assert company[seed % 4].output == alone
    assert company[-1].output != alone


def test_blocks_filled_by_one_row_serve_another_in_the_same_step(
    new_runner: Callable[[], AnyRunner], theirs: LlamaForCausalLM
) -> None:
    """In a layer all rows store before any attends."""
    prompt = list(range(10, 19))
    rows = [
        admission(5, prompt, 0, 9, [7, 3, 9]),
        # Runs only the last token; the two blocks in front are written in this very step.
        admission(2, prompt, 8, 1, [7, 3, 4]),
    ]
    result = new_runner().run(make_plan(0, admitted=rows))
    expected = oracle.greedy(theirs, prompt, 1)
    assert result.rows.tolist() == [2, 5]
    assert result.tokens.tolist() == expected * 2


def test_a_copied_block_continues_as_the_original(
    new_runner: Callable[[], AnyRunner], theirs: LlamaForCausalLM
) -> None:
    prompt = list(range(30, 36))
    runner = new_runner()
    runner.run(make_plan(0, admitted=[admission(0, prompt[:5], 0, 5, [1, 2])]))
    fork = admission(1, prompt, 5, 1, [1, 3])
    plan = make_plan(1, released=[0], admitted=[fork], copies=[(2, 3)])
    assert runner.run(plan).tokens.tolist() == oracle.greedy(theirs, prompt, 1)


def test_a_prompt_cut_in_chunks_samples_only_behind_its_last(
    new_runner: Callable[[], AnyRunner],
) -> None:
    driver, sequence = PlanDriver(new_runner()), Sequence(list(range(10)))
    assert driver.step({sequence: 4}).rows.tolist() == []
    assert driver.step({sequence: 5}).rows.tolist() == []
    assert len(driver.step({sequence: 1}).rows) == 1


def test_a_row_with_a_bad_token_fails_alone(
    new_runner: Callable[[], AnyRunner], theirs: LlamaForCausalLM
) -> None:
    runner = new_runner()
    rows = [admission(0, [5, VOCAB], 0, 2, [1]), admission(1, [5, 6], 0, 2, [2])]
    result = runner.run(make_plan(0, admitted=rows))
    assert result.row_errors == ((0, "a token id is not in 0 to 271"),)
    assert result.rows.tolist() == [1]
    assert result.tokens.tolist() == oracle.greedy(theirs, [5, 6], 1)
    # A plan that was under way tells of it again; once released, the row serves another.
    assert runner.run(make_plan(1)).row_errors == result.row_errors
    again = make_plan(2, released=[0, 1], admitted=[admission(0, [5, 6], 0, 2, [1])])
    assert runner.run(again).row_errors == ()


def test_a_row_whose_logits_are_not_finite_fails_alone(
    new_runner: Callable[[], AnyRunner],
) -> None:
    runner = new_runner()
    # Row 0 claims that a token is computed which is not, and so reads NaN.
    rows = [admission(0, [5, 6], 1, 1, [1]), admission(1, [5, 6], 0, 2, [2])]
    result = runner.run(make_plan(0, admitted=rows))
    assert result.row_errors == ((0, "the model's logits are not finite"),)
    assert result.rows.tolist() == [1]
    assert runner.run(make_plan(1)).row_errors == result.row_errors


def test_only_the_next_step_or_a_reset_is_run(new_runner: Callable[[], AnyRunner]) -> None:
    runner = new_runner()
    runner.run(make_plan(0))
    for step_id in (0, 2, -1):
        with pytest.raises(InvariantError, match=f"step {step_id} follows step 0"):
            runner.run(make_plan(step_id))
    runner.run(make_plan(1, admitted=[admission(3, [1], 0, 1, [1])]))
    result = runner.run(make_plan(0, reset=True))
    assert (result.step_id, result.rows.tolist()) == (0, [])
    with pytest.raises(InvariantError, match="row 3 is released, but was never admitted"):
        runner.run(make_plan(1, released=[3]))


def test_a_step_says_where_its_time_went(new_runner: Callable[[], AnyRunner]) -> None:
    timing = new_runner().run(make_plan(0, admitted=[admission(0, [1], 0, 1, [1])])).timing
    parts = (timing.prepare_ns, timing.forward_ns, timing.sample_ns)
    assert all(part > 0 for part in parts)
    assert sum(parts) == timing.total_ns
    idle = new_runner().run(make_plan(0)).timing
    assert (idle.forward_ns, idle.sample_ns) == (0, 0)


def test_plans_may_be_read_only(new_runner: Callable[[], AnyRunner]) -> None:
    """As they are when they come from bytes."""
    plan = make_plan(
        0,
        admitted=[admission(0, [1, 2], 0, 2, [1])],
        appended=[(0, 2)],
        copies=[(2, 3)],
        exceptions=[(0, 0, 1)],
    )
    for column in (
        plan.admitted[0].tokens,
        *plan.admitted[0].block_tables,
        *plan.appended[0],
        *plan.copies,
        plan.exception_rows,
        plan.exception_num_computed_tokens,
        plan.exception_num_new_tokens,
        plan.released_rows,
    ):
        column.flags.writeable = False
    assert len(new_runner().run(plan).rows) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs(directory: Path, dtype: torch.dtype, operations: Operations) -> None:
    loaded = load_model(directory, dtype, CPU, operations)
    runner, _ = make_runner(loaded, RunnerLimits(num_gpu_blocks_override=9))
    assert len(PlanDriver(runner).generate(Sequence([1, 2, 3]), 4)) == 4


def admission(
    row: int, tokens: list[int], computed: int, new: int, blocks: list[int]
) -> AdmittedRow:
    return AdmittedRow(
        row=row,
        request_id="r",
        tokens=np.array(tokens, dtype=np.int32),
        num_prompt_tokens=len(tokens),
        num_computed_tokens=computed,
        num_new_tokens=new,
        block_tables=(int32(*blocks),),
        sampling=SamplingParams(),
    )
