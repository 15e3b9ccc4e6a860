"""Ids in, text out: stop strings count from the text, and chunks make no difference."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.service.text.output_text import OutputText
from scheduler_svc.service.text.stop_strings import StopMatch
from scheduler_svc.service.text.tokenizer import Tokenizer

MakeBackend = Callable[..., tokenizers.Tokenizer]

TOKENS = [b"ab", b"cd", b"DEF", b"G", b"HI", b"J", b"\xe2\x82"]
AB, CD, DEF, G, HI, J, U1 = range(260, 267)
EOS = 257


@pytest.fixture(scope="module")
def tokenizer(make_byte_backend: MakeBackend) -> Tokenizer:
    return Tokenizer(make_byte_backend(TOKENS))


def generate(
    tokenizer: Tokenizer, ids: Sequence[int], chunks: Sequence[int], **options: Any
) -> tuple[list[str], StopMatch | None]:
    """Push ids in chunks of the given sizes, over and over. Return all deltas and the match."""
    output = OutputText(tokenizer, **options)
    texts, start, turn = [], 0, 0
    while start < len(ids):
        size = chunks[turn % len(chunks)]
        text, stop = output.push(ids[start : start + size])
        texts.append(text)
        if stop:
            return [*texts, output.finish()], stop
        start, turn = start + size, turn + 1
    return [*texts, output.finish()], None


# Case H-03: stop strings against token borders.
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize(
    ("ids", "options", "text", "match"),
    [
        ([DEF, G, HI, J, AB], {"stops": ["DEFGHIJ"]}, "", ("DEFGHIJ", 4)),
        ([DEF, G, HI, J, AB], {"stops": ["DEFGHX"]}, "DEFGHIJab", None),
        ([AB, CD, AB], {"stops": ["bc"]}, "a", ("bc", 2)),
        ([AB, CD, AB], {"stops": ["bc"], "include_stop": True}, "abc", ("bc", 2)),
        ([AB, CD, AB], {"stops": ["d"]}, "abc", ("d", 2)),
        ([AB, CD, AB], {"stops": ["cd", "bc"]}, "a", ("bc", 2)),
        ([DEF, G, HI, J], {"stops": ["J"]}, "DEFGHI", ("J", 4)),
        ([AB, U1, 0xAC, CD], {"stops": ["€"]}, "ab", ("€", 3)),
    ],
)
def test_stop_strings_end_the_text_wherever_tokens_cut_it(
    tokenizer: Tokenizer,
    ids: list[int],
    options: dict[str, Any],
    text: str,
    match: tuple[str, int] | None,
    chunk: int,
) -> None:
    texts, stop = generate(tokenizer, ids, [chunk], **options)
    assert "".join(texts) == text
    assert stop == match


def test_a_stop_string_to_come_shows_nothing_of_itself(tokenizer: Tokenizer) -> None:
    texts, _ = generate(tokenizer, [DEF, G, HI, J], [1], stops=["DEFGHIJ"])
    assert texts == ["", "", "", "", ""]


def test_an_empty_stop_string_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"stop\[0\] is empty"):
        OutputText(tokenizer, stops=[""])


@pytest.mark.parametrize("skip", [True, False])
def test_a_token_that_ends_the_output_is_not_text(tokenizer: Tokenizer, skip: bool) -> None:
    output = OutputText(tokenizer, stops=["<eos>", "ba"], skip_special_tokens=skip)
    assert output.push([AB, EOS], ends_with_stop_token=True) == ("a", None)
    assert output.finish() == "b"


def test_an_unfinished_character_completes_no_stop_string(tokenizer: Tokenizer) -> None:
    texts, stop = generate(tokenizer, [AB, U1], [1], stops=["b\ufffd"])
    assert (texts, stop) == (["a", "", "b\ufffd"], None)


@given(
    ids=st.lists(st.integers(0x60, 0x64) | st.integers(250, 266), max_size=20),
    stops=st.lists(st.text(alphabet="abcd€", min_size=1, max_size=4), max_size=3),
    chunks=st.lists(st.integers(1, 5), min_size=1),
    min_tokens=st.integers(0, 5),
    include=st.booleans(),
)
def test_chunks_make_no_difference(
    tokenizer: Tokenizer,
    ids: list[int],
    stops: list[str],
    chunks: list[int],
    min_tokens: int,
    include: bool,
) -> None:
    options = {"stops": stops, "min_tokens": min_tokens, "include_stop": include}
    texts, stop = generate(tokenizer, ids, chunks, **options)
    unary, unary_stop = generate(tokenizer, ids, [1000], **options)
    assert ("".join(texts), stop) == ("".join(unary), unary_stop)
    if stop is None:
        assert "".join(texts) == tokenizer.decode(ids)
