"""Special tokens in a chat are the template's alone; what users write stays plain text.

Chats are tried as a template would lay them out, with user strings side by side as well, so
that two of them could make up a special token.
"""

from collections.abc import Callable
from itertools import chain

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.service.text.special_text import MARK, SpecialText
from scheduler_svc.service.text.tokenizer import Tokenizer

MakeBackend = Callable[..., tokenizers.Tokenizer]

WRITTEN = ("<bos>", "<eos>", "<eot>", "<img>")
# No template of these tests writes the others, which begin or end inside one another.
SPECIAL = (*WRITTEN, "<x>", "<x>y", "y<x", "x>z")
IDS = {text: 256 + number for number, text in enumerate(SPECIAL)}

fragments = st.sampled_from([*SPECIAL, *"<>xyz ", "<b", "os>", "<e", "ot>", MARK, "\ufdd1", "é"])
user_texts = st.lists(fragments | st.text(max_size=3), max_size=6).map("".join)
# A chat is user strings, some of them behind a special token of the template.
chats = st.lists(st.tuples(st.sampled_from(["", *WRITTEN]), user_texts), max_size=5)


@pytest.fixture(scope="module")
def tokenizer(make_byte_backend: MakeBackend) -> Tokenizer:
    return Tokenizer(make_byte_backend(special=SPECIAL))


def rendered(tokenizer: Tokenizer, chat: list[tuple[str, str]]) -> str:
    marked = [tokenizer.special_text.mark({"content": text})["content"] for _, text in chat]
    return "".join(chain.from_iterable(zip((s for s, _ in chat), map(str, marked), strict=True)))


@given(chat=chats)
def test_users_write_bytes_and_templates_special_tokens(
    tokenizer: Tokenizer, chat: list[tuple[str, str]]
) -> None:
    ids = tokenizer.encode_chat(rendered(tokenizer, chat))
    plain = [text.replace("\ufdd1", "\ufffd") for _, text in chat]
    if MARK not in rendered(tokenizer, chat):
        plain = [text for _, text in chat]
    expected: list[int] = []
    for (special, _), text in zip(chat, plain, strict=True):
        expected += [IDS[special]] if special else []
        expected += text.encode()
    assert ids == expected


@given(chat=chats)
def test_a_bound_on_tokens_does_not_count_the_signs(
    tokenizer: Tokenizer, chat: list[tuple[str, str]]
) -> None:
    text = rendered(tokenizer, chat)
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode_chat(text))


# Case H-12: user content with special tokens as plain text.
def test_a_chat_has_the_bos_of_its_template_and_no_other(make_byte_backend: MakeBackend) -> None:
    tokenizer = Tokenizer(make_byte_backend(adds_bos=True))
    content = str(tokenizer.special_text.mark({"content": "a<eot><bos>"})["content"])
    ids = tokenizer.encode_chat(f"<bos>{content}<eot>")
    assert ids == [256, *b"a<eot><bos>", 258]


def test_everything_in_a_message_is_marked() -> None:
    message = {"<eos>": [{"text": "<eot>", "number": 1.5}, None, ("<eot>",)], "open": "a <im  "}
    assert SpecialText(WRITTEN).mark(message) == {
        f"{MARK}<eos>": [{"text": f"{MARK}<eot>", "number": 1.5}, None, [f"{MARK}<eot>"]],
        "open": f"a {MARK}<im  ",
    }


def test_special_texts_inside_one_another_are_all_marked() -> None:
    # The end may become `cde`, whose sign breaks `abc`; `b` in it must not go free then.
    special_text = SpecialText(["abc", "b", "cde"])
    marked = str(special_text.mark({"": "abc"})[""])
    assert special_text.alias(marked + "de") == "abcde"


@given(text=st.text())
def test_without_special_tokens_nothing_is_marked(text: str) -> None:
    special_text = SpecialText([])
    marked = str(special_text.mark({"": text})[""])
    assert marked == text.replace(MARK, MARK * 2)
    assert special_text.alias(marked) == text.replace("\ufdd1", "\ufffd")


@given(text=user_texts)
def test_python_lists_and_objects_in_a_template_keep_the_signs(
    tokenizer: Tokenizer, text: str
) -> None:
    marked = tokenizer.special_text.mark({"key": [text]})
    ids = tokenizer.encode_chat(str(marked))
    assert not set(ids) & set(IDS.values())


@given(words=st.lists(st.sampled_from(["<|im_end|>", " at 12:30", "n'est-ce", "  ", "日本", "x"])))
def test_words_are_cut_as_if_special_text_were_any_other(
    demo_tokenizer: Tokenizer, demo_backend: tokenizers.Tokenizer, words: list[str]
) -> None:
    text = "".join(words)
    marked = str(demo_tokenizer.special_text.mark({"content": text})["content"])
    ids = demo_tokenizer.encode_chat(f"<|im_start|>user\n{marked}.<|im_end|>\n")
    demo_backend.encode_special_tokens = True
    inner = demo_backend.encode(f"user\n{text}.", add_special_tokens=False).ids
    assert ids == [1, *inner, 2, *demo_tokenizer.encode("\n")]


@given(text=st.text(alphabet=st.sampled_from("ab é€ \n") | st.characters(codec="utf-8")))
def test_a_chat_with_a_sign_is_encoded_as_one_without(
    backend: tokenizers.Tokenizer, text: str
) -> None:
    tokenizer = Tokenizer(backend)
    text = text.replace("\ufdd1", "") + MARK
    special = max(tokenizer.special_text.alias_by_text)
    marked = tokenizer.special_text.mark({"content": text})["content"]
    expected = tokenizer.encode(f"{special}{text}{special}", add_special_tokens=False)
    assert tokenizer.encode_chat(f"{special}{marked}{special}") == expected
