"""Tokenizers for the tests of text: one of bytes, one with byte fallback, and the demo model's."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from scheduler_svc.service.text.gguf_header import read_gguf_header
from scheduler_svc.service.text.gguf_tokenizer import build_gguf_tokenizer
from scheduler_svc.service.text.tokenizer import Tokenizer

SPECIAL_TOKENS = ("<bos>", "<eos>", "<eot>", "<img>")

MakeBackend = Callable[..., tokenizers.Tokenizer]


def byte_characters(data: bytes) -> str:
    """Return the characters that stand for bytes in a byte-level vocabulary."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(b) if b in printable else chr(256 + others.index(b)) for b in data)


def byte_backend(
    tokens: Sequence[bytes] = (), *, adds_bos: bool = False, special: Sequence[str] = SPECIAL_TOKENS
) -> tokenizers.Tokenizer:
    """Ids 0-255 are bytes, then come special tokens, then `tokens`, which no merge makes."""
    words = [*(byte_characters(bytes([byte])) for byte in range(256)), *special]
    words += [byte_characters(token) for token in tokens]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={word: id_ for id_, word in enumerate(words)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    if adds_bos:
        backend.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 256)]
        )
    return backend


def fallback_backend() -> tokenizers.Tokenizer:
    """A small tokenizer of the Llama 2 family: text tokens, and bytes for all else."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", *"abcdefg", "é", "ab", "▁ab", "▁▁"]
    merges = [("a", "b"), ("▁", "ab"), ("▁", "▁")]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={word: id_ for id_, word in enumerate(words)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in words[:3]])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


@pytest.fixture(scope="session")
def make_byte_backend() -> MakeBackend:
    return byte_backend


@pytest.fixture(scope="session", params=["byte level", "byte fallback"])
def backend(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    """One tokenizer of each family. Byte level: with characters that lie in two tokens."""
    if request.param == "byte fallback":
        return fallback_backend()
    backend = byte_backend([b"\xf0\x9f", b"\x98\x80", b"\xe2\x82", b" ab", "é!".encode()])
    # Added tokens are spelled as text: the space has no byte of its own, and `é` another.
    backend.add_tokens(["two words", "éé"])
    return backend


@pytest.fixture(scope="session")
def fallback() -> tokenizers.Tokenizer:
    return fallback_backend()


@pytest.fixture(scope="session")
def demo_tokenizer(demo_gguf: Path) -> Tokenizer:
    return Tokenizer.from_path(demo_gguf)


@pytest.fixture(scope="module")
def demo_backend(demo_gguf: Path) -> tokenizers.Tokenizer:
    """The demo's tokenizer as the library has it; a module may change its own."""
    return build_gguf_tokenizer(read_gguf_header(demo_gguf).fields)
