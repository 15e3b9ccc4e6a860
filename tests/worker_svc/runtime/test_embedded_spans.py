"""Embeddings in place of tokens: the same as the tokens, if they are the table's own rows."""

import random
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_driver import AnyRunner, PlanDriver, Sequence
from tiny_llama import HIDDEN, IMG, tiny_weights, write_tiny_llama
from worker_svc.model.weights import LoadedModel, load_model
from worker_svc.runtime.model_runner import ModelRunner
from worker_svc.runtime.start_up import RunnerLimits, make_runner
from worker_svc.runtime.step_plan import EmbeddedSpan

Kind: TypeAlias = Callable[[LoadedModel, ModelRunner], AnyRunner]

CPU = torch.device("cpu")
PROMPT = [random.Random(0).randrange(256) for _ in range(20)]
TABLE = tiny_weights(0)["model.embed_tokens.weight"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_tiny_llama(tmp_path_factory.mktemp("tiny")), torch.float32, CPU)


def new_runner(loaded: LoadedModel, kind: Kind) -> AnyRunner:
    limits = RunnerLimits(
        block_size=4, max_num_seqs=8, max_model_len=64, num_gpu_blocks_override=60
    )
    return kind(loaded, make_runner(loaded, limits)[0])


def span(start: int, end: int, dtype: torch.dtype = torch.float32) -> EmbeddedSpan:
    """The table's rows for a part of the prompt."""
    vectors = TABLE[PROMPT[start:end]].to(dtype)
    name = str(dtype).removeprefix("torch.")
    return EmbeddedSpan(start, vectors.view(torch.uint8).numpy().tobytes(), name)


def hidden(*spans: tuple[int, int]) -> list[int]:
    """The prompt with placeholders where the spans are."""
    return [
        IMG if any(start <= place < end for start, end in spans) else token
        for place, token in enumerate(PROMPT)
    ]


bounds = st.lists(st.integers(0, 20), min_size=4, max_size=4, unique=True).map(sorted)


@settings(max_examples=25, deadline=None)
@given(bounds=bounds, chunk=st.integers(1, 20))
def test_the_tables_own_rows_give_the_tokens_of_the_ids(
    loaded: LoadedModel, kind: Kind, bounds: list[int], chunk: int
) -> None:
    first, second = (bounds[0], bounds[1]), (bounds[2], bounds[3])
    plain = PlanDriver(new_runner(loaded, kind)).generate(Sequence(PROMPT), 6)
    runner = new_runner(loaded, kind)
    spans = (span(*first), span(*second))
    sequence = Sequence(hidden(first, second), embeddings=spans)
    assert PlanDriver(runner).generate(sequence, 6, chunk) == plain
    assert runner.rows.embedded._spans == {}


def test_rows_in_one_step_have_their_own(loaded: LoadedModel, kind: Kind) -> None:
    plain = PlanDriver(new_runner(loaded, kind)).generate(Sequence(PROMPT), 4)
    driver = PlanDriver(new_runner(loaded, kind))
    sequences = [
        Sequence(hidden((3, 9)), embeddings=(span(3, 9),)),
        Sequence(PROMPT),
        Sequence(hidden((0, 20)), embeddings=(span(0, 20),)),
    ]
    while left := [each for each in sequences if len(each.output) < 4]:
        driver.step({s: min(7, s.num_tokens - s.num_computed_tokens) for s in left})
    assert [each.output for each in sequences] == [plain] * 3


def test_they_change_what_comes_behind_them(loaded: LoadedModel, kind: Kind) -> None:
    def output(seed: int) -> list[int]:
        vectors = np.random.default_rng(seed).normal(size=(6, HIDDEN)).astype("<f4")
        spans = (EmbeddedSpan(3, vectors.tobytes(), "float32"),)
        return PlanDriver(new_runner(loaded, kind)).generate(Sequence(PROMPT, embeddings=spans), 8)

    assert output(1) != output(2)


def test_a_preempted_row_gets_them_again(loaded: LoadedModel, kind: Kind) -> None:
    plain = PlanDriver(new_runner(loaded, kind)).generate(Sequence(PROMPT), 6)
    driver = PlanDriver(new_runner(loaded, kind))
    sequence = Sequence(hidden((2, 15)), embeddings=(span(2, 15),))
    driver.step({sequence: 9})
    driver.release(sequence)
    driver.step({sequence: 20})
    driver.release(sequence)
    assert driver.generate(sequence, 6) == plain


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_are_widened(loaded: LoadedModel, kind: Kind, dtype: torch.dtype) -> None:
    rounded = TABLE[PROMPT].to(dtype)
    wide = EmbeddedSpan(0, rounded.float().numpy().tobytes(), "float32")
    outputs = [
        PlanDriver(new_runner(loaded, kind)).generate(
            Sequence(hidden((0, 20)), embeddings=(each,)), 6
        )
        for each in (wide, span(0, 20, dtype))
    ]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    "wrong",
    [
        EmbeddedSpan(0, bytes(HIDDEN * 4 - 1), "float32"),
        EmbeddedSpan(0, b"", "float32"),
        EmbeddedSpan(0, bytes(HIDDEN * 4), "int8"),
        EmbeddedSpan(20, bytes(HIDDEN * 4), "float32"),
    ],
)
def test_what_does_not_fit_fails_its_row_alone(
    loaded: LoadedModel, kind: Kind, wrong: EmbeddedSpan
) -> None:
    driver = PlanDriver(new_runner(loaded, kind))
    bad, well = Sequence(PROMPT, embeddings=(wrong,)), Sequence(PROMPT)
    result = driver.step({bad: 20, well: 20})
    ((row, reason),) = result.row_errors
    assert (row, len(well.output)) == (bad.row, 1)
    assert f"must be vectors of {HIDDEN} for some of 20 tokens" in reason


def test_a_released_row_keeps_none(loaded: LoadedModel, kind: Kind) -> None:
    runner = new_runner(loaded, kind)
    driver = PlanDriver(runner)
    sequence, other = Sequence(PROMPT, embeddings=(span(3, 9),)), Sequence(PROMPT)
    driver.step({sequence: 2})
    assert len(runner.rows.embedded._spans) == 1
    driver.release(sequence)
    driver.step({other: 20})
    assert runner.rows.embedded._spans == {}
