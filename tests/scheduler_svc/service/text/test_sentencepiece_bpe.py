"""A SentencePiece tokenizer rebuilt from GGUF merges as SentencePiece does."""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from scheduler_svc.errors import ConfigError
from scheduler_svc.service.text.file_fields import FileFields
from scheduler_svc.service.text.gguf_tokenizer import build_gguf_tokenizer
from scheduler_svc.service.text.tokenizer import Tokenizer

CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>"]
USER_DEFINED = ["  ", "   ", "\n"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# Each is made of two others in one way, so that which two are merged first is all there is to say.
MERGED = ["he", "▁t", "▁the", "os>", "<b", "<bos>x", "ab", "cab", "lo", "hello"]
LETTERS = ["▁", "h", "e", "t", "l", "o", "a", "b", "c", "s", "<", ">", "x"]
TOKENS = [*CONTROL, *USER_DEFINED, *BYTES, *MERGED, *LETTERS]
SCORES = [-1000.0] * 7 + [0.0] * 256 + [-float(place) for place in range(23)]
TYPES = [3] * 4 + [4] * 3 + [6] * 256 + [1] * 23


def fields(**changes: object) -> FileFields:
    values: dict[str, object] = {
        "model": "llama",
        "tokens": TOKENS,
        "scores": SCORES,
        "token_type": TYPES,
        "bos_token_id": 2,
        "unknown_token_id": 3,
        "add_space_prefix": False,
        **changes,
    }
    return FileFields(
        Path("small.gguf"),
        {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None},
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(build_gguf_tokenizer(fields()))


def merged_by_score(text: str) -> list[str]:
    """Merge the pair with the best score, the first of several, until there is none."""
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [left + right for left, right in pairwise(parts)]
        known = [(-SCORES[TOKENS.index(pair)], place) for place, pair in enumerate(pairs)
                 if pair in MERGED]  # fmt: skip
        if not known:
            return parts
        _, place = min(known)
        parts[place : place + 2] = [pairs[place]]


@given(words=st.lists(st.text(alphabet="hetloabcs", max_size=8), max_size=5))
def test_pairs_are_merged_by_score(tokenizer: Tokenizer, words: list[str]) -> None:
    text = " ".join(word for word in words if word)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [TOKENS[id_] for id_ in ids] == merged_by_score(text)
    assert tokenizer.decode(ids) == text


def test_what_has_no_token_is_spelled_in_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a é", add_special_tokens=False)
    assert [TOKENS[id_] for id_ in ids] == ["a", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "a é"


def test_runs_of_spaces_are_tokens_though_the_file_spells_them_as_spaces(
    tokenizer: Tokenizer,
) -> None:
    ids = tokenizer.encode("a   b\n", add_special_tokens=False)
    assert [TOKENS[id_] for id_ in ids] == ["a", "   ", "b", "\n"]
    assert tokenizer.decode(ids) == "a   b\n"


def test_text_begins_with_bos_unless_the_file_says_no(tokenizer: Tokenizer) -> None:
    assert tokenizer.bos_id == 2
    assert Tokenizer(build_gguf_tokenizer(fields(add_bos_token=False))).bos_id is None


def test_no_merges_spell_a_control_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<bos>", add_special_tokens=False) == [2]
    written = str(tokenizer.special_text.mark({"content": "<bos>x"})["content"])
    ids = tokenizer.encode_chat(f"<bos>{written}<eos>")
    assert ids[0] == 2
    assert ids[-1] == 1
    assert not {0, 1, 2, 3}.intersection(ids[1:-1])
    assert tokenizer.decode(ids[1:-1]) == "<bos>x"


def test_llama_2_puts_a_space_in_front() -> None:
    tokenizer = Tokenizer(build_gguf_tokenizer(fields(add_space_prefix=None)))
    ids = tokenizer.encode("the", add_special_tokens=False)
    assert [TOKENS[id_] for id_ in ids] == ["▁the"]
    assert tokenizer.decode(ids) == "the"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "scores is missing"),
        ({"scores": SCORES[1:]}, "scores has 285 entries, must have 286"),
        ({"scores": ["x"] * 286}, "scores is .*must be a list of numbers"),
        ({"unknown_token_id": 286}, "unknown_token_id is 286, must be below 286"),
        ({"unknown_token_id": None}, "unknown_token_id is missing"),
        ({"tokens": [*TOKENS[:-1], "h"]}, "names a token twice"),
        ({"token_type": TYPES[1:]}, "token_type has 285 entries"),
    ],
)
def test_a_file_that_lacks_a_part_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_gguf_tokenizer(fields(**changes))


TEXTS: Sequence[str] = [
    "",
    "What is a   page table?",
    "  leading,   inner    and trailing spaces   \n \n  \t\t ",
    "def f(x):\n    return {**x, 'a': [1, 2]}\n\n\n\tif x != None: pass  # why?\n",
    "日本語の文章と中文，以及한국어。",
    "👩‍👩‍👧‍👦 🇩🇪 😀😀 \u200d\ufe0f",
    "a\u0301 e\u0301 \u00e9 \ufb01 \u212b",
    "hi<eos> <h1>x</h1> <start_of_turn>user\nhi<end_of_turn>\n<end_of",
    "\x00\x01\x04\x7f\ufeff\ufffd",
    "x" * 300 + " " * 100 + "=" * 90,
]


@pytest.mark.slow
def test_gemmas_tokenizer_encodes_as_transformers_does(gemma_gguf: Path) -> None:
    """Transformers takes half a minute to read it."""
    ours = Tokenizer.from_path(gemma_gguf)
    oracle = AutoTokenizer.from_pretrained(gemma_gguf.parent, gguf_file=gemma_gguf.name)
    assert isinstance(oracle, PreTrainedTokenizerFast)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == oracle.encode(text)
        assert ours.decode(ids, skip_special_tokens=False) == oracle.decode(ids)
