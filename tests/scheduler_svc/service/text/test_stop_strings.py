"""The matcher finds, token by token, what a search of the whole text so far would find."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.service.text.stop_strings import (
    MAX_STOP_CHARACTERS,
    StopMatch,
    StopMatcher,
    check_stop_strings,
)

# Few characters, so that stop strings overlap each other and the text.
words = st.text(alphabet="abc", min_size=1, max_size=5)
stop_lists = st.lists(words, min_size=1, max_size=4)
token_texts = st.lists(st.text(alphabet="abcd", max_size=4), max_size=30)


def naive(
    tokens: list[str], stops: list[str], *, include: bool, min_tokens: int
) -> tuple[str, StopMatch | None]:
    """Search all text known after each token for what that token completed."""
    before = ""
    for num_tokens, token in enumerate(tokens, 1):
        text = before + token
        matches = [
            (start, index)
            for index, stop in enumerate(stops)
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > len(before)
        ]
        if matches and num_tokens > min_tokens:
            start, index = min(matches)
            end = start + len(stops[index]) if include else start
            return text[:end], StopMatch(stops[index], num_tokens)
        before = text
    return before, None


def run(matcher: StopMatcher, tokens: list[str]) -> tuple[str, StopMatch | None, list[str]]:
    """Return the joined text, the match, and what was visible after each token."""
    joined, seen = "", []
    for token in tokens:
        text, match = matcher.push(token)
        joined += text
        seen.append(joined)
        if match:
            return joined + matcher.finish(), match, seen
    return joined + matcher.finish(), None, seen


@settings(max_examples=500)
@given(tokens=token_texts, stops=stop_lists, include=st.booleans(), min_tokens=st.integers(0, 8))
def test_matching_token_by_token_equals_searching_the_whole_text(
    tokens: list[str], stops: list[str], include: bool, min_tokens: int
) -> None:
    matcher = StopMatcher(stops, include_stop=include, min_tokens=min_tokens)
    text, match, _ = run(matcher, tokens)
    assert (text, match) == naive(tokens, stops, include=include, min_tokens=min_tokens)


@given(tokens=token_texts, stops=stop_lists)
def test_text_is_held_back_only_while_it_may_begin_a_stop_string(
    tokens: list[str], stops: list[str]
) -> None:
    _, match, seen = run(StopMatcher(stops), tokens)
    so_far = ""
    for token, visible in zip(tokens, seen[:-1] if match else seen, strict=False):
        so_far += token
        held = so_far[len(visible) :]
        beginnings = [
            so_far[start:]
            for start in range(len(so_far))
            if any(stop.startswith(so_far[start:]) and stop != so_far[start:] for stop in stops)
        ]
        assert held == max(beginnings, key=len, default="")


def test_the_earliest_start_wins_then_the_order_of_the_request() -> None:
    assert StopMatcher(["d", "bcd"]).push("abcd") == ("a", StopMatch("bcd", 1))
    assert StopMatcher(["ab", "abc"]).push("xabc") == ("x", StopMatch("ab", 1))
    assert StopMatcher(["abc", "ab"]).push("xabc") == ("x", StopMatch("abc", 1))
    assert StopMatcher(["ab", "abc", "ab"]).push("xabc") == ("x", StopMatch("ab", 1))


def test_a_stop_string_is_found_inside_the_beginning_of_another() -> None:
    matcher = StopMatcher(["abc", "b"])
    assert matcher.push("xa") == ("x", None)
    assert matcher.push("b") == ("a", StopMatch("b", 2))


def test_a_stop_string_may_begin_within_the_first_tokens_and_end_behind_them() -> None:
    matcher = StopMatcher(["ab"], min_tokens=2)
    assert matcher.push("ab") == ("ab", None)
    assert matcher.push("xa") == ("x", None)
    assert matcher.push("b") == ("", StopMatch("ab", 3))


def test_after_a_match_no_text_follows() -> None:
    matcher = StopMatcher(["b"], include_stop=True)
    assert matcher.push("abc") == ("ab", StopMatch("b", 1))
    assert matcher.push("abc") == ("", StopMatch("b", 1))
    assert matcher.finish("rest") == ""


@pytest.mark.parametrize(
    ("stops", "complaint"),
    [
        (["a", ""], r"stop\[1\] is empty, must have at least 1 character"),
        (["a" * MAX_STOP_CHARACTERS, "b"], "stop has 4097 characters.*at most 4096"),
    ],
)
def test_impossible_stop_strings_are_refused(stops: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_stop_strings(stops)
    with pytest.raises(ValueError, match=complaint):
        StopMatcher(stops)
