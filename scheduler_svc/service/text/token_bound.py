"""How few tokens a text can have, told without encoding it: a hopeless prompt costs nothing."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from scheduler_svc.service.text.token_pieces import BytePieces, Pieces

# Composing (NFC) makes a text up to three times shorter: U+0390 has 2 bytes, its parts 6.
# Checked over all of Unicode.
_NFC_RATIO = 3


@dataclass(frozen=True, slots=True)
class TokenBound:
    """A lower bound on the number of tokens of a text."""

    max_token_bytes: int | None
    """Bytes of text that can become one token, at most. None: any number."""

    dropped_bytes: bytes
    """Bytes that have no token, and that the tokenizer drops."""

    def fewest_tokens(self, text: bytes) -> int:
        """Return a number of tokens that a UTF-8 text has at least. 0 if nothing is known.

        Cost: 1 ms per megabyte.
        """
        if self.max_token_bytes is None:
            return 0
        return math.ceil(len(text.translate(None, self.dropped_bytes)) / self.max_token_bytes)


def read_token_bound(backend: Tokenizer, pieces: Pieces) -> TokenBound:
    """Return the bound for a tokenizer.

    There is none if some step may drop text, or one token may swallow a run of it.
    """
    added = backend.get_added_tokens_decoder().values()
    ratio = _normalizer_ratio(backend)
    dropped = _dropped_bytes(backend, pieces)
    if (
        ratio is None
        or dropped is None
        or (dropped and ratio > 1)  # what is dropped then is not seen in the text itself
        or not all(map(_keeps_text, _steps(backend.pre_tokenizer)))
        or any(token.lstrip or token.rstrip for token in added)
    ):
        return TokenBound(None, b"")
    # An added token is matched as text, and may have fewer bytes in the output than there.
    lengths = [len(piece if isinstance(piece, bytes) else piece.encode()) for piece in pieces.all]
    lengths += [len(token.content.encode()) for token in added]
    return TokenBound(max(lengths) * ratio, dropped)


def _dropped_bytes(backend: Tokenizer, pieces: Pieces) -> bytes | None:
    """Return the bytes without a token, or None if unknown text is handled in another way."""
    model = backend.model
    if not isinstance(model, models.BPE):
        return None
    if isinstance(pieces, BytePieces):
        known = {piece for piece in pieces.all if len(piece) == 1}
        return bytes(byte for byte in range(256) if bytes([byte]) not in known)
    spells_all = model.byte_fallback and len(set(pieces.byte_by_id.values())) == 256
    return b"" if spells_all else None


def _normalizer_ratio(backend: Tokenizer) -> int | None:
    """Return how many times shorter normalizing can make a text, or None if unknown."""
    ratio = 1
    for step in _steps(backend.normalizer):
        match step:
            case {"type": "NFC"}:
                ratio *= _NFC_RATIO
            case {"type": "Prepend"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                if len(old.encode()) > len(new.encode()):
                    return None
            case _:
                return None
    return ratio


def _keeps_text(step: dict[str, object]) -> bool:
    """Return whether a pre-tokenizer only cuts, and drops nothing."""
    match step:
        case {"type": "ByteLevel" | "Digits" | "Metaspace"}:
            return True
        case {"type": "Split" | "Punctuation", "behavior": str(behavior)}:
            return behavior != "Removed"
        case _:
            return False


def _steps(
    component: normalizers.Normalizer | pre_tokenizers.PreTokenizer | None,
) -> Iterator[dict[str, object]]:
    """Yield the steps of a component, those of a nested sequence in place of the sequence."""
    pending = [json.loads(component.__getstate__())] if component else []
    while pending:
        step = pending.pop()
        if step["type"] == "Sequence":
            pending += step.get("normalizers") or step.get("pretokenizers") or []
        else:
            yield step
