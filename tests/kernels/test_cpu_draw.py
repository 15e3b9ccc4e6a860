"""Native draws are those of the reference, whatever the filters."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import cpu_threads
from kernels.cpu_build import native_code
from kernels.cpu_draw import Draws, draw, likeliest
from kernels.reference_draw import draw_token
from native_variants import variant, variants

pytestmark = pytest.mark.skipif(native_code() is None, reason="this machine compiles no C++")


def draws(places: list[int], shares: list[float], **filters: Any) -> Draws:
    """Return draws with one set of filters."""
    given = {"temperatures": 1.0, "top_ks": 0, "top_ps": 1.0, "min_ps": 0.0, **filters}
    dtypes = {"top_ks": torch.int64}
    columns = {
        name: torch.full((len(places),), value, dtype=dtypes.get(name, torch.float64))
        for name, value in given.items()
    }
    return Draws(
        places=torch.tensor(places), shares=torch.tensor(shares, dtype=torch.float64), **columns
    )


@variants
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 4),
    vocab=st.integers(1, 70) | st.just(3001),
    distinct=st.integers(1, 40),
    special=st.dictionaries(
        st.integers(0, 8000), st.sampled_from([np.nan, np.inf, -np.inf]), max_size=6
    ),
    seed=st.integers(0, 999),
)
def test_the_likeliest_is_the_first_of_the_largest_and_nan_is_larger(
    name: str, rows: int, vocab: int, distinct: int, special: dict[int, float], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    whole = rng.integers(-distinct, 1, (rows, vocab + 3)).astype(np.float32)
    for place, value in special.items():
        if rows:
            whole.reshape(-1)[place % whole.size] = value
    logits = whole[:, :vocab]
    tokens, scores = likeliest(torch.from_numpy(logits), code=variant(name))
    assert tokens.tolist() == logits.argmax(axis=-1).tolist()
    np.testing.assert_array_equal(scores, logits[np.arange(rows), tokens])


def test_a_row_of_nothing_but_impossible_tokens_names_the_first() -> None:
    tokens, scores = likeliest(torch.full((2, 33), -torch.inf))
    assert tokens.tolist() == [0, 0]
    assert scores.tolist() == [-np.inf] * 2
    with pytest.raises(ValueError, match="logits is"):
        likeliest(torch.zeros(2, 3, dtype=torch.bfloat16))


@variants
@settings(max_examples=40, deadline=None)
@given(
    vocab=st.integers(1, 60) | st.just(3000),
    spread=st.sampled_from([0.0, 0.5, 4.0, 30.0]),
    is_rough=st.booleans(),
    masked=st.sets(st.integers(0, 59), max_size=4),
    temperature=st.sampled_from([0.01, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 17, 1000, 5000]),
    top_p=st.sampled_from([1e-9, 0.3, 0.95, 0.9999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-6, 0.1, 1.0]),
    seed=st.integers(0, 999),
)
def test_draws_are_those_of_the_reference(
    name: str,
    vocab: int,
    spread: float,
    is_rough: bool,
    masked: set[int],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
) -> None:
    """Rough logits are whole numbers, of which many are equal."""
    rng = np.random.default_rng(seed)
    logits = (rng.normal(0, 1, (2, vocab)) * spread).astype(np.float32)
    logits = logits.round() if is_rough else logits
    logits[:, [id_ for id_ in sorted(masked) if id_ < vocab - 1]] = -np.inf
    shares = [0.0, *rng.random(6).tolist(), 1 - 2.0**-53]
    places = [0, 1] * 4
    found = draw(
        torch.from_numpy(logits),
        draws(places, shares, temperatures=temperature, top_ks=top_k, top_ps=top_p, min_ps=min_p),
        code=variant(name),
    )
    for token, place, share in zip(found.tolist(), places, shares, strict=True):
        # Weights are rounded otherwise: what lies on a border may fall to either side.
        factors = (1 - 3e-6, 1, 1 + 3e-6) if top_p < 1 else (1,)
        near = {
            draw_token(logits[place], temperature, top_k, top_p * factor, min_p, moved)
            for factor in factors
            for moved in (max(share - 3e-6, 0.0), share, min(share + 3e-6, 1 - 2.0**-53))
        }
        assert token in near


@variants
def test_a_token_is_drawn_at_every_share_of_its_own_probability(name: str) -> None:
    """Exactly, where weights are exact: powers of two."""
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0]]) * np.log(2)
    weights = np.array([8, 4, 2, 1, 0.5])  # of ids 1, 3, 2, 0, 4
    middles = (np.cumsum(weights) - weights / 2) / weights.sum()
    found = draw(logits, draws([0] * 5, middles.tolist()), code=variant(name))
    assert found.tolist() == [1, 3, 2, 0, 4]
    # Of the two likeliest: 8 and 4.
    found = draw(logits, draws([0] * 3, [0.0, 0.6, 0.7], top_ks=2), code=variant(name))
    assert found.tolist() == [1, 1, 3]


@variants
@pytest.mark.parametrize(
    ("filters", "last"),
    [({}, 2999), ({"top_k": 2}, 0), ({"top_k": 2000}, 1998), ({"top_p": 0.98}, 1742)],
    ids=["all", "two", "many", "a share"],
)
def test_tokens_far_below_the_best_are_drawn_as_well(
    name: str, filters: dict[str, float], last: int
) -> None:
    """3,000 of them, 11 below: each is rare, but one token in twenty is one of them."""
    logits = torch.full((1, 3001), -11.0)
    logits[0, 1500] = 0.0
    rare = np.exp(-11.0)
    nths = sorted({0, last // 2, last})
    kept = 1 + (last + 1) * rare
    shares = [0.5, *((1 + (nth + 0.5) * rare) / kept for nth in nths), 1 - 2.0**-53]
    columns = {f"{name}s": value for name, value in filters.items()}
    found = draw(logits, draws([0] * len(shares), shares, **columns), code=variant(name))
    ids = [nth + (nth >= 1500) for nth in [*nths, last]]
    assert found.tolist() == [1500, *ids]


def test_draws_do_not_depend_on_neighbours_or_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(7, 4000, generator=generator)
    shares = torch.rand(7, generator=generator).tolist()
    whole = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(cpu_threads, "num_threads", lambda threads=threads: threads)
        whole.append(draw(logits, draws(list(range(7)), shares, top_ps=0.99)).tolist())
    alone = [
        draw(logits[place : place + 1], draws([0], [shares[place]], top_ps=0.99)).item()
        for place in range(7)
    ]
    assert whole == [alone] * 3


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"logits is \[1, 5\] torch.bfloat16"):
        draw(torch.zeros(1, 5, dtype=torch.bfloat16), draws([0], [0.5]))
    with pytest.raises(ValueError, match=r"top_ks is \[1\] torch.float64, must be \[D\]"):
        draw(torch.zeros(1, 5), Draws(**{
            field: torch.zeros(1, dtype=torch.int64 if field == "places" else torch.float64)
            for field in Draws.__slots__
        }))  # fmt: skip
