"""A tokenizer rebuilt from GGUF encodes as the model's own does.

Oracles: transformers' own conversion of the same file, and its word patterns for the names it
knows. Its conversion knows no `smollm` and does not cut digits apart, as SmolLM2's
tokenizer.json does; the test sets that one rule on it, and nothing else.
"""

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from scheduler_svc.errors import ConfigError
from scheduler_svc.service.text.file_fields import FileFields
from scheduler_svc.service.text.gguf_tokenizer import build_gguf_tokenizer
from scheduler_svc.service.text.tokenizer import Tokenizer

TEXTS = [
    "",
    "What is a page table?",
    "In 2024, 1234567 + 89 = 1234656; v3.14.159, 0x7f, ½ ² ③ ٣",
    "def f(x):\n    return {**x, 'a': [1, 2]}\n\n\n\tif x != None: pass  # why?\n",
    "  leading,   inner    and trailing spaces   \n \n  \t\t ",
    "I'll say we've done it, haven't they'd? I'M SURE.",
    "日本語の文章と中文，以及한국어。",
    "Grüße, naïve café — “quotes” … ¿qué?",
    "👩‍👩‍👧‍👦 🇩🇪 😀😀 \u200d\ufe0f",
    "a\u0301 e\u0301 \u00e9 \ufb01 \u212b",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><|im_end",
    "https://example.org/a_b?c=%20d&e=f#g",
    "\x00\x01\x04\x7f\ufeff\ufffd",
    "x" * 300 + " " * 100 + "=" * 90,
]


@pytest.fixture(scope="module")
def oracle(demo_gguf: Path) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(demo_gguf.parent, gguf_file=demo_gguf.name)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            tokenizer.backend_tokenizer.pre_tokenizer,
        ]
    )
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_the_demo_tokenizer_encodes_as_transformers_does(
    demo_tokenizer: Tokenizer, oracle: PreTrainedTokenizerFast, text: str
) -> None:
    ids = demo_tokenizer.encode(text)
    assert ids == oracle.encode(text)
    assert demo_tokenizer.decode(ids, skip_special_tokens=False) == oracle.decode(ids)
    assert demo_tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


@given(text=st.text() | st.text(alphabet="a 1'sé\n\t.<|>_日"))
def test_any_text_is_encoded_as_transformers_does(
    demo_tokenizer: Tokenizer, oracle: PreTrainedTokenizerFast, text: str
) -> None:
    assert demo_tokenizer.encode(text) == oracle.encode(text)


def small_fields(**changes: object) -> FileFields:
    """Return the metadata of a tokenizer with single bytes, one merge and three added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    values: dict[str, object] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*alphabet, "ab", "<bos>", "<eot>", "<think>"],
        "token_type": [1] * 257 + [3, 3, 4],
        "merges": ["a b"],
        "bos_token_id": 257,
        **changes,
    }
    return FileFields(
        Path("small.gguf"),
        {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None},
    )


def words(tokenizer: Backend, text: str) -> list[str]:
    """Return the words that a tokenizer cuts a text into, in the alphabet of bytes."""
    assert tokenizer.pre_tokenizer is not None
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", ["llama-bpe", "llama3", "llama-v3", "qwen2", "deepseek-r1-qwen"])
@given(text=st.text(alphabet="aB 1'slL\r\n\té.,_日½") | st.text())
def test_words_are_cut_by_the_patterns_of_the_models(pre: str, text: str) -> None:
    expected = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer = build_gguf_tokenizer(small_fields(pre=pre))
    assert words(tokenizer, text) == [word for word, _ in expected.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "cut"),
    [
        ("gpt-2", ["1234567", "Ġ89"]),
        ("default", ["1234567", "Ġ89"]),
        ("smollm", ["1", "2", "3", "4", "5", "6", "7", "Ġ", "8", "9"]),
        ("llama-bpe", ["123", "456", "7", "Ġ", "89"]),
        ("qwen2", ["1", "2", "3", "4", "5", "6", "7", "Ġ", "8", "9"]),
    ],
)
def test_each_rule_has_its_way_with_digits(pre: str, cut: list[str]) -> None:
    assert words(build_gguf_tokenizer(small_fields(pre=pre)), "1234567 89") == cut


def test_qwen_composes_and_the_others_do_not() -> None:
    for pre, length in {"qwen2": 2, "llama-bpe": 3, "smollm": 3}.items():
        tokenizer = Tokenizer(build_gguf_tokenizer(small_fields(pre=pre)))
        assert len(tokenizer.encode("e\u0301", add_special_tokens=False)) == length, pre


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("qwen2", False)])
def test_llama_keeps_a_word_whole_that_is_a_token_though_no_merges_lead_to_it(
    pre: str, whole: bool
) -> None:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "xyz"]
    fields = small_fields(pre=pre, tokens=tokens, token_type=[1] * 257, merges=[], bos_token_id=0)
    ids = Tokenizer(build_gguf_tokenizer(fields)).encode("xyz", add_special_tokens=False)
    assert (ids == [256]) is whole


@pytest.mark.parametrize(
    ("changes", "bos_id"),
    [
        ({}, None),
        ({"add_bos_token": True}, 257),
        ({"pre": "llama-bpe"}, 257),
        ({"pre": "llama-bpe", "add_bos_token": False}, None),
    ],
)
def test_bos_is_added_if_the_file_or_the_family_says_so(
    changes: dict[str, object], bos_id: int | None
) -> None:
    assert Tokenizer(build_gguf_tokenizer(small_fields(**changes))).bos_id == bos_id


def test_control_tokens_are_special_and_user_defined_ones_are_text() -> None:
    tokenizer = Tokenizer(build_gguf_tokenizer(small_fields()))
    ids = tokenizer.encode("ab<eot><think>")
    assert ids == [256, 258, 259]
    assert tokenizer.decode(ids) == "ab<think>"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert', must be 'gpt2'"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"pre": "bloom"}, "tokenizer.ggml.pre is 'bloom', must be one of default, gpt-2, smollm"),
        ({"pre": None}, "tokenizer.ggml.pre is missing"),
        ({"tokens": ["a", "a"]}, "tokenizer.ggml.tokens names a token twice"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["a zz"]}, "tokenizer.ggml.merges has 'a zz', must be made of tokens"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type has 1 entries, must have 260"),
        ({"bos_token_id": 260, "add_bos_token": True}, "bos_token_id is 260, must be below 260"),
        ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id is missing"),
    ],
)
def test_a_file_without_a_usable_tokenizer_is_refused(
    changes: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=f"small.gguf: .*{complaint}"):
        build_gguf_tokenizer(small_fields(**changes))
