"""A SentencePiece tokenizer of the BPE kind, rebuilt from a GGUF file's tokens and scores.

The file has no merges. They follow from the vocabulary: a token may be made of any two others that
spell it, and those that SentencePiece would merge first come first. As in transformers, which
rebuilds the tokenizers of Llama 2 and Gemma in this way.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum

from tokenizers import Tokenizer, decoders, models, normalizers

from scheduler_svc.errors import ConfigError
from scheduler_svc.service.text.file_fields import FileFields

_SPACE_MARK = "▁"


class TokenType(IntEnum):
    """What GGUF says of a token."""

    NORMAL = 1

    CONTROL = 3
    """Special: no text is spelled with it."""

    USER_DEFINED = 4
    """Found whole in any text, but text itself."""


def spelled(tokens: Sequence[str]) -> list[str]:
    """Return tokens as text is spelled: runs of spaces stand in the file as they are."""
    return [token if token.strip(" ") else _SPACE_MARK * len(token) for token in tokens]


def build_sentencepiece_bpe(
    fields: FileFields, vocab: dict[str, int], types: Sequence[int]
) -> Tokenizer:
    """Build the tokenizer, but for its added tokens and BOS.

    `vocab` has the tokens, as `spelled` gives them, by id and in order.

    Raises: ConfigError if a part is missing.
    Cost: 3 s for 262,144 tokens.
    """
    tokens = list(vocab)
    scores = fields.required(fields.numbers, "tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ConfigError(
            f"{fields.path}: tokenizer.ggml.scores has {len(scores)} entries, "
            f"must have {len(tokens)}, one for each token"
        )
    unknown = fields.required(fields.integer, "tokenizer.ggml.unknown_token_id")
    if not 0 <= unknown < len(tokens):
        raise ConfigError(
            f"{fields.path}: tokenizer.ggml.unknown_token_id is {unknown}, "
            f"must be below {len(tokens)}"
        )
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=list(_merges(_by_priority(tokens, scores, types))),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    # Where the file does not say, llama.cpp puts a space in front of a text.
    prefixed = fields.flag("tokenizer.ggml.add_space_prefix") is not False
    replace = normalizers.Replace(" ", _SPACE_MARK)
    joined = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), replace])
        joined.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(joined)
    return tokenizer


def _by_priority(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[str]:
    """Return the tokens that text can be merged into, those that are merged first in front.

    Control tokens are none of them: a text that spells one is still a text.
    """
    made = [
        id_ for id_, kind in enumerate(types) if kind in {TokenType.NORMAL, TokenType.USER_DEFINED}
    ]
    made.sort(key=lambda id_: (types[id_] == TokenType.NORMAL, -scores[id_], id_))
    return [tokens[id_] for id_ in made]


def _merges(made: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield every pair of tokens that spells another one, the longest first part in front."""
    parts = set(made)
    for token in made:
        for end in range(len(token) - 1, 0, -1):
            if token[:end] in parts and token[end:] in parts:
                yield token[:end], token[end:]
