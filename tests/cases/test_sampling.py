"""Area h of the public cases, sampling: bad values, seeds, lengths and tiny temperatures."""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import transformers_oracle as oracle
from cases.stack import Stack, held, serving, until
from cases.table_llama import HIDDEN, STATE, successors_of, write_table_llama
from pagemill.client import InvalidArgumentError as InvalidArgument
from tiny_llama import VOCAB

Dense = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="module")
def dense(bench_r: Path) -> Dense:
    """The logits behind each token of a sequence, without cache or batch."""
    model = oracle.load_directory(bench_r)
    return lambda tokens: oracle.logits(model, tokens)


NAN, INFINITY = float("nan"), float("inf")
GOOD = {"prompt": [1], "max_tokens": 3, "temperature": 0}

# What is sent, and the field that the refusal names.
BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "token_ids"),
    ({"prompt": ""}, "text"),
    ({"prompt": [-1]}, "token_ids"),
    ({"prompt": [272]}, "token_ids"),
    ({"prompt": [2**31]}, "prompt"),
    ({"logit_bias": {272: 1}}, "logit_bias"),
    ({"logit_bias": {-1: 1}}, "logit_bias"),
    ({"logit_bias": {5: NAN}}, "logit_bias"),
    ({"logit_bias": {5: INFINITY}}, "logit_bias"),
    ({"stop_token_ids": [999_999], "min_tokens": 1}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [300]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_p": NAN}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"min_p": 2.0}, "min_p"),
    ({"temperature": -1.0}, "temperature"),
    ({"temperature": NAN}, "temperature"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"logprobs": 300}, "logprobs"),
]


async def test_case_H_06_a_bad_value_is_refused_by_name_and_harms_nobody(bench_t: Path) -> None:
    """There is no best_of, so that none can be too small."""
    async with serving(bench_t, num_blocks=256, step_s=0.002) as stack:
        background = asyncio.create_task(
            stack.client.complete(
                prompt=[0], temperature=0, max_tokens=500, ignore_eos=True, request_id="background"
            )
        )
        await until(lambda: stack.scheduler.counters.generation_tokens > 3)
        for arguments, field in BAD:
            begin = time.monotonic()
            with pytest.raises(InvalidArgument) as refused:
                await stack.client.complete(**{**GOOD, **arguments})
            assert time.monotonic() - begin < 3
            assert field in str(refused.value), arguments
            assert await stack.client.health()
        assert not background.done()
        assert stack.scheduler._next_sequence == 1
        assert list((await background).token_ids) == successors_of(0, 500)
        ran = {row.request_id for step in stack.steps for row in step}
        assert ran == {"background"}
        await stack.idle()


SEEDED: Any = {
    "prompt": list(range(40, 51)),
    "seed": 42,
    "temperature": 0.8,
    "max_tokens": 32,
    "ignore_eos": True,
}


async def _draw(stack: Stack, **more: Any) -> list[int]:
    reply = await stack.client.complete(**{**SEEDED, **more})
    return list(reply.token_ids)


async def _draw_beside(stack: Stack, before: int, after: int, **neighbour: Any) -> list[int]:
    """Draw with unseeded neighbours, some of which were there before."""
    others = []

    async def join(number: int) -> None:
        prompt = [100 + number] * (number + 1)
        others.append(
            asyncio.create_task(
                _draw(stack, prompt=prompt, seed=None, max_tokens=28 + 3 * number, **neighbour)
            )
        )
        running = stack.scheduler._next_sequence
        await until(lambda: stack.scheduler._next_sequence > running or others[-1].done())

    for number in range(before):
        await join(number)
    drawn = asyncio.create_task(_draw(stack))
    for number in range(before, before + after):
        steps = len(stack.steps)
        await join(number)
        await until(lambda: len(stack.steps) > steps + 1 or drawn.done())  # noqa: B023
    result = await drawn
    await asyncio.gather(*others)
    return result


async def test_case_H_09_a_seeded_request_is_the_same_in_any_company(bench_r: Path) -> None:
    async with serving(bench_r, num_blocks=256, max_num_seqs=8, step_s=0.002) as stack:
        alone = await _draw(stack)
        assert len(alone) == 32
        found = {
            "with one": await _draw_beside(stack, 1, 0),
            "first row": await _draw_beside(stack, 0, 7),
            "middle row": await _draw_beside(stack, 3, 4),
            "last row": await _draw_beside(stack, 7, 0),
            "beside top_k": await _draw_beside(stack, 2, 2, top_k=3),
        }
        with held(stack):
            beside = asyncio.create_task(_draw_beside(stack, 7, 0))
            await until(lambda: stack.engine.num_live == 8)
        found["at once"] = await beside
        assert max(len(step) for step in stack.steps) == 8
        for number in range(20):
            await _draw(stack, prompt=[number], seed=number, max_tokens=2)
        found["after twenty"] = await _draw(stack)
        await stack.stop_worker()
        await stack.add_worker(step_s=0.002)
        found["another worker"] = await _draw(stack)
        assert await _draw(stack, seed=None) != await _draw(stack, seed=None)
    async with serving(bench_r, long_prefill_token_threshold=3) as stack:
        found["restarted, chunks of 3"] = await _draw(stack)
    # 43 slots are 11 blocks: two do not fit 14, and one is preempted.
    async with serving(
        bench_r, num_blocks=14, max_model_len=64, preemption_victim="newest"
    ) as stack:
        both = await asyncio.gather(_draw(stack, prompt=[7] * 11, seed=1), _draw(stack))
        assert stack.scheduler.counters.preemptions > 0
        found["preempted"] = both[1]
    assert found == dict.fromkeys(found, alone)


async def test_case_H_10_at_the_edge_of_the_length(tmp_path: Path) -> None:
    model = write_table_llama(tmp_path / "short")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ bos_token }}{{ messages[0].content }}<eot><eot>"
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    async with serving(model, max_model_len=64) as stack:

        async def count(**asked: Any) -> int:
            """Return how many tokens came of it; the next request is served in any case."""
            try:
                reply = await stack.client.complete(temperature=0, ignore_eos=True, **asked)
                assert reply.finish_reason == "length"
                return len(reply.token_ids)
            finally:
                normal = await stack.client.complete(prompt=[5], temperature=0, max_tokens=2)
                assert list(normal.token_ids) == [6, 7]
                await stack.idle()

        for length, most in ((62, 2), (63, 1)):
            assert await count(prompt=[1] * length) == most
            for wanted in (1, 2, 10):
                if wanted <= most:
                    assert await count(prompt=[1] * length, max_tokens=wanted) == wanted
                else:
                    with pytest.raises(InvalidArgument, match=rf"{wanted}.*{most}.*64.*{length}"):
                        await count(prompt=[1] * length, max_tokens=wanted)
        for length in (64, 65, 1000):
            for more in ({}, {"max_tokens": 1}, {"max_tokens": 2}, {"max_tokens": 10}):
                with pytest.raises(InvalidArgument, match=rf"{length} tokens.*64"):
                    await count(prompt=[1] * length, **more)
        assert await count(prompt=[1] * 10, max_tokens=54) == 54
        with pytest.raises(InvalidArgument, match=r"55.*54.*64.*10"):
            await count(prompt=[1] * 10, max_tokens=55)
        for more in ({}, {"prompt_logprobs": 1}):
            with pytest.raises(InvalidArgument, match="max_tokens"):
                await count(prompt=[1] * 10, max_tokens=0, **more)
        # The template adds three tokens.
        assert await count(messages=[{"role": "user", "content": "x" * 60}]) == 1
        with pytest.raises(InvalidArgument, match=r"65 tokens.*64"):
            await count(messages=[{"role": "user", "content": "x" * 62}])


async def test_case_H_11_the_chosen_and_the_best_stand_at_each_position(
    bench_r: Path, dense: Dense
) -> None:
    asked: Any = {"prompt": list(range(40, 51)), "max_tokens": 9, "ignore_eos": True, "seed": 3}
    async with serving(bench_r) as stack:
        for count in (0, 1, 3, 5):
            for temperature in (0, 1.5):
                more: Any = {"temperature": temperature, "logprobs": count, "n": 2}
                whole = await stack.client.complete(**asked, **more)
                last = whole.sequences[0].token_ids[-1]
                stop: Any = {"stop": chr(last)} if 32 < last < 127 else {}
                cut = await stack.client.complete(**asked, **more, **stop)
                assert len(cut.token_ids) <= len(whole.token_ids)
                for sequence in (*whole.sequences, *cut.sequences):
                    assert len(sequence.logprobs) == len(sequence.token_ids)
                    tokens = [*asked["prompt"], *sequence.token_ids]
                    expected = torch.log_softmax(dense(tokens), dim=-1)[10:]
                    for token, position, row in zip(
                        sequence.token_ids, sequence.logprobs, expected, strict=False
                    ):
                        own, *others = position
                        best = row.topk(count).indices.tolist() if count else []
                        assert own.token_id == token
                        assert own.rank == 1 + int((row > row[token]).sum())
                        assert [each.token_id for each in others] == [
                            id_ for id_ in best if id_ != token
                        ]
                        for each in position:
                            assert each.logprob == pytest.approx(
                                float(row[each.token_id]), abs=5e-5
                            )
                            assert each.logprob <= 0


async def test_case_H_11_tiny_temperatures_take_the_likeliest(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randperm(VOCAB, generator=generator).float() / VOCAB * 2e4 - 1e4
    head = torch.zeros(VOCAB, HIDDEN)
    head[:, :VOCAB] = logits[:, None] / STATE
    best = int(logits.argmax())
    async with serving(write_table_llama(tmp_path / "fixed", head)) as stack:
        for temperature in (0, 1e-10, 1e-6, 1e-5, 0.01):
            reply = await stack.client.complete(
                prompt=[1], temperature=temperature, max_tokens=6, ignore_eos=True, n=2, logprobs=2
            )
            assert [s.token_ids for s in reply.sequences] == [(best,) * 6] * 2
            assert {s.finished.reason for s in reply.sequences} == {"length"}
            # Of logits of 10,000 too, all that is told is finite.
            assert all(
                -2e4 <= e.logprob <= 0 for s in reply.sequences for p in s.logprobs for e in p
            )
