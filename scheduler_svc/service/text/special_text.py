"""Keeps what users write apart from the special tokens that a chat template writes.

In a rendered chat, `<|im_end|>` from the template and the same ten characters from a user
look alike, and a tokenizer makes a special token of both: a user could end the turn and go on
as the system. So user strings are marked before rendering: a sign goes before each place
where the text of a special token begins. After rendering, special texts without the sign
are the template's own; they get aliases that no user can write, and the signs go.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

MARK = "\U000101fc"
"""The sign. From the Phaistos disc: nobody can write it, and it is printable, so that it
survives Python's `repr`, by which some templates print objects. A user's own is doubled."""

# A noncharacter, kept by Unicode for internal use, then a private one for the number.
_ALIAS = "\ufdd1"
_FIRST_NUMBER = 0xF0000
_REPLACEMENT = "\ufffd"


class SpecialText:
    """Finds the texts of a tokenizer's special tokens, in users' words and in templates'."""

    __slots__ = ("_begin", "_longest", "_prefixes", "_sign", "alias_by_text")

    def __init__(self, texts: Sequence[str]) -> None:
        self.alias_by_text: Mapping[str, str] = {
            text: f"{_ALIAS}{chr(_FIRST_NUMBER + number)}" for number, text in enumerate(texts)
        }
        begin = _pattern([MARK, *texts])
        signs = [f"{MARK}(?P<kept>{begin}|)"] + ([_pattern(texts)] if texts else [])
        self._begin = re.compile(begin)
        self._sign = re.compile("|".join(signs))
        self._prefixes = {text[:end] for text in texts for end in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)

    def mark(self, value: Mapping[str, object]) -> dict[str, object]:
        """Return a copy of a JSON-like object in which every string is marked.

        A key is marked only where it has a whole special text: templates look keys up.
        """
        return {
            _with_marks(key, self._whole_starts(key)): self._mark(part)
            for key, part in value.items()
        }

    def alias(self, rendered: str) -> str:
        """Return a rendered chat with the template's special texts renamed and the signs gone.

        A user's U+FDD1, with which an alias begins, becomes U+FFFD.
        """

        def resolve(match: re.Match[str]) -> str:
            kept = match["kept"]
            return self.alias_by_text[match[0]] if kept is None else kept

        return self._sign.sub(resolve, rendered.replace(_ALIAS, _REPLACEMENT))

    def _mark(self, value: object) -> object:
        if isinstance(value, str):
            return _with_marks(value, {*self._whole_starts(value), *self._open_starts(value)})
        if isinstance(value, Mapping):
            return self.mark(value)
        if isinstance(value, list | tuple):
            return [self._mark(part) for part in value]
        return value

    def _whole_starts(self, text: str) -> list[int]:
        """Return where special texts begin, also inside one another, and where signs stand."""
        starts = []
        position = 0
        while match := self._begin.search(text, position):
            starts.append(match.start())
            position = match.start() + 1
        return starts

    def _open_starts(self, text: str) -> list[int]:
        """Return where a special text begins that the end of the string leaves unfinished.

        The template may put another user string right behind, which finishes it.
        """
        end = len(text.rstrip())
        first = max(0, end - self._longest)
        return [start for start in range(first, end) if text[start:end] in self._prefixes]


def _with_marks(text: str, starts: Collection[int]) -> str:
    if not starts:
        return text
    edges = [0, *sorted(starts), len(text)]
    return MARK.join(text[start:end] for start, end in pairwise(edges))


def _pattern(texts: Sequence[str]) -> str:
    """Return a pattern for the longest of `texts` that begins at a place.

    It is a tree: the time at one place grows with the length of a text, not with their
    number, so that no prompt can make hundreds of special tokens slow.
    """
    rests: dict[str, list[str]] = {}
    for text in texts:
        if text:
            rests.setdefault(text[0], []).append(text[1:])
    branches = [re.escape(first) + _pattern(rest) for first, rest in rests.items()]
    if "" in texts:
        branches.append("")
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
