"""Texts become ids with one BOS at most, and come back as they were."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, normalizers

from scheduler_svc.errors import ConfigError
from scheduler_svc.service.text.tokenizer import Tokenizer

MakeBackend = Callable[..., tokenizers.Tokenizer]

BOS = 256


def byte_ids(text: str) -> list[int]:
    return list(text.encode())


# Case H-12: BOS twice when the text has it already.
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("hi", [BOS, *b"hi"]),
        ("<bos>hi", [BOS, *b"hi"]),
        ("", [BOS]),
        ("hi<bos>", [BOS, *b"hi", BOS]),
        ("<bos><bos>hi", [BOS, BOS, *b"hi"]),
    ],
)
def test_a_text_begins_with_bos_once(
    make_byte_backend: MakeBackend, text: str, ids: list[int]
) -> None:
    tokenizer = Tokenizer(make_byte_backend(adds_bos=True))
    assert tokenizer.bos_id == BOS
    assert tokenizer.encode(text) == ids


def test_a_tokenizer_without_bos_adds_none(make_byte_backend: MakeBackend) -> None:
    tokenizer = Tokenizer(make_byte_backend())
    assert tokenizer.bos_id is None
    assert tokenizer.encode("hi") == byte_ids("hi")
    assert tokenizer.encode("") == []


@given(text=st.text())
def test_decoding_undoes_encoding(make_byte_backend: MakeBackend, text: str) -> None:
    tokenizer = Tokenizer(make_byte_backend())
    assert tokenizer.encode(text) == byte_ids(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_left_out_of_the_text_on_request(make_byte_backend: MakeBackend) -> None:
    tokenizer = Tokenizer(make_byte_backend())
    ids = tokenizer.encode("a<eot>b")
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<eot>b"
    assert tokenizer.vocab_size == 260


@given(text=st.text(alphabet=st.characters(codec="utf-8") | st.sampled_from(" \t\n\x04e\u0301K")))
def test_no_text_has_fewer_tokens_than_the_bound(
    backend: tokenizers.Tokenizer, demo_tokenizer: Tokenizer, text: str
) -> None:
    for tokenizer in (Tokenizer(backend), demo_tokenizer):
        assert tokenizer.fewest_tokens(text) <= len(
            tokenizer.encode(text, add_special_tokens=False)
        )


@given(text=st.text(alphabet="\u03b9\u0308\u0301K\u212a\u0344ae", max_size=40))
def test_the_bound_holds_where_texts_are_composed(
    make_byte_backend: MakeBackend, text: str
) -> None:
    backend = make_byte_backend(special=())
    backend.normalizer = normalizers.NFC()
    tokenizer = Tokenizer(backend)
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))


def test_the_bound_counts_the_text_of_an_added_token(make_byte_backend: MakeBackend) -> None:
    backend = make_byte_backend(special=())
    backend.add_tokens(["éé"])
    tokenizer = Tokenizer(backend)
    assert len(tokenizer.encode("éé" * 9)) == tokenizer.fewest_tokens("éé" * 9) == 9


def test_the_bound_does_not_count_what_has_no_token(demo_tokenizer: Tokenizer) -> None:
    assert demo_tokenizer.encode("\x04" * 1000) == []
    assert demo_tokenizer.fewest_tokens("\x04" * 1000) == 0


def test_a_hopeless_prompt_is_told_by_its_bytes(demo_tokenizer: Tokenizer) -> None:
    assert demo_tokenizer.fewest_tokens("a " * 5_000_000) > 8192


def test_there_is_no_bound_where_text_is_dropped(make_byte_backend: MakeBackend) -> None:
    backend = make_byte_backend()
    backend.normalizer = normalizers.Strip()
    assert Tokenizer(backend).fewest_tokens("a" * 1000) == 0
    backend = make_byte_backend()
    backend.add_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    assert Tokenizer(backend).fewest_tokens("a" * 1000) == 0


def test_threads_share_a_tokenizer(demo_tokenizer: Tokenizer) -> None:
    texts = [f"{number} pages of {'x' * number} " * 50 for number in range(8)]
    results: dict[str, list[int]] = {}
    threads = [
        threading.Thread(target=lambda t=text: results.update({t: demo_tokenizer.encode(t)}))
        for text in texts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert results == {text: demo_tokenizer.encode(text) for text in texts}


def test_a_directory_is_read(make_byte_backend: MakeBackend, tmp_path: Path) -> None:
    backend = make_byte_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_path(tmp_path).encode("a long text") == byte_ids("a long text")


def test_a_directory_without_a_usable_tokenizer_is_refused(
    make_byte_backend: MakeBackend, tmp_path: Path
) -> None:
    file = tmp_path / "tokenizer.json"
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_path(tmp_path)

    file.write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(ConfigError, match=r"tokenizer\.json: "):
        Tokenizer.from_path(tmp_path)

    backend = make_byte_backend()
    backend.decoder = decoders.WordPiece()
    backend.save(str(file))
    with pytest.raises(ConfigError, match=r"tokenizer\.json: .*WordPiece.*must be ByteLevel"):
        Tokenizer.from_path(tmp_path)
