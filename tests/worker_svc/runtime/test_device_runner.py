"""A runner that never waits for its device brings what the one that waits would have brought.

The tests of `ModelRunner`, of forks and of beams run on this one, too; here is what only it can do.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from launching import launching, reference_sampler
from plan_driver import PlanDriver, Sequence, int32, make_plan
from tiny_families import write_family
from tiny_llama import HIDDEN, VOCAB, write_tiny_llama
from worker_svc.model.torch_operations import TorchOperations
from worker_svc.model.weights import LoadedModel, load_model
from worker_svc.runtime.decode_batches import batch_sizes
from worker_svc.runtime.device_runner import DeviceRunner
from worker_svc.runtime.start_up import RunnerLimits, make_runner
from worker_svc.runtime.step_plan import AdmittedRow, EmbeddedSpan, ForkedRow, SamplingParams

BLOCK_SIZE = 4
LIMITS = RunnerLimits(
    block_size=BLOCK_SIZE, max_num_seqs=8, max_model_len=64, num_gpu_blocks_override=90
)
NOT_FINITE = "the model's logits are not finite"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory: Path = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return load_model(directory, torch.float32, torch.device("cpu"), TorchOperations())


@pytest.fixture
def runner(loaded: LoadedModel) -> Iterator[DeviceRunner]:
    waiting, _ = make_runner(loaded, LIMITS)
    for layer in waiting.kv_cache.layers:
        for cache in layer[:2]:
            cache.fill_(float("nan"))
    with reference_sampler():
        yield launching(loaded, waiting)


def admission(
    row: int, tokens: list[int], sampling: SamplingParams, first_block: int = 0
) -> AdmittedRow:
    """Return a row with blocks for 32 tokens."""
    first_block = first_block or 1 + 8 * row
    return AdmittedRow(
        row=row,
        request_id="r",
        tokens=int32(*tokens),
        num_prompt_tokens=len(tokens),
        num_computed_tokens=0,
        num_new_tokens=len(tokens),
        block_tables=(int32(*range(first_block, first_block + 8)),),
        sampling=sampling,
    )


@pytest.mark.parametrize("seed", range(4))
def test_steps_launched_before_any_has_ended_bring_what_they_would_one_by_one(
    loaded: LoadedModel, runner: DeviceRunner, seed: int
) -> None:
    numbers = random.Random(seed)
    rows = numbers.sample(range(8), 5)
    load = {
        row: (
            [numbers.randrange(VOCAB) for _ in range(numbers.randrange(1, 12))],
            SamplingParams(temperature=numbers.choice([0.0, 0.9]), seed=row),
        )
        for row in rows
    }
    admitted = [admission(row, *load[row]) for row in rows]
    plans = [make_plan(0, admitted=admitted), *(make_plan(step) for step in range(1, 9))]
    launched = [runner.launch(plan) for plan in plans]
    results = [runner.collect(step) for step in launched]
    for row, (prompt, sampling) in load.items():
        alone = launching(loaded, make_runner(loaded, LIMITS)[0])
        expected = PlanDriver(alone).generate(Sequence(prompt, sampling), len(plans))
        assert [int(r.tokens[r.rows.tolist().index(row)]) for r in results] == expected


def test_a_fork_has_tokens_of_its_parent_that_the_host_does_not_know_yet(
    loaded: LoadedModel, runner: DeviceRunner
) -> None:
    prompt = [5, 6, 7, 8]
    plans = [
        make_plan(0, admitted=[admission(0, prompt, SamplingParams())]),
        make_plan(1),
        # The child copies the parent's second block, which both are about to write.
        make_plan(
            2,
            forked=[
                ForkedRow(row=1, parent_row=0, sequence_index=1, last_token=None, num_blocks=1)
            ],
            appended=[(1, 80), (1, 81)],
            copies=[(2, 80), (3, 81)],
        ),
        make_plan(3),
    ]
    results = [runner.collect(step) for step in [runner.launch(plan) for plan in plans]]
    alone = PlanDriver(launching(loaded, make_runner(loaded, LIMITS)[0]))
    expected = alone.generate(Sequence(prompt), 4)
    assert [result.tokens.tolist() for result in results[:2]] == [[token] for token in expected[:2]]
    assert [result.tokens.tolist() for result in results[2:]] == [
        [token] * 2 for token in expected[2:]
    ]


def test_a_row_that_fails_is_told_of_in_every_step_under_way_and_harms_none_after_it(
    runner: DeviceRunner,
) -> None:
    sick = AdmittedRow(
        row=0,
        request_id="r",
        tokens=int32(5, 6),
        num_prompt_tokens=2,
        # Not so: its block was never written.
        num_computed_tokens=1,
        num_new_tokens=1,
        block_tables=(int32(1, 2),),
        sampling=SamplingParams(),
    )
    well = admission(1, [5, 6], SamplingParams())
    under_way = [runner.launch(make_plan(0, admitted=[sick, well])), runner.launch(make_plan(1))]
    # Row 0 is another's by the time the first step is looked at.
    again = make_plan(2, released=[0], admitted=[admission(0, [5, 6], SamplingParams(), 50)])
    under_way.append(runner.launch(again))
    results = [runner.collect(step) for step in under_way]
    assert [result.row_errors for result in results] == [((0, NOT_FINITE),)] * 2 + [()]
    assert [result.rows.tolist() for result in results] == [[1], [1], [0, 1]]
    assert results[2].tokens[0] == results[0].tokens[0]
    assert runner.run(make_plan(3)).rows.tolist() == [0, 1]


def test_who_shares_a_step_with_a_row_that_makes_it_wait_samples_the_same(
    loaded: LoadedModel, runner: DeviceRunner
) -> None:
    seeded = admission(0, [5, 6, 7], SamplingParams(temperature=1.2, seed=3))
    telling = replace(admission(1, [8, 9], SamplingParams()), logprobs=True)
    plans = [
        make_plan(0, admitted=[seeded]),
        make_plan(1, admitted=[telling]),
        make_plan(2),
        make_plan(3, released=[1]),
        make_plan(4),
    ]
    launched = [runner.launch(plan) for plan in plans]
    results = [runner.collect(step) for step in launched]
    assert [result.token_logprobs is not None for result in results] == [False, True, True] + [
        False
    ] * 2
    alone = PlanDriver(launching(loaded, make_runner(loaded, LIMITS)[0]))
    expected = alone.generate(Sequence([5, 6, 7], seeded.sampling), len(plans))
    assert [int(result.tokens[0]) for result in results] == expected


def test_a_row_that_failed_is_not_run_again(runner: DeviceRunner) -> None:
    runner.run(make_plan(0, admitted=[admission(0, [5, VOCAB], SamplingParams())]))
    result = runner.run(make_plan(1))
    assert result.row_errors == ((0, f"a token id is not in 0 to {VOCAB - 1}"),)
    assert len(result.rows) == 0


def test_layers_with_windows_read_blocks_of_their_own(tmp_path: Path) -> None:
    write_family("gemma3", tmp_path)
    loaded = load_model(tmp_path, torch.float32, torch.device("cpu"), TorchOperations())
    limits = RunnerLimits(block_size=BLOCK_SIZE, max_num_seqs=4, num_gpu_blocks_override=99)
    num_groups, prompt = len(loaded.model.config.kv_groups), [3 * i % 96 for i in range(13)]
    tables = np.random.default_rng(1).permutation(99)[: num_groups * 6].reshape(num_groups, 6) + 1
    row = replace(
        admission(2, prompt, SamplingParams()), block_tables=tuple(tables.astype(np.int32))
    )
    plans = [make_plan(0, admitted=[row], exceptions=[(2, 0, 5)])]
    plans += [make_plan(1, exceptions=[(2, 5, 8)]), *(make_plan(step) for step in range(2, 10))]
    waiting, beside = (make_runner(loaded, limits)[0] for _ in range(2))
    with reference_sampler():
        runner = launching(loaded, beside)
        launched = [runner.launch(plan) for plan in plans]
        found = [runner.collect(step).tokens.tolist() for step in launched]
    assert num_groups > 1
    assert found == [waiting.run(plan).tokens.tolist() for plan in plans]


def test_padding_writes_nothing(runner: DeviceRunner) -> None:
    rows = [admission(row, [row + 1], SamplingParams()) for row in range(5)]
    runner.run(make_plan(0, admitted=rows))
    before = [[cache.clone() for cache in layer[:2]] for layer in runner.kv_cache.layers]
    runner.run(make_plan(1))
    written = [
        (now.nan_to_num(9.0) != then.nan_to_num(9.0)).flatten(2).any(-1).nonzero().tolist()
        for layer, old in zip(runner.kv_cache.layers, before, strict=True)
        for now, then in zip(layer[:2], old, strict=True)
    ]
    # Five rows in a batch of eight: the second token of each, and nothing else.
    assert written == [[[1 + 8 * row, 1] for row in range(5)]] * len(written)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 60, 64, 256, 1000])
def test_batches_of_any_size_are_at_most_a_fifth_padding(most: int) -> None:
    sizes = batch_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    assert len(sizes) <= 4 * most.bit_length()
    for rows in range(9, most + 1):
        size = next(size for size in sizes if size >= rows)
        assert size - rows <= 0.2 * size


@pytest.mark.parametrize("wants", ["adapter", "embeddings"])
def test_a_row_with_an_adapter_or_embeddings_fails_alone(runner: DeviceRunner, wants: str) -> None:
    span = EmbeddedSpan(0, np.zeros(HIDDEN, dtype=np.float32).tobytes(), "float32")
    plain = admission(0, [5, 6], SamplingParams())
    wanting = (
        replace(plain, adapter=1) if wants == "adapter" else replace(plain, embeddings=(span,))
    )
    well = admission(1, [5, 6], SamplingParams())
    result = runner.run(make_plan(0, admitted=[wanting, well]))
    ((row, reason),) = result.row_errors
    assert row == 0
    assert reason.startswith("adapters and embeddings are not served")
    assert result.rows.tolist() == [1]
