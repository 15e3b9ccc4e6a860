"""Rules over many rows at once change each row's logits as the textbook does one by one."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sampling_oracle import Rules
from worker_svc.runtime.logit_rules import apply_rules, names_only, read_rules
from worker_svc.runtime.sampling_columns import SamplingColumns
from worker_svc.runtime.step_plan import (
    AdmittedRow,
    Int32Array,
    SamplingParams,
    no_float32,
    no_int32,
)

VOCAB, MAX_ROWS, MAX_TOKENS = 12, 6, 24

ids = st.integers(0, VOCAB - 1)
penalties = st.sampled_from([0.0, 0.0, 0.5, -1.25, 2.0])
all_rules = st.builds(
    Rules,
    presence_penalty=penalties,
    frequency_penalty=penalties,
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5, 0.5]),
    logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, -0.5, 3.0]), max_size=3),
    allowed=st.lists(ids, max_size=4, unique=True),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 4),
    stop_ids=st.lists(ids, max_size=2, unique=True),
)
rows = st.tuples(
    all_rules,
    st.lists(ids, min_size=1, max_size=8),
    st.lists(ids, max_size=8),
)


def int32(values: list[int]) -> Int32Array:
    return np.array(values, dtype=np.int32)


def params_of(rules: Rules) -> SamplingParams:
    return SamplingParams(
        presence_penalty=rules.presence_penalty,
        frequency_penalty=rules.frequency_penalty,
        repetition_penalty=rules.repetition_penalty,
        min_tokens=rules.min_tokens,
        stop_token_ids=int32([*rules.stop_ids]),
        bias_token_ids=int32([*rules.logit_bias]),
        bias_values=np.array([*rules.logit_bias.values()], dtype=np.float32),
        allowed_token_ids=int32([*rules.allowed]),
        bad_words=tuple(int32([*word]) for word in rules.bad_words),
    )


def admission(row: int, params: SamplingParams, prompt: list[int]) -> AdmittedRow:
    return AdmittedRow(row, "r", int32(prompt), len(prompt), 0, len(prompt), (), params)


@given(load=st.lists(rows, min_size=1, max_size=MAX_ROWS), data=st.data())
def test_rules_of_many_rows_are_the_textbooks(
    load: list[tuple[Rules, list[int], list[int]]], data: st.DataObject
) -> None:
    places = data.draw(st.permutations(range(MAX_ROWS)))[: len(load)]
    columns = SamplingColumns(MAX_ROWS)
    tokens = np.full((MAX_ROWS, MAX_TOKENS), VOCAB + 1, dtype=np.int32)
    num_tokens = np.zeros(MAX_ROWS, dtype=np.int32)
    for row, (rules, prompt, output) in zip(places, load, strict=True):
        columns.write(row, admission(row, params_of(rules), prompt))
        known = [*prompt, *output]
        tokens[row, : len(known)], num_tokens[row] = known, len(known)
    # Zeros too: they are divided, not multiplied, and stay.
    seed = data.draw(st.integers(0, 99))
    logits = torch.randn(len(load), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    logits[:, 3] = 0.0
    expected = logits.clone()
    for place, (rules, prompt, output) in enumerate(load):
        rules.apply(expected[place], prompt, output)
    apply_rules(logits, np.array(places), tokens, num_tokens, columns.rules)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=1.0, top_k=5, top_p=0.5, min_p=0.1, seed=9),
        # Stop ids alone forbid nothing: they matter before min_tokens; and that without them.
        SamplingParams(stop_token_ids=int32([1])),
        SamplingParams(min_tokens=5),
    ],
)
def test_a_row_without_rules_has_none(params: SamplingParams) -> None:
    assert read_rules(admission(0, params, [1, 2])) is None


def test_rules_go_with_their_row_and_its_forks() -> None:
    columns = SamplingColumns(4)
    columns.write(1, admission(1, SamplingParams(presence_penalty=1.0), [1]))
    columns.write(2, admission(2, SamplingParams(), [1]))
    index = np.arange(2)
    columns.fork(np.array([2, 3]), np.array([1, 2]), index)
    assert columns.is_ruled.tolist() == [False, True, True, False]
    assert columns.rules[2] is columns.rules[1]
    assert 3 not in columns.rules
    columns.forget(int32([1, 2, 3]))
    assert not columns.is_ruled.any()
    assert not columns.rules


@pytest.mark.parametrize("wrong", [-1, VOCAB])
@pytest.mark.parametrize(
    "name", ["stop_token_ids", "bias_token_ids", "allowed_token_ids", "bad_words"]
)
def test_an_id_outside_the_vocabulary_is_found(name: str, wrong: int) -> None:
    value = int32([0, wrong])
    params = SamplingParams(**{name: (value,) if name == "bad_words" else value})  # type: ignore[arg-type]
    assert not names_only(params, VOCAB)
    assert names_only(SamplingParams(bias_token_ids=no_int32(), bias_values=no_float32()), VOCAB)
