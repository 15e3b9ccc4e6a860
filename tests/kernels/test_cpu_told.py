"""Native log-probabilities, ranks and likeliest tokens are those of the textbook, row by row."""

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import cpu_threads, reference_told
from kernels.checks import ACTIVATIONS
from kernels.cpu_build import native_code
from kernels.cpu_told import tell_likeliest, tell_tokens
from native_variants import drawn, variant, variants

pytestmark = pytest.mark.skipif(native_code() is None, reason="this machine compiles no C++")
INF, NAN = float("inf"), float("nan")


def column(*numbers: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


def both(
    logits: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor, code: ctypes.CDLL
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        tell_tokens(logits, places, tokens, code=code),
        reference_told.tell_tokens(logits, places, tokens),
    ]


@variants
@pytest.mark.parametrize("dtype", ACTIVATIONS)
@settings(max_examples=10, deadline=None)
@given(
    vocab=st.integers(1, 70) | st.sampled_from([2047, 2048, 2050]),
    num_values=st.integers(1, 40),
    masked=st.sets(st.integers(0, 69), max_size=5),
    seed=st.integers(0, 99),
)
def test_what_is_told_is_what_the_reference_tells(
    name: str, dtype: torch.dtype, vocab: int, num_values: int, masked: set[int], seed: int
) -> None:
    """Few values make many ties; rows are told of in any order, some twice, some not at all."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.integers(-num_values, num_values, (3, vocab)) * 0.75).to(dtype)
    logits[:, [id_ for id_ in sorted(masked) if id_ < vocab - 1]] = -INF
    places = column(2, 0, 2, 1)
    tokens = torch.from_numpy(rng.integers(0, vocab, 4).astype(np.int32))
    ours, theirs = both(logits, places, tokens, variant(name))
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
    assert ours[1].tolist() == theirs[1].tolist()

    counts = torch.from_numpy(rng.integers(0, vocab + 1, 4))
    ids, logprobs = tell_likeliest(logits, places, counts, code=variant(name))
    expected_ids, expected = reference_told.tell_likeliest(logits, places, counts)
    assert ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)


@variants
def test_numbers_are_right_to_a_millionth_over_a_large_vocabulary(name: str) -> None:
    logits = drawn(3, 2, 49_152, dtype=torch.float32) * 4
    tokens = column(7, 49_151, dtype=torch.int32)
    told, _ = tell_tokens(logits, column(0, 1), tokens, code=variant(name))
    exact = torch.log_softmax(logits.double(), dim=-1)
    for place, token in enumerate(tokens.tolist()):
        assert told[place].item() == pytest.approx(float(exact[place, token]), rel=2e-7, abs=1e-6)


@variants
@pytest.mark.parametrize("order", [1, -1], ids=["rising", "falling"])
def test_ordered_logits_have_their_likeliest_at_the_right_end(name: str, order: int) -> None:
    logits = (order * torch.arange(1000.0))[None]
    ids, _ = tell_likeliest(logits, column(0), column(20), code=variant(name))
    expected = range(999, 979, -1) if order == 1 else range(20)
    assert ids.tolist() == list(expected)


@variants
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_row_that_is_no_number_says_so_and_no_other_does(name: str, bad: float) -> None:
    logits = drawn(1, 4, 99, dtype=torch.float32)
    logits[1, 98], logits[3] = bad, -INF
    told, ranks = tell_tokens(
        logits, column(0, 1, 2, 3), torch.zeros(4, dtype=torch.int32), code=variant(name)
    )
    assert told.isnan().tolist() == [False, True, False, True]
    assert ranks[0] == reference_told.tell_tokens(logits[:1], column(0), column(0).int())[1]


def test_bits_depend_neither_on_neighbours_nor_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = drawn(2, 9, 5000, dtype=torch.bfloat16)
    tokens = torch.arange(9, dtype=torch.int32) * 500
    whole = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(cpu_threads, "num_threads", lambda threads=threads: threads)
        whole.append(tell_tokens(logits, torch.arange(9), tokens)[0].tolist())
    alone = [
        tell_tokens(logits[place:], column(0), tokens[place : place + 1])[0].item()
        for place in range(9)
    ]
    assert whole == [alone] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(2, 5, dtype=torch.float64)}, r"logits is \[2, 5\] torch.float64"),
        ({"logits": torch.zeros(5, 2).T}, "logits is on cpu with strides"),
        ({"places": column(0, 1).int()}, r"places is \[2\] torch.int32"),
        ({"tokens": column(0, 1)}, r"tokens is \[2\] torch.int64"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    fitting = {
        "logits": torch.zeros(2, 5),
        "places": column(0, 1),
        "tokens": torch.zeros(2, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        tell_tokens(**{**fitting, **changes})


def test_more_tokens_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match=r"counts are \[6\], must be 0 to 5"):
        tell_likeliest(torch.zeros(1, 5), column(0), column(6))
