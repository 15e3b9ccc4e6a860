"""Ends an output where a stop string begins, however tokens cut it."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

MAX_STOP_CHARACTERS = 4096
"""Characters in all stop strings of a request. Each costs 0.3 KB while the request lives."""


class StopMatch(NamedTuple):
    """Which stop string ended an output."""

    stop: str
    """The stop string, as the request has it."""

    num_tokens: int
    """Output tokens up to and including the one that completed it."""


class TextDelta(NamedTuple):
    """What an output gained."""

    text: str
    """Text that is certain: nothing in it can become part of a stop string. May be empty."""

    stop: StopMatch | None
    """Set once a stop string is complete; the output's text ends then."""


class StopMatcher:
    """Searches one output for stop strings, token by token.

    Text that may be the beginning of a stop string is held back until that is decided. If
    several stop strings are complete once a token is in, the one that begins first in the
    text wins; if they begin together, the one named first in the request.

    Source: Aho and Corasick 1975: a tree of all stop strings, each node knowing the longest
        other node that is a suffix of it. So a character is looked at once, and the depth of
        the current node is the length of the text held back.
    """

    __slots__ = (
        "_children",
        "_depth",
        "_fallback",
        "_firsts",
        "_found",
        "_held",
        "_include_stop",
        "_match",
        "_min_tokens",
        "_node",
        "_num_tokens",
        "_stops",
    )

    def __init__(
        self, stops: Sequence[str], *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        """Prepare the search.

        `include_stop` leaves the stop string in the text. Stop strings that are complete
        within the first `min_tokens` tokens are text like any other.

        Raises: ValueError if a stop string is empty, or they are too long together.
        """
        check_stop_strings(stops)
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        # Per node: its children by character; its length; the node to go on from when no
        # child fits; the longest stop string that ends with it.
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fallback = [0]
        self._found: list[int | None] = [None]
        for index, stop in enumerate(self._stops):
            self._grow(index, stop)
        self._link()
        self._firsts = frozenset(self._children[0])
        self._node = 0
        self._held = ""
        self._num_tokens = 0
        self._match: StopMatch | None = None

    def push(self, text: str) -> TextDelta:
        """Take the text that one token added, which may be none.

        After a match there is no more text, and the match is returned again.
        """
        if self._match is not None:
            return TextDelta("", self._match)
        self._num_tokens += 1
        if not self._node and self._firsts.isdisjoint(text):
            return TextDelta(text, None)
        found = self._search(text)
        text = self._held + text
        if found and self._num_tokens > self._min_tokens:
            start, index = found
            stop = self._stops[index]
            self._match = StopMatch(stop, self._num_tokens)
            return TextDelta(text[: start + len(stop) * self._include_stop], self._match)
        certain = len(text) - self._depth[self._node]
        self._held = text[certain:]
        return TextDelta(text[:certain], None)

    def finish(self, rest: str = "") -> str:
        """Return the text held back and then `rest`, which no token completed.

        After a match there is none. Nothing is pushed afterwards.
        """
        return self._held + rest if self._match is None else ""

    def _search(self, text: str) -> tuple[int, int] | None:
        """Follow the tree along `text`. Return start and number of the best stop string.

        The start counts from the beginning of the text held back so far.
        """
        children, fallback, found = self._children, self._fallback, self._found
        node = self._node
        best: tuple[int, int] | None = None
        for end, character in enumerate(text, len(self._held) + 1):
            while node and character not in children[node]:
                node = fallback[node]
            node = children[node].get(character, 0)
            index = found[node]
            if index is not None:
                match = (end - len(self._stops[index]), index)
                best = min(best or match, match)
        # A whole stop string that did not count can only go on as the start of another.
        while node and not children[node]:
            node = fallback[node]
        self._node = node
        return best

    def _grow(self, index: int, stop: str) -> None:
        """Add a stop string to the tree."""
        node = 0
        for depth, character in enumerate(stop, 1):
            child = self._children[node].setdefault(character, len(self._children))
            if child == len(self._children):
                self._children.append({})
                self._depth.append(depth)
                self._fallback.append(0)
                self._found.append(None)
            node = child
        if self._found[node] is None:
            self._found[node] = index

    def _link(self) -> None:
        """Give every node its fallback, shorter nodes first."""
        pending = deque(self._children[0].values())
        while pending:
            node = pending.popleft()
            for character, child in self._children[node].items():
                fallback = self._fallback[node]
                while fallback and character not in self._children[fallback]:
                    fallback = self._fallback[fallback]
                fallback = self._children[fallback].get(character, 0)
                self._fallback[child] = fallback
                if self._found[child] is None:
                    self._found[child] = self._found[fallback]
                pending.append(child)


def check_stop_strings(stops: Sequence[str]) -> None:
    """Raise ValueError, naming field, value and bound, if a request may not have these."""
    if "" in stops:
        raise ValueError(f"stop[{stops.index('')}] is empty, must have at least 1 character")
    num_characters = sum(map(len, stops))
    if num_characters > MAX_STOP_CHARACTERS:
        raise ValueError(
            f"stop has {num_characters} characters in all its strings, "
            f"must have at most {MAX_STOP_CHARACTERS}"
        )
