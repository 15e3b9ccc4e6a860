"""What a runner tells of tokens, prompts and rows, however their steps are cut."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

import transformers_oracle as oracle
from plan_driver import AnyRunner, int32, make_plan
from tiny_llama import VOCAB, write_tiny_llama
from worker_svc.model.torch_operations import TorchOperations
from worker_svc.model.weights import LoadedModel, load_model
from worker_svc.runtime.logprobs import find_logprobs, sampled_logprobs
from worker_svc.runtime.model_runner import ModelRunner
from worker_svc.runtime.start_up import RunnerLimits, make_runner
from worker_svc.runtime.step_plan import AdmittedRow, Pooling, SamplingParams, StepResult

PROMPT = [(11 * i * i + 5) % VOCAB for i in range(130)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def loaded(directory: Path) -> LoadedModel:
    return load_model(directory, torch.float32, torch.device("cpu"), TorchOperations())


@pytest.fixture(scope="module")
def theirs(directory: Path) -> LlamaForCausalLM:
    return oracle.load_directory(directory)


@pytest.fixture
def runner(loaded: LoadedModel, kind: Callable[[LoadedModel, ModelRunner], AnyRunner]) -> AnyRunner:
    limits = RunnerLimits(
        block_size=4, max_num_seqs=4, max_model_len=256, num_gpu_blocks_override=90
    )
    made, _ = make_runner(loaded, limits)
    for layer in made.kv_cache.layers:
        for cache in layer[:2]:
            cache.fill_(float("nan"))
    return kind(loaded, made)


def admission(row: int, new: int, computed: int = 0, **asked: Any) -> AdmittedRow:
    blocks = int32(*range(1 + 40 * row, 41 + 40 * row))
    sampling = asked.pop("sampling", SamplingParams())
    return AdmittedRow(
        row,
        "r",
        int32(*PROMPT),
        len(PROMPT),
        computed,
        new,
        (blocks,),
        sampling,
        **asked,
    )


def in_chunks(runner: AnyRunner, chunks: list[int], **asked: Any) -> list[StepResult]:
    """Run the prompt of row 1 in chunks; the last is what is left."""
    results = [runner.run(make_plan(0, admitted=[admission(1, chunks[0], **asked)]))]
    done = chunks[0]
    for step, chunk in enumerate([*chunks[1:], len(PROMPT)], 1):
        new = min(chunk, len(PROMPT) - done)
        if not new:
            break
        results.append(runner.run(make_plan(step, exceptions=[(1, done, new)])))
        done += new
    return results


@given(
    seed=st.integers(0, 999),
    scale=st.sampled_from([0.0, 1.0, 30.0, 1e4]),
    tokens=st.lists(st.integers(0, 29), min_size=1, max_size=6),
)
def test_log_probabilities_are_the_log_softmax_and_ranks_a_total_order(
    seed: int, scale: float, tokens: list[int]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Whole numbers, so that some are equal.
    logits = (torch.randn(len(tokens), 30, generator=generator) * 2).round() * scale
    told = find_logprobs(logits, int32(*tokens))
    exact = torch.log_softmax(logits.double(), dim=-1)
    order = np.lexsort((np.tile(np.arange(30), (len(tokens), 1)), -logits.numpy()))
    for place, token in enumerate(tokens):
        assert told.logprobs[place] == pytest.approx(float(exact[place, token]), rel=1e-6, abs=1e-5)
        assert told.logprobs[place] <= 0
        assert told.ranks[place] == order[place].tolist().index(token) + 1


def test_rows_that_did_not_ask_have_zeros_and_cost_nothing() -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(1))
    tokens, counts = int32(4, 5, 6, 7), int32(1, 2, 1)
    assert sampled_logprobs(logits, tokens, counts, np.zeros(3, dtype=np.bool_)) is None
    asked = np.array([False, True, False])
    told = sampled_logprobs(logits, tokens, counts, asked)
    assert told is not None
    alone = find_logprobs(logits[[1, 1]], int32(5, 6))
    assert told.ranks.tolist() == [0, *alone.ranks.tolist(), 0]
    assert told.logprobs.tolist() == [0, *alone.logprobs.tolist(), 0]


@pytest.mark.parametrize("chunks", [[130], [1, 1, 127], [64, 65], [100, 3, 20], [129]])
@pytest.mark.parametrize("count", [0, 2])
def test_a_prompt_is_told_of_once_and_as_transformers_has_it(
    runner: AnyRunner, theirs: LlamaForCausalLM, chunks: list[int], count: int
) -> None:
    results = in_chunks(runner, chunks, prompt_logprobs=count)
    parts = [part for result in results for part in result.prompt_logprobs]
    assert [part.offset for part in parts] == [
        1 + sum(chunks[:place]) for place in range(len(parts))
    ]
    expected = torch.log_softmax(oracle.logits(theirs, PROMPT), dim=-1)[:-1]
    own = expected.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    told = np.concatenate([part.logprobs for part in parts])
    np.testing.assert_allclose(told, own.numpy(), atol=5e-5)
    ranks = np.concatenate([part.ranks for part in parts])
    assert ranks.tolist() == ((expected > own[:, None]).sum(dim=1) + 1).tolist()
    ids = np.concatenate([part.candidate_ids for part in parts])
    assert (
        ids.tolist() == expected.topk(count).indices.flatten().tolist() if count else not len(ids)
    )


def test_a_row_whose_prompt_is_no_number_fails_alone(runner: AnyRunner) -> None:
    """It claims that a token is computed which is not, and so reads NaN."""
    bad = admission(0, 129, computed=1, prompt_logprobs=1, logprobs=True)
    good = admission(1, 130, logprobs=True)
    result = runner.run(make_plan(0, admitted=[bad, good]))
    assert result.row_errors == ((0, "the model's logits at a prompt position are not finite"),)
    assert result.rows.tolist() == [1]
    assert result.prompt_logprobs == ()
    assert result.token_logprobs is not None
    assert result.token_logprobs.ranks.tolist() == [1]


def test_a_row_that_rules_out_every_token_fails_with_that_reason(runner: AnyRunner) -> None:
    rules = SamplingParams(allowed_token_ids=int32(5), bad_words=(int32(5),))
    rows = [admission(0, 130, sampling=rules, logprobs=True), admission(1, 130)]
    result = runner.run(make_plan(0, admitted=rows))
    [(row, reason)] = result.row_errors
    assert (row, result.rows.tolist()) == (0, [1])
    assert reason == "no token may be drawn: the request's own rules leave none"


def test_a_rule_that_names_no_token_fails_its_row(runner: AnyRunner) -> None:
    rules = SamplingParams(stop_token_ids=int32(VOCAB), min_tokens=2)
    rows = [admission(0, 130, sampling=rules), admission(1, 130)]
    result = runner.run(make_plan(0, admitted=rows))
    assert result.row_errors == ((0, "a token id is not in 0 to 271"),)
    assert result.rows.tolist() == [1]


def states(theirs: LlamaForCausalLM) -> torch.Tensor:
    with torch.inference_mode():
        hidden: torch.Tensor = theirs.model(torch.tensor([PROMPT])).last_hidden_state[0]
    return hidden


@pytest.mark.parametrize("chunks", [[130], [1, 128], [64, 65], [7, 7, 7]])
@pytest.mark.parametrize("pooling", Pooling)
def test_a_pooled_row_gives_one_vector_at_its_end_and_no_token(
    runner: AnyRunner, theirs: LlamaForCausalLM, chunks: list[int], pooling: Pooling
) -> None:
    results = in_chunks(runner, chunks, pooling=pooling)
    assert all(not len(result.tokens) and not len(result.rows) for result in results)
    assert [len(result.vectors) for result in results] == [0] * (len(results) - 1) + [1]
    [vector] = results[-1].vectors
    hidden = states(theirs)
    expected = hidden[-1] if pooling is Pooling.LAST else hidden.mean(dim=0)
    assert vector.row == 1
    np.testing.assert_allclose(vector.values, expected.numpy(), atol=2e-5)


def test_a_mean_that_begins_behind_the_start_or_is_no_number_fails_its_row(
    runner: AnyRunner,
) -> None:
    rows = [
        admission(0, 128, computed=2, pooling=Pooling.MEAN),
        admission(1, 128, computed=2, pooling=Pooling.LAST),
    ]
    result = runner.run(make_plan(0, admitted=rows))
    assert result.vectors == ()
    assert dict(result.row_errors) == {
        0: "the mean over all tokens is asked for, but the row does not run all of them",
        1: "the model's hidden states are not finite",
    }


def test_a_row_pooled_again_begins_its_sum_anew(
    runner: AnyRunner, theirs: LlamaForCausalLM
) -> None:
    """As after a preemption in the middle of its prompt."""
    runner.run(make_plan(0, admitted=[admission(1, 50, pooling=Pooling.MEAN)]))
    runner.run(make_plan(1, released=[1], admitted=[admission(1, 60, pooling=Pooling.MEAN)]))
    result = runner.run(make_plan(2, exceptions=[(1, 60, 70)]))
    [vector] = result.vectors
    np.testing.assert_allclose(vector.values, states(theirs).mean(dim=0).numpy(), atol=2e-5)
