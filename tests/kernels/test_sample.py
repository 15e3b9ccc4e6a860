"""A row's token is the one that sorting in fp64 gives, from its own parameters and draw alone."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.reference_sample import noisy_scores
from kernels.sample import PenaltyColumns, SamplingColumns, sample
from paged_cases import DEVICE, NAN


def columns(rows: int, **given: list[float]) -> SamplingColumns:
    """Return plain draws at temperature 1, but for what is given."""
    plain = {
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        "seed": 0, "sequence_index": 0, "position": 0,
    }  # fmt: skip
    dtypes = {"top_k": torch.int32, "seed": torch.int64, "sequence_index": torch.int32,
              "position": torch.int32}  # fmt: skip
    return SamplingColumns(**{
        name: torch.tensor(given.get(name, [value] * rows),
                           dtype=dtypes.get(name, torch.float32), device=DEVICE)
        for name, value in plain.items()
    })  # fmt: skip


def penalties(rows: int, vocabulary: int) -> PenaltyColumns:
    return PenaltyColumns(
        repetition=torch.rand(rows, device=DEVICE) + 0.75,
        frequency=torch.rand(rows, device=DEVICE) - 0.3,
        presence=torch.rand(rows, device=DEVICE) - 0.3,
        output_counts=torch.randint(0, 3, (rows, vocabulary), dtype=torch.int32, device=DEVICE),
        in_prompt=torch.rand(rows, vocabulary, device=DEVICE) > 0.5,
    )


def assert_tokens(tokens: torch.Tensor, scores: torch.Tensor) -> None:
    """Check that each token has the largest score, or one that fp32 noise may take for it."""
    taken = scores.gather(1, tokens.long().cpu()[:, None])[:, 0]
    assert (taken >= scores.amax(1) - 1e-4).all()


def check(data: st.DataObject) -> None:
    rows, vocabulary = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 40, 1500]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))

    def column(values: st.SearchStrategy[float]) -> list[float]:
        return data.draw(st.lists(values, min_size=rows, max_size=rows))

    params = columns(
        rows,
        temperature=column(st.sampled_from([0.0, 1e-3, 0.7, 1.0, 5.0])),
        top_k=column(st.sampled_from([0, 1, 2, 7, 50, 10**6])),
        top_p=column(st.sampled_from([1.0, 1e-9, 0.3, 0.9, 0.99])),
        min_p=column(st.sampled_from([0.0, 0.05, 1.0])),
        seed=column(st.integers(-(2**63), 2**63 - 1)),
        sequence_index=column(st.integers(0, 9)),
        position=column(st.integers(0, 2**31 - 1)),
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = (torch.randn(rows, vocabulary, generator=generator) * 4).to(dtype).to(DEVICE)
    logits[0, vocabulary // 2 :] = -torch.inf if vocabulary > 1 else 1.0
    extra = penalties(rows, vocabulary) if data.draw(st.booleans()) else None
    assert_tokens(sample(logits, params, extra), noisy_scores(logits, params, extra))


@settings(max_examples=10)
@given(data=st.data())
def test_any_row_gets_the_token_that_sorting_gives(data: st.DataObject) -> None:
    check(data)


@pytest.mark.slow
@settings(max_examples=300)
@given(data=st.data())
def test_any_row_gets_the_token_that_sorting_gives_many_times(data: st.DataObject) -> None:
    check(data)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(4, 300, device=DEVICE)
    params = columns(4, seed=[1, 2, 3, 4], position=[5, 6, 7, 8], top_p=[0.9] * 4)
    together = sample(logits, params)
    for row in (0, 2):
        alone = SamplingColumns(*(
            getattr(params, field.name)[row : row + 1] for field in dataclasses.fields(params)
        ))  # fmt: skip
        assert sample(logits[row : row + 1], alone)[0] == together[row]


def test_noise_depends_on_seed_sequence_and_position() -> None:
    logits = torch.zeros(4, 1000, device=DEVICE)
    varied = columns(4, seed=[0, 1, 0, 0], sequence_index=[0, 0, 1, 0], position=[0, 0, 0, 1])
    assert len(set(sample(logits, varied).tolist())) == 4


def test_rows_that_are_no_distribution_are_refused_alone() -> None:
    logits = torch.randn(5, 40, device=DEVICE)
    logits[0, 3], logits[1, 39] = NAN, torch.inf
    logits[2] = -torch.inf
    tokens = sample(logits, columns(5, temperature=[0, 1, 1, 0, 1])).tolist()
    assert tokens[:3] == [-1, -1, -1]
    assert tokens[3] == int(logits[3].argmax())
    assert tokens[4] >= 0


def test_among_equals_a_greedy_row_takes_the_lowest_id() -> None:
    logits = torch.zeros(1, 3000, device=DEVICE)
    logits[0, [1700, 2500]] = 1.0
    assert sample(logits, columns(1, temperature=[0.0])).tolist() == [1700]


def test_draws_have_the_frequencies_of_the_softmax() -> None:
    # The reference, which the kernel equals, is cheap enough for a statistic.
    rows = 4000
    logits = torch.tensor([2.0, 1.0, 0.0, 0.0, -1.0]).repeat(rows, 1)
    params = columns(rows, seed=list(range(rows)))
    scores = noisy_scores(logits, SamplingColumns(*(
        getattr(params, field.name).cpu() for field in dataclasses.fields(params)
    )))  # fmt: skip
    counts = scores.argmax(1).bincount(minlength=5).double()
    wanted = logits[0].double().softmax(0) * rows
    chi_square = float(((counts - wanted) ** 2 / wanted).sum())
    assert chi_square < 18.5  # 0.1 % of fair draws with 4 degrees of freedom lie above


@pytest.mark.parametrize("cut", [{"top_k": [2] * 64}, {"top_p": [0.6] * 64}, {"min_p": [0.9] * 64}])
def test_the_last_token_a_filter_keeps_can_be_drawn_and_the_next_cannot(
    cut: dict[str, list[float]],
) -> None:
    logits = torch.full((64, 40), -6.0, device=DEVICE)
    logits[:, 7], logits[:, 30] = 1.0, 0.99
    # The two likely tokens have some 0.48 each of the probability: a share of 0.6 needs both.
    logits[:, 11] = 0.5 if "top_k" in cut else -3.0
    tokens = sample(logits, columns(64, seed=list(range(64)), **cut))
    assert set(tokens.tolist()) == {7, 30}
