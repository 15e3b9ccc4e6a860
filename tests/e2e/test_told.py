"""Log-probabilities, rules and vectors over the whole product equal those of transformers."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import transformers_oracle as oracle
from cases.stack import Stack, serving
from pagemill.client import Delta, InvalidArgumentError, TokenLogprob
from pagemill.client.embedding import Pooling
from sampling_oracle import Rules, greedy_by
from tiny_llama import EOS, EOT, VOCAB, write_tiny_llama

Position = tuple[TokenLogprob, ...]
PROMPT = [(7 * i * i + 3) % 250 for i in range(23)]
# Of two float32 models whose logits reach 10; the log-softmax itself has its own, sharper test.
TOLERANCE = 5e-5
ENDLESS: Any = {"ignore_eos": True}

# How the server cuts and squeezes requests: blocks have 4 tokens, and each request needs 12.
SETTINGS: dict[str, Any] = {
    "as it comes": {},
    "chunks of 3": {"long_prefill_token_threshold": 3},
    "one plan in flight": {"pipeline_depth": 1, "long_prefill_token_threshold": 5},
    "preempted": {"num_blocks": 18, "max_model_len": 60, "preemption_victim": "newest"},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def theirs(tiny: Path) -> LlamaForCausalLM:
    return oracle.load_directory(tiny)


def check_positions(
    theirs: LlamaForCausalLM,
    told: Sequence[Position],
    tokens: Sequence[int],
    first: int,
    count: int,
) -> None:
    """Check what is told of `tokens[first:]` against the dense log-softmax."""
    logprobs = torch.log_softmax(oracle.logits(theirs, tokens), dim=-1)
    assert len(told) == len(tokens) - first
    for place, position in enumerate(told, first):
        expected = logprobs[place - 1]
        own, *others = position
        assert own.token_id == tokens[place]
        assert own.logprob == pytest.approx(float(expected[own.token_id]), abs=TOLERANCE)
        assert own.rank == 1 + int((expected > expected[own.token_id]).sum())
        best = expected.topk(count) if count else None
        ids = best.indices.tolist() if best else []
        assert [entry.token_id for entry in others] == [i for i in ids if i != own.token_id]
        for entry in others:
            assert entry.rank == ids.index(entry.token_id) + 1
            assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=TOLERANCE)
            assert entry.text == (bytes([entry.token_id]) if entry.token_id < 256 else entry.text)
        assert all(entry.logprob <= 0 for entry in position)


async def busy(stack: Stack, count: int = 3) -> "asyncio.Task[object]":
    """Let other requests run beside what follows, with prompts of their own."""

    async def others() -> object:
        return await asyncio.gather(
            *(
                stack.client.complete(
                    prompt=[200 + number] * 11, temperature=0, max_tokens=25, **ENDLESS
                )
                for number in range(count)
            )
        )

    return asyncio.create_task(others())


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
async def test_all_that_is_told_of_a_request_is_the_dense_log_softmax(
    tiny: Path, theirs: LlamaForCausalLM, settings: dict[str, Any]
) -> None:
    """Also where its prompt was cached before, and where it lost its blocks on the way."""
    async with serving(tiny, **settings) as stack:
        asked: Any = {"prompt": PROMPT, "max_tokens": 20, **ENDLESS}
        plain = await stack.client.complete(temperature=0, **asked)
        others = await busy(stack)
        for temperature, count, n in ((0, 3, 1), (1.5, 3, 1), (1.5, 0, 2)):
            reply = await stack.client.complete(
                temperature=temperature, seed=5, n=n, logprobs=count, prompt_logprobs=2, **asked
            )
            if not temperature:
                assert reply.token_ids == plain.token_ids
            assert reply.usage.cached_tokens == 0
            assert reply.summary.prompt_logprobs[0] == ()
            check_positions(theirs, reply.summary.prompt_logprobs[1:], PROMPT, 1, 2)
            for sequence in reply.sequences:
                tokens = [*PROMPT, *sequence.token_ids]
                check_positions(theirs, sequence.logprobs, tokens, len(PROMPT), count)
                told = sum(position[0].logprob for position in sequence.logprobs)
                assert sequence.finished.cumulative_logprob == pytest.approx(told, abs=1e-6)
        await others
        if settings.get("num_blocks"):
            assert stack.scheduler.counters.preemptions > 0
        await stack.idle()


async def test_a_prompt_that_is_told_of_publishes_its_blocks_and_reads_none(
    tiny: Path, theirs: LlamaForCausalLM
) -> None:
    async with serving(tiny) as stack:
        for _ in range(2):
            reply = await stack.client.complete(
                prompt=PROMPT, temperature=0, max_tokens=1, prompt_logprobs=0
            )
            assert reply.usage.cached_tokens == 0
            check_positions(theirs, reply.summary.prompt_logprobs[1:], PROMPT, 1, 0)
        reply = await stack.client.complete(prompt=PROMPT, temperature=0, max_tokens=1, logprobs=1)
        assert reply.usage.cached_tokens == 20
        check_positions(theirs, reply.sequences[0].logprobs, [*PROMPT, *reply.token_ids], 23, 1)
        with pytest.raises(InvalidArgumentError, match=r"cache\.read_cache is true"):
            await stack.client.complete(prompt=PROMPT, prompt_logprobs=0, read_cache=True)


async def test_a_prompt_of_one_token_has_nothing_told(tiny: Path) -> None:
    async with serving(tiny) as stack:
        reply = await stack.client.complete(
            prompt=[65], temperature=0, max_tokens=1, prompt_logprobs=2, echo=True, logprobs=0
        )
        assert reply.summary.prompt_logprobs == ((),)
        assert reply.sequences[0].logprobs[0] == ()
        assert len(reply.sequences[0].logprobs) == len(reply.token_ids) == 2


@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_an_echo_is_the_prompt_in_front_of_each_output(
    tiny: Path, theirs: LlamaForCausalLM, logprobs: int | None
) -> None:
    async with serving(tiny, long_prefill_token_threshold=4) as stack:
        text = "Grüße, world"
        prompt = list(await stack.client.tokenize(text))
        asked: Any = {"prompt": text, "n": 2, "seed": 1, "max_tokens": 6, "logprobs": logprobs}
        plain = await stack.client.complete(**asked, **ENDLESS)
        # What would end the text were it put out does not when it is the prompt's.
        reply = await stack.client.complete(**asked, **ENDLESS, echo=True, stop="Grüße, wor")
        assert reply.usage.completion_tokens == plain.usage.completion_tokens == 12
        for echoed, sequence in zip(reply.sequences, plain.sequences, strict=True):
            assert list(echoed.token_ids) == [*prompt, *sequence.token_ids]
            assert echoed.text == text + sequence.text
            assert echoed.finished == sequence.finished
            if logprobs is None:
                assert echoed.logprobs == ()
                continue
            assert echoed.logprobs[0] == ()
            check_positions(theirs, echoed.logprobs[1:], echoed.token_ids, 1, logprobs)


async def test_a_stop_string_cuts_what_is_told_as_it_cuts_the_ids(tiny: Path) -> None:
    async with serving(tiny) as stack:
        asked: Any = {"prompt": PROMPT, "temperature": 0, "max_tokens": 20, "logprobs": 1}
        whole = await stack.client.complete(**asked, **ENDLESS)
        [sequence] = whole.sequences
        place = next(
            place
            for place, token in enumerate(sequence.token_ids)
            if place > 4 and 32 < token < 127 and token not in sequence.token_ids[:place]
        )
        reply = await stack.client.complete(
            **asked, **ENDLESS, stop=chr(sequence.token_ids[place]), min_interval_s=0.05
        )
        [cut] = reply.sequences
        assert cut.token_ids == sequence.token_ids[: place + 1]
        assert cut.logprobs == sequence.logprobs[: place + 1]
        told = sum(position[0].logprob for position in cut.logprobs)
        assert cut.finished.cumulative_logprob == pytest.approx(told)


async def test_as_many_are_told_of_as_came_in_every_message(tiny: Path) -> None:
    async with serving(tiny) as stack:
        events = stack.client.generate(
            prompt=PROMPT, max_tokens=30, n=3, seed=2, logprobs=2, min_interval_s=0.02, **ENDLESS
        )
        deltas = [event async for event in events if isinstance(event, Delta)]
        assert len(deltas) > 3
        for delta in deltas:
            assert len(delta.logprobs) == len(delta.token_ids)
            assert [p[0].token_id for p in delta.logprobs] == list(delta.token_ids)


RULES: dict[str, tuple[Rules, dict[str, Any]]] = {
    "penalties": (
        Rules(presence_penalty=1.5, frequency_penalty=0.7, repetition_penalty=1.4),
        {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.4},
    ),
    "rewards": (
        Rules(presence_penalty=-2, frequency_penalty=-0.5, repetition_penalty=0.8),
        {"presence_penalty": -2, "frequency_penalty": -0.5, "repetition_penalty": 0.8},
    ),
    "biases": (
        Rules(logit_bias={5: 6.0, 9: 6.5, 11: -100.0}, frequency_penalty=2),
        {"logit_bias": {5: 6.0, 9: 6.5, 11: -100.0}, "frequency_penalty": 2},
    ),
    "allowed": (
        Rules(allowed=range(40, 60), presence_penalty=1),
        {"allowed_token_ids": list(range(40, 60)), "presence_penalty": 1},
    ),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
async def test_rules_change_the_logits_as_the_textbook_does(
    tiny: Path, theirs: LlamaForCausalLM, settings: dict[str, Any]
) -> None:
    async with serving(tiny, **settings) as stack:
        asked: Any = {"prompt": PROMPT, "temperature": 0, "max_tokens": 18, **ENDLESS}
        plain = oracle.greedy(theirs, PROMPT, 18)
        replies = await asyncio.gather(
            *(stack.client.complete(**asked, logprobs=1, **more) for _, more in RULES.values())
        )
        for reply, (rules, _) in zip(replies, RULES.values(), strict=True):
            assert list(reply.token_ids) == greedy_by(theirs, PROMPT, 18, rules) != plain
            # What is told is of the logits before the rules.
            tokens = [*PROMPT, *reply.token_ids]
            check_positions(theirs, reply.sequences[0].logprobs, tokens, len(PROMPT), 1)
        await stack.idle()


async def test_nothing_stops_an_output_before_its_least_length(
    tiny: Path, theirs: LlamaForCausalLM
) -> None:
    async with serving(tiny) as stack:
        plain = oracle.greedy(theirs, PROMPT, 12)
        first = plain[3]
        rules = Rules(min_tokens=6, stop_ids=[first, EOS, EOT])
        asked: Any = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12}
        reply = await stack.client.complete(**asked, stop_token_ids=[first])
        assert list(reply.token_ids) == plain[: plain.index(first) + 1]
        reply = await stack.client.complete(**asked, stop_token_ids=[first], min_tokens=6)
        assert list(reply.token_ids) == greedy_by(theirs, PROMPT, 12, rules)
        assert len(reply.token_ids) >= 6
        # A stop string too: here any character is one, and the seventh token is the first to count.
        stops = [chr(code) for code in range(33, 97)]
        reply = await stack.client.complete(
            **asked, stop=stops[:60], min_tokens=6, allowed_token_ids=[ord("!"), ord('"')]
        )
        assert len(reply.token_ids) == 7


async def test_bad_words_never_appear_at_the_start_or_behind_a_space(
    tiny: Path, theirs: LlamaForCausalLM
) -> None:
    async with serving(tiny) as stack:
        asked: Any = {"prompt": PROMPT, "temperature": 0, "max_tokens": 14, **ENDLESS}
        letters: Any = {"allowed_token_ids": [32, *b"abc"], "logit_bias": {32: 1.0}}
        reply = await stack.client.complete(**asked, **letters)
        text = reply.text.strip()
        for bad in (text[:1], text[:2], text[1:4]):
            rules = Rules(
                allowed=[32, *b"abc"],
                logit_bias={32: 1.0},
                bad_words=[list(bad.encode()), list(f" {bad.lstrip()}".encode())],
            )
            reply = await stack.client.complete(**asked, **letters, bad_words=[bad])
            assert list(reply.token_ids) == greedy_by(theirs, PROMPT, 14, rules)
            assert bad not in reply.text


async def test_rules_that_leave_no_token_end_one_sequence_with_the_reason(tiny: Path) -> None:
    async with serving(tiny) as stack:
        background = await busy(stack, 1)
        reply = await stack.client.complete(
            prompt=PROMPT, max_tokens=5, allowed_token_ids=[65, 66], bad_words=["A", "AB", "BB"]
        )
        assert list(reply.token_ids) == [66]
        assert reply.finish_reason == "error"
        assert "no token may be drawn" in reply.sequences[0].finished.error
        with pytest.raises(InvalidArgumentError, match="one must be left"):
            await stack.client.complete(prompt=PROMPT, allowed_token_ids=[65], bad_words=["A"])
        await background
        await stack.idle()


@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.3, "min_p": 0.02, "logprobs": 1}])
async def test_a_seed_draws_the_same_alone_in_company_in_chunks_and_preempted(
    tiny: Path, more: dict[str, Any]
) -> None:
    asked: Any = {"prompt": PROMPT, "seed": 42, "temperature": 0.9, "max_tokens": 24, **ENDLESS}
    found = {}
    for name, settings in SETTINGS.items():
        async with serving(tiny, **settings) as stack:
            others = await busy(stack, 0 if name == "as it comes" else 4)
            found[name] = (await stack.client.complete(**asked, **more)).token_ids
            await others
    assert found == dict.fromkeys(found, found["as it comes"])


POOLINGS: tuple[Pooling, ...] = ("last", "mean")


def states(theirs: LlamaForCausalLM, tokens: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        hidden: torch.Tensor = theirs.model(torch.tensor([list(tokens)])).last_hidden_state[0]
    return hidden


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
async def test_vectors_are_the_pooled_hidden_states(
    tiny: Path, theirs: LlamaForCausalLM, settings: dict[str, Any]
) -> None:
    inputs = [PROMPT, PROMPT[:16], [7], PROMPT[5:] + PROMPT, [VOCAB - 1] * 9]
    async with serving(tiny, **settings) as stack:
        others = await busy(stack)
        for repetition in range(2):
            for normalize in (False, True):
                for pooling in POOLINGS:
                    reply = await stack.client.embed(
                        inputs,
                        pooling=pooling,
                        normalize=normalize,
                    )
                    assert reply.usage.prompt_tokens == sum(map(len, inputs))
                    assert reply.usage.completion_tokens == 0
                    assert pooling == "last" or not reply.usage.cached_tokens
                    for tokens, vector in zip(inputs, reply.vectors, strict=True):
                        hidden = states(theirs, tokens)
                        expected = hidden[-1] if pooling == "last" else hidden.mean(dim=0)
                        if normalize:
                            expected = expected / expected.norm()
                        torch.testing.assert_close(
                            torch.tensor(vector.tolist()), expected, rtol=2e-5, atol=2e-5
                        )
            assert repetition or settings.get("num_blocks") or stack.scheduler.hit_rate > 0
        await others
        if settings.get("num_blocks"):
            assert stack.scheduler.counters.preemptions > 0
        await stack.idle()


async def test_an_input_that_cannot_be_is_named_and_harms_nobody(tiny: Path) -> None:
    async with serving(tiny, max_model_len=32) as stack:
        for inputs, words in (
            ([], "texts is empty"),
            (["fine", ""], r"texts\[1\] is empty"),
            ([[1], [VOCAB]], r"tokens\[1\] has the id 272"),
            ([[1] * 32], r"tokens\[0\] has 32 tokens, must have fewer than 32"),
            ([[1]] * 1025, "tokens has 1025 inputs, must have at most 1024"),
        ):
            with pytest.raises(InvalidArgumentError, match=words):
                await stack.client.embed(inputs)
        texts = await stack.client.embed(["ab", "ba"], request_id="x")
        ids = await stack.client.embed([list(b"ab"), list(b"ba")])
        assert texts.vectors == ids.vectors
        await stack.idle()
