"""n sequences of one prompt: different, reproducible, and each what its index alone decides."""

import asyncio
import json
import sys
from collections.abc import Iterator

import pytest

from commands import run
from e2e.conftest import PROMPTS
from e2e.serving import Served, serving
from pagemill.client import AsyncClient, Client, Completion, GenerateArguments

STORY = PROMPTS[2]
LONG = PROMPTS[-1]
SEED = 11
COUNT = 12

Oracle = dict[str, list[int]]
Alone = dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def demo() -> Iterator[Served]:
    with serving("demo") as served:
        yield served


def drawing(prompt: str, n: int, *, seed: int = SEED, stop: str | None = None) -> GenerateArguments:
    return GenerateArguments(
        prompt=prompt,
        n=n,
        seed=seed,
        temperature=0.9,
        max_tokens=COUNT,
        ignore_eos=True,
        stop=stop,
    )


def ids(completion: Completion) -> list[list[int]]:
    return [list(sequence.token_ids) for sequence in completion.sequences]


@pytest.fixture(scope="module")
def alone(demo: Served) -> Alone:
    """Three sequences of each prompt, drawn while nothing else runs."""
    with Client(demo.address) as client:
        return {prompt: ids(client.complete(**drawing(prompt, 3))) for prompt in (STORY, LONG)}


async def test_four_sequences_differ_and_come_again_with_their_seed(demo: Served) -> None:
    async with AsyncClient(demo.address) as client:
        before = (await client.load()).totals
        first = await client.complete(**drawing(STORY, 4))
        after = (await client.load()).totals
        again = await client.complete(**drawing(STORY, 4))
        other = await client.complete(**drawing(STORY, 4, seed=SEED + 1))
        load = await client.load()
    assert len({tuple(tokens) for tokens in ids(first)}) == 4
    assert [sequence.finished.sequence_index for sequence in first.sequences] == [0, 1, 2, 3]
    assert ids(again) == ids(first)
    assert not set(map(tuple, ids(other))) & set(map(tuple, ids(first)))
    assert first.usage.completion_tokens == 4 * COUNT
    # The prompt is counted, and computed, once.
    assert after.prompt_tokens - before.prompt_tokens == first.usage.prompt_tokens
    assert (load.running, load.waiting, load.used_blocks) == (0, 0, 0)


async def test_a_sequence_depends_on_its_index_and_not_on_n(demo: Served) -> None:
    async with AsyncClient(demo.address) as client:
        completions = [await client.complete(**drawing(STORY, n)) for n in (4, 2, 1)]
    four, two, one = map(ids, completions)
    assert four[:2] == two
    assert four[:1] == one


async def test_sequences_do_not_depend_on_what_else_runs(demo: Served, alone: Alone) -> None:
    async with AsyncClient(demo.address) as client:
        together = await asyncio.gather(
            *(client.complete(**drawing(prompt, 3)) for prompt in alone)
        )
    assert list(map(ids, together)) == list(alone.values())


async def test_greedy_sequences_are_those_of_transformers(demo: Served, oracle: Oracle) -> None:
    async with AsyncClient(demo.address) as client:
        for prompt in (STORY, LONG):
            completion = await client.complete(
                prompt=prompt, n=2, temperature=0, max_tokens=COUNT, ignore_eos=True
            )
            assert ids(completion) == [oracle[prompt][:COUNT]] * 2


async def test_a_stop_string_ends_one_sequence_and_leaves_the_others(demo: Served) -> None:
    async with AsyncClient(demo.address) as client:
        whole = await client.complete(**drawing(STORY, 4))
        texts = [sequence.text for sequence in whole.sequences]
        index, stop = next(
            (index, word)
            for index, text in enumerate(texts)
            for word in text.split()[3:]
            if sum(word in each for each in texts) == 1
        )
        cut = await client.complete(**drawing(STORY, 4, stop=stop))
        load = await client.load()
    for number, (sequence, text) in enumerate(zip(cut.sequences, texts, strict=True)):
        if number == index:
            assert sequence.text == text[: text.index(stop)]
            assert (sequence.finished.reason, sequence.finished.stop_match) == ("stop", stop)
            assert len(sequence.token_ids) < COUNT
        else:
            assert (sequence.text, sequence.finished.reason) == (text, "length")
    assert cut.usage.completion_tokens == sum(len(s.token_ids) for s in cut.sequences)
    assert load.used_blocks == 0


@pytest.mark.parametrize(
    "flags",
    [
        ("--pipeline-depth", "1", "--max-num-batched-tokens", "16"),
        ("--no-enable-prefix-caching",),
        # 10 blocks hold each of the families below, but not both to their ends.
        ("--num-gpu-blocks-override", "10"),
    ],
    ids=lambda flags: flags[0],
)
async def test_sequences_are_the_same_under(flags: tuple[str, ...], alone: Alone) -> None:
    with serving("demo", *flags) as served:
        async with AsyncClient(served.address) as client:
            found = await asyncio.gather(
                *(client.complete(**drawing(prompt, 3)) for prompt in alone)
            )
            load = await client.load()
    assert list(map(ids, found)) == list(alone.values())
    assert (load.running, load.waiting, load.used_blocks) == (0, 0, 0)
    if "--num-gpu-blocks-override" in flags:
        assert load.totals.preemptions > 0


def test_the_command_prints_all_sequences(demo: Served) -> None:
    flags = ("--server", demo.address, "--prompt", STORY, "--max-tokens", "4", "--n", "2")
    command = (sys.executable, "-m", "pagemill.cli", "complete", *flags)
    answer = json.loads(run(*command, "--seed", "3", "--json"))
    assert [len(sequence["token_ids"]) for sequence in answer["sequences"]] == [4, 4]
    assert answer["usage"]["completion_tokens"] == 8
    text = run(*command, "--seed", "3")
    for number, sequence in enumerate(answer["sequences"]):
        assert f"[{number}] length\n{sequence['text']}" in text
