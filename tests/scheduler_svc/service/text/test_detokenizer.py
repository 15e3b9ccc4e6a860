"""Deltas join to the text of all ids at once, and none shows what the text does not keep."""

from collections.abc import Callable, Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.service.text.tokenizer import Tokenizer

EOS = 257
# Tokens of case H-01: each but the last holds a part of a character.
E1, E2, U1 = 260, 261, 262
TOKENS = [b"\xf0\x9f", b"\x98\x80", b"\xe2\x82"]

MakeBackend = Callable[..., tokenizers.Tokenizer]

chunk_sizes = st.lists(st.integers(1, 5), min_size=1)


def deltas(
    tokenizer: Tokenizer, ids: Sequence[int], sizes: Sequence[int], *, skip: bool
) -> list[str]:
    """Decode ids in chunks of the given sizes, over and over."""
    detokenizer = tokenizer.new_detokenizer(skip_special_tokens=skip)
    texts, start, turn = [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        texts.append(detokenizer.push(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return [*texts, detokenizer.finish()]


@settings(max_examples=300)
@given(data=st.data(), sizes=chunk_sizes, skip=st.booleans())
def test_deltas_join_to_the_text_of_all_ids(
    backend: tokenizers.Tokenizer, data: st.DataObject, sizes: list[int], skip: bool
) -> None:
    tokenizer = Tokenizer(backend)
    # Mostly bytes that mean something to UTF-8, so that whole characters are not rare.
    ids = data.draw(
        st.lists(st.integers(0, tokenizer.vocab_size + 2) | st.sampled_from(_telling_ids(backend)))
    )
    joined = "".join(deltas(tokenizer, ids, sizes, skip=skip))
    assert joined == backend.decode(ids, skip_special_tokens=skip)
    assert joined == tokenizer.decode(ids, skip_special_tokens=skip)


def _telling_ids(backend: tokenizers.Tokenizer) -> list[int]:
    """Return ids of bytes on the borders of UTF-8's rules, and all that stand for no byte."""
    offset = backend.token_to_id("<0x00>") or 0
    borders = (0x20, 0x7F, 0x80, 0x9F, 0xA0, 0xBF, 0xC2, 0xE0, 0xED, 0xF0, 0xF4, 0xFF)
    others = {*range(backend.get_vocab_size() + 2)} - {*range(offset, offset + 256)}
    return [offset + byte for byte in borders] + sorted(others)


@given(text=st.text(), sizes=chunk_sizes)
def test_a_byte_level_tokenizer_holds_no_whole_character_back(
    demo_tokenizer: Tokenizer, text: str, sizes: list[int]
) -> None:
    ids = demo_tokenizer.encode(text)
    *texts, rest = deltas(demo_tokenizer, ids, sizes, skip=False)
    assert "".join(texts) == demo_tokenizer.decode(ids, skip_special_tokens=False)
    assert rest == ""


# Case H-01: a character split over tokens becomes replacement marks.
@pytest.mark.parametrize("interval", [1, 3, 100])
@pytest.mark.parametrize(
    ("ids", "text"),
    [
        pytest.param([E1, E2, ord("!"), EOS], "\U0001f600!", id="two tokens"),
        pytest.param([U1, 0xAC, EOS], "\u20ac", id="token and byte"),
        pytest.param([ord("a"), E1], "a\ufffd", id="unfinished"),
        pytest.param([E1, ord("b"), EOS], "\ufffdb", id="broken off"),
        pytest.param([0xFF, ord("c"), EOS], "\ufffdc", id="never valid"),
        pytest.param([E1, E2] * 50, "\U0001f600" * 50, id="many"),
    ],
)
def test_split_characters_come_whole(
    make_byte_backend: MakeBackend, ids: list[int], text: str, interval: int
) -> None:
    tokenizer = Tokenizer(make_byte_backend(TOKENS))
    texts = deltas(tokenizer, ids, [interval], skip=True)
    assert "".join(texts) == text
    assert len(texts) == -(-len(ids) // interval) + 1


def test_an_unfinished_character_shows_only_at_the_end(make_byte_backend: MakeBackend) -> None:
    tokenizer = Tokenizer(make_byte_backend(TOKENS))
    assert deltas(tokenizer, [ord("a"), E1], [1], skip=True) == ["a", "", "\ufffd"]


def test_a_run_of_fallback_bytes_is_replaced_as_a_whole(fallback: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(fallback)
    vocab = fallback.get_vocab()
    euro = [vocab[f"<0x{byte:02X}>"] for byte in "€".encode()]
    a, bad = vocab["a"], vocab["<0xFF>"]
    assert deltas(tokenizer, [*euro, a], [1], skip=True) == ["", "", "", "€a", ""]
    assert deltas(tokenizer, [*euro, bad, a], [1], skip=True)[4] == "\ufffd" * 4 + "a"
