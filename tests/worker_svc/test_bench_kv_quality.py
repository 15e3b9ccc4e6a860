"""The quality of a cache is told against the run dtype's, by outputs and by logits."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_llama import write_tiny_llama
from worker_svc.bench_kv_quality import Comparison, Question, compare_logits, compare_outputs
from worker_svc.errors import ConfigError
from worker_svc.model.weights import load_model

PROMPTS = [[1, 2, 3], [60, 61, 62, 63, 64, 65]]


def test_agreement_ends_with_the_first_token_that_differs() -> None:
    agreement = compare_outputs([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]])
    assert agreement == {"greedy_agreement": 0.75, "identical_outputs": 0.5}


def test_logit_errors_are_those_of_the_distributions() -> None:
    plain = torch.tensor([[0.0, math.log(3.0)], [0.0, 1.0]])
    other = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    told = compare_logits(plain, other)
    assert told["same_best_token"] == 0.5
    assert told["logit_error_max"] == pytest.approx(math.log(3.0))
    assert told["logit_error_mean"] == pytest.approx(math.log(3.0) / 4)
    # sum of p * log(p / q) with p = (1/4, 3/4), q = (1/2, 1/2)
    expected = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert told["kl_max"] == pytest.approx(expected)
    assert told["kl_mean"] == pytest.approx(expected / 2)


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    path = write_tiny_llama(tmp_path)
    return Comparison(load_model(path, torch.float32, torch.device("cpu")))


def ask(comparison: Comparison, kv_dtype: str) -> dict[str, Any]:
    question = {"kv_dtype": kv_dtype, "prompts": PROMPTS, "output_len": 5, "needles": [[9] * 40]}
    return comparison.answer(Question.model_validate(question))


def test_the_run_dtype_agrees_with_itself_and_fp8_nearly(comparison: Comparison) -> None:
    auto = ask(comparison, "auto")
    assert auto["greedy_agreement"] == auto["same_best_token"] == 1.0
    assert auto["logit_error_max"] == 0.0
    fp8, e5m2 = ask(comparison, "fp8"), ask(comparison, "fp8_e5m2")
    for told in (fp8, e5m2):
        assert told["tokens_per_gib"] == 4 * auto["tokens_per_gib"]
        assert 0 < told["logit_error_mean"] < 0.3 * told["logit_std"]
    # Two bits of mantissa err twice as much as three.
    assert fp8["logit_error_mean"] < e5m2["logit_error_mean"]
    (needle,) = auto["needle_outputs"]
    assert len(needle) == 24


def test_auto_comes_first(comparison: Comparison) -> None:
    with pytest.raises(ConfigError, match="the first kv_dtype must be auto"):
        ask(comparison, "fp8")
    with pytest.raises(ConfigError, match="kv_dtype is 'int4'"):
        ask(comparison, "int4")
