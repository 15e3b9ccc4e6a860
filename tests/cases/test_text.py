"""Area h of the public cases, text: characters, stop strings and special tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

from cases.stack import serving
from cases.table_llama import BOS, EOS, chain, table_head, write_table_llama
from pagemill.client import Completion, Delta
from pagemill.client import InvalidArgumentError as InvalidArgument

E1, E2, U1, AB, CD, DEF, HI = range(260, 267)
SPARE = {
    E1: b"\xf0\x9f",
    E2: b"\x98\x80",
    U1: b"\xe2\x82",
    AB: b"ab",
    CD: b"cd",
    DEF: b"DEF",
    HI: b"HI",
}
AC = 0xAC

# What follows the prompt [0], most tokens, the text.
CHARACTERS: list[tuple[dict[int, int], int, str]] = [
    (chain(0, E1, E2, ord("!"), EOS), 20, "\U0001f600!"),
    (chain(0, U1, AC, EOS), 20, "€"),
    (chain(0, ord("a"), E1, E2), 2, "a\ufffd"),
    (chain(0, E1, ord("b"), EOS), 20, "\ufffdb"),
    (chain(0, 0xFF, ord("c"), EOS), 20, "\ufffdc"),
    (chain(0, E1, E2, E1), 100, "\U0001f600" * 50),
]


def script(directory: Path, table: dict[int, int], **more: Any) -> Path:
    return write_table_llama(directory / "script", table_head(table), spare=SPARE, **more)


def said(table: dict[int, int], count: int) -> list[int]:
    """Return the ids that a script says behind [0], with its end."""
    tokens = list[int]()
    last = 0
    while len(tokens) < count and last != EOS:
        last = table[last]
        tokens.append(last)
    return tokens


@pytest.mark.parametrize(("table", "count", "text"), CHARACTERS, ids=[*"123456"])
async def test_case_H_01_a_character_split_over_tokens_comes_whole(
    tmp_path: Path, table: dict[int, int], count: int, text: str
) -> None:
    async with serving(script(tmp_path, table), step_s=0.003) as stack:
        whole = await stack.client.complete(prompt=[0], temperature=0, max_tokens=count)
        ids = list(whole.token_ids)
        assert (whole.text, ids) == (text, said(table, count))
        assert await stack.client.detokenize(ids) == text
        for interval_s in (0.0, 0.01):
            deltas = [
                event
                async for event in stack.client.generate(
                    prompt=[0], temperature=0, max_tokens=count, min_interval_s=interval_s
                )
                if isinstance(event, Delta)
            ]
            joined = "".join(delta.text for delta in deltas)
            assert joined == text
            # Every token has come, whether the message that brought it had text or not.
            assert [token for delta in deltas for token in delta.token_ids] == ids
            assert ("\ufffd" in joined) == any("\ufffd" in delta.text for delta in deltas)
            for delta in deltas:
                assert delta.text or {*delta.token_ids} & {E1, U1, EOS}


LETTERS = chain(0, DEF, ord("G"), HI, ord("J"), *range(ord("K"), ord("Z")), EOS)
PAIRS = chain(0, AB, CD, ord("e"), EOS)


@pytest.mark.parametrize(
    ("table", "stop", "more", "text", "count", "match"),
    [
        (LETTERS, ["DEFGHIJ"], {}, "", 4, "DEFGHIJ"),
        (LETTERS, ["DEFGHX"], {}, "DEFGHIJKLMNOPQRSTUVWXY", 20, None),
        (PAIRS, ["bc"], {}, "a", 2, "bc"),
        (PAIRS, ["bc"], {"include_stop_string": True}, "abc", 2, "bc"),
        (PAIRS, ["d"], {}, "abc", 2, "d"),
        # The earliest start wins: StopMatcher, and docs of the field.
        (PAIRS, ["cd", "bc"], {}, "a", 2, "bc"),
        (LETTERS, ["J"], {"max_tokens": 4}, "DEFGHI", 4, "J"),
        (PAIRS, ["<eos>"], {}, "abcde", 4, None),
        (chain(0, ord("x"), U1, AC, EOS), ["€"], {}, "x", 3, "€"),
    ],
    ids=["1", "2", "3", "4", "5", "6", "8", "9", "10"],
)
async def test_case_H_03_a_stop_string_ends_the_text_wherever_tokens_are_cut(
    tmp_path: Path,
    table: dict[int, int],
    stop: list[str],
    more: dict[str, Any],
    text: str,
    count: int,
    match: str | None,
) -> None:
    arguments: Any = {"prompt": [0], "temperature": 0, "max_tokens": 60, "stop": stop, **more}
    async with serving(script(tmp_path, table)) as stack:
        whole = await stack.client.complete(**arguments)
        _check(whole, table, text, count, match)
        joined = ""
        async for event in stack.client.generate(**arguments):
            joined += event.text if isinstance(event, Delta) else ""
            assert text.startswith(joined)
        assert joined == text
        await stack.idle()


def _check(
    whole: Completion, table: dict[int, int], text: str, count: int, match: str | None
) -> None:
    (output,) = whole.sequences
    assert output.text == text
    assert (output.finished.reason, output.finished.stop_match) == ("stop", match)
    assert list(output.token_ids) == said(table, count)
    assert whole.usage.completion_tokens == count


async def test_case_H_03_an_empty_stop_string_is_refused(bench_t: Path) -> None:
    async with serving(bench_t) as stack:
        with pytest.raises(InvalidArgument, match=r"stopping\.stop"):
            await stack.client.complete(prompt=[1], stop=[""], max_tokens=4)
        await stack.idle()


async def test_case_H_12_a_prompt_begins_with_bos_once(tmp_path: Path) -> None:
    model = write_table_llama(tmp_path / "bos", add_bos=True)
    template = json.loads((model / "tokenizer_config.json").read_text())["chat_template"]
    assert template.startswith("{{ bos_token }}")
    hi = list(b"hi")
    async with serving(model) as stack:

        async def prompt_of(**prompt: Any) -> list[int]:
            """Return the ids as the worker got them."""
            stack.workers[0].host.plans.clear()
            reply = await stack.client.complete(max_tokens=1, temperature=0, **prompt)
            row = stack.workers[0].host.plans[0].admitted[0]
            assert reply.usage.prompt_tokens == row.num_prompt_tokens
            return [int(token) for token in row.tokens]

        user = {"role": "user", "content": "hi"}
        chat = await prompt_of(messages=[user])
        assert chat[:2] == [BOS, ord("u")]
        assert chat.count(BOS) == 1
        assert await prompt_of(prompt="hi") == [BOS, *hi]
        # One that has it gets no second: Tokenizer.encode.
        assert await prompt_of(prompt="<bos>hi") == [BOS, *hi]
        assert await prompt_of(prompt=[BOS, *hi]) == [BOS, *hi]
        assert await prompt_of(prompt=hi) == hi

        plain = await prompt_of(messages=[{"role": "user", "content": "<eot><bos>"}])
        assert bytes(plain[7:17]) == b"<eot><bos>"
        assert [token for token in plain if token > 255] == [token for token in chat if token > 255]

        stack.scheduler.flush_cache()
        first = await stack.client.complete(messages=[user], max_tokens=1, temperature=0)
        again = await stack.client.complete(prompt=chat, max_tokens=1, temperature=0)
        hit = (len(chat) - 1) // 4 * 4
        assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, hit)
        assert hit > 0
